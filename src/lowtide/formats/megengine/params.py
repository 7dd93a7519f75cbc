"""How an operator that was captured from PyTorch works, in the words of a MegEngine profile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lowtide.graph import Op

__all__ = ["param_of"]

Arguments = Sequence[Any]


def param_of(op: Op) -> dict[str, Any]:
    """The parameters under the names that MegEngine gives them; nothing where none are known."""
    arguments = op.arguments
    make = _PARAMS.get(op.kind)
    if make is None or arguments is None:
        return {}
    try:
        return make(arguments)
    except (IndexError, TypeError, ValueError):
        return {}  # arguments that are not those of the captured operator


def _convolution(arguments: Arguments) -> dict[str, Any]:
    stride, padding, dilation = arguments[3:6]
    return {
        **_pair("stride", stride),
        **_pair("pad", padding),
        **_pair("dilate", dilation),
        "mode": "CROSS_CORRELATION",
        "sparse": "DENSE" if arguments[8] == 1 else "GROUP",
        "format": "NCHW",
        "compute_mode": "DEFAULT",
    }


def _pooling(mode: str) -> Callable[[Arguments], dict[str, Any]]:
    def param(arguments: Arguments) -> dict[str, Any]:
        window = arguments[1]
        stride = arguments[2] if len(arguments) > 2 and arguments[2] else window
        return {
            **_pair("window", window),
            **_pair("stride", stride),
            **_pair("pad", arguments[3] if len(arguments) > 3 else [0, 0]),
            "mode": mode,
            "format": "NCHW",
        }

    return param


def _product(_: Arguments) -> dict[str, Any]:
    """A transposed operand is a view before the product here, so that the product itself has none."""
    return {"transposeA": False, "transposeB": False, "format": "DEFAULT", "compute_mode": "DEFAULT"}


def _reduction(mode: str) -> Callable[[Arguments], dict[str, Any]]:
    def param(arguments: Arguments) -> dict[str, Any]:
        axes = list(arguments[1])
        return {"axis": axes[0] if len(axes) == 1 else axes, "mode": mode, "data_type": "DEFAULT"}

    return param


def _elementwise(mode: str) -> Callable[[Arguments], dict[str, Any]]:
    return lambda _: {"mode": mode}


def _pair(name: str, values: Any) -> dict[str, int]:
    """Height and width, which PyTorch writes as one number where they are equal."""
    height, width = (values if len(values) == 2 else [values[0], values[0]]) if values else (0, 0)
    return {f"{name}_h": height, f"{name}_w": width}


_PARAMS: dict[str, Callable[[Arguments], dict[str, Any]]] = {
    "aten.convolution": _convolution,
    "aten.max_pool2d_with_indices": _pooling("MAX"),
    "aten.avg_pool2d": _pooling("AVERAGE"),
    "aten.mm": _product,
    "aten.addmm": _product,
    "aten.amax": _reduction("MAX"),
    "aten.sum": _reduction("SUM"),
    "aten.mean": _reduction("MEAN"),
} | {
    f"aten.{kind}": _elementwise(kind.upper())
    for kind in ("relu", "add", "sub", "mul", "div", "exp", "log", "tanh", "sigmoid")
}
