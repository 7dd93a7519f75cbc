"""Timeline: what is live while each operator runs, and for how long it runs."""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = ["Lifetime", "Recording", "Timeline"]


class Lifetime(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """The steps at which one storage takes memory: ``first <= step <= last``, both included."""

    tensor: int
    bytes: int
    first: int
    last: int


class Timeline(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Live bytes and seconds, one entry an operator in program order.

    bytes │      ▄▄█▄        live_bytes[k]: everything that takes memory while operator k runs:
          │  ▄▄█████▄▄       leaves, what is kept for later, its inputs, outputs and workspace
          └───────────── k   peak_step: the first k at which live_bytes is largest
    """

    live_bytes: tuple[int, ...]
    lifetimes: tuple[Lifetime, ...] = ()
    workspace_bytes: tuple[int, ...] = ()
    """Per operator; empty when none is known."""
    seconds: tuple[float, ...] = ()
    """How long each operator takes; empty when not known."""
    resident_bytes: int = 0
    """How much of the live bytes is there throughout: leaves."""
    inside: dict[int, tuple[int, ...]] = {}
    """Of operators that run others, as loops do: the most until the first of these, then while each ran."""

    @property
    def peak_step(self) -> int | None:
        """The operator that runs at the peak, or None for an empty timeline."""
        if not self.live_bytes:
            return None
        return self.live_bytes.index(max(self.live_bytes))

    @property
    def peak_bytes(self) -> int:
        """The high-water mark."""
        return max(self.live_bytes, default=0)

    def live_at(self, step: int) -> list[Lifetime]:
        """Who takes memory while this operator runs, largest first."""
        live = [one for one in self.lifetimes if one.first <= step <= one.last and one.bytes]
        return sorted(live, key=lambda one: (-one.bytes, one.tensor))

    def bytes_between(self, step: int) -> int:
        """What stays live after this operator has ended and before the next one starts."""
        return sum(one.bytes for one in self.lifetimes if one.first <= step < one.last)


class Recording(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A timeline as a file: which operator ran at each of its entries."""

    operators: tuple[str, ...]
    timeline: Timeline
    lowtide: Literal["timeline"] = "timeline"
    version: Literal[1] = 1
