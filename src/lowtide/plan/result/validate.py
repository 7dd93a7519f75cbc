"""Says whether a plan from a file is valid, before anything relies on it: its program, then its figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lowtide.errors import PlanError
from lowtide.graph import EXCHANGE, SUM, Graph, Recording, Timeline
from lowtide.plan.check.checker import Checked, check
from lowtide.plan.check.graph import sound
from lowtide.plan.check.rules import Rule, broken
from lowtide.plan.program.instructions import Loop, Program, Run, Send
from lowtide.plan.request import METHODS, MOVABLE
from lowtide.plan.result.figures import Contradiction, contradictions
from lowtide.plan.result.measured_run import MeasuredRun
from lowtide.plan.result.plan import Plan

__all__ = ["check_plan", "valid_plan", "valid_program", "valid_recording", "valid_run"]

_MOST = 1 << 63
"""No figure is that large."""


def valid_plan(plan: Plan) -> Plan:
    """The plan itself, or a PlanError that names the first rule of docs/valid-programs.md that it breaks."""
    check_plan(plan)
    return plan


def valid_program(program: Program) -> Program:
    """The program itself, or such an error about the steps of its tiles."""
    _refuse(_of_bodies(program), "program")
    return program


def valid_run(run: MeasuredRun) -> MeasuredRun:
    """The run itself, if its plan is valid, its program may run, and its figures are amounts."""
    if run.plan is not None:
        check_plan(run.plan)
    _refuse(_of_run(run), "run")
    for graph in (run.graph, run.plain):
        if graph is not None:
            sound(graph)
    valid_program(run.program)
    check(run.graph, run.program, offload=run.plan.offload if run.plan else tuple(MOVABLE))
    valid_recording(run.recording)
    return run


def valid_recording(recording: Recording) -> Recording:
    """The timeline itself, or a PlanError about figures in it."""
    _refuse(_of_timeline(recording.timeline), "timeline")
    return recording


def _of_run(run: MeasuredRun) -> Iterator[Contradiction]:
    sides = [side for side in (run.eager, run.measured) if side is not None]
    figures = (figure for side in sides for figure in (side.peak_bytes, side.seconds))
    amounts = (*figures, run.predicted_peak_bytes, run.difference or 0.0, *run.eager_bytes)
    if not all(map(_amount, amounts)):
        yield Rule.AMOUNTS, "a figure that was measured is no amount"
    if run.plan is not None and len(run.graph.ops) < len(run.plan.graph.ops):
        yield Rule.AMOUNTS, "fewer operators ran than its plan has"


def _of_timeline(timeline: Timeline) -> Iterator[Contradiction]:
    inside = (size for sizes in timeline.inside.values() for size in sizes)
    if not all(map(_amount, (*timeline.live_bytes, *inside, *timeline.seconds))):
        yield Rule.AMOUNTS, "a figure that was measured is no amount"


def check_plan(plan: Plan) -> Checked:
    """What the program of a valid plan takes; a PlanError as of :func:`valid_plan`."""
    _refuse(_amounts(plan))
    for graph in (plan.graph, plan.plain_graph):
        if graph is not None:
            sound(graph)
    _refuse(_words(plan))
    _refuse(_talks(plan))
    found = check(
        plan.graph,
        plan.program,
        budget=plan.budget_bytes - plan.beside_bytes,
        workspace_bytes=plan.workspace_bytes,
        offload=plan.offload,
        able=plan.able,
    )
    _refuse(contradictions(plan, found))
    return found


def _refuse(problems: Iterator[Contradiction], what: str = "plan") -> None:
    for rule, problem in problems:
        said = f"{problem}: the {what} is damaged, or was written by another version; plan again"
        raise PlanError(str(broken(rule, said)), rule=rule.value)


def _amounts(plan: Plan) -> Iterator[Contradiction]:
    """Figures that are no amounts, or that there are too many or too few of."""
    sides = {
        "budget_bytes": plan.budget_bytes,
        "beside_bytes": plan.beside_bytes,
        "resident_bytes": plan.resident_bytes,
        "smallest_budget_bytes": plan.smallest_budget_bytes,
        "solve_seconds": plan.solve_seconds,
        "disturbed": plan.disturbed,
        "plain.peak_bytes": plan.plain.peak_bytes,
        "plain.seconds": plan.plain.seconds,
        "predicted.peak_bytes": plan.predicted.peak_bytes,
        "predicted.seconds": plan.predicted.seconds,
        "bound.seconds": plan.bound.seconds,
        "gap": plan.gap,
    }
    for name, figure in sides.items():
        if not _amount(figure):
            yield Rule.AMOUNTS, f"{name} is no amount"
    link = plan.link
    if link is not None:
        rates = (link.to_host, link.to_device, 1.0 + link.handover, 1.0 + link.beside)
        if not all(_amount(rate) and rate > 0 for rate in rates):
            yield Rule.AMOUNTS, "a rate of its link is no amount"
    if not all(_amount(seconds) for seconds in plan.short.values()):
        yield Rule.AMOUNTS, "a short run takes less than no time, or forever"
    for figures in (plan.plain_seconds, plan.plain_workspace_bytes):
        count = len(plan.plain_graph.ops) if plan.plain_graph is not None else 0
        if len(figures) not in (0, count) or not all(map(_amount, figures)):
            yield (
                Rule.AMOUNTS,
                "costs of the step before it are no amounts, or another number of them",
            )
    if not all(_amount(seconds) for seconds in plan.wire_seconds.values()):
        yield Rule.AMOUNTS, "a communication takes less than no time, or forever"
    yield from _of_operators(plan.graph, plan.workspace_bytes, plan.seconds)
    yield from _of_bodies(plan.program)


def _of_bodies(program: Program) -> Iterator[Contradiction]:
    for body in program.bodies:
        yield from _of_operators(body.graph, body.workspace_bytes, body.seconds)
        yield from _of_bodies(body.program)


def _of_operators(
    graph: Graph, workspace: Sequence[int], seconds: Sequence[float]
) -> Iterator[Contradiction]:
    for what, figures in (("workspaces", workspace), ("times", seconds)):
        if figures and len(figures) != len(graph.ops):
            yield Rule.AMOUNTS, f"it has {len(figures)} {what} for {len(graph.ops)} operators"
        if not all(map(_amount, figures)):
            yield Rule.AMOUNTS, f"one of its {what} is no amount"


def _words(plan: Plan) -> Iterator[Contradiction]:
    """Operators and kinds that a plan names and that there are none of; methods that it was not to use."""
    ops = len(plan.graph.ops)
    for k in (*plan.able, *plan.short, *plan.wire_seconds):
        if not 0 <= k < ops:
            yield Rule.WORDS, f"it names operator {k}; the step has {ops}"
    for k in plan.able:
        if not plan.graph.ops[k].inputs or not plan.graph.ops[k].outputs:
            yield Rule.WORDS, f"operator {k} may run in place, and reads or gives nothing"
    for word in plan.offload:
        if word not in MOVABLE:
            yield Rule.WORDS, f"it lets {word!r} leave the device; {' and '.join(MOVABLE)} may"
    for word in plan.only:
        if word not in METHODS:
            yield Rule.WORDS, f"it uses {word!r}; there are {', '.join(METHODS)}"
    lines = plan.program.instructions
    if "offload" not in plan.only and any(isinstance(line, Send) for line in lines):
        yield Rule.WORDS, "it sends to the host, which is not among its methods"
    if "tile" not in plan.only and any(isinstance(line, Loop) for line in lines):
        yield Rule.WORDS, "it runs loops, which are not among its methods"
    short = {line.op for line in lines if isinstance(line, Run) and line.short}
    if short - plan.short.keys():
        yield Rule.WORDS, f"operator {min(short - plan.short.keys())} runs in short, without a time for that"


def _talks(plan: Plan) -> Iterator[Contradiction]:
    """Operators with a time on the lane of communication that talk to nobody."""
    for k in plan.wire_seconds:
        if plan.graph.ops[k].kind not in (EXCHANGE, SUM):
            yield Rule.WORDS, f"operator {k} has a time on the lane of communication, and talks to nobody"


def _amount(figure: float) -> bool:
    return 0 <= figure < _MOST
