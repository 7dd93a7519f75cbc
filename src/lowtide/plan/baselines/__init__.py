"""The planners of others, to hold ours against.

Each is called as ``planner(graph, seconds, budget, workspace_bytes=...)``, with seconds and bytes for every
operator, and gives a Program whose simulated peak is inside the budget, or a PlanError. PyTorch's partitioner
needs a captured step and is found in ``execute/compare/partitioner.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

from lowtide.errors import PlanError
from lowtide.graph import Graph
from lowtide.plan.baselines.checkmate import checkmate
from lowtide.plan.baselines.chen import chen
from lowtide.plan.baselines.common import Baseline, cheapest, keeping, run_seconds
from lowtide.plan.baselines.dtr import dtr
from lowtide.plan.baselines.keep_all import keep_all
from lowtide.plan.baselines.lower_sets import lower_sets_approximate, lower_sets_exact
from lowtide.plan.program.instructions import Program
from lowtide.units import format_bytes

__all__ = ["BASELINES", "Baseline", "best", "cheapest", "keeping", "run_seconds"]

BASELINES: dict[str, Baseline] = {
    "keep-all": keep_all,
    "chen": chen,
    "lower-sets-exact": lower_sets_exact,
    "lower-sets": lower_sets_approximate,
    "dtr": dtr,
    "checkmate": checkmate,
}


def best(
    graph: Graph, seconds: Sequence[float], budget: int, *, workspace_bytes: Sequence[int] = ()
) -> tuple[str, Program]:
    """The name and Program of the fastest baseline, the first of equals; a PlanError if none has one."""
    found: list[tuple[float, str, Program]] = []
    failures: list[str] = []
    for name, planner in BASELINES.items():
        try:
            program = planner(graph, seconds, budget, workspace_bytes=workspace_bytes)
        except PlanError as error:
            failures.append(f"{name}: {error}")
            continue
        found.append((run_seconds(program, seconds), name, program))
    if not found:
        said = "; ".join(failures)
        raise PlanError(f"no baseline has a plan inside the budget of {format_bytes(budget)}: {said}")
    _, name, program = min(found, key=lambda one: one[0])
    return name, program
