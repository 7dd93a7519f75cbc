"""``cheapest``: one choice for each of several things, where choices cost by themselves and in pairs."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lowtide.errors import PlanError
from lowtide.plan.bounds.model import Rows

__all__ = ["Chosen", "Pairs", "cheapest"]

Pairs = Mapping[tuple[int, int], Sequence[Sequence[float]]]
"""By two things: what each choice of the first takes together with each of the second."""
_NODES = 100_000
_GAP = 1e-9
_CONTINUOUS = 2.0
"""What may grow beyond 1 is no choice."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """The choice for each thing, what they cost, and a lower bound of what any choices cost."""

    choices: tuple[int, ...]
    cost: float
    bound: float


def cheapest(alone: Sequence[Sequence[float]], pairs: Pairs, seconds: float) -> Chosen:
    """The choices that cost least, or the best after so many seconds."""
    rows = Rows()
    chosen = [[rows.variable(cost) for cost in costs] for costs in alone]
    for variables in chosen:
        rows.row([(one, 1.0) for one in variables], 1.0, 1.0)
    for (a, b), costs in pairs.items():
        _pair(rows, chosen[a], chosen[b], costs)
    found = rows.solve(_NODES, seconds, _GAP)
    if found.values is None:
        raise PlanError("no way to split the step was found in time; give more (--time-limit)")
    values = found.values
    choices = tuple(max(range(len(some)), key=lambda k: values[some[k]]) for some in chosen)
    return Chosen(choices, cost_of(choices, alone, pairs), found.dual)


def _pair(rows: Rows, first: Sequence[int], second: Sequence[int], costs: Sequence[Sequence[float]]) -> None:
    """Rows for what two choices take together."""
    if not any(map(any, costs)):
        return
    both = {
        (i, j): rows.variable(costs[i][j], at_most=_CONTINUOUS)
        for i, j in itertools.product(range(len(first)), range(len(second)))
    }
    for i, one in enumerate(first):
        rows.row([*((both[i, j], 1.0) for j in range(len(second))), (one, -1.0)], 0.0, 0.0)
    for j, one in enumerate(second):
        rows.row([*((both[i, j], 1.0) for i in range(len(first))), (one, -1.0)], 0.0, 0.0)


def cost_of(choices: Sequence[int], alone: Sequence[Sequence[float]], pairs: Pairs) -> float:
    """What choices cost."""
    own = sum(costs[k] for costs, k in zip(alone, choices, strict=True))
    return own + sum(costs[choices[a]][choices[b]] for (a, b), costs in pairs.items())
