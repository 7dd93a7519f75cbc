"""How the devices along an axis of a mesh talk to each other, by the name of their wire."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from lowtide.errors import RunError

__all__ = ["Wire", "connect", "wire_of"]


class Wire(Protocol):
    """Connects some devices, counted from 0 on."""

    @property
    def place(self) -> int:
        """Which of them this one is."""

    def swap(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> None:
        """Send tensors to others, and fill others with what they send."""

    def add_up(self, x: Tensor) -> None:
        """Put the sum of what all of them have into the tensor."""


_WIRES: dict[str, Wire] = {}


def connect(name: str, wire: Wire | None) -> None:
    """Have this wire under a name, or none any more."""
    if wire is None:
        _WIRES.pop(name, None)
    else:
        _WIRES[name] = wire


def wire_of(name: str) -> Wire:
    """The wire of a name."""
    found = _WIRES.get(name)
    if found is None:
        raise RunError(
            f"this process has no connection {name!r} to others; a step that is split over devices runs in "
            "processes that have split it themselves"
        )
    return found
