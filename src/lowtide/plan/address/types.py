"""AddressPlan: one arena, and the place of every allocation in it."""

from __future__ import annotations

import enum
from typing import Literal

import msgspec

__all__ = ["AddressPlan", "Allocation", "EventClock", "Placed", "Purpose"]


class Purpose(str, enum.Enum):
    """What a piece of memory is for."""

    TENSOR = "tensor"
    """What an operator writes, with its views and with what later operators write over it in place."""
    WORKSPACE = "workspace"
    """What an operator needs while it runs, a group included."""
    AGAIN = "again"
    """A second copy of a held tensor: its operator runs again for the sake of another output."""
    FETCHED = "fetched"
    """A tensor that comes back from the host."""
    GIVEN = "given"
    """What comes in from outside without being a leaf: the gradient that starts backward."""
    LEAF = "leaf"
    """A parameter or optimiser state that leaves for the host and comes back to its own place."""
    COPY = "copy"
    """The old value of a leaf that the step updates and backward reads."""
    RESTORE = "restore"
    """Leaves that forward updates, kept until it has succeeded."""
    OTHER = "other"
    """Scalars of autograd and states of random generators, which plans count too."""


class EventClock(str, enum.Enum):
    """What births and deaths count."""

    INSTRUCTION = "instruction"
    """Instructions of a Program; those of the bodies of a loop stand behind the loop, each body once."""
    OPERATOR = "operator"
    """Operators of a graph in program order."""


class Allocation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """So many bytes at every event t with ``birth <= t < death``.

    event    0   1   2   3        birth 1, death 3: taken by instruction 1, and free for instruction 3
             ────┤███████├────
    """

    birth: int
    death: int
    bytes: int
    use: Purpose = Purpose.TENSOR
    at: tuple[int, ...] = ()
    """The instruction that takes the memory; in the body of a loop: loop, body, instruction, and so on."""
    tensors: tuple[int, ...] = ()
    """Tensors whose bytes lie here, one after the other: an operator in place takes the place of its input.

    Views are left out. Positions in the graph of the step, or in that of the body.
    """
    pinned: int | None = None
    """Where it must lie, if that is not free."""


class Placed(Allocation, frozen=True, forbid_unknown_fields=True, omit_defaults=True, gc=False, kw_only=True):
    """An allocation with its place: ``offset <= byte < offset + bytes`` of the arena."""

    offset: int


class AddressPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One arena for a step. Leaves that stay on the device are not part of it."""

    allocations: tuple[Placed, ...]
    """In the order in which they are taken; an executor that asks for memory gets them one by one."""
    clock: EventClock
    events: int
    """All births and deaths lie in ``0 <= t <= events``."""
    alignment: int
    """Every offset, and the arena, is a multiple of it."""
    arena_bytes: int
    live_bytes: int
    """The most bytes that are live at one event: no arena is smaller."""
    greedy_bytes: int
    """What greedy placement by size takes, or at least takes where it was not finished."""
    method: str
    """What found it: greedy, or OmniMalloc's search."""
    optimal: bool
    """Whether no arena of this alignment can be smaller."""
    solve_seconds: float
    lowtide: Literal["addresses"] = "addresses"
    version: Literal[1] = 1

    @property
    def efficiency(self) -> float:
        """Live bytes over arena bytes; 1 where nothing is wasted."""
        return self.live_bytes / self.arena_bytes if self.arena_bytes else 1.0

    def taken_by(self) -> dict[tuple[int, ...], list[Placed]]:
        """The allocations of each instruction in order, by its place (``Allocation.at``)."""
        found: dict[tuple[int, ...], list[Placed]] = {}
        for one in self.allocations:
            found.setdefault(one.at, []).append(one)
        return found
