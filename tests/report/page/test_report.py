"""The document of the page agrees with what plans predict, with the simulation, and with what was measured."""

import json

import msgspec
import pytest
import torch
from torch import nn
from torch.fx.traceback import annotate

from lowtide import capture, zoo
from lowtide.cost import Step
from lowtide.documents import decode_document, encode_document
from lowtide.errors import PlanError
from lowtide.execute.compare.tiles import plain_tiles
from lowtide.execute.tiling.plan_tiles import with_loop
from lowtide.formats.pytorch.snapshot import read_snapshot
from lowtide.formats.registry import read_file
from lowtide.graph import ACCUMULATE, Recording, Timeline
from lowtide.plan.make.sweep import sweep
from lowtide.plan.program.costs import Costs
from lowtide.plan.program.instructions import Loop, Run, Send
from lowtide.plan.program.simulate import simulate
from lowtide.plan.request import DeviceRoom, PlanRequest
from lowtide.plan.result.measured_run import MeasuredRun
from lowtide.plan.result.plan import Side
from lowtide.report.page import moments as moments_module
from lowtide.report.page import thin
from lowtide.report.page.html import embedded
from lowtide.report.page.loops import loop_views
from lowtide.report.page.make import Given, report_of
from lowtide.report.page.moments import spread_by_bytes
from lowtide.report.page.tables import Tables, Words
from lowtide.report.page.tradeoff import QUICK
from lowtide.report.page.types import Report
from lowtide.trace.tiles.tiling import Tiling
from tests.conftest import document_path
from tests.formats.snapshots import pickled
from tests.report.page.cases import grouped, measured, offloading, recomputing, sharded, tiled
from tests.steps import DEVICE, families

PLANS = {"recomputing": recomputing, "offloading": offloading, "tiled": tiled}


def reported(*values, **options):
    return report_of(
        [Given(f"case {k}", value) for k, value in enumerate(values)], title="a title", **options
    )


def live_by_hand(report, run, event):
    """Bytes of all blocks at an event, with leaves and what is beside the step."""
    blocks = run.blocks
    sizes = report.steps[run.step].tensors.bytes
    rows = zip(blocks.bytes, blocks.birth, blocks.death, strict=True)
    live = sum(size for size, birth, death in rows if birth <= event < death)
    return live + sum(sizes[row] for row in run.leaves) + run.beside_bytes


@pytest.mark.parametrize("name", PLANS)
def test_the_highest_moment_is_the_peak_that_the_plan_predicts(name):
    plan = PLANS[name]()
    before, after = reported(plan).runs
    assert max(after.moments.live) == plan.predicted.peak_bytes == after.moments.live[after.moments.peak]
    assert after.moments.seconds == pytest.approx(plan.predicted.seconds)
    assert before.predicted.peak_bytes == plan.plain.peak_bytes
    if name != "tiled":  # a plan in tiles does not have the step without them
        assert max(before.moments.live) == plan.plain.peak_bytes


@pytest.mark.parametrize("name", PLANS)
def test_every_moment_is_the_sum_of_the_blocks_that_are_live(name):
    report = reported(PLANS[name]())
    for run in report.runs:
        for live, event in zip(run.moments.live, run.moments.event, strict=True):
            assert live == live_by_hand(report, run, event)


@pytest.mark.parametrize("name", PLANS)
def test_moments_outside_of_loops_are_those_of_the_simulation(name):
    plan = PLANS[name]()
    after = reported(plan).runs[-1]
    simulated = simulate(plan.graph, plan.program, workspace_bytes=plan.workspace_bytes)
    runs = [line for line in plan.program.instructions if isinstance(line, Run)]
    at = 0
    for line, most in zip(runs, simulated.live_bytes, strict=True):
        count = 1
        if isinstance(line, Loop):
            bodies = [plan.program.bodies[tile.body].program for tile in line.tiles]
            count += sum(isinstance(one, Run) for body in bodies for one in body.instructions)
        inside = after.moments.live[at : at + count]
        assert max(inside) == most + plan.beside_bytes
        at += count
    assert at == len(after.moments.live)


def test_a_loop_is_not_one_spike():
    after = reported(tiled()).runs[-1]
    tiles = set(after.moments.tile) - {-1}
    assert tiles == set(range(len(after.loops[0].lo)))
    first = [live for live, tile in zip(after.moments.live, after.moments.tile, strict=True) if tile == 0]
    assert len(set(first)) > 3


def test_who_is_live_in_a_step_in_tiles_has_its_source_line():
    plan = tiled()
    inside = [op for body in plan.program.bodies for op in body.graph.ops if op.kind != ACCUMULATE]
    for op in (*plan.graph.ops, *inside):
        assert op.source is not None
        assert op.source.file.endswith("gpt2.py")
    assert {"blocks.0.attention", "norm"} <= {op.name for op in plan.graph.ops}


def test_tiles_say_what_they_read_beyond_their_share():
    """Two convolutions and a pool, in 2 x 2 tiles: each reads 11 x 11 of an image of 16 x 16."""
    torch._dynamo.reset()
    built = zoo.build("convpool")
    joint = capture(built.loss, built.model, *built.batch).joint
    program, *_ = plain_tiles(joint, Tiling(joint).boxes((1, 1, 2, 2)))
    graph = with_loop(joint, program).graph
    part = Tables("a step", Words(), "").part(graph).programmed(program)
    (loop,) = loop_views(part, program)
    assert loop.axes == (1, 1, 4, 4)
    assert (loop.lo[1], loop.hi[1]) == ((0, 0, 0, 2), (1, 1, 2, 4))
    (read,) = loop.reads
    assert (read.name, read.whole, read.part) == ("image", (1, 1, 16, 16), (1, 1, 11, 11))
    assert read.halo == (0, 0, 3, 3)
    assert read.times == pytest.approx(4 * 11 * 11 / 16**2, abs=1e-4)


def test_the_operators_inside_of_a_group_have_moments_of_their_own():
    report = reported(Step(grouped()))
    (run,) = report.runs
    names = [report.words[report.steps[0].operators.name[row]] for row in run.moments.operator]
    assert names == ["inner0", "inner1", "inner2", "last"]
    assert report.steps[0].operators.parent == (-1, -1, 0, 0, 0)


def test_decisions_are_those_of_the_plan():
    for plan in (recomputing(), offloading()):
        report = reported(plan)
        table = report.runs[-1].decisions
        names = [report.words[word] for word in table.decision]
        again = {line.op for line in plan.program.instructions if isinstance(line, Run)}
        assert again
        assert names.count("offloaded") == plan.decisions.offloaded
        assert names.count("recomputed") >= plan.decisions.recomputed
        assert len(set(table.tensor)) == len(table.tensor)
        assert all(report.words[word] for word in table.reason)
    prices = reported(recomputing()).runs[-1].decisions.price
    spent = recomputing().predicted.seconds - recomputing().plain.seconds
    assert sum(price or 0.0 for price in prices) == pytest.approx(spent, rel=1e-6)


def test_copies_have_lanes_of_their_own():
    plan = offloading()
    lanes = {lane.name: lane for lane in reported(plan).runs[-1].lanes}
    sends = sum(isinstance(line, Send) for line in plan.program.instructions)
    assert len(lanes["copies to the host"].row) == sends > 0
    for lane in lanes.values():
        assert all(a <= b for a, b in zip(lane.start, lane.end, strict=True))
        assert list(lane.start) == sorted(lane.start)


def test_what_was_measured_is_drawn_apart_from_what_is_predicted():
    run = measured()
    report = reported(run)
    before, after = report.runs
    assert before.name == "eager PyTorch"
    assert before.measured.peak_bytes == run.eager.peak_bytes
    assert after.measured.peak_bytes == run.measured.peak_bytes
    assert max(after.curve.live) == run.recording.timeline.peak_bytes
    assert list(after.curve.at) == sorted(after.curve.at)
    assert 0 <= after.curve.at[0] <= after.curve.at[-1] <= len(after.moments.live)
    loops = [
        k
        for k, line in enumerate(r for r in run.program.instructions if isinstance(r, Run))
        if isinstance(line, Loop)
    ]
    assert set(run.recording.timeline.inside) == set(loops)
    inside = run.recording.timeline.inside[loops[0]]
    assert max(inside) == run.recording.timeline.live_bytes[loops[0]]
    assert len(set(inside)) > 3
    differences = [one - other for one, other in zip(after.curve.live, after.moments.live, strict=True)]
    close = sum(abs(difference) < 256 for difference in differences)  # workspaces are not known to the plan
    assert close > 0.9 * len(differences)
    assert after.check.loss_equal in (True, False)
    assert after.check.difference < 1e-5


def test_what_eager_pytorch_held_is_drawn_too():
    run = measured()
    assert max(run.eager_bytes) == run.eager.peak_bytes
    built = zoo.build(run.target)
    before, after = reported(capture(built.loss, built.model, *built.batch).step, run).runs
    assert after.check is not None
    assert before.measured.peak_bytes == run.eager.peak_bytes
    assert max(before.curve.live) == run.eager.peak_bytes
    assert not before.curve.aligned
    assert 0 <= before.curve.at[0] <= before.curve.at[-1] <= len(before.moments.live)


def test_thousands_of_small_allocations_do_not_move_the_peak():
    """They are one operator's, behind the peak: by their number the peak stood at the very left."""
    step = families()
    (run,) = reported(step).runs
    moments, peak = run.moments, run.moments.live[run.moments.peak]
    at = run.moments.peak + 1
    small = [moments.live[at] + k % 2 for k in range(5000)]
    curve = spread_by_bytes([*moments.live[:at], *small, *moments.live[at:]], moments)
    place = curve.at[curve.live.index(peak)]
    assert abs(place - run.moments.peak) < 0.05 * len(moments.live)


def test_the_step_without_tiles_is_drawn_where_the_run_has_it():
    run = msgspec.structs.replace(measured(), plain=families().graph)
    before, after = reported(run).runs
    assert before.name == "eager PyTorch"
    assert before.predicted.peak_bytes == run.plan.plain.peak_bytes
    assert before.measured.peak_bytes == run.eager.peak_bytes
    assert len(before.moments.live) >= len(run.plain.ops)
    assert not before.curve.aligned
    assert after.curve.aligned


def test_what_pytorch_has_recorded_is_no_prediction():
    (run,) = reported(read_snapshot(pickled())).runs
    assert run.measured.peak_bytes == max(run.curve.live) > 1 << 20
    assert run.predicted.peak_bytes is None


def test_a_timeline_finds_the_plan_that_it_is_of():
    run = measured()
    report = reported(run.plan, run.recording)
    assert report.runs[-1].curve == reported(run).runs[-1].curve
    with pytest.raises(PlanError, match="case 1: its operators are not those of a plan"):
        reported(recomputing(), Recording(("nothing",), Timeline((1,))))


def test_blocks_lie_apart_in_the_arena():
    for make in PLANS.values():
        run = reported(make()).runs[-1]
        blocks, layout = run.blocks, run.layout
        assert layout.live_bytes <= layout.arena_bytes <= layout.greedy_bytes
        rows = list(zip(blocks.birth, blocks.death, blocks.offset, blocks.bytes, strict=True))
        for k, (birth, death, offset, size) in enumerate(rows):
            assert offset + size <= layout.arena_bytes
            for other in rows[:k]:
                apart = other[2] + other[3] <= offset or offset + size <= other[2]
                assert apart or other[1] <= birth or death <= other[0]


def test_addresses_of_a_document_are_shown_as_they_are():
    """Of each pair of blocks, those that lie apart or over each other in the document do so here."""
    step = read_file(document_path("001")).step
    report = reported(step)
    (run,) = report.runs
    blocks, touched = run.blocks, set()
    told = [graph_tensor.address for graph_tensor in step.graph.tensors]
    names = {tensor.label: k for k, tensor in enumerate(step.graph.tensors)}
    rows = []
    for row, offset, size in zip(blocks.tensor, blocks.offset, blocks.bytes, strict=True):
        address = told[names[report.words[report.steps[0].tensors.name[row]]]] if row >= 0 else None
        if offset >= 0 and address is not None:
            rows.append((address, offset, size))
            touched.add((offset, offset + size))
    assert len(rows) > 100
    assert max(end for _, end in touched) == run.layout.arena_bytes
    for k, (address, offset, size) in enumerate(rows):
        for other, place, length in rows[:k]:
            assert (address < other + length and other < address + size) == (
                offset < place + length and place < offset + size
            )


def test_large_steps_are_thinned_and_say_so(monkeypatch):
    plan = tiled()
    whole = reported(plan).runs[-1]
    monkeypatch.setattr(moments_module, "MOST_MOMENTS", 40)
    report = reported(plan)
    run = report.runs[-1]
    assert len(run.moments.live) <= 44
    assert run.moments.in_all == len(whole.moments.live)
    assert max(run.moments.live) == plan.predicted.peak_bytes
    assert any("are drawn" in note for note in report.notes)
    monkeypatch.setattr(moments_module, "_MOST_ROWS", 64)
    assert max(reported(plan).runs[-1].moments.live) == plan.predicted.peak_bytes


def test_extremes_keep_the_largest_and_the_smallest():
    import numpy as np

    values = np.random.default_rng(0).integers(0, 1 << 40, 10_007)
    kept = thin.extremes(values, 100)
    assert len(kept) <= 102
    assert values.max() in values[kept]
    assert values.min() in values[kept]
    assert list(kept) == sorted(set(kept.tolist()))


def test_a_sweep_gives_the_curve_with_its_bound_and_the_rivals():
    plan = recomputing()
    costs = Costs(plan.seconds, plan.workspace_bytes, plan.cost)
    request = PlanRequest.of("100%", only="recompute", time_limit=1.0, smallest_seconds=0.0)
    found = sweep(plan.graph, costs, request, DeviceRoom(), shares=(1.0, 0.9))
    curve = reported(plan, found, rival_seconds=2.0).tradeoff
    assert curve.budget_bytes == tuple(point.budget_bytes for point in found.points)
    assert curve.seconds == tuple(point.seconds for point in found.points)
    for bound, seconds in zip(curve.bound_seconds, curve.seconds, strict=True):
        assert bound <= seconds * (1 + 1e-9)
    assert {rival.name for rival in curve.rivals} <= set(QUICK.values())
    assert curve.rivals


def test_operators_have_their_work_and_the_device_its_limits():
    step = families()
    report = reported(step, DEVICE)
    table = report.steps[0].operators
    assert report.limits.bytes_per_second == DEVICE.bytes_per_second
    for k, cost in enumerate(step.costs):
        assert table.flop[k] == cost.flop.value
        assert table.moved[k] == cost.bytes_moved.value
        assert table.seconds[k] == pytest.approx(cost.seconds.value, rel=1e-4)


@pytest.mark.parametrize("number", ["000", "001", "002", "003", "004"])
def test_documents_of_other_frameworks_are_reported_on(number):
    step = read_file(document_path(number)).step
    report = reported(step)
    assert len(report.steps[0].operators.name) == len(step.graph.ops)
    if step.graph.ordered:
        assert max(report.runs[0].moments.live) == step.lifetimes().peak_bytes


def test_the_document_is_versioned_and_comes_back():
    report = reported(recomputing())
    data = encode_document(report)
    assert json.loads(data)["lowtide"] == "report"
    assert json.loads(data)["version"] == 1
    assert decode_document(data, Report) == report


def test_no_name_can_end_the_script_that_holds_the_document():
    hostile = "</script><img src=x onerror=alert(1)><!-- \u2028"
    plan = recomputing()
    tensors = tuple(
        msgspec.structs.replace(t, id=f"{hostile}{k}", name=hostile) for k, t in enumerate(plan.graph.tensors)
    )
    graph = msgspec.structs.replace(plan.graph, tensors=tensors)
    report = reported(Step(graph))
    text = embedded(report)
    assert not set("<>&\u2028") & set(text)
    assert decode_document(text.encode(), Report) == report


def test_each_step_has_its_own_before():
    assert [run.name for run in reported(recomputing(), measured()).runs] == [
        "storing everything", "case 0", "eager PyTorch", "case 1"
    ]  # fmt: skip
    one = reported(tiled(), measured()).runs
    assert [run.name for run in one] == ["eager PyTorch", "case 0", "case 1"]
    assert one[0].measured.peak_bytes == measured().eager.peak_bytes


def test_files_of_different_steps_are_told_apart():
    """Each has its own before, by a name of its own, and ways know which of them run the same step."""
    other = MeasuredRun(
        "other",
        "cpu",
        Side(300, 2.0),
        Side(200, 3.0),
        200,
        loss_equal=True,
        bitwise=True,
        difference=0.0,
        graph=recomputing().graph,
        program=recomputing().program,
        recording=Recording((), Timeline((200,))),
    )
    runs = reported(measured(), other, recomputing()).runs
    named = [(run.name, run.group) for run in runs]
    assert named == [
        ("eager PyTorch (case 0)", 1),
        ("case 0", 1),
        ("eager PyTorch (case 1)", 2),
        ("case 1", 2),
        ("case 2", 2),
    ]
    assert runs[2].measured.peak_bytes == 300
    assert {run.group for run in reported(sharded()).runs} == {1}
    assert {run.group for run in reported(Step(grouped())).runs} == {0}


@pytest.mark.parametrize("first", [True, False])
def test_times_that_a_busy_machine_disturbed_are_told_and_not_compared_with(first):
    """The step as it is takes the times of the plan that was disturbed least."""
    quiet = recomputing()
    busy = msgspec.structs.replace(quiet, seconds=tuple(10 * one for one in quiet.seconds), disturbed=7)
    busy = msgspec.structs.replace(busy, plain=Side(quiet.plain.peak_bytes, 10 * quiet.plain.seconds))
    before, *runs = reported(*((busy, quiet) if first else (quiet, busy))).runs
    assert before.moments.seconds == pytest.approx(quiet.plain.seconds)
    assert before.note == ""
    notes = [run.note for run in runs]
    told = "7 operators were measured while the machine was busy: plan again for better times"
    assert notes == ([told, ""] if first else ["", told])
    assert reported(busy).runs[0].note == told
    curve = reported(*((busy, quiet) if first else (quiet, busy))).tradeoff
    assert curve.plain_seconds == quiet.plain.seconds


def test_the_time_of_eager_is_the_one_measured_in_turns():
    slower = msgspec.structs.replace(measured(), eager=Side(measured().eager.peak_bytes, 100.0))
    first, *runs = reported(slower, measured()).runs
    assert first.measured.seconds == 100.0
    assert [run.eager.seconds for run in runs] == [100.0, measured().eager.seconds]


class Annotated(nn.Module):
    """Two layers in parts of the step that the user has named."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 64), nn.Linear(64, 4)

    def forward(self, x):
        with annotate({"stage": "first"}):
            x = self.a(x).relu()
        with annotate({"stage": "second"}):
            return self.b(x).square().sum()


def test_the_users_annotations_are_categories():
    graph = capture(lambda model, x: model(x), Annotated(), torch.randn(32, 4)).step.graph
    report = reported(Step(graph))
    table = report.steps[0].operators
    said = {
        (report.words[phase], report.words[word])
        for phase, word in zip(table.phase, table.annotation, strict=True)
    }
    assert {
        (phase, f"stage={name}") for phase in ("forward", "backward") for name in ("first", "second")
    } <= said
