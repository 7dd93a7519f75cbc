"""Repeated blocks: runs of forward operators that come again and again, such as the layers of a network.

Operators repeat each other if kind, times, workspace and results are the same, and each thing that they read
is one and the same for all, or for all made as many operators before, as the same result:

    ... │ a b c │ a b c │ a b c │ a b c │ ...      start, length 3, 4 copies
          └───────┴───────┴───────┴─ one operator and its counterparts

A search may then choose once for an operator and its counterparts. So that any number of copies can have one
choice and the rest another, they do so in groups: every second copy, every second of the rest, and so on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from lowtide.plan.bounds.cut import Ties
from lowtide.plan.problem.problem import Problem
from lowtide.plan.problem.schedule import Outcome

__all__ = ["Blocks", "repeated", "shared"]

_COPIES = 3
"""So many copies at least: two have nothing to share that is worth it."""
_LOOKS = 400_000
"""So many pairs of operators are compared at most, short blocks first."""
_BORDERS = (8, 4)
"""Copies between two borders."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Copies of one block, one right after the other."""

    start: int
    """The first operator of the first copy."""
    length: int
    """Operators a copy."""
    copies: int

    @property
    def end(self) -> int:
        """The first operator after the last copy."""
        return self.start + self.length * self.copies


def repeated(problem: Problem) -> tuple[Blocks, ...]:
    """The repeated blocks of forward in order: the longest stretches, each with the shortest block."""
    if problem.fetched:
        return ()  # copies back from the host stand between the operators
    place = {s: (v, k) for v, made in enumerate(problem.writes) for k, s in enumerate(made)}
    tokens = _tokens(problem)
    found: list[Blocks] = []
    looks = 0
    for length in range(1, problem.split // _COPIES + 1):
        equal = tokens[:-length] == tokens[length:]
        for low, high in _stretches(equal, (_COPIES - 1) * length):
            looks += high - low
            if looks > _LOOKS:
                break
            found += _runs([_reads(problem, v, length, place) for v in range(low, high)], low, length)
    taken = np.zeros(problem.split, dtype=bool)
    chosen = []
    for one in sorted(found, key=lambda one: (one.start - one.end, one.length, one.start)):
        if not taken[one.start : one.end].any():
            taken[one.start : one.end] = True
            chosen.append(one)
    return tuple(sorted(chosen, key=lambda one: one.start))


def shared(problem: Problem, plain: Outcome) -> list[Ties]:
    """Ways to choose once for many copies: freely, then with borders between some of them.

    What runs again on one side of a border does not need what would have to run again on the other: so a long
    chain of copies is not made again all at once. All are for a cut where storing everything needs most.
    """
    found = repeated(problem)
    if not found:
        return []
    numbers = alike(problem, found, plain.peak_at)
    ways = [Ties(numbers)]
    most = max(one.copies for one in found)
    return ways + [Ties(numbers, borders(problem, found, every)) for every in _BORDERS if 2 * every <= most]


def alike(problem: Problem, found: Iterable[Blocks], cut: int) -> list[int]:
    """A number for each operator, the same for counterparts that share their choices at a cut.

    They do if their copies are of one group, all made before the cut and read after it.
    """
    numbers = list(range(len(problem.ops)))
    for one in found:
        first: dict[tuple[int, int], int] = {}
        for copy in range(one.copies):
            ops = range(one.start + copy * one.length, one.start + (copy + 1) * one.length)
            late = [
                r for v in ops for s in problem.writes[v] for r in problem.readers[s] if r >= problem.split
            ]
            if ops[-1] < cut < min(late, default=0):
                for offset, v in enumerate(ops):
                    numbers[v] = first.setdefault((offset, _group(copy)), v)
    return numbers


def borders(problem: Problem, found: Iterable[Blocks], every: int) -> list[tuple[int, int]]:
    """What every so many copies get from those before them: each storage with an operator that reads it."""
    pairs = []
    for one in found:
        for start in range(one.start, one.end + 1, one.length * every):
            for v in range(start, min(start + one.length, problem.split)):
                pairs += [(s, v) for s in problem.reads[v] if 0 <= problem.producer[s] < start]
    return pairs


def _group(copy: int) -> int:
    """How often the number of a copy, from 1 on, can be halved."""
    return ((copy + 1) & -(copy + 1)).bit_length() - 1


def _tokens(problem: Problem) -> np.ndarray:
    """A number for each forward operator, the same for those that are equal but for what they read."""
    known: dict[tuple[object, ...], int] = {}
    found = []
    for v in range(problem.split):
        op = problem.graph.ops[problem.ops[v]]
        made = tuple((problem.bytes[s], problem.kept[s]) for s in problem.writes[v])
        taken = tuple(problem.bytes[s] for s in problem.reads[v])
        times = (problem.time[v], problem.repeat[v])
        own = (op.kind, *times, problem.workspace[v], problem.again[v], made, taken)
        found.append(known.setdefault(own, len(known)))
    return np.array(found, dtype=np.int64)


def _stretches(equal: np.ndarray, least: int) -> list[tuple[int, int]]:
    """Where at least so many neighbours are all true, from and to."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], equal, [False])).astype(np.int8)))
    return [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True) if b - a >= least]


def _reads(
    problem: Problem, v: int, length: int, place: dict[int, tuple[int, int]]
) -> tuple[bool, ...] | None:
    """For what an operator reads, whether the one a block later reads just that, else its counterpart.

    None if it reads something else.
    """
    found = []
    for a, b in zip(problem.reads[v], problem.reads[v + length], strict=True):
        maker, result = place.get(a, (-1, -1))
        if a != b and (maker < 0 or place.get(b) != (maker + length, result)):
            return None
        found.append(a == b)
    return tuple(found)


def _runs(reads: list[tuple[bool, ...] | None], low: int, length: int) -> list[Blocks]:
    """The stretches in which an operator and its counterparts all read in one way."""
    found = []
    start = 0
    for k in range(len(reads) + 1):
        end = k == len(reads) or reads[k] is None
        if end or (k - length >= start and reads[k - length] != reads[k]):
            copies = (k - start) // length + 1
            if copies >= _COPIES:
                found.append(Blocks(low + start, length, copies))
            start = k + 1 if end else k - length + 1
    return found
