"""How the devices along an axis of a mesh talk to each other, by the name of their wire."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from lowtide.cost.wire import WireEnd
from lowtide.errors import RunError

__all__ = ["Wire", "connect", "wire_ends", "wire_of"]


class Wire(Protocol):
    """Connects some devices, counted from 0 on."""

    @property
    def place(self) -> int:
        """Which of them this one is."""

    def swap(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> None:
        """Send tensors to others, and fill others with what they send."""

    def begin_swap(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]
    ) -> Callable[[], None]:
        """Start the same; who reads or writes one of the tensors calls what this gives before."""

    def add_up(self, x: Tensor) -> None:
        """Put the sum of what all of them have into the tensor."""

    def begin_sum(self, x: Tensor) -> Callable[[], None]:
        """Start the same; who reads the tensor, or gives its memory back, calls what this gives before."""


_WIRES: dict[str, tuple[Wire, WireEnd | None]] = {}


def connect(name: str, wire: Wire | None, end: WireEnd | None = None) -> None:
    """Have this wire under a name, or none any more; ``end`` says how fast it is, if that is known."""
    if wire is None:
        _WIRES.pop(name, None)
    else:
        _WIRES[name] = wire, end


def wire_ends() -> dict[str, WireEnd]:
    """The wires of which it is known how fast they are."""
    return {name: end for name, (_, end) in _WIRES.items() if end is not None}


def wire_of(name: str) -> Wire:
    """The wire of a name."""
    found = _WIRES.get(name)
    if found is None:
        raise RunError(
            f"this process has no connection {name!r} to others; a step that is split over devices runs in "
            "processes that have split it themselves"
        )
    return found[0]
