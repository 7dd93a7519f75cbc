"""A budget that is too small, told so that the user knows what to do next."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from lowtide.errors import InfeasibleError
from lowtide.graph import RESIDENT_ROLES
from lowtide.plan import time_shares
from lowtide.plan.problem.lower import lower
from lowtide.plan.problem.problem import Problem
from lowtide.plan.program.in_place import with_in_place
from lowtide.plan.program.memory import allocated_bytes
from lowtide.plan.recompute.smallest_budget import Smallest, smallest_budget
from lowtide.plan.request import PlanTask
from lowtide.plan.result.explain import at_peak
from lowtide.plan.result.plan import HoldsFor, by_methods
from lowtide.printable import printable
from lowtide.units import format_bytes

__all__ = ["SplitBeforeError", "explained", "smaller_refusal"]

_ROWS = 8


def explained(
    problem: Problem,
    error: InfeasibleError,
    task: PlanTask,
    holds_for: HoldsFor,
) -> InfeasibleError:
    """The error with who is live at the peak of the smallest plan that is known, and what would help.

    What is proven is so for the programs that ``holds_for`` names, by the methods of the ``task``. Where
    the error does not know that plan, to look for it takes half of the time limit at most. Where tiles are
    tried besides, they are no advice, and may need less.
    """
    graph, budget, beside = problem.graph, task.budget, task.room.outside_bytes
    tiled, time_limit = task.request.tiles, task.request.limits.time_limit
    smallest = error.known
    if not isinstance(smallest, Smallest):
        smallest = smallest_budget(
            problem, time_limit=min(time_shares.SMALLEST_SECONDS, time_shares.SMALLEST * time_limit)
        )
    known = error.smallest_budget + beside
    floor = max(error.floor + beside, budget + 1 if error.proven else 0)
    program = with_in_place(graph, lower(smallest.problem, smallest.events), task.able)
    rows = at_peak(graph, program, problem.workspace_of_graph)
    leaves = sum(allocated_bytes(t) for t in graph.tensors if t.role in RESIDENT_ROLES and t.alias is None)
    lines = [
        f"{'no plan fits' if error.proven else 'no plan was found for'} {format_bytes(budget)} "
        f"({budget} bytes) {by_methods(task.methods)}; {'without tiles ' if tiled else ''}the smallest "
        f"budget with a known plan is {format_bytes(known)} ({known} bytes), and none exists below "
        f"{format_bytes(floor)} ({floor} bytes), {holds_for.words}",
        "live at its peak:",
        f"  {format_bytes(leaves):>12}  parameters, buffers and inputs",
    ]
    if beside:
        lines.append(f"  {format_bytes(beside):>12}  on the device outside the step")
    for size, label, place in rows[:_ROWS]:
        lines.append(printable(f"  {format_bytes(size):>12}  {label}{f'  ({place})' if place else ''}"))
    tiles = "" if tiled else "tiles (`tile` among the methods, of a PyTorch step), "
    lines.append(f"what would help: {tiles}a smaller batch or image, half precision")
    return InfeasibleError(
        "\n".join(lines),
        budget=budget,
        smallest_budget=known,
        floor=floor,
        proven=error.proven,
        holds_for=holds_for.value,
    )


class SplitBeforeError(InfeasibleError):
    """The step is not to run with whole convolutions, as a kept plan says; users never see it."""

    def __init__(self, budget: int, split: Sequence[str]) -> None:
        """``budget`` is that of the kept plan, ``split`` its split convolutions."""
        self.split = tuple(split)
        said = "no plan was found with whole convolutions"
        super().__init__(said, budget=budget, smallest_budget=sys.maxsize, floor=0)


def smaller_refusal(whole: InfeasibleError, split: InfeasibleError) -> InfeasibleError:
    """The one of two refusals of a step, with whole and with split convolutions, with the smaller budget."""
    if whole is split or whole.smallest_budget <= split.smallest_budget:
        return whole
    how = "with the backward of convolutions in two calls each, and slices of the batch, in less memory"
    split.args = (f"{split}\n({how})",)
    split.floor, split.proven = min(whole.floor, split.floor), whole.proven and split.proven
    return split
