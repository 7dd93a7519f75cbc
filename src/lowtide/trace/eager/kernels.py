"""While a step is traced, every operator is the one that eager PyTorch runs.

Tracing prefers Python versions of some operators, made for symbolic sizes or for compilers: interpolation as
index arithmetic, dropout on the CPU with another mask layout. Their last bits, or their random numbers, are
not those of eager. Sizes are never symbolic here, so the built-in operators can be traced instead.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from lowtide.torch_internals import (
    MATMUL_TAKES_SYMBOLS,
    DispatchKey,
    forget_kernels,
    functorch_config,
    inductor_config,
)
from lowtide.trace.eager.autocast import cast_once
from lowtide.trace.eager.in_place_calls import InPlaceCalls
from lowtide.trace.eager.layouts import Layouts
from lowtide.trace.eager.library import define

__all__ = ["eager_kernels", "eager_target"]

_NAMES = (
    "dropout",
    "hardshrink",
    "matmul",
    "multi_margin_loss",
    "multilabel_margin_loss_forward",
    "softshrink",
    "unsafe_chunk",
    "upsample_bicubic2d",
    "upsample_bilinear2d",
    "upsample_linear1d",
    "upsample_nearest1d",
    "upsample_nearest2d",
    "upsample_nearest3d",
    "upsample_trilinear3d",
    "_upsample_bicubic2d_aa",
    "_upsample_bilinear2d_aa",
    "_upsample_lanczos2d_aa",
    "_upsample_nearest_exact1d",
    "_upsample_nearest_exact2d",
    "_upsample_nearest_exact3d",
)
"""Operators with a Python version that eager never runs."""
_OF_SYMBOLS = tuple(name for name in _NAMES if name != "matmul")
"""Those of them whose built-in version is traced with symbols for sizes, in every version of torch."""


def _bernoulli(
    like: torch.Tensor, p: float = 0.5, *, generator: torch.Generator | None = None
) -> torch.Tensor:
    """As ``bernoulli_``: filled in the order of memory. The functional form makes a contiguous tensor."""
    return torch.empty_like(like).bernoulli_(p, generator=generator)


define(
    "bernoulli(Tensor like, float p=0.5, *, Generator? generator=None) -> Tensor",
    _bernoulli,
    tags=(torch.Tag.nondeterministic_seeded,),
)


def _rrelu(
    self: torch.Tensor,
    noise: torch.Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    generator: torch.Generator | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``rrelu``: its result is contiguous. The functional form makes one that lies as its input does."""
    drawn = noise.clone()
    result = torch.ops.aten.rrelu_with_noise(self, drawn, lower, upper, training, generator)
    return result, drawn


define(
    "rrelu(Tensor self, Tensor noise, Scalar lower=0.125, Scalar upper=0.3333333333333333, "
    "bool training=False, Generator? generator=None) -> (Tensor, Tensor)",
    _rrelu,
    tags=(torch.Tag.nondeterministic_seeded,),
)
_TARGETS: dict[Any, Any] = {
    torch.ops.aten.bernoulli.p: torch.ops.lowtide.bernoulli.default,
    torch.ops.aten.rrelu_with_noise_functional.default: torch.ops.lowtide.rrelu.default,
}

_BACKWARD = {"backward_pass_autocast": "off"} if hasattr(functorch_config, "backward_pass_autocast") else {}
"""Backward is called outside of autocast, whatever is around forward."""
_KEYS = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)
_LOCK = threading.RLock()


@contextlib.contextmanager
def eager_kernels(layouts: Layouts | None = None, *, symbolic: bool = False) -> Iterator[None]:
    """Inside, tracing finds the built-in operators, knows those in place, and keeps random ones nobody reads.

    Memory that backward may write over is not promised either: a second backward is refused by name. The
    gradient of a result is expected to lie as the result does, which torch 2.11 and before it did not.
    ``layouts`` are those of the mode that the step is traced in. Where sizes are ``symbolic``, the Python
    version of an operator stays if the built-in one takes numbers alone.
    """
    with (
        _LOCK,
        inductor_config.patch(fallback_random=True),
        functorch_config.patch(donated_buffer=False, guess_tangent_strides_as_outputs=True, **_BACKWARD),
        InPlaceCalls(layouts or Layouts()),
        cast_once(),
    ):
        hidden = [
            (op, key, op.py_kernels.pop(key))
            for op in _operators(_NAMES if MATMUL_TAKES_SYMBOLS or not symbolic else _OF_SYMBOLS)
            for key in _KEYS
            if key in op.py_kernels
        ]
        _forget(hidden)
        try:
            yield
        finally:
            for op, key, kernel in hidden:
                op.py_kernels[key] = kernel
            _forget(hidden)


def eager_target(target: Any) -> Any:
    """The function that does what eager does, where the functional form of an operator does not."""
    return _TARGETS.get(target, target)


def _operators(names: Sequence[str]) -> Iterator[Any]:
    for name in names:
        packet = getattr(torch.ops.aten, name, None)
        if packet is not None:
            yield from (getattr(packet, overload) for overload in packet.overloads())


def _forget(hidden: list[tuple[Any, Any, Any]]) -> None:
    """Operators remember which version they chose."""
    for op, _, _ in hidden:
        forget_kernels(op)
