"""Under autocast a parameter is cast once, however often it is read, as in eager PyTorch.

Autocast keeps the casts of leaves until its outermost region ends, so the gradients of all readers add up in
half precision before one of them is cast back. While torch traces, parameters are no leaves, and each reader
would get a cast of its own: gradients would round otherwise, and every cast would take memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from lowtide.torch_internals import DispatchKey, forget_kernels, is_excluded, is_view

__all__ = ["cast_once"]

_CAST = torch.ops.aten._to_copy.default
_KEYS = {
    "cpu": (DispatchKey.AutogradCPU, DispatchKey.AutocastCPU),
    "cuda": (DispatchKey.AutogradCUDA, DispatchKey.AutocastCUDA),
}
"""By type of device: where gradients are recorded, and where autocast is."""


@contextlib.contextmanager
def cast_once() -> Iterator[None]:
    """Inside, tracing finds the casts of autocast that it has made before in the same region."""
    if not torch.is_autocast_cache_enabled():
        yield
        return
    kept: dict[tuple[int, torch.dtype], tuple[torch.Tensor, torch.Tensor]] = {}
    enabled = {device: torch.is_autocast_enabled(device) for device in _KEYS}
    clear, enable = torch.clear_autocast_cache, torch.set_autocast_enabled

    def cast(tensor: torch.Tensor, **options: Any) -> torch.Tensor:
        with _in_place_of_casts(None):
            made: torch.Tensor
            if not enabled.get(tensor.device.type) or not _is_kept(tensor, options):
                made = _CAST(tensor, **options)
                return made
            key = id(tensor), options["dtype"]
            if key not in kept:
                kept[key] = tensor, _CAST(tensor, **options)
            return kept[key][1]

    def forget() -> None:
        kept.clear()
        clear()

    def note(*values: Any) -> None:  # inside of a cast, torch says that autocast is disabled
        device, value = values if len(values) == 2 else ("cuda", *values)
        enabled[device] = value
        enable(*values)

    # what regions call where they begin and end, and where the outermost one ends
    torch.set_autocast_enabled, torch.clear_autocast_cache = note, forget  # type: ignore[assignment]
    try:
        with _in_place_of_casts(cast):
            yield
    finally:
        torch.set_autocast_enabled, torch.clear_autocast_cache = enable, clear


@contextlib.contextmanager
def _in_place_of_casts(function: Callable[..., torch.Tensor] | None) -> Iterator[None]:
    """Inside, this is traced where a cast and its gradient would be; None: the cast itself is."""
    before = {key: _CAST.py_kernels.pop(key) for key, _ in _KEYS.values() if key in _CAST.py_kernels}
    if function is not None:
        _CAST.py_kernels.update({key: function for key, _ in _KEYS.values()})
    forget_kernels(_CAST)
    try:
        yield
    finally:
        for key, _ in _KEYS.values():
            _CAST.py_kernels.pop(key, None)
        _CAST.py_kernels.update(before)
        forget_kernels(_CAST)


def _is_kept(tensor: torch.Tensor, options: dict[str, Any]) -> bool:
    """Whether this is a cast by autocast, of what stands for a leaf, that eager would keep."""
    device = tensor.device.type
    if options.get("dtype") != torch.get_autocast_dtype(device):
        return False
    if not is_excluded(_KEYS[device][1]):
        return False  # somebody's own cast
    if tensor.dtype != torch.float32 or not tensor.requires_grad or is_view(tensor):
        return False
    return tensor.grad_fn is None or not tensor.grad_fn.next_functions
