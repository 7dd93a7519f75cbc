"""Simulated annealing over recompute events, in rounds of a given number of moves.

A round is a function of its arguments alone: the same problem, start, seed and number of moves give the
same schedule, whether the compiled kernel is there or not.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from math import log

from lowtide.plan.problem.problem import Problem
from lowtide.plan.problem.schedule import Event

try:
    from lowtide.plan.recompute.annealing._anneal import anneal as _kernel
except ImportError:  # no compiler where it was installed: slower, same plans
    from lowtide.plan.recompute.annealing.kernel_python import anneal as _kernel

__all__ = ["COMPILED", "Annealer", "Cooling", "Round"]

COMPILED = _kernel.__module__ != "lowtide.plan.recompute.annealing.kernel_python"

_LOGARITHMS = [round(-log((k + 0.5) / 1024) * 65536) for k in range(1024)]
_TEMPERATURES = 64


@dataclass(frozen=True, slots=True)
class Cooling:
    """How a round of annealing cools down, and what bytes over the budget cost meanwhile."""

    hot: float
    cold: float
    """In units of time, as ``hot``."""
    weight: int = 1 << 16
    shift: int = 0


@dataclass(frozen=True, slots=True)
class Round:
    """What one round of annealing gave."""

    best: frozenset[Event] | None
    """The cheapest schedule inside the budget that beat ``known``, if any did."""
    cost: int
    """Its cost; else what was known."""
    last: frozenset[Event]
    """Where the round ended."""
    last_cost: int
    excess: int
    """Bytes over the budget at the end, added up over runs."""
    weight: int
    """What an excess was worth at the end; the next round may go on from there."""
    accepted: int


class Annealer:
    """A problem packed for the kernel."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._packed = packed(problem)

    def round(
        self,
        start: Iterable[Event],
        budget: int,
        cooling: Cooling,
        *,
        moves: int,
        seed: int,
        known: int | None = None,
    ) -> Round:
        """Try so many moves; ``known`` is the cost of a schedule that is there already."""
        hot, cold = cooling.hot, cooling.cold
        n = len(self.problem.ops)
        ratio = (cold / hot) ** (1 / (_TEMPERATURES - 1)) if hot > 0 else 1.0
        heats = [max(0, round(hot * ratio**k)) for k in range(_TEMPERATURES)]
        least = (1 << 62) if known is None else known
        settings = array(
            "q", [budget, moves, seed, cooling.weight, cooling.shift, least, *heats, *_LOGARITHMS]
        )
        keys = array("q", [t * n + v for t, v in sorted(start)])
        best, last, figures = _kernel(self._packed, keys.tobytes(), settings.tobytes())
        cost, last_cost, excess, weight, accepted, _ = array("q", figures)
        return Round(
            None if best is None else self._events(best),
            cost,
            self._events(last),
            last_cost,
            excess,
            weight,
            accepted,
        )

    def _events(self, keys: bytes) -> frozenset[Event]:
        n = len(self.problem.ops)
        return frozenset(divmod(key, n) for key in array("q", keys))


def packed(problem: Problem) -> bytes:
    """The problem as 64-bit numbers in the order that the kernel expects."""
    n = len(problem.ops)
    reads, writes, charged = (_flat(rows) for rows in (problem.reads, problem.writes, problem.charged))
    charges = problem.charges
    head = [
        n,
        len(problem.bytes),
        len(reads[1]),
        len(writes[1]),
        len(charges),
        len(charged[1]),
        problem.split,
    ]
    return array(
        "q",
        [
            *head, *problem.repeat, *problem.workspace, *problem.fixed,
            *map(int, problem.again), *problem.over,
            *reads[0], *reads[1], *writes[0], *writes[1],
            *problem.bytes, *problem.producer, *map(int, problem.kept), *problem.back,
            *charged[0], *charged[1],
            *(c.bytes for c in charges), *(c.instant * n + c.op for c in charges), *(c.when for c in charges),
        ],
    ).tobytes()  # fmt: skip


def _flat(rows: tuple[tuple[int, ...], ...]) -> tuple[list[int], list[int]]:
    """Where each row starts, and all rows in one."""
    return [0, *accumulate(len(row) for row in rows)], [item for row in rows for item in row]
