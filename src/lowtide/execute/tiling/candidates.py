"""Ways to cut a step that were tried: the best of them, to be planned again."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from lowtide.execute.tiling.capture_tiles import Way
from lowtide.plan.result.plan import Plan

__all__ = ["Candidate", "Candidates"]

_KEPT = 3
"""So many of the fastest ways: where groups were estimated, the first may turn out worse."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way to cut, planned in a short time."""

    way: Way
    search: Callable[[Way, float], Plan]
    """Plans it in so many seconds."""
    limit: float
    """The seconds that it had."""
    seconds: float = math.inf
    """What the step takes; infinite where nothing was found."""
    needed: float = math.inf
    """The memory that it would need, where nothing was found."""
    over: float = 0.0
    """Seconds that planning took beyond its limit."""


@dataclass(slots=True)
class Candidates:
    """The fastest ways to cut, and the one that missed the budget by least."""

    fastest: list[Candidate] = field(default_factory=list)
    nearest: Candidate | None = None

    def add(self, one: Candidate) -> None:
        """Keep it if it is among the best."""
        if one.seconds < math.inf:
            self.fastest.append(one)
            self.fastest.sort(key=lambda other: other.seconds)
            del self.fastest[_KEPT:]
        elif self.nearest is None or one.needed < self.nearest.needed:
            self.nearest = one

    @property
    def found(self) -> list[Candidate]:
        """Ways that fit, the fastest first; else the one that missed the budget by least."""
        return self.fastest or ([] if self.nearest is None else [self.nearest])
