"""An integer program, solved by HiGHS for small steps: Jain et al., "Checkmate: Breaking the Memory Wall with
Optimal Tensor Rematerialization" (2020).

The frontier advances by one operator a stage: stage ``t`` ends with the first run of operator ``t``; before
it, earlier operators may run again, each at most once and in program order.

    runs[t, k]      operator k runs in stage t
    keeps[t, v]     tensor v is there when stage t begins
    there[t, k, s]  storage s is there while operator k runs in stage t
    twice[t, v]     tensor v is kept and passes by once more: its operator runs again for another output
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import chain

import highspy
import numpy as np

from lowtide.errors import PlanError
from lowtide.graph import RESIDENT_ROLES, Graph
from lowtide.plan.baselines.common import unrepeatable, within
from lowtide.plan.bounds.highs import new_solver, run_solver
from lowtide.plan.program.instructions import Program
from lowtide.plan.program.memory import Memory, allocated_bytes
from lowtide.plan.program.simple import forward_count, kept_throughout, with_drops
from lowtide.plan.program.simulate import simulate
from lowtide.units import format_bytes

__all__ = ["MOST_OPERATORS", "checkmate"]

MOST_OPERATORS = 40
TIME_LIMIT = 60.0

Terms = list[tuple[int, float]]
"""Columns with their factors."""


def checkmate(
    graph: Graph,
    seconds: Sequence[float],
    budget: int,
    *,
    workspace_bytes: Sequence[int] = (),
    time_limit: float = TIME_LIMIT,
    most_operators: int = MOST_OPERATORS,
) -> Program:
    """The optimum with operators in program order; a PlanError for larger steps, or where time runs out."""
    if len(graph.ops) > most_operators:
        raise PlanError(
            f"the step has {len(graph.ops)} operators; the integer program is for up to {most_operators}"
        )

    def plan(asked: int) -> Program:
        model = _Staged(graph, seconds, asked, workspace_bytes or [0] * len(graph.ops))
        again = _solved(model, time_limit, asked)
        stages = [[k for k in range(t + 1) if again[model.runs[t, k]]] for t in range(len(graph.ops))]
        return _without_idle(graph, stages, workspace_bytes)

    return within(graph, budget, plan, workspace_bytes=workspace_bytes)


def _without_idle(graph: Graph, stages: list[list[int]], workspace_bytes: Sequence[int]) -> Program:
    """The Program of the stages, less what runs again for nobody because it costs nothing."""

    def program() -> Program:
        split = forward_count(graph)
        return Program(*with_drops(graph, *(list(chain(*part)) for part in (stages[:split], stages[split:]))))

    def peak(one: Program) -> int:
        return simulate(graph, one, workspace_bytes=workspace_bytes).peak_bytes

    best = program()
    for t, k in [(t, k) for t, stage in enumerate(stages) for k in stage if k < t]:
        before = stages[t]
        stages[t] = [one for one in before if one != k]
        with suppress(PlanError):
            shorter = program()
            if peak(shorter) <= peak(best):
                best = shorter
                continue
        stages[t] = before
    return best


class _Staged:
    """The columns and rows; every row says that its terms come to at most so much."""

    def __init__(
        self, graph: Graph, seconds: Sequence[float], budget: int, workspace_bytes: Sequence[int]
    ) -> None:
        self.graph, self.workspace = graph, workspace_bytes
        self.storage = graph.storages()
        self.last = len(graph.ops) - 1
        self.maker = self._makers()
        since = self._since()
        once = unrepeatable(graph)
        slowest = max(seconds, default=0) or 1.0
        self.cost: list[float] = []
        self.lower: list[float] = []
        self.upper: list[float] = []
        self.rows: list[tuple[Terms, float]] = []
        self.runs: dict[tuple[int, int], int] = {}
        self.keeps: dict[tuple[int, int], int] = {}
        self.fixed: set[tuple[int, int]] = set()
        self.twice: dict[tuple[int, int], int] = {}
        for t in range(self.last + 1):
            for k in range(t + 1):
                most = 0.0 if k < t and k in once else 1.0
                self.runs[t, k] = self._column(seconds[k] / slowest, float(k == t), most)
            for v, made in self.maker.items():
                if made < t:
                    stays = since.get(self.storage[v], t) < t or t == 0
                    self.keeps[t, v] = self._column(0.0, float(stays), 1.0)
                    self.fixed |= {(t, v)} if stays else set()
        self.integers = len(self.cost)
        self.room = budget - Memory(graph).resident_bytes
        for t in range(self.last + 1):
            self._hold_what_is_read(t)
            self._stay_inside(t, set(since))

    def _makers(self) -> dict[int, int]:
        """The first operator that writes each tensor, -1 for what is given; leaves are there throughout."""
        maker = dict.fromkeys(Memory(self.graph).storage_of, -1)
        for k in reversed(range(self.last + 1)):
            maker.update(dict.fromkeys(self.graph.ops[k].outputs, k))
        return {t: k for t, k in maker.items() if self.graph.tensors[t].role not in RESIDENT_ROLES}

    def _since(self) -> dict[int, int]:
        """After which operator a storage stays, where one of its tensors must; -1 for leaves."""
        found: dict[int, int] = {}
        for t in kept_throughout(self.graph):
            s, made = self.storage[t], self.maker.get(t, -1)
            found[s] = min(found.get(s, made), made)
        read = {self.storage[t] for op in self.graph.ops for t in op.reads}
        return {**dict.fromkeys((t for t, k in self.maker.items() if k < 0 and t not in read), -1), **found}

    def _column(self, cost: float, lower: float, upper: float) -> int:
        self.cost.append(cost)
        self.lower.append(lower)
        self.upper.append(upper)
        return len(self.cost) - 1

    def _hold_what_is_read(self, t: int) -> None:
        runs, keeps = self.runs, self.keeps
        for k in range(t + 1):
            op = self.graph.ops[k]
            for v in set(op.reads if k == t else op.reads_again) & set(self.maker):
                self.rows.append(([(runs[t, k], 1.0), *self._comes(t, v)], 0.0))
        for v, made in self.maker.items():
            base = self.graph.tensors[v].alias
            if made < t:
                if base in self.maker:
                    self.rows.append(([(keeps[t, v], 1.0), (keeps[t, base], -1.0)], 0.0))
                if made >= 0 and (t, v) not in self.fixed:
                    twice = self.twice[t, v] = self._column(0.0, 0.0, float(self._makes_several(made)))
                    self.rows.append(([(keeps[t, v], 1.0), (runs[t, made], 1.0), (twice, -1.0)], 1.0))
                if t < self.last:
                    self.rows.append(([(keeps[t + 1, v], 1.0), *self._comes(t, v)], 0.0))

    def _makes_several(self, k: int) -> bool:
        op = self.graph.ops[k]
        return sum(self.storage[v] == v and v not in op.inputs for v in op.outputs) > 1

    def _comes(self, t: int, v: int) -> Terms:
        """Where a tensor in a stage is from: kept since before, or made."""
        made = self.maker[v]
        kept = [(self.keeps[t, v], -1.0)] if made < t else []
        return kept + ([(self.runs[t, made], -1.0)] if made >= 0 else [])

    def _stay_inside(self, t: int, stay: set[int]) -> None:
        graph = self.graph
        size = {s: allocated_bytes(graph.tensors[s]) for s in self.maker if self.storage[s] == s}
        following = {s: self._after(t, s, s in stay) for s in size if self.maker[s] <= t and size[s]}
        for k in range(t, -1, -1):
            op = graph.ops[k]
            touched = {self.storage[v] for v in (*op.reads, *op.outputs)}
            passing = [v for v in op.outputs if k < t and (t, v) in self.fixed and v in size]
            memory = [(self.runs[t, k], float(self.workspace[k] + sum(size[v] for v in passing)))]
            memory += [
                (self.twice[t, v], float(size[v])) for v in op.outputs if v in size and (t, v) in self.twice
            ]
            for s, after in following.items():
                if self.maker[s] > k:
                    memory += [(self.keeps[t, s], float(size[s]))] if self.maker[s] < t else []
                    continue
                now = self._column(0.0, 0.0, 1.0)
                self.rows += [([(after, 1.0), (now, -1.0)], 0.0)] if after is not None else []
                self.rows += [([(self.runs[t, k], 1.0), (now, -1.0)], 0.0)] if s in touched else []
                following[s] = now
                memory.append((now, float(size[s])))
            unit = max(self.room, 1)
            self.rows.append(([(c, factor / unit) for c, factor in memory if factor], self.room / unit))

    def _after(self, t: int, s: int, stays: bool) -> int | None:
        """The column that says whether a storage is there once the stage is over."""
        if t < self.last:
            return self.keeps[t + 1, s]
        return self._column(0.0, 1.0, 1.0) if stays else None


def _solved(model: _Staged, time_limit: float, budget: int) -> list[bool]:
    """Which columns are chosen in a proven optimum."""
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = len(model.cost), len(model.rows)
    lp.col_cost_, lp.col_lower_, lp.col_upper_ = (
        np.array(one, float) for one in (model.cost, model.lower, model.upper)
    )
    lp.row_lower_ = np.full(len(model.rows), -highspy.kHighsInf)
    lp.row_upper_ = np.array([limit for _, limit in model.rows], float)
    kinds = (highspy.HighsVarType.kInteger, highspy.HighsVarType.kContinuous)
    lp.integrality_ = [kinds[c >= model.integers] for c in range(len(model.cost))]
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_ = np.cumsum([0, *(len(terms) for terms, _ in model.rows)])
    lp.a_matrix_.index_ = np.array([column for terms, _ in model.rows for column, _ in terms], np.int32)
    lp.a_matrix_.value_ = np.array([factor for terms, _ in model.rows for _, factor in terms], float)
    solver = new_solver(time_limit=time_limit)
    solver.passModel(lp)
    run_solver(solver)
    status = solver.getModelStatus()
    if status == highspy.HighsModelStatus.kInfeasible:
        raise PlanError(f"no plan in program order inside the budget of {format_bytes(budget)}")
    if status != highspy.HighsModelStatus.kOptimal:
        raise PlanError(f"the integer program was not solved in {time_limit:g} s")
    return [value > 0.5 for value in solver.getSolution().col_value]
