"""The rules of docs/valid-programs.md by their numbers. Serves the checker and ``valid_plan``."""

from __future__ import annotations

from enum import IntEnum

from lowtide.errors import PlanError

__all__ = ["Rule", "broken"]


class Rule(IntEnum):
    """A line of docs/valid-programs.md; the number is the line's."""

    GRAPH = 1
    NAMES = 2
    PHASES = 3
    COMPLETE = 4
    THERE = 5
    VALUES = 6
    ONCE = 7
    ORDER = 8
    IN_PLACE_FORM = 9
    IN_PLACE_STORAGE = 10
    DROPS = 11
    SENDS = 12
    SENDING = 13
    FETCHES = 14
    LEAVES_AWAY = 15
    SHORT = 16
    LOOPS = 17
    TILES = 18
    REGION = 19
    BODIES = 20
    RESULTS = 21
    BUDGET = 22
    AMOUNTS = 23
    WORDS = 24
    PREDICTED = 25
    PLAIN = 26
    RATIOS = 27
    SMALLEST = 28
    DECISIONS = 29
    FORMS = 30
    SAME_STEP = 31
    BESIDE = 32


def broken(rule: Rule, what: str) -> PlanError:
    """The error for a program or plan that breaks a rule."""
    return PlanError(f"{what} (rule {rule.value} of docs/valid-programs.md)", rule=rule.value)
