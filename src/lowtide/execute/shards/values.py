"""Tensors in a folder: processes of one machine read the parts that they need, and map the rest."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from lowtide.errors import RunError
from lowtide.files import read_bytes, write_atomically
from lowtide.graph import Rect
from lowtide.nested import mapped

__all__ = ["Values", "without_values", "write_values"]


class _Entry(msgspec.Struct, frozen=True):
    file: str
    shape: tuple[int, ...]
    dtype: str


def write_values(folder: Path, values: Mapping[str, torch.Tensor]) -> None:
    """Put tensors into files of a folder, as bare numbers."""
    entries = {}
    for number, (name, value) in enumerate(values.items()):
        entry = _Entry(f"{number}.bin", tuple(value.shape), str(value.dtype).removeprefix("torch."))
        value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tofile(folder / entry.file)
        entries[name] = entry
    write_atomically(folder / "values.json", msgspec.json.encode(entries))


class Values:
    """Reads them, one or a part of one at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._entries = msgspec.json.decode(read_bytes(folder / "values.json"), type=dict[str, _Entry])

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __getitem__(self, name: str) -> torch.Tensor:
        """The whole tensor; what nobody reads of it takes no memory."""
        if name not in self._entries:
            raise RunError(
                f"there is no tensor {name!r} in {self._folder}; use the same network in all processes"
            )
        entry = self._entries[name]
        dtype: torch.dtype = getattr(torch, entry.dtype)
        count = math.prod(entry.shape)
        if not count:
            return torch.empty(entry.shape, dtype=dtype)
        path = str(self._folder / entry.file)
        return torch.from_file(path, shared=False, size=count, dtype=dtype).view(entry.shape)

    def part(self, name: str, box: Rect) -> torch.Tensor:
        """A part of it, in memory of its own."""
        return self[name][box.slices()].clone(memory_format=torch.contiguous_format)


def without_values(model: nn.Module, batch: Any) -> tuple[nn.Module, Any]:
    """What is on the meta device, in memory that is not written to: the system takes no page for it."""

    def here(x: Any) -> Any:
        return torch.empty_like(x, device="cpu") if isinstance(x, torch.Tensor) else x

    return model.to_empty(device="cpu"), mapped(here, batch)
