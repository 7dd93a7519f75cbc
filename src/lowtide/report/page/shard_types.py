"""Tables of a split step, as the page draws them; by column, as all of a Report is."""

from __future__ import annotations

import msgspec

__all__ = ["Column", "MoveTable", "Reals", "ShardDecisions", "ShardNodes", "SplitRow"]

Column = tuple[int, ...]
Reals = tuple[float | None, ...]


class ShardNodes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Operators and variables as document 002 draws them: in order, with boxes for each device shown."""

    name: Column = ()
    kind: Column = ()
    """``variable``, or the kind of the operator."""
    module: Column = ()
    phase: Column = ()
    shape: tuple[Column, ...] = ()
    label: tuple[Column, ...] = ()
    """What its boxes are called, as ``read_rect``."""
    box: tuple[tuple[tuple[Column | None, ...], ...], ...] = ()
    """By label and device: lower bounds, then upper ones; None where it has none there."""
    in_all: int = 0


class ShardDecisions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What each tensor is on the devices, why, and what that costs."""

    tensor: Column = ()
    decision: Column = ()
    cut: Column = ()
    """Which dimension, over which axis of the mesh."""
    part: Column = ()
    """Bytes on the largest device."""
    reason: Column = ()
    price: Reals = ()
    """Seconds in which it moves."""
    instead: Reals = ()
    """Seconds of its operator on one device."""
    in_all: int = 0


class MoveTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What moves between devices."""

    tensor: Column = ()
    """-1 where that is not known."""
    operator: Column = ()
    """-1 behind backward."""
    how: Column = ()
    phase: Column = ()
    axis: Column = ()
    dim: Column = ()
    sent: tuple[Column, ...] = ()
    """Bytes by each device shown."""
    seconds: Reals = ()
    in_all: int = 0


class SplitRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a way to split the step is predicted to take."""

    name: str
    seconds: float
    peak_bytes: int
    plain_bytes: int
    wire_bytes: int
    fits: bool
