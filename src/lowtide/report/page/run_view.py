"""One way to run a step, with every detail that follows from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from lowtide.cost import Span
from lowtide.errors import PlanError
from lowtide.graph import MAX_BYTES, Recording
from lowtide.plan.address.allocations import graph_allocations, program_allocations
from lowtide.plan.address.types import Allocation, EventClock
from lowtide.plan.program.copy_lanes import Link
from lowtide.plan.program.instructions import Program
from lowtide.plan.program.simulate import simulate
from lowtide.report.page.decisions import Known, decision_table
from lowtide.report.page.lanes import CopiesSeen, lane_of_talks, lanes_of_copies, lanes_of_spans
from lowtide.report.page.loops import loop_views
from lowtide.report.page.memory import (
    block_table,
    leaves_that_stay,
    placed,
    placed_by_file,
    settled_by,
)
from lowtide.report.page.moments import (
    Walk,
    events_of,
    live_by_event,
    spread_by_bytes,
    walk_graph,
    walk_program,
)
from lowtide.report.page.tables import TablePart
from lowtide.report.page.thin import Ints
from lowtide.report.page.types import (
    Figures,
    GradientCheck,
    MeasuredCurve,
    Moments,
    Proof,
    RunView,
    Settled,
)

__all__ = ["WayToRun", "run_view"]


@dataclass(frozen=True, slots=True)
class WayToRun:
    """One way to run a step, as it is known before anything is computed from it."""

    name: str
    part: TablePart
    program: Program | None
    """None: every operator once, in program order."""
    seconds: Sequence[float] = ()
    workspace_bytes: Sequence[int] = ()
    short: Mapping[int, float] = field(default_factory=dict)
    wire_seconds: Mapping[int, float] = field(default_factory=dict)
    link: Link | None = None
    beside_bytes: int = 0
    cost: str = ""
    budget_bytes: int | None = None
    predicted: Figures | None = None
    measured: Figures | None = None
    eager: Figures | None = None
    check: GradientCheck | None = None
    recording: Recording | None = None
    allocated: Sequence[int] = ()
    """Bytes that were live from allocation to allocation, where no operators were told apart."""
    spans: Sequence[Span] = ()
    proof: Proof | None = None
    note: str = ""
    known: bool = True
    """Whether its graph says what it does; else there are figures alone."""
    disturbed: int = 0
    """Operators whose times a busy machine disturbed."""
    file: str = ""
    """What was given that it comes from."""
    group: int = 0
    """As in RunView."""


def run_view(way: WayToRun, step: int) -> RunView:
    """What is drawn of one way."""
    part, program, graph = way.part, way.program, way.part.graph
    in_all = sum(one.bytes for one in graph.tensors) + sum(way.workspace_bytes) + way.beside_bytes
    if in_all > MAX_BYTES:
        raise PlanError(
            f"{way.name}: its tensors and workspaces take {in_all} bytes in all, more than any device has: "
            "the file is damaged; make it again"
        )
    figures = RunView(
        name=way.name,
        step=step,
        group=way.group,
        note=way.note,
        budget_bytes=way.budget_bytes,
        predicted=way.predicted,
        measured=way.measured,
        eager=way.eager,
        check=way.check,
        proof=way.proof,
        beside_bytes=way.beside_bytes,
    )
    if not graph.ordered:
        note = "the document does not say in which order its operators ran: nothing follows about memory"
        return msgspec.structs.replace(figures, note=note)
    if not way.known or not graph.ops:
        return figures
    seen = CopiesSeen(graph, way.link, way.wire_seconds)
    if program is None:
        allocations = graph_allocations(graph, way.workspace_bytes)
        live = live_by_event(allocations, len(graph.ops))
        walk = walk_graph(part, way.seconds)
        talks = lane_of_talks(part, None, way.seconds)
    else:
        part = part.programmed(program)
        allocations = program_allocations(graph, program, way.workspace_bytes)
        live = live_by_event(allocations, events_of(program))
        costs = {"workspace_bytes": way.workspace_bytes, "seconds": way.seconds, "short": way.short}
        timeline = simulate(graph, program, lanes=seen, **costs)  # type: ignore[arg-type]
        walk = walk_program(part, program, live, timeline.seconds)
        talks = () if way.wire_seconds else lane_of_talks(part, program, timeline.seconds)
    found = _detailed(way, part, figures, allocations, live, walk, seen)
    if not talks or way.spans:
        return found
    return msgspec.structs.replace(found, lanes=(*talks, *found.lanes))


def _detailed(
    way: WayToRun,
    part: TablePart,
    figures: RunView,
    allocations: Sequence[Allocation],
    live: Ints,
    walk: Walk,
    seen: CopiesSeen,
) -> RunView:
    graph, program = part.graph, way.program
    leaves = leaves_that_stay(graph, program)
    resident = sum(part.tables.bytes_of(graph.tensors[t]) for t in leaves)
    moments, kept = walk.moments(live, resident + way.beside_bytes)
    blocks, offsets, layout = _layout(part, program, allocations)
    known = Known(way.cost, way.short, seen.waited, way.budget_bytes)
    plans = program is not None and way.proof is not None
    return msgspec.structs.replace(
        figures,
        predicted=way.predicted or Figures(max(moments.live, default=None), moments.seconds),
        resident_bytes=resident,
        leaves=tuple(part.tensor(t) for t in leaves),
        moments=moments,
        curve=_measured(way, walk, moments, kept),
        blocks=block_table(part, program, blocks, offsets, len(live)),
        layout=layout,
        lanes=lanes_of_spans(part, way.spans) or lanes_of_copies(part, seen),
        decisions=decision_table(part, program, known) if plans and program is not None else None,
        loops=loop_views(part, program) if program is not None else (),
    )


def _measured(way: WayToRun, walk: Walk, moments: Moments, kept: Ints) -> MeasuredCurve | None:
    if way.recording is not None:
        return walk.measured(way.recording, kept)
    return spread_by_bytes(way.allocated, moments) if way.allocated else None


def _layout(
    part: TablePart, program: Program | None, allocations: Sequence[Allocation]
) -> tuple[Sequence[Allocation], Sequence[int], Settled | None]:
    """BlockTable with their places, as the document says or as they are planned."""
    told = placed_by_file(part.graph, allocations) if program is None else None
    if told is not None:
        return allocations, *told
    clock = EventClock.OPERATOR if program is None else EventClock.INSTRUCTION
    plan = placed(part.graph, allocations, clock)
    if plan is None:
        return allocations, (), None
    return plan.allocations, [one.offset for one in plan.allocations], settled_by(plan)
