"""Rows: a mixed-integer program, row by row, and its solution.

Variables may be tied: those with one representative have one value, so that the program that is solved is
smaller. What it finds is a solution of the whole program; its bound is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import highspy
import numpy as np

from lowtide.errors import PlanError
from lowtide.plan.bounds.highs import new_solver, run_solver

__all__ = ["Rows", "Solution"]


@dataclass(frozen=True, slots=True)
class Solution:
    """How the solver ended."""

    status: str
    """Infeasible, optimal, or stopped before."""
    dual: float
    """The dual bound of the program that was solved."""
    values: np.ndarray | None
    """The best values that were found, one a variable."""


class Rows:
    """A mixed-integer program under construction."""

    def __init__(self) -> None:
        self.costs: list[float] = []
        self.lower: list[float] = []
        self.upper: list[float] = []
        self.starts = [0]
        self.columns: list[int] = []
        self.values: list[float] = []
        self.row_lower: list[float] = []
        self.row_upper: list[float] = []

    def variable(self, cost: float = 0.0, at_least: float = 0.0, at_most: float = 1.0) -> int:
        """A variable that is 0 or 1, or where it may grow beyond, any number."""
        self.costs.append(cost)
        self.lower.append(at_least)
        self.upper.append(at_most)
        return len(self.costs) - 1

    def row(self, terms: Sequence[tuple[int, float]], lower: float, upper: float = inf) -> None:
        """A sum that is at least ``lower`` and at most ``upper``; a variable may come in it several times."""
        summed: dict[int, float] = {}
        for column, value in terms:  # the solver takes each variable once a row
            summed[column] = summed.get(column, 0.0) + value
        self.columns += summed.keys()
        self.values += summed.values()
        self.starts.append(len(self.columns))
        self.row_lower.append(lower)
        self.row_upper.append(upper)

    def tied(self, same: Sequence[int]) -> tuple[Rows, list[int]]:
        """The program in which variables with the same number are one, and the new variable of each."""
        found = Rows()
        number: dict[int, int] = {}
        place: list[int] = []
        for column, key in enumerate(same):
            if key not in number:
                number[key] = found.variable(at_least=self.lower[column], at_most=self.upper[column])
            new = number[key]
            place.append(new)
            found.costs[new] += self.costs[column]
            found.lower[new] = max(found.lower[new], self.lower[column])
            found.upper[new] = min(found.upper[new], self.upper[column])
        seen = set()
        for k, (lower, upper) in enumerate(zip(self.row_lower, self.row_upper, strict=True)):
            terms: dict[int, float] = {}
            for i in range(self.starts[k], self.starts[k + 1]):
                new = place[self.columns[i]]
                terms[new] = terms.get(new, 0.0) + self.values[i]
            row = (tuple(terms.items()), lower, upper)
            if row not in seen:
                seen.add(row)
                found.row(row[0], lower, upper)
        return found, place

    def solve(self, nodes: int, seconds: float, gap: float, start: np.ndarray | None = None) -> Solution:
        """The best solution after so many nodes, or once it is known to within ``gap``.

        With no nodes it is the linear program that is solved: its optimum is a bound, and soon known.
        """
        model = highspy.HighsLp()
        model.num_col_, model.num_row_ = len(self.costs), len(self.row_lower)
        model.col_cost_ = np.array(self.costs)
        model.col_lower_, model.col_upper_ = np.array(self.lower), np.array(self.upper)
        model.row_lower_, model.row_upper_ = np.array(self.row_lower), np.array(self.row_upper)
        model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        model.a_matrix_.start_ = np.array(self.starts, dtype=np.int32)
        model.a_matrix_.index_ = np.array(self.columns, dtype=np.int32)
        model.a_matrix_.value_ = np.array(self.values)
        kinds = highspy.HighsVarType
        model.integrality_ = (
            [] if not nodes else [kinds.kInteger if top <= 1 else kinds.kContinuous for top in self.upper]
        )
        solver = new_solver(threads=1, mip_abs_gap=gap, mip_max_nodes=nodes, time_limit=seconds)
        if solver.passModel(model) == highspy.HighsStatus.kError:
            raise PlanError("the solver refuses the cut program: a time or a size is too large")
        if start is not None:
            known = highspy.HighsSolution()
            known.col_value = list(start)
            solver.setSolution(known)
        run_solver(solver)
        status = solver.getModelStatus()
        if status == highspy.HighsModelStatus.kInfeasible:
            return Solution("infeasible", 0.0, None)
        if not nodes:
            known_best = status == highspy.HighsModelStatus.kOptimal
            return Solution("stopped", solver.getInfo().objective_function_value if known_best else 0.0, None)
        solution = solver.getSolution()
        values = np.array(solution.col_value) if solution.value_valid else None
        done = status == highspy.HighsModelStatus.kOptimal
        return Solution("optimal" if done else "stopped", solver.getInfo().mip_dual_bound, values)
