"""Dynamic programming over lower sets: Kusumoto, Inoue, Watanabe, Akiba, Koyama, "A Graph Theoretic Framework
of Recomputation Algorithms for Memory-Efficient Backpropagation" (2019).

A lower set is a set of forward operators with all that they depend on. Along a growing sequence of them the
difference of two neighbours is a segment; kept is what a lower set hands to the outside.
``front[set, units]`` is the least that is kept where so many units of recomputation led to the set.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lowtide.errors import PlanError
from lowtide.graph import Graph
from lowtide.plan.baselines.common import cheapest, homes, segmented, unrepeatable
from lowtide.plan.program.instructions import Program
from lowtide.plan.program.memory import allocated_bytes
from lowtide.plan.program.simple import forward_count, kept_throughout, store_all
from lowtide.plan.program.simulate import simulate

__all__ = ["lower_sets_approximate", "lower_sets_exact"]

MOST_SETS = 1000
"""More lower sets than these are too many for the exact method."""
MOST_PRUNED = 200
"""Of the approximate method's, one an operator, so many are looked at."""
_MOST_UNITS = 300
_OF_THE_BUDGET = [percent / 100 for percent in range(130, 68, -3)]
"""What the tables are asked for, one after the other: they count bytes more coarsely than the simulation."""
_ENOUGH = 3

Booleans = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]


def lower_sets_exact(
    graph: Graph, seconds: Sequence[float], budget: int, *, workspace_bytes: Sequence[int] = ()
) -> Program:
    """The best sequence among all lower sets; a PlanError where there are more than MOST_SETS."""
    needs = _needs(graph)
    families = (_all_sets(needs), _spanned(graph, needs))  # the smaller one for what the larger counts wrong
    return _planned(graph, families, seconds, budget, workspace_bytes)


def lower_sets_approximate(
    graph: Graph, seconds: Sequence[float], budget: int, *, workspace_bytes: Sequence[int] = ()
) -> Program:
    """The best sequence among the lower sets that a single operator spans."""
    return _planned(graph, [_spanned(graph, _needs(graph))], seconds, budget, workspace_bytes)


def _needs(graph: Graph) -> list[int]:
    """For each operator of forward the ones whose results it reads, as bits."""
    made: dict[int, int] = {}
    needs: list[int] = []
    for k, op in enumerate(graph.ops[: forward_count(graph)]):
        before = {made[t] for t in op.reads if t in made} | set(op.after)
        needs.append(sum(1 << one for one in before))
        made.update(dict.fromkeys(op.outputs, k))
    return needs


def _all_sets(needs: Sequence[int]) -> list[int]:
    found = {0}
    stack = [0]
    while stack:
        one = stack.pop()
        for k, need in enumerate(needs):
            grown = one | 1 << k
            if not one >> k & 1 and not need & ~one and grown not in found:
                found.add(grown)
                stack.append(grown)
        if len(found) > MOST_SETS:
            raise PlanError(f"the step has more than {MOST_SETS} lower sets, too many for the exact method")
    return sorted(found, key=lambda one: (one.bit_count(), one))


def _spanned(graph: Graph, needs: Sequence[int]) -> list[int]:
    """Each operator with all it depends on; where they are many, of neighbours the one that keeps least."""
    spans: list[int] = []
    for k, need in enumerate(needs):
        span = 1 << k
        while need:
            low = need & -need
            span |= spans[low.bit_length() - 1] | low
            need ^= low
        spans.append(span)
    whole = (1 << len(needs)) - 1
    found = sorted({0, whole, *spans}, key=lambda one: (one.bit_count(), one))
    if len(found) > MOST_PRUNED:
        facts = _Facts(graph, found, (), ())
        kept = facts.crossing @ facts.bytes
        groups = np.array_split(np.arange(1, len(found) - 1), MOST_PRUNED - 2)
        found = [0, *(found[int(group[kept[group].argmin()])] for group in groups), whole]
    return found


class Segments(NamedTuple):
    """From one lower set to each of several."""

    to: npt.NDArray[np.intp]
    seconds: Floats
    """What is made again."""
    kept: Floats
    """Bytes kept more."""
    peak: Floats
    """Bytes in backward, without what was kept before."""


class _Facts:
    """A row a lower set; a column a storage, an operator of forward, or one of backward."""

    def __init__(
        self, graph: Graph, sets: Sequence[int], seconds: Sequence[float], workspace: Sequence[int]
    ) -> None:
        split, storage = forward_count(graph), graph.storages()
        stay = {storage[t] for t in kept_throughout(graph)}
        stay |= {storage[t] for k in unrepeatable(graph) for t in graph.ops[k].outputs}
        home = {s: k for s, k in homes(graph, storage).items() if s not in stay}
        column = {s: c for c, s in enumerate(home)}
        self.seconds = np.array(seconds[:split], float)
        self.bytes = np.array([allocated_bytes(graph.tensors[s]) for s in home], float)
        self.within = np.array([[one >> k & 1 for k in range(split)] for one in sets], bool)
        self.owns = self.within[:, list(home.values())].reshape(len(sets), len(home))
        reader = np.zeros((split, len(home)), bool)
        self.makes = np.zeros((split, len(home)), np.float32)
        for k, op in enumerate(graph.ops[:split]):
            reader[k, [column[storage[t]] for t in op.reads if storage[t] in column]] = True
            self.makes[k, [column[storage[t]] for t in op.outputs if storage[t] in column]] = 1.0
        outside = (~self.within).astype(np.float32) @ reader.astype(np.float32) > 0
        self.crossing: Booleans = self.owns & outside
        later = len(graph.ops) - split
        self.first = np.full(len(home), later)
        self.last = np.full(len(home), -1)
        for j, op in enumerate(graph.ops[split:]):
            for c in {column[storage[t]] for t in op.reads if storage[t] in column}:
                self.first[c] = min(self.first[c], j)
                self.last[c] = j
        alive = self.bytes[:, None] * (np.arange(later) <= self.last[:, None])
        self.alive: Floats = self.owns.astype(float) @ alive
        """Bytes of a set that backward still reads, at each of its operators."""
        plain = simulate(graph, store_all(graph), workspace_bytes=workspace).live_bytes[split:]
        self.beside: Floats = np.array(plain, float) - alive.sum(0)
        """What else is there at each operator of backward."""

    def segments(self, start: int) -> Segments:
        """The segments from one set to those around it."""
        to = np.flatnonzero(~(self.within[start] & ~self.within).any(1))
        to = to[to > start]
        own = self.owns[to] & ~self.owns[start]
        fresh = own & ~self.crossing[to]
        again = fresh.astype(np.float32) @ self.makes.T > 0
        took = (again & self.within[to] & ~self.within[start]).astype(float) @ self.seconds
        kept = (own & ~fresh).astype(float) @ self.bytes
        begin = np.where(fresh, self.first, len(self.beside)).min(1, initial=len(self.beside))
        end = np.where(fresh, self.last, -1).max(1, initial=-1)
        if len(to):  # the last segment is still there when backward begins
            took[-1], begin[-1], end[-1] = 0.0, 0, max(end[-1], 0)
        at = np.arange(len(self.beside))
        here = (at >= begin[:, None]) & (at <= end[:, None])
        live = np.where(here, self.alive[to] - self.alive[start] + self.beside, 0.0)
        return Segments(to, took, kept, live.max(1, initial=0.0))


def _planned(
    graph: Graph,
    families: Sequence[Sequence[int]],
    seconds: Sequence[float],
    budget: int,
    workspace: Sequence[int],
) -> Program:
    tables = (_Facts(graph, sets, seconds, workspace) for sets in families)
    programs = (program for facts in tables for program in _programs(graph, facts, budget, workspace))
    return cheapest(graph, seconds, budget, programs, workspace_bytes=workspace)


def _programs(graph: Graph, facts: _Facts, budget: int, workspace: Sequence[int]) -> Iterator[Program]:
    """Programs for budgets around the one asked for, until a few fit."""
    edges = [facts.segments(start) for start in range(len(facts.within))]
    seen: set[tuple[int, ...]] = set()
    fitting = 0
    for share in _OF_THE_BUDGET:
        path = _shortest(facts, edges, budget * share)
        if path is None or fitting == _ENOUGH:
            return
        if tuple(path) not in seen:
            seen.add(tuple(path))
            program = segmented(graph, (~facts.within[path[:-1]]).sum(0).tolist())
            fitting += simulate(graph, program, workspace_bytes=workspace).peak_bytes <= budget
            yield program


def _shortest(facts: _Facts, edges: Sequence[Segments], budget: float) -> list[int] | None:
    """The sets of the cheapest sequence whose segments all fit, smallest first; the empty one is left out."""
    whole = float(facts.seconds.sum())
    exact = whole <= _MOST_UNITS and bool((facts.seconds == facts.seconds.round()).all())
    unit = 1.0 if exact or not whole else whole / _MOST_UNITS
    most = int(whole / unit) + 1
    count = len(facts.within)
    front = np.full((count, most + 1), np.inf)
    came = np.zeros((count, most + 1, 2), np.int32)
    front[0, 0] = 0.0
    for start, edge in enumerate(edges):
        spent = np.flatnonzero(front[start] < np.minimum.accumulate([np.inf, *front[start, :-1]]))
        held = front[start, spent][:, None]
        at = np.rint(edge.seconds / unit).astype(int) + spent[:, None]
        which, place = np.nonzero((held + edge.peak <= budget) & (at <= most))
        to, at, value = edge.to[place], at[which, place], (held + edge.kept)[which, place]
        better = value < front[to, at]  # no two of them meet: the same set is reached at different units
        to, at = to[better], at[better]
        front[to, at] = value[better]
        came[to, at, 0] = start
        came[to, at, 1] = spent[which[better]]
    reached = np.flatnonzero(np.isfinite(front[-1]))
    if not len(reached):
        return None
    path, here, units_left = [], count - 1, int(reached[0])
    while here:
        path.append(here)
        here, units_left = (int(one) for one in came[here, units_left])
    return path[::-1]
