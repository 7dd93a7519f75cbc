"""What operators take: figures that say where they come from."""

from __future__ import annotations

import enum

import msgspec

__all__ = ["Cost", "Figure", "Origin", "Span"]


class Origin(str, enum.Enum):
    """How a figure came about."""

    MEASURED = "measured"
    """Taken by Lowtide on a device at hand."""
    ESTIMATED = "estimated"
    """Computed from shapes or from a device description."""
    IMPORTED = "imported"
    """Read from somebody else's file."""


class Figure(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """A number and how it came about; the unit is that of the field that holds it."""

    value: int | float
    origin: Origin


class Cost(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """What one operator takes; None is "not known", never zero."""

    seconds: Figure | None = None
    flop: Figure | None = None
    bytes_moved: Figure | None = None
    workspace_bytes: Figure | None = None
    short_seconds: dict[str, Figure] = {}
    """Second runs that start from what the first one saved, where they give the same bits in less time: alone
    (no name), and joined with operators that follow (``relu``, ``add``, ``add,relu``)."""
    disturbed: bool = False
    """Whether times were measured while something else kept the machine busy. Such a cost is not cached."""


class Span(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """One operator on one lane of a profile, in seconds of the profile's own clock.

    start      kern           end
      ├─waiting─┼──── kernel ───┤
    """

    op: int
    lane: str
    start: float
    kern: float
    end: float
    host: bool = False
    """True for the thread that issues work, False for the device that does it."""

    @property
    def waiting(self) -> float:
        """Seconds between being started and running."""
        return self.kern - self.start

    @property
    def running(self) -> float:
        """Seconds of the kernel itself."""
        return self.end - self.kern
