"""Which convolutions run in less memory: those that must for a plan to fit, and those that make one faster.

A convolution's backward in two calls, or a convolution in slices of the batch, gives the same bits with less
workspace, and takes longer. So at first none does. Where nothing fits, those do whose own working set is more
than the budget, and those at which the smallest plan is; at last all that can. Where a plan fits but
recomputes much, those with a working set near the budget are tried, and the faster of the two plans is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from lowtide.errors import InfeasibleError
from lowtide.execute.planning.kept import Kept
from lowtide.execute.planning.plan_step import StepPlanner
from lowtide.graph import LOOP, RESIDENT_ROLES, Graph
from lowtide.plan import time_shares
from lowtide.plan.budget import Budget
from lowtide.plan.make.plan_loop import least_bytes
from lowtide.plan.program.instructions import Program, Run
from lowtide.plan.program.memory import allocated_bytes
from lowtide.plan.program.simulate import simulate
from lowtide.plan.request import PlanRequest
from lowtide.plan.result.infeasible import SplitBeforeError, smaller_refusal
from lowtide.plan.result.plan import Plan
from lowtide.trace.groups.slices import needs_less_in_slices
from lowtide.trace.step.joint import Joint
from lowtide.trace.step.split_convolutions import ALL, Split, can_split, same_in_two_calls

__all__ = ["NotFaster", "Splitting", "in_less_time", "marked", "working_sets"]

_ROUNDS = 2
"""So many times some convolutions are split before all are."""
_SLOW = 0.1
"""A plan that adds more than this share of the step may be improved on."""
_LARGE = 0.8
"""A working set of this share of the budget leaves little room for anything else."""


class NotFaster(Exception):  # noqa: N818  the plan that it is held against is taken
    """Ends the planning of a step with more split convolutions: it is not faster than with fewer."""


def in_less_time(request: PlanRequest, split: Split, budget: int) -> PlanRequest:
    """What is asked for of the step with these convolutions split: the same bytes, in a share of the time."""
    share = time_shares.SPLIT if split == ALL else time_shares.SPLIT_SOME
    asked = request.within(share * request.limits.time_limit)
    return replace(asked, budget=Budget(bytes=budget))  # a share is one of the step with whole ones


def marked(program: Program, split: Split) -> Program:
    """The Program, which says that it is of the step with these convolutions split."""
    return msgspec.structs.replace(program, split=tuple(sorted(split)))


def working_sets(graph: Graph, workspace: Sequence[int], *, leaves_stay: bool = True) -> list[int]:
    """What each operator needs whatever else is kept: leaves, what it reads and writes, its workspace.

    Leaves that it does not read count where they stay on the device.
    """
    owner = graph.storages()
    size = [allocated_bytes(tensor) for tensor in graph.tensors]
    leaves = {k for k, t in enumerate(graph.tensors) if t.role in RESIDENT_ROLES and t.alias is None}
    always = leaves if leaves_stay else set[int]()
    found = []
    for k, op in enumerate(graph.ops):
        held = {owner[t] for t in (*op.inputs, *op.outputs)} | always
        found.append(sum(size[t] for t in held) + (workspace[k] if workspace else 0))
    return found


class Splitting:
    """What is found out about the convolutions of one step while it is made ready."""

    def __init__(self, *, allowed: bool) -> None:
        """Convolutions stay whole where it is not ``allowed`` to split them."""
        self._allowed = allowed
        self._refused: list[tuple[InfeasibleError, Graph]] = []
        """Why the step does not fit with whole convolutions, then with some of them split."""
        self._kept: Kept | None = None
        """Where plans for the step with whole convolutions are kept."""
        self._believed = True
        """Whether to believe a kept plan that it is not to run with whole convolutions."""
        self._settled = False
        """Whether a kept plan says which convolutions to split, or it was tried."""
        self._rival: tuple[float, Graph] | None = None
        """What the plan takes that one with more split convolutions is held against, and of which step."""

    @property
    def budget(self) -> int:
        """The budget in bytes, once the step was refused with whole convolutions."""
        return self._refused[0][0].budget

    def look(self, joint: Joint, kept: Kept, split: Split) -> None:
        """Raise where it is known how planning ends: an InfeasibleError, or NotFaster."""
        if not self._allowed:
            return
        if not split:
            self._kept = kept
            before = kept.load_split() if self._believed else None
            self._settled = before is not None
            if before is not None and before.program.split:
                raise SplitBeforeError(before.budget_bytes, before.program.split)
        elif self._rival is not None and self._rival[1] == joint.graph:
            raise NotFaster
        for error, graph in self._refused if split and self._rival is None else ():
            if graph == joint.graph:
                raise error

    def next(self, error: InfeasibleError, planner: StepPlanner | None, split: Split) -> Split:
        """Which convolutions to split where nothing fits; the refusal is raised where nothing is left."""
        if not self._allowed or planner is None:
            raise error
        if not split and not can_split(call.target for call in planner.joint.calls):
            raise error
        first = self._refused[0][0] if self._refused else error
        if isinstance(first, SplitBeforeError) and split:
            self._refused, self._believed, self._settled = [], False, False
            return frozenset()  # what was kept does not hold any more
        if split == ALL:
            raise smaller_refusal(first, error) from None
        self._refused.append((error.with_traceback(None), planner.joint.graph))
        if isinstance(error, SplitBeforeError):
            return frozenset(error.split)
        return self._needed(error, planner, split) if len(self._refused) <= _ROUNDS else ALL

    def faster(self, plan: Plan, planner: StepPlanner | None, split: Split) -> Split | None:
        """Which convolutions to split for a plan that may be faster than this one, if any."""
        if not self._allowed or self._settled or self._rival is not None or split == ALL:
            return None
        if plan.interrupted or not plan.seconds:
            return None
        if plan.overhead <= _SLOW or planner is None or planner.familiar or plan.program.bodies:
            return None
        limit = _LARGE * (plan.budget_bytes - plan.beside_bytes)
        sets = working_sets(plan.graph, plan.workspace_bytes, leaves_stay=not plan.offload)
        large = [k for k, size in enumerate(sets) if size > limit]
        more = {planner.joint.graph.ops[k].id for k in large if _needs_less(planner.joint, k, split)}
        if not more:
            return None
        self._rival, self._settled = (plan.predicted.seconds, planner.joint.graph), True
        return split | more

    def compare(self, plan: Plan) -> None:
        """Raise NotFaster where a plan with more split convolutions is not faster than its rival."""
        if self._rival is None:
            return
        if plan.interrupted:
            self.undecided()
        if plan.predicted.seconds >= self._rival[0]:
            raise NotFaster

    def decided(self) -> None:
        """A plan has been held against its rival."""
        self._rival = None

    def undecided(self) -> None:
        """It was not, or not to the end: it is tried again the next time."""
        self._settled = False

    def keep(self, plan: Plan, split: Split) -> None:
        """Keep the plan for the step with whole convolutions, where others were tried."""
        if self._kept is not None and (split or self._settled):
            self._kept.store_split(plan)

    def _needed(self, error: InfeasibleError, planner: StepPlanner, split: Split) -> Split:
        """Some more convolutions, without which there is no plan; all where those alone cannot help."""
        if planner.measured is None:
            return ALL
        joint, (graph, costs) = planner.joint, planner.measured
        limit = error.budget - planner.outside_bytes
        sets = working_sets(graph, costs.workspace_bytes, leaves_stay=not planner.moves_leaves)
        large = [k for k, size in enumerate(sets) if size > limit]
        if least_bytes(graph) > limit or not all(_needs_less(joint, k, split) for k in large):
            return ALL
        if isinstance(error.plan, Plan) and error.plan.graph == graph:
            large += [k for k in _over(error.plan, limit) if _needs_less(joint, k, split)]
        return split | {graph.ops[k].id for k in large} if large else ALL


def _over(plan: Plan, limit: int) -> list[int]:
    """Operators at which a plan takes more than a limit."""
    if any(op.kind == LOOP for op in plan.graph.ops):
        return []
    live = simulate(plan.graph, plan.program, workspace_bytes=plan.workspace_bytes).live_bytes
    runs = [line.op for line in plan.program.instructions if isinstance(line, Run)]
    return sorted({op for op, size in zip(runs, live, strict=True) if size > limit})


def _needs_less(joint: Joint, op: int, split: Split) -> bool:
    """Whether an operator is a convolution that can run in less memory, and does not yet."""
    call = joint.calls[op]
    if joint.graph.ops[op].id in split or call.kwargs:
        return False
    return same_in_two_calls(call.source, call.args) or needs_less_in_slices(call.source, call.args)
