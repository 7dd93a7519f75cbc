"""Collects what is known about a step, from files or from runs at hand, into a Report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from lowtide.cost import Cost, Origin, Step
from lowtide.cost.device import Device
from lowtide.errors import PlanError
from lowtide.graph import GROUP, Graph, Recording
from lowtide.plan.make.sweep import Sweep
from lowtide.plan.program.copy_lanes import Link
from lowtide.plan.program.in_place import with_in_place
from lowtide.plan.program.instructions import Loop, Program, Run
from lowtide.plan.program.simple import store_all
from lowtide.plan.result.measured_run import MeasuredRun
from lowtide.plan.result.plan import HoldsFor, Plan, by_methods
from lowtide.plan.result.shard_plan import ShardPlan
from lowtide.report.page.notes import notes_of
from lowtide.report.page.run_view import WayToRun, run_view
from lowtide.report.page.same_step import grouped, leaves_of, told_apart
from lowtide.report.page.shards import check_of, shard_view
from lowtide.report.page.tables import TablePart, Tables, Words
from lowtide.report.page.tradeoff import curve_of_plans, curve_of_sweep, rivals_of
from lowtide.report.page.types import (
    DeviceLimits,
    Figures,
    GradientCheck,
    Proof,
    Report,
    RunView,
    ShardView,
    TradeoffCurve,
)

__all__ = ["Given", "Source", "report_of"]

Source = Step | Plan | MeasuredRun | Recording | Sweep | Device | ShardPlan
"""What a report is made of."""


@dataclass(frozen=True, slots=True)
class Given:
    """One thing to report on, and what to call it."""

    name: str
    value: Source
    note: str = ""


@dataclass(slots=True)
class _Steps:
    """Tables of the graphs that were seen, each once."""

    words: Words
    tables: list[Tables] = field(default_factory=list)
    parts: list[TablePart] = field(default_factory=list)

    def part(
        self,
        name: str,
        graph: Graph,
        origin: str,
        seconds: Sequence[float],
        costs: Sequence[Cost] = (),
        *,
        rounds: bool = True,
    ) -> TablePart:
        for part in self.parts:
            same = part.seconds == seconds and part.costs == costs and part.tables.rounds == rounds
            if same and part.graph == graph:
                return part
        self.tables.append(Tables(name, self.words, origin, rounds=rounds))
        part = self.tables[-1].part(graph, -1, seconds, costs)
        self.parts.append(part)
        return part

    def number(self, part: TablePart) -> int:
        return self.tables.index(part.tables)


def report_of(
    given: Sequence[Given],
    *,
    title: str,
    about: str = "",
    target: str = "",
    rival_seconds: float = 0.0,
    made_by: str = "",
) -> Report:
    """The report; with ``rival_seconds`` the planners of others are asked too, for so long at most."""
    maker = _Maker(_Steps(Words()))
    for one in given:
        maker.add(one)
    for one in given:
        if isinstance(one.value, Recording):
            maker.add_recording(one.name, one.value)
    runs = tuple(maker.views())  # before the tables: views ask for rows
    shards = tuple(maker.shard_views())
    report = Report(
        title=title,
        about=about,
        words=(),
        steps=tuple(tables.finished() for tables in maker.steps.tables),
        runs=runs,
        target=target or next(filter(None, maker.targets()), ""),
        tradeoff=maker.tradeoff(rival_seconds),
        limits=maker.limits,
        shards=shards,
        made_by=made_by,
    )
    return msgspec.structs.replace(report, words=maker.steps.words.all(), notes=tuple(notes_of(report)))


class _Maker:
    """Ways to run the step in the order in which they are shown."""

    def __init__(self, steps: _Steps) -> None:
        self.steps = steps
        self.ways: list[WayToRun] = []
        self.plans: list[Plan] = []
        self.runs: list[MeasuredRun] = []
        self.sweeps: list[Sweep] = []
        self.limits: DeviceLimits | None = None
        self.shards: list[tuple[str, ShardPlan, TablePart, tuple[int, ...]]] = []
        """With the rows of the step on one device, and the ways that are shown for it."""

    def add(self, one: Given) -> None:
        """Note what is given; recordings find their run once everything else is known."""
        known = len(self.ways)
        self._add(one)
        self.ways[known:] = [replace(way, file=one.name) for way in self.ways[known:]]

    def _add(self, one: Given) -> None:
        value = one.value
        if isinstance(value, Step):
            self._add_step(one.name, value)
        elif isinstance(value, Plan):
            self._add_plan(one.name, value, one.note)
        elif isinstance(value, MeasuredRun):
            self._add_run(one.name, value, one.note)
        elif isinstance(value, ShardPlan):
            self._add_shards(one.name, value)
        elif isinstance(value, Sweep):
            self.sweeps.append(value)
        elif isinstance(value, Device):
            rates = value.matrix_flop_per_second
            self.limits = DeviceLimits(value.name, dict(rates), value.bytes_per_second)

    def _add_step(self, name: str, step: Step) -> None:
        origins = {c.seconds.origin for c in step.costs if c.seconds is not None}
        origin = "" if not origins else "estimated" if Origin.ESTIMATED in origins else min(origins).value
        part = self.steps.part(name, step.graph, origin, (), step.costs, rounds=False)
        known = [float(c.seconds.value) if c.seconds else 0.0 for c in step.costs]
        workspace = [int(c.workspace_bytes.value) if c.workspace_bytes else 0 for c in step.costs]
        self.ways.append(
            WayToRun(
                name,
                part,
                None,
                seconds=known if any(known) else (),
                workspace_bytes=workspace if any(workspace) else (),
                spans=step.spans,
                recording=None if step.timeline is None else Recording((), step.timeline),
                predicted=None if step.timeline is None else Figures(None, sum(known) or None),
                measured=None if step.timeline is None else Figures(step.timeline.peak_bytes),
            )
        )

    def _add_plan(self, name: str, plan: Plan, note: str) -> None:
        self._before(plan, plain=plan.plain_graph)
        part = self.steps.part(name, plan.graph, plan.cost, plan.seconds)
        self.plans.append(plan)
        self.ways.append(_planned(name, part, plan, plan.program, note))

    def _add_run(self, name: str, run: MeasuredRun, note: str) -> None:
        plan = run.plan
        eager = None if run.eager is None else Figures(run.eager.peak_bytes, run.eager.seconds)
        note = "; ".join(filter(None, (note, _ALONE if eager is None else "")))
        if plan is None:
            part = self.steps.part(name, run.graph, "", ())
            if not any(
                way.name == EAGER and leaves_of(way.part.graph) == leaves_of(run.graph) for way in self.ways
            ):
                before = STORED if eager is None else EAGER
                stored = WayToRun(
                    before, part, store_all(run.graph), measured=eager, allocated=run.eager_bytes
                )
                self.ways.append(stored)
            way = WayToRun(name, part, run.program, predicted=Figures(run.predicted_peak_bytes), note=note)
        else:
            self._before(plan, eager, run.eager_bytes, run.plain or plan.plain_graph)
            self.plans.append(plan)
            more = len(run.graph.ops) - len(plan.graph.ops)
            seconds = (*plan.seconds, *([0.0] * more)) if plan.seconds else ()
            part = self.steps.part(name, run.graph, plan.cost, seconds)
            way = _planned(name, part, plan, run.program, note)
            if more:
                padded = (*plan.workspace_bytes, *([0] * more)) if plan.workspace_bytes else ()
                way = replace(way, workspace_bytes=padded, seconds=seconds)
        self.runs.append(run)
        check = None
        if run.bitwise is not None and run.loss_equal is not None:
            check = GradientCheck(run.bitwise, run.loss_equal, run.difference)
        measured = Figures(run.measured.peak_bytes, run.measured.seconds)
        self.ways.append(replace(way, check=check, measured=measured, eager=eager, recording=run.recording))

    def _before(
        self,
        plan: Plan,
        eager: Figures | None = None,
        allocated: Sequence[int] = (),
        plain: Graph | None = None,
    ) -> None:
        """The step as it is, once; of a plan in tiles its file may hold nothing but its figures."""
        for k, known in enumerate(self.ways):
            if known.proof is None and leaves_of(known.part.graph) == leaves_of(plan.graph):
                if eager is not None and known.measured is None:
                    name = EAGER if known.name == STORED else known.name
                    self.ways[k] = replace(known, name=name, measured=eager, allocated=allocated)
                if known.disturbed > plan.disturbed and known.part.graph == plan.graph:
                    self.ways[k] = _stored(self.ways[k], self.steps, plan)
                return
        fused = (eager or plain) is not None and any(op.kind == GROUP for op in plan.graph.ops)
        name = STORED if eager is None and not fused else EAGER
        part = self.steps.part(name, plan.graph, plan.cost, plan.seconds)
        predicted = Figures(plan.plain.peak_bytes, plan.plain.seconds)
        tiled = any(isinstance(line, Loop) for line in plan.program.instructions)
        if tiled or fused:
            how = "in tiles" if tiled else "with fused kernels"
            note = f"the plan is of a step {how}: what eager PyTorch does over time is not in its file"
            told = None if fused else predicted
            if plain is not None:
                cost, note = (plan.cost, "") if plan.plain_seconds else ("", _NO_WORKSPACES)
                own = self.steps.part(name, plain, cost, plan.plain_seconds)
                way = WayToRun(name, own, store_all(plain), measured=eager, allocated=allocated, note=note)
                way = replace(way, seconds=plan.plain_seconds, workspace_bytes=plan.plain_workspace_bytes)
                way = replace(way, beside_bytes=plan.beside_bytes)
            else:
                way = WayToRun(name, part, None, measured=eager, note=note, known=False)
            self.ways.append(replace(way, predicted=told))
        if tiled:
            return
        if fused:
            name, eager, allocated = STORED, None, ()
        self.ways.append(
            _stored(WayToRun(name, part, None, measured=eager, allocated=allocated), self.steps, plan)
        )

    def _add_shards(self, name: str, plan: ShardPlan) -> None:
        """The step on one device, and its largest device of several."""
        part = self.steps.part(name, plan.graph, "estimated", plan.seconds)
        whole = next((k for k, way in enumerate(self.ways) if way.part is part), None)
        if whole is None:
            whole = len(self.ways)
            predicted = Figures(plan.one.peak_bytes, plan.one.seconds)
            way = WayToRun(ONE, part, store_all(plan.graph), seconds=plan.seconds, predicted=predicted)
            self.ways.append(replace(way, cost="estimated"))
        runs = [whole]
        if plan.plan is not None:
            runs.append(len(self.ways))
            called = f"{name}: device {plan.largest} of {plan.shards.mesh.devices}"
            own = self.steps.part(called, plan.plan.graph, plan.plan.cost, plan.plan.seconds)
            note = "by estimated times; workspaces are not known before it runs"
            way = _planned(called, own, plan.plan, plan.plan.program, note)
            measured = Figures(plan.measured[plan.largest].peak_bytes) if plan.measured else None
            asked = plan.budget_bytes is not None or plan.plan.budget_bytes < plan.plan.plain.peak_bytes
            budget = plan.plan.budget_bytes if asked else None
            if asked and plan.budget_bytes is None and plan.measured:  # a share, of more than this plan knows
                budget = max(one.budget_bytes for one in plan.measured) or None
            self.ways.append(replace(way, check=check_of(plan), measured=measured, budget_bytes=budget))
        self.shards.append((name, plan, part, tuple(runs)))

    def targets(self) -> Iterable[str]:
        """What the step is called, as far as files say it."""
        return [*(run.target for run in self.runs), *(plan.target for _, plan, _, _ in self.shards)]

    def shard_views(self) -> Iterable[ShardView]:
        """How each is split."""
        for name, plan, part, runs in self.shards:
            yield shard_view(name, plan, part, self.steps.number(part), runs)

    def add_recording(self, name: str, recording: Recording) -> None:
        """What was measured, beside the way whose operators it lists."""
        for k, way in enumerate(self.ways):
            if way.program is not None and _operators(way.part.graph, way.program) == recording.operators:
                peak = Figures(recording.timeline.peak_bytes)
                self.ways[k] = replace(way, recording=recording, measured=way.measured or peak)
                return
        raise PlanError(
            f"{name}: its operators are not those of a plan that is given; give the plan that ran too, or "
            "write all in one file by `lowtide run TARGET -o FILE`"
        )

    def views(self) -> Iterable[RunView]:
        """What is drawn; the devices of a split run the step of the whole."""
        whole = {k: runs[0] for *_, runs in self.shards for k in runs}
        return [run_view(way, self.steps.number(way.part)) for way in told_apart(grouped(self.ways, whole))]

    def tradeoff(self, rival_seconds: float) -> TradeoffCurve | None:
        """All budgets: of a sweep, or as far as plans are given."""
        budgets = [point.budget_bytes for sweep in self.sweeps[:1] for point in sweep.points]
        plans = sorted(self.plans, key=lambda plan: plan.disturbed)
        whole = next((plan for plan in plans if not plan.decisions.tiles), None)
        rivals = []
        if whole is not None and rival_seconds > 0:
            plain, least = whole.plain.peak_bytes, whole.smallest_budget_bytes
            budgets = budgets or [round(plain * k / 10) for k in range(10, 0, -1) if plain * k / 10 >= least]
            rivals = rivals_of(whole, budgets, rival_seconds)
        if self.sweeps:
            return curve_of_sweep(self.sweeps[0], rivals)
        found = curve_of_plans(plans) if plans else None
        return None if found is None else msgspec.structs.replace(found, rivals=tuple(rivals))


_NO_WORKSPACES = "workspaces of its operators are not known: its curve leaves them out"
_ALONE = "not compared: eager PyTorch ran out of memory"
EAGER, STORED, ONE = "eager PyTorch", "storing everything", "one device"


def _operators(graph: Graph, program: Program) -> tuple[str, ...]:
    return tuple(graph.ops[line.op].id for line in program.instructions if isinstance(line, Run))


def _stored(known: WayToRun, steps: _Steps, plan: Plan) -> WayToRun:
    """The step as it is, by the times of a plan, with what is known of it besides."""
    part = steps.part(known.name, plan.graph, plan.cost, plan.seconds)
    stored = with_in_place(plan.graph, store_all(plan.graph), plan.able)
    return replace(
        _planned(known.name, part, plan, stored, ""),
        note=_busy(plan),
        predicted=Figures(plan.plain.peak_bytes, plan.plain.seconds),
        measured=known.measured,
        allocated=known.allocated,
        file=known.file,
        budget_bytes=None,
        proof=None,
        link=None,
    )


def _busy(plan: Plan) -> str:
    many = f"{plan.disturbed} operators were" if plan.disturbed > 1 else "1 operator was"
    return (
        f"{many} measured while the machine was busy: plan again for better times" if plan.disturbed else ""
    )


def _planned(name: str, part: TablePart, plan: Plan, program: Program, note: str) -> WayToRun:
    bound = None if plan.bound.holds_for is HoldsFor.NOTHING else plan.bound
    tiled = bool(plan.decisions.tiles)
    words = "" if bound is None or tiled else f"{by_methods(plan.only)}, {bound.holds_for.words}"
    link: Link | None = plan.link
    return WayToRun(
        name,
        part,
        program,
        seconds=plan.seconds,
        workspace_bytes=plan.workspace_bytes,
        short=plan.short,
        wire_seconds=plan.wire_seconds,
        link=link,
        beside_bytes=plan.beside_bytes,
        cost=plan.cost,
        budget_bytes=plan.budget_bytes,
        predicted=Figures(plan.predicted.peak_bytes, plan.predicted.seconds),
        note="; ".join(filter(None, (note or plan.no_tiles, _busy(plan)))),
        disturbed=plan.disturbed,
        proof=Proof(
            plan.method,
            plan.overhead,
            None if bound is None or tiled else bound.overhead,
            plan.gap,
            words,
            plan.smallest_budget_bytes,
            plan.solve_seconds,
            plan.only,
            _decided(plan),
        ),
    )


def _decided(plan: Plan) -> str:
    d = plan.decisions
    where = f" in one of {d.tiles} tiles" if d.tiles else ""
    more = "; others run again on the way to them" if d.recomputed else ""
    return (
        f"Of what backward needs, {d.kept} storages are kept, {d.recomputed} recomputed and {d.offloaded} "
        f"offloaded to the host{where}{more}. {d.in_place} operators run in place"
    )
