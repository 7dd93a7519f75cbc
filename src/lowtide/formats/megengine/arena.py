"""Planned addresses for a MegEngine profile: one chunk for all of them, and where it begins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lowtide.cost import Step
from lowtide.graph import RESIDENT_ROLES

__all__ = ["Arena", "arena_for"]

_PAGE = 2 << 20
"""Arenas begin at multiples of what CUDA maps at once."""


@dataclass(frozen=True, slots=True)
class Arena:
    """A chunk of memory with the values of a step in it."""

    base: int
    """Its first byte in device memory: behind all leaves, whose addresses stay."""
    bytes: int
    offsets: dict[int, int]
    """By tensor; a view lies where it lay in what it views."""
    chunk: str


def arena_for(step: Step, offsets: Mapping[int, int], arena_bytes: int) -> Arena:
    """An arena for storages at these offsets; views of them are added."""
    tensors = step.graph.tensors
    ends = [t.address + t.bytes for t in tensors if t.role in RESIDENT_ROLES and t.address is not None]
    storage = step.graph.storages()
    found = dict(offsets)
    for k, owner in enumerate(storage):
        if k != owner and owner in offsets:
            apart = (tensors[k].address or 0) - (tensors[owner].address or 0)
            known = tensors[k].address is not None and tensors[owner].address is not None
            found[k] = offsets[owner] + (apart if known else 0)
    chunk, ids = "chkarena", {f"chk{t.id}" for t in tensors}
    while chunk in ids:
        chunk += "_"
    return Arena((max(ends, default=0) // _PAGE + 1) * _PAGE, arena_bytes, found, chunk)
