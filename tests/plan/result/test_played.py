"""Plans as steps: an operator for each instruction, with its time, on lanes for computation and copies."""

import json

import msgspec
import pytest
from click.testing import CliRunner

from lowtide.commands.common import load
from lowtide.commands.main import cli
from lowtide.cost import validate_step
from lowtide.documents import encode_document, write_document
from lowtide.errors import FormatError, PlanError
from lowtide.formats import chainer, native, trace
from lowtide.formats.registry import read_file
from lowtide.graph import Category
from lowtide.plan.budget import Budget
from lowtide.plan.program.copy_lanes import Link
from lowtide.plan.program.costs import Costs
from lowtide.plan.program.instructions import Drop, Fetch, Run, Send
from lowtide.plan.result.played import plan_step, run_step
from tests.conftest import document_path
from tests.formats.perfetto import TraceProcessor, needs_perfetto
from tests.planning import plan_for
from tests.report.page.cases import measured
from tests.steps import DEVICE


def planned(only, share):
    graph = chainer.read(document_path("000").read_bytes()).graph
    seconds = tuple(1e-2 if "Convolution" in op.kind else 1e-3 for op in graph.ops)
    link = Link(2e10, 2e10)
    return plan_for(graph, Costs(seconds), Budget(share=share), only=only, link=link, time_limit=0.5)


@pytest.fixture(scope="module")
def offloaded():
    return planned(("offload",), 0.75)


@pytest.fixture(scope="module")
def recomputed():
    return planned(("recompute",), 0.6)


@pytest.mark.parametrize("name", ["offloaded", "recomputed"])
def test_each_instruction_but_drops_is_an_operator(name, request):
    plan = request.getfixturevalue(name)
    step = validate_step(plan_step(plan))
    lines = [line for line in plan.program.instructions if not isinstance(line, Drop)]
    assert len(step.graph.ops) == len(step.timeline.live_bytes) == len(lines)
    for op, line in zip(step.graph.ops, lines, strict=True):
        if isinstance(line, Run):
            assert op.name.removesuffix(" again") == plan.graph.ops[line.op].label
        else:
            assert op.category is Category.COPY
            assert op.kind == ("send DtoH" if isinstance(line, Send) else "fetch HtoD")
    assert native.read(native.write(step).data) == step


@pytest.mark.parametrize("name", ["offloaded", "recomputed"])
def test_peak_and_time_are_those_that_the_plan_promises(name, request):
    plan = request.getfixturevalue(name)
    step = plan_step(plan)
    assert step.timeline.peak_bytes == plan.predicted.peak_bytes
    runs = [span for span in step.spans if step.graph.ops[span.op].category is not Category.COPY]
    assert max(span.end for span in runs) == pytest.approx(plan.predicted.seconds)
    assert sum(span.running + span.waiting for span in runs) == pytest.approx(plan.predicted.seconds)


def test_storages_live_from_when_they_come_to_when_they_go(offloaded):
    """Sums of lifetimes against the live bytes of the simulation: never more, and the same at some operator."""
    step = plan_step(offloaded)
    steps = len(step.graph.ops)
    sums = [
        sum(one.bytes for one in step.timeline.lifetimes if one.first <= k <= one.last) for k in range(steps)
    ]
    runs = [k for k, op in enumerate(step.graph.ops) if op.category is not Category.COPY]
    assert all(sums[k] <= step.timeline.live_bytes[k] for k in runs)
    assert sums[step.timeline.peak_step] == step.timeline.peak_bytes
    sent = {
        offloaded.graph.tensors[one.tensor].id
        for one in offloaded.program.instructions
        if isinstance(one, Send)
    }
    ids = {tensor.id for tensor in step.graph.tensors}
    assert sent
    assert {f"{name}#2" for name in sent} <= ids  # once before it is sent, once when it is back


def test_operators_that_run_again_say_so(recomputed):
    names = [op.name for op in plan_step(recomputed).graph.ops]
    again = [name for name in names if name.endswith(" again")]
    assert len(again) == len(names) - len(recomputed.graph.ops) > 0


def test_copies_have_lanes_of_their_own_beside_the_computation(offloaded):
    events = json.loads(trace.write(plan_step(offloaded)).data)["traceEvents"]
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    counts = {}
    for event in events:
        if event["ph"] == "X" and event["name"] != "waiting":
            lane = lanes[event["pid"], event["tid"]]
            counts[lane] = counts.get(lane, 0) + 1
    sends, fetches = (
        sum(isinstance(one, kind) for one in offloaded.program.instructions) for kind in (Send, Fetch)
    )
    assert counts == {
        "compute": len(offloaded.graph.ops),
        "compute copies to the host": sends,
        "compute copies to the device": fetches,
    }


@needs_perfetto
def test_perfetto_loads_a_plan(offloaded):
    step = plan_step(offloaded)
    with TraceProcessor(trace.write(step).data) as processor:
        rows = processor.query(
            "select thread.name as lane, sum(dur) as dur from slice join thread_track on slice.track_id = thread_track.id "
            "join thread using (utid) group by 1"
        )
        ((most,),) = processor.query(
            "select max(value) as most from counter join counter_track track on counter.track_id = track.id "
            "where track.name = 'live bytes'"
        )
        errors = processor.query("select name from stats where severity = 'error' and value > 0")
    assert errors == []
    assert most == offloaded.predicted.peak_bytes
    assert {lane for lane, _ in rows} == {
        "compute",
        "compute copies to the host",
        "compute copies to the device",
    }
    assert dict(rows)["compute"] * 1e-9 == pytest.approx(offloaded.predicted.seconds, rel=1e-6)


def test_commands_take_plans(offloaded, recomputed, tmp_path):
    for name, plan in (("a.json", offloaded), ("b.json", recomputed)):
        (tmp_path / name).write_bytes(encode_document(plan))

    def run(*arguments):
        result = CliRunner().invoke(cli, [str(one) for one in arguments])
        assert result.exit_code == 0, result.output
        return result.stdout

    shown = json.loads(run("show", tmp_path / "a.json", "--json"))
    assert shown["format"] == "plan"
    assert shown["peak"]["bytes"] == offloaded.predicted.peak_bytes
    assert "send DtoH" in run("top", tmp_path / "a.json", "--by", "type", "--limit", 0)
    changes = json.loads(run("diff", tmp_path / "a.json", tmp_path / "b.json", "--json", "--limit", 0))[
        "rows"
    ]
    assert any(one["name"].endswith(" again") and one["count_a"] == 0 for one in changes)
    run("convert", tmp_path / "a.json", "--to", "trace", "-o", tmp_path / "trace.json")
    run("convert", tmp_path / "a.json", "--to", "dot", "--fold", "12", "-o", tmp_path / "a.dot")
    refused = CliRunner().invoke(cli, ["show", str(damaged(offloaded, tmp_path / "c.json"))]).exception
    assert isinstance(refused, PlanError)
    assert "c.json: " in str(refused)


def damaged(plan, path):
    data = json.loads(encode_document(plan))
    data["predicted"]["peak_bytes"] -= 512
    path.write_text(json.dumps(data))
    return path


def test_a_run_is_its_plan_with_measured_bytes():
    run = measured()
    step = validate_step(run_step(run))
    assert step.format == "run"
    assert step.timeline.peak_bytes == run.measured.peak_bytes
    assert step.timeline.live_bytes == run.recording.timeline.live_bytes
    assert native.read(native.write(step).data) == step


def test_runs_are_compared_and_what_is_no_step_is_named(tmp_path):
    run, device = tmp_path / "run.json", tmp_path / "device.json"
    write_document(run, measured())
    write_document(device, DEVICE)
    done = CliRunner().invoke(cli, ["diff", str(run), str(run), "--json"])
    assert done.exit_code == 0
    assert json.loads(done.output)
    for read in (load, read_file):
        with pytest.raises(
            FormatError, match="a description of a device, which `lowtide report` shows; expected a"
        ):
            read(str(device))
    with pytest.raises(FormatError, match="a measured run, which `lowtide report`, `show` and `diff` show"):
        read_file(str(run))
    write_document(run, msgspec.structs.replace(measured(), plan=None))
    with pytest.raises(PlanError, match=r"run.json: a run of a program without a plan .*`lowtide report`"):
        load(str(run))
