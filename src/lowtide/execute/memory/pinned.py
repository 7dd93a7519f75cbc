"""Pinned buffers of the host that serve step after step.

PyTorch's own pool gives a block out again only once the device is known to be done with it: a host that runs
ahead of the device would get new memory in every step, and pinning is slow. Here a buffer is free as soon as
no tensor is on it; who takes it lets the device wait for its last use, not the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lowtide.torch_internals import storage_owners

__all__ = ["PinnedPool"]


@dataclass(slots=True)
class _Buffer:
    tensor: torch.Tensor
    alone: int
    """How many owners its storage has while nobody uses it."""
    last: Any = None
    """The device's event after its last use."""


class PinnedPool:
    """Buffers by size; they live as long as the pool."""

    def __init__(self) -> None:
        self._buffers: dict[int, list[_Buffer]] = {}
        self._at: dict[int, _Buffer] = {}

    def take(self, size: int, new: Callable[[int], torch.Tensor]) -> tuple[torch.Tensor, Any]:
        """A buffer of so many bytes, and the event that its next user must come after, or None."""
        for buffer in self._buffers.setdefault(size, []):
            if storage_owners(buffer.tensor) == buffer.alone:
                return buffer.tensor.detach(), buffer.last
        tensor = new(size)
        if tensor.is_pinned():
            buffer = _Buffer(tensor, storage_owners(tensor))
            self._buffers[size].append(buffer)
            self._at[tensor.data_ptr()] = buffer
            tensor = tensor.detach()
        return tensor, None

    def used(self, tensor: torch.Tensor, event: Any) -> None:
        """A buffer is used by the device up to this event."""
        buffer = self._at.get(tensor.data_ptr())
        if buffer is not None:
            buffer.last = event

    def shrink(self) -> None:
        """Let go of the buffers that nobody uses."""
        for size, buffers in self._buffers.items():
            self._buffers[size] = [b for b in buffers if storage_owners(b.tensor) != b.alone]
        self._at = {b.tensor.data_ptr(): b for buffers in self._buffers.values() for b in buffers}
