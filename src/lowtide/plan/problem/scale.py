"""Seconds as whole numbers: the units that a Problem counts time in."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor, isclose

from lowtide.errors import PlanError

__all__ = ["scale_of", "whole_units"]

_TOTAL_TIME = 1 << 30
"""What the times of all operators add up to, about, where they have no common unit."""
_NOISE = 1e-12
"""How far a product of floating-point numbers may be from the whole number that it stands for."""


def whole_units(time: float) -> int:
    """Whole units, rounded down: what a schedule is said to take is never more than it takes."""
    return round(time) if isclose(time, round(time), rel_tol=_NOISE) else floor(time)


def scale_of(times: Sequence[float], fine: bool) -> float:
    """Whole units a second: a common unit of all times where there is one, else about 2^30 in all.

    Where times are to be fine, a common unit is split into as many.
    """
    if any(t < 0 or t != t for t in times):
        raise PlanError("an operator takes less than no time: costs must be 0 seconds or more")
    positive = [t for t in times if t > 0]
    if not positive:
        return 1.0
    total = sum(positive)
    for unit in (1.0, min(positive)):
        if total / unit <= _TOTAL_TIME and all(
            round(t / unit) > 0 and isclose(t / unit, round(t / unit), rel_tol=_NOISE) for t in positive
        ):
            return (_TOTAL_TIME * unit // total if fine else 1) / unit
    return _TOTAL_TIME / total
