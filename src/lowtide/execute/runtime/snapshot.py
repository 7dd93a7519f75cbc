"""Values of tensors before a step changes them, so that a step that fails leaves them as they were."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["Snapshot"]


class Snapshot:
    """Copies in one block for each device and type of number: few kernels, however many tensors."""

    __slots__ = ("_taken",)

    def __init__(self) -> None:
        self._taken: list[tuple[list[torch.Tensor], torch.Tensor]] = []

    def take(self, tensors: Sequence[torch.Tensor]) -> None:
        """Keep what the tensors hold now."""
        groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for tensor in tensors:
            groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
        self._taken = [
            (group, torch.cat([t if t.dim() == 1 else t.reshape(-1) for t in group]))
            for group in groups.values()
        ]

    def restore(self) -> None:
        """Put the values back, and forget them."""
        for group, block in self._taken:
            parts = torch.split_with_sizes(block, [tensor.numel() for tensor in group])
            for tensor, part in zip(group, parts, strict=True):
                tensor.copy_(part.view_as(tensor))
        self._taken.clear()
