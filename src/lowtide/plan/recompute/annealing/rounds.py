"""Annealing for a search: rounds from several starts, in one order of the operators."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lowtide.plan.problem.problem import Problem
from lowtide.plan.problem.schedule import Event, Outcome, evaluate
from lowtide.plan.recompute.annealing.kernel import Annealer, Cooling
from lowtide.plan.recompute.state import State

__all__ = ["SHORTEST", "OrderedProblem", "anneal", "anneal_round", "moves_of"]

_WORK = 240_000_000
"""Moves times operators that annealing may take in ten seconds: about five of them on one core."""

SHORTEST = 20_000
"""Moves of a round at least: fewer do not improve a schedule."""


@dataclass(frozen=True)
class OrderedProblem:
    """A problem in one order of its operators, packed for annealing."""

    problem: Problem
    annealer: Annealer
    plain: Outcome

    @classmethod
    def of(cls, problem: Problem) -> OrderedProblem:
        """The line of a problem."""
        return cls(problem, Annealer(problem), evaluate(problem, ()))


def moves_of(state: State) -> int:
    """How many moves a round of annealing has."""
    work = int(_WORK * min(1.0, (state.effort or state.time_limit) / 10))
    return max(SHORTEST, work // max(len(state.problem.ops), 60) // 8)


def anneal(state: State, line: OrderedProblem, pool: Iterable[frozenset[Event]], *, first: int = 0) -> None:
    """Anneal from each start, then again and again from the best; ``first`` tells seeds apart."""
    moves = moves_of(state)
    starts = dict.fromkeys([*pool, line.plain.events])
    ends: list[tuple[int, int, frozenset[Event]]] = []
    for k, start in enumerate(starts):
        if not state.done():
            seed = state.seed * 1000 + first + k
            ends.append(anneal_round(state, line, start, moves, seed=seed, hot=2.0))
    for k in range(4 + 4 * (state.best is None)):
        if state.done():
            break
        here = state.best is not None and (state.there or state.problem) is line.problem
        start = state.best.events if here and state.best is not None else min(ends)[2]
        hot = 1.0 if k % 2 else 4.0
        seed = state.seed * 1000 + first + 100 + k
        ends.append(anneal_round(state, line, start, moves, seed=seed, hot=hot))


def anneal_round(
    state: State,
    line: OrderedProblem,
    start: frozenset[Event],
    moves: int,
    *,
    seed: int,
    hot: float,
    method: str = "annealing",
) -> tuple[int, int, frozenset[Event]]:
    """One round of annealing, in pieces short enough for a deadline and an interrupt: how it ended."""
    weight = max(16, state.median * 64)
    pieces = max(1, moves * len(line.problem.ops) // 12_000_000)
    cold = hot / 32
    ratio = (cold / hot) ** (1 / pieces)
    shift = max(0, sum(max(0, x - state.budget) for x in line.plain.live).bit_length() - 22)
    events = start
    excess = cost = 0
    for piece in range(pieces):
        if state.done():
            break
        high = hot * state.median * ratio**piece
        result = line.annealer.round(
            events,
            state.budget,
            Cooling(high, high * ratio, weight, shift),
            moves=moves // pieces,
            seed=seed * 64 + piece,
            known=None if state.best is None else state.best.cost,
        )
        events, weight, excess, cost = result.last, result.weight, result.excess, result.last_cost
        if result.best is not None:
            state.offer(evaluate(line.problem, result.best), method, line.problem)
    return excess, cost, events
