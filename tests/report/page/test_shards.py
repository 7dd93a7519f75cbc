"""A split step in the document of the page, held against the split itself and against its communications."""

import math

import msgspec
import pytest

from lowtide.graph import EXCHANGE, RESIDENT_ROLES, SUM, Phase
from lowtide.plan.check.communication import communications
from lowtide.plan.program.instructions import Run
from lowtide.report.page import decisions as decisions_module
from lowtide.report.page import lanes as lanes_module
from lowtide.report.page import shards as shards_module
from lowtide.report.page.make import Given, report_of
from tests.report.page.cases import sharded


def reported(*values):
    return report_of([Given(f"case {k}", value) for k, value in enumerate(values)], title="a title")


def sent_by_its_program(plan):
    """Bytes that the plan of a device sends, as the checker of communications counts them."""
    kinds = (EXCHANGE, SUM)
    names = {op.arguments[-1] for op in plan.plan.graph.ops if op.kind in kinds}
    wires = dict.fromkeys(names, tuple(range(plan.shards.mesh.devices)))
    talks = communications(plan.plan.graph, plan.plan.program, plan.largest, wires)
    return sum(one.sent_bytes for one in talks)


def test_what_moves_is_what_the_device_sends():
    plan = sharded()
    moves = reported(plan).shards[0].moves
    place = plan.ranks.index(plan.largest)
    assert sum(sent[place] for sent in moves.sent) == sent_by_its_program(plan) > 0
    assert max(map(sum, zip(*moves.sent, strict=True))) == plan.split.wire_bytes


def test_parts_on_devices_make_up_the_whole():
    report = reported(sharded())
    nodes, words = report.shards[0].nodes, report.words
    seen = set()
    for k, shape in enumerate(nodes.shape):
        for label, boxes in zip(nodes.label[k], nodes.box[k], strict=True):
            if words[label] != "write_rect" or None in boxes:
                continue
            sizes = [
                math.prod(hi - lo for lo, hi in zip(box[: len(shape)], box[len(shape) :], strict=True))
                for box in boxes
            ]
            whole = math.prod(shape)
            assert sizes == [whole] * 2 or (sum(sizes) == whole and boxes[0] != boxes[1])
            seen.add(sizes == [whole] * 2)
    assert seen == {True, False}, "some are cut, and some are whole on both"


def test_tensors_of_forward_are_decided_once_with_a_reason():
    plan = sharded()
    report = reported(plan)
    shards, words = report.shards[0], report.words
    tables = report.steps[shards.step].tensors
    names = [words[tables.name[row]] for row in shards.decisions.tensor]
    made = {t for op in plan.graph.ops if op.phase is Phase.FORWARD for t in op.outputs}
    expected = [
        tensor.label
        for t, tensor in enumerate(plan.graph.tensors)
        if tensor.alias is None and (tensor.role in RESIDENT_ROLES or t in made)
    ]
    assert sorted(names) == sorted(expected)
    decided = {words[k] for k in shards.decisions.decision}
    assert decided == {"sharded", "summed"}
    for row, decision, part in zip(
        shards.decisions.tensor, shards.decisions.decision, shards.decisions.part, strict=True
    ):
        assert (part < tables.bytes[row]) == (words[decision] == "sharded") or tables.bytes[row] - part < 64
    assert all(words[k] for k in shards.decisions.reason)
    assert sum(shards.decisions.price) == pytest.approx(sum(move.seconds for move in plan.moves))


def test_a_split_is_shown_beside_one_device():
    plan = sharded()
    report = reported(plan)
    one, device = report.runs
    assert one.predicted.peak_bytes == max(one.moments.live) == plan.one.peak_bytes
    assert max(device.moments.live) == plan.split.peak_bytes
    assert report.shards[0].runs == (0, 1)
    assert device.measured.peak_bytes == 5000
    assert device.check.difference == pytest.approx(2e-7)


def test_a_share_of_what_a_process_takes_is_the_budget_that_it_counted():
    """Before it ran, workspaces were not known: a share of less than that is no line for what was measured."""
    plan = sharded("99%")
    asked = msgspec.structs.replace(plan, measured=())
    *_, before = reported(asked).runs
    assert before.budget_bytes == plan.plan.budget_bytes < plan.plan.plain.peak_bytes
    taken = tuple(msgspec.structs.replace(one, budget_bytes=7000) for one in plan.measured)
    *_, unknown = reported(plan).runs
    assert unknown.budget_bytes is None
    *_, after = reported(msgspec.structs.replace(plan, measured=taken)).runs
    assert after.budget_bytes == 7000 > after.measured.peak_bytes


def test_messages_have_a_lane_of_their_own():
    """One after the other, each as long as its link takes, not before the operators that it follows."""
    plan = sharded().plan
    lane, waits = reported(plan).runs[-1].lanes
    assert (lane.name, waits.name) == ("communication", "computation waits")
    runs = [line.op for line in plan.program.instructions if isinstance(line, Run)]
    talks = [op for op in runs if plan.graph.ops[op].kind in (EXCHANGE, SUM)]
    last = plan.predicted.seconds
    took = [end - start for start, end in zip(lane.start, lane.end, strict=True)]
    assert took == pytest.approx([plan.wire_seconds[op] for op in talks], abs=1e-6 * last)
    assert all(end <= start + 1e-6 * last for end, start in zip(lane.end, lane.start[1:], strict=False))
    computed = [sum(plan.seconds[op] for op in runs[: runs.index(talk) + 1]) for talk in talks]
    assert all(start >= own - 1e-6 * last for start, own in zip(lane.start, computed, strict=True))
    waited = sum(end - start for start, end in zip(waits.start, waits.end, strict=True))
    assert waited + sum(plan.seconds[op] for op in runs) == pytest.approx(last)


def test_what_is_left_out_is_said(monkeypatch):
    whole = reported(sharded())
    assert whole.notes == ()
    monkeypatch.setattr(decisions_module, "MOST_BLOCKS", 3)
    monkeypatch.setattr(lanes_module, "MOST_SPANS", 2)
    monkeypatch.setattr(shards_module, "MOST_NODES", 5)
    monkeypatch.setattr(shards_module, "MOST_BLOCKS", 4)
    thinned = reported(sharded())
    assert len(thinned.notes) == 6
    device, (lane, _) = thinned.runs[-1], whole.runs[-1].lanes
    lengths = sorted(b - a for a, b in zip(lane.start, lane.end, strict=True))
    kept, _ = device.lanes
    found = sorted(b - a for a, b in zip(kept.start, kept.end, strict=True))
    assert found == pytest.approx(lengths[-2:], rel=1e-3)
    assert len(device.decisions.tensor) == 3 < device.decisions.in_all
    sizes = [max(sent) for sent in thinned.shards[0].moves.sent]
    assert sizes == [max(sent) for sent in whole.shards[0].moves.sent][:4]
    named = [[report.words[k] for k in report.shards[0].nodes.name] for report in (thinned, whole)]
    assert named[0] == named[1][:5]
