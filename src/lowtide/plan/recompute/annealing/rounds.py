"""Annealing for a search: rounds from several starts, in one order of the operators.

How a round from the plain step ends is a matter of its seed: on a ResNet-50 at a quarter of its memory most
end several percent of a step above the best of twelve. So many short ones come first, then rounds from the
best of them, in waves. The rounds of a wave run side by side, on as many cores as there are; what they find
does not depend on how many that is. At tight budgets short rounds may find nothing at all: there are long
ones too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from threading import Event as Flag

from lowtide.cores import usable_cores
from lowtide.plan.problem.problem import Problem
from lowtide.plan.problem.schedule import Event, Outcome, evaluate
from lowtide.plan.recompute.annealing.kernel import COMPILED, Annealer, Cooling
from lowtide.plan.recompute.state import State

__all__ = ["SHORTEST", "OrderedProblem", "anneal", "anneal_first", "anneal_from", "moves_of"]

_WORK = 480_000_000
"""Moves times operators that annealing may take in ten seconds: about five of them on two cores."""

SHORTEST = 20_000
"""Moves of a round at least: fewer seldom improve a schedule."""
_FRESH = SHORTEST // 2
"""The same from the plain step, of which there are many."""
_MOST_FRESH = 32
"""So many of these at most; where there is time for more, they are longer."""
_LONG = 5 * SHORTEST
"""Moves of a long round from the plain step, in a second at least."""
_FIRST = 8
"""So many of them for something to compare with, if there is time for half as many."""
_KEPT = 4
"""So many of the schedules that are found are annealed again."""
_WAVE = 4
"""Rounds that begin at the best so far; what they find is known to the next ones."""
_AGAIN = 4 * _WAVE
"""So many of these at most; where there is time for more, they are longer."""
_WIDEST = 16
"""Threads at most."""
_WARM, _HOT = (1.0, 32.0), (4.0, 128.0)
"""How hot a round begins, in times of a usual operator, and how many times colder it ends.

From a schedule, and from the plain step."""


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


@dataclass(frozen=True)
class _Round:
    """A round that is to be run."""

    start: frozenset[Event]
    moves: int
    seed: int
    heat: tuple[float, float] = _WARM


@dataclass(frozen=True)
class _Ended:
    """What came of a round: the best schedule that it found, else where it ended."""

    excess: int
    cost: int
    events: frozenset[Event]
    better: bool = False
    """Whether it is inside the budget, and better than what was known."""


def moves_of(state: State) -> int:
    """How many moves a round of annealing has that starts from a schedule."""
    return max(SHORTEST, _work(state) // 16)


def _work(state: State) -> int:
    """How many moves all rounds have."""
    share = min(1.0, (state.effort or state.time_limit) / 10)
    return int(_WORK * share) // max(len(state.problem.ops), 60)


def anneal(state: State, line: OrderedProblem, pool: Iterable[frozenset[Event]], *, first: int = 0) -> None:
    """Anneal from each start and from the plain step, then again and again from the best.

    ``first`` tells seeds apart.
    """
    moves, half = moves_of(state), max(4 * SHORTEST, _work(state) // 2)
    seed = state.seed * 1000 + first
    starts = [one for one in dict.fromkeys(pool) if one != line.plain.events]
    rounds = [_Round(start, moves, seed + k, (2.0, 32.0)) for k, start in enumerate(starts)]
    fresh = min(_MOST_FRESH, half // _FRESH)
    rounds += [_Round(line.plain.events, moves, seed + 19, (2.0, 32.0))]
    best = _wave(state, line, [*rounds, *_fresh(line, fresh, half // fresh, seed + 20)])
    again = min(_AGAIN, half // SHORTEST)
    for begin in range(0, again, _WAVE):
        if not best or state.done():
            break
        wave = range(begin, min(again, begin + _WAVE))
        lost = state.best is None
        size = 2 * moves if lost else half // again
        heats = (_HOT, _WARM) if lost else (_WARM,)
        rounds = [
            _Round(best[k % len(best)].events, size, seed + 100 + k, heats[k % len(heats)]) for k in wave
        ]
        best = _kept([*best, *_wave(state, line, rounds)])


def anneal_first(state: State, line: OrderedProblem, *, longest: bool) -> None:
    """Anneal from the plain step a few times, for something to compare with, where time allows.

    With the ``longest`` one round is so long that it finds something at tight budgets too.
    """
    count = min(_FIRST, _work(state) // 2 // _FRESH)
    seed = state.seed * 1000 + 900
    rounds = _fresh(line, count, _FRESH, seed) if count >= _FIRST // 2 else []
    if longest:
        share = 1.0 if state.effort else min(1.0, state.time_limit)
        moves = max(_FRESH, int(_LONG * share))
        rounds = [_Round(line.plain.events, moves, state.seed, (2.0, 32.0)), *rounds]
    if rounds:
        _wave(state, line, rounds)


def anneal_from(
    state: State,
    line: OrderedProblem,
    start: frozenset[Event],
    *,
    moves: int,
    seed: int,
    hot: float,
    method: str = "annealing",
) -> frozenset[Event]:
    """Anneal from one schedule, twice: the better of what they came to."""
    rounds = [_Round(start, moves, seed + 500 * k, (hot, 32.0)) for k in range(2)]
    ended = _wave(state, line, rounds, method)
    return ended[0].events if ended else start


def _fresh(line: OrderedProblem, count: int, moves: int, seed: int) -> list[_Round]:
    """Rounds from the plain step."""
    return [_Round(line.plain.events, moves, seed + k, _HOT) for k in range(count)]


def _kept(ended: Iterable[_Ended]) -> list[_Ended]:
    """The best of them, no two alike."""
    ordered = sorted(ended, key=lambda one: (one.excess, one.cost))
    return [*{(one.excess, one.cost): one for one in ordered}.values()][:_KEPT]


def _wave(
    state: State, line: OrderedProblem, rounds: Sequence[_Round], method: str = "annealing"
) -> list[_Ended]:
    """Run rounds side by side, and offer what they find in their order: the best of what they came to."""
    known = None if state.best is None else state.best.cost
    over, ended = Flag(), list[_Ended]()

    def run(one: _Round) -> _Ended | None:
        return _run(state, line, one, known, over.is_set)

    def enough(one: _Ended | None) -> bool:
        """Take what a round came to: whether nothing better is left to be found."""
        if one is not None:
            ended.append(one)
            if one.better:
                state.offer(evaluate(line.problem, one.events), method, line.problem)
        return state.done() and not state.late

    threads = min(len(rounds), _WIDEST, usable_cores() if COMPILED else 1)
    if threads < 2 or not _in_threads(run, rounds, threads, enough, over):
        over.clear()
        any(enough(run(one)) for one in rounds)
    return _kept(ended)


def _in_threads(
    run: Callable[[_Round], _Ended | None],
    rounds: Sequence[_Round],
    threads: int,
    enough: Callable[[_Ended | None], bool],
    over: Flag,
) -> bool:
    """Run rounds in threads, until it is enough; an interrupt ends them all, and what they found is taken.

    Whether there were any threads: while the interpreter ends, none can start.
    """
    with ThreadPoolExecutor(threads, thread_name_prefix="lowtide-annealing") as pool:
        left: deque[Future[_Ended | None]] = deque()
        try:
            with suppress(RuntimeError):
                left.extend(pool.submit(run, one) for one in rounds)
            if len(left) < len(rounds):
                return False
            while left and not enough(left.popleft().result()):
                pass
        except KeyboardInterrupt:
            over.set()
            while left:
                enough(left.popleft().result())
            raise
        finally:
            over.set()
            pool.shutdown(cancel_futures=True)
    return True


def _run(
    state: State, line: OrderedProblem, one: _Round, known: int | None, over: Callable[[], bool]
) -> _Ended | None:
    """A round, in pieces short enough for a deadline and an interrupt; None where it did not begin."""
    weight = max(16, state.median * 64)
    pieces = max(1, one.moves * len(line.problem.ops) // 12_000_000)
    hot, span = one.heat
    ratio = span ** (-1 / pieces)
    shift = max(0, sum(max(0, x - state.budget) for x in line.plain.live).bit_length() - 22)
    found = last = None
    events = one.start
    for piece in range(pieces):
        if over() or state.done():
            break
        high = hot * state.median * ratio**piece
        result = line.annealer.round(
            events,
            state.budget,
            Cooling(high, high * ratio, weight, shift),
            moves=one.moves // pieces,
            seed=one.seed * 64 + piece,
            known=known,
        )
        events, weight = result.last, result.weight
        last = _Ended(result.excess, result.last_cost, events)
        if result.best is not None:
            known = result.cost
            found = _Ended(0, result.cost, result.best, better=True)
    return found or last
