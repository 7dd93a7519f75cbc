"""``cheapest``: one choice for each of several things, where choices cost by themselves and in pairs.

``fastest``: the same where parts of the cost go on beside each other.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lowtide.errors import PlanError
from lowtide.plan.bounds.model import Rows

__all__ = ["Chosen", "MemoryRow", "Pairs", "Weighted", "cheapest", "cost_of", "fastest"]

Pairs = Mapping[tuple[int, int], Sequence[Sequence[float]]]
"""By two things: what each choice of the first takes together with each of the second; infinite where they
do not go together."""
Weighted = Callable[[float, float], tuple[Sequence[Sequence[float]], Pairs]]
"""What choices cost alone and in pairs, where two parts of the cost count so much each."""
_NODES = 100_000
_GAP = 1e-9
_LARGEST = 1e3
"""The largest cost of a choice, as the solver is told: it takes what is far below 1 for nothing."""
_CONTINUOUS = 2.0
"""What may grow beyond 1 is no choice."""
_WORTH = 0.98
"""Choices that do not cost least in sum are taken where they need at most this share of the time."""
_HALVINGS = 2
"""How often the weights of parts that go on beside each other are looked for between two others."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """The choice for each thing, what they cost, and a lower bound of what any choices cost."""

    choices: tuple[int, ...]
    cost: float
    bound: float


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """What choices take of something that there is only so much of."""

    alone: Sequence[Sequence[float]]
    pairs: Pairs
    most: float


def cheapest(
    alone: Sequence[Sequence[float]], pairs: Pairs, seconds: float, memory: MemoryRow | None = None
) -> Chosen:
    """The choices that cost least, or the best after so many seconds, within what memory there is.

    Without a limit on memory they cost no more than the first choice of each.
    """
    rows, scale = Rows(), _LARGEST / (max(map(max, alone), default=0.0) or 1.0)
    chosen = [[rows.variable(scale * cost) for cost in costs] for costs in alone]
    for variables in chosen:
        rows.row([(one, 1.0) for one in variables], 1.0, 1.0)
    taken: list[tuple[int, float]] = []
    if memory is not None:
        both = zip(chosen, memory.alone, strict=True)
        taken = [pair for some, sizes in both for pair in zip(some, sizes, strict=True)]
    for (a, b), costs in pairs.items():
        sizes = None if memory is None else memory.pairs.get((a, b))
        scaled = [[scale * cost for cost in some] for some in costs]
        taken += _pair(rows, chosen[a], chosen[b], scaled, sizes)
    if memory is not None:
        rows.row([(one, size / memory.most) for one, size in taken if size], 0.0, 1.0)
    found = rows.solve(_NODES, seconds, _GAP)
    if found.values is None:
        advice = (
            "in time; give more (--time-limit)"
            if found.status != "infeasible"
            else "in this memory; give more"
        )
        raise PlanError(f"no way to split the step was found {advice}")
    values = found.values
    choices = tuple(max(range(len(some)), key=lambda k: values[some[k]]) for some in chosen)
    first = (0,) * len(chosen)
    if memory is None and cost_of(first, alone, pairs) < cost_of(choices, alone, pairs):
        choices = first  # the search was ended before it found as good ones
    return Chosen(choices, cost_of(choices, alone, pairs), found.dual / scale)


def fastest(
    weighted: Weighted,
    taken: Callable[[Sequence[int]], float],
    seconds: float,
    memory: MemoryRow | None = None,
) -> Chosen:
    """The choices that cost least by ``taken``, where two parts of the cost go on beside each other.

    So choices cost no less than either part with all the rest: than both, weighted by two numbers that
    add up to one. The cheapest ones are found for several weights, and for the sum of both; the bound is
    the highest, or half of that of the sum. The sum comes first, and others have the time that it leaves.
    Choices whose sum is least are kept where others save next to nothing.
    """
    both, first, second = weighted(1.0, 1.0), weighted(1.0, 0.0), weighted(0.0, 1.0)
    end = time.monotonic() + seconds
    best = cheapest(*both, seconds, memory)
    found, bound = [best.choices], best.bound / 2
    low, high, share = 0.0, 1.0, 1.0
    for _ in range(1 + _HALVINGS):
        left = end - time.monotonic()
        if left <= 0:
            break
        with contextlib.suppress(PlanError):  # not in so little time
            one = cheapest(*(first if share == 1.0 else weighted(share, 1.0 - share)), left, memory)
            bound = max(bound, one.bound)
            found.append(one.choices)
            longer = cost_of(one.choices, *first) > cost_of(one.choices, *second)
            low, high = (share, high) if longer else (low, share)
        if low == high:
            break
        share = (low + high) / 2
    choices = min(found, key=taken)
    if _WORTH * taken(best.choices) <= taken(choices):
        choices = best.choices
    return Chosen(choices, taken(choices), min(bound, taken(choices)))


def _pair(
    rows: Rows,
    first: Sequence[int],
    second: Sequence[int],
    costs: Sequence[Sequence[float]],
    sizes: Sequence[Sequence[float]] | None,
) -> list[tuple[int, float]]:
    """Rows for what two choices take together; their variables, with what they take of the memory."""
    if not any(map(any, costs)) and not any(map(any, sizes or ())):
        return []
    both = {}
    for i, j in itertools.product(range(len(first)), range(len(second))):
        possible = costs[i][j] < math.inf
        both[i, j] = rows.variable(costs[i][j] if possible else 0.0, at_most=_CONTINUOUS if possible else 0.0)
    for i, one in enumerate(first):
        rows.row([*((both[i, j], 1.0) for j in range(len(second))), (one, -1.0)], 0.0, 0.0)
    for j, one in enumerate(second):
        rows.row([*((both[i, j], 1.0) for i in range(len(first))), (one, -1.0)], 0.0, 0.0)
    return [] if sizes is None else [(one, sizes[i][j]) for (i, j), one in both.items()]


def cost_of(choices: Sequence[int], alone: Sequence[Sequence[float]], pairs: Pairs) -> float:
    """What choices cost."""
    own = sum(costs[k] for costs, k in zip(alone, choices, strict=True))
    return own + sum(costs[choices[a]][choices[b]] for (a, b), costs in pairs.items())
