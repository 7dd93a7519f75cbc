import itertools
import json

import pytest

from lowtide.cost import Cost, Figure, Origin, Step
from lowtide.formats import chainer, megengine, tensorflow, trace
from lowtide.graph import Graph, Op


def events_of(step):
    written = trace.write(step)
    document = json.loads(written.data)
    assert set(document) == {"traceEvents", "displayTimeUnit", "otherData"}
    return document["traceEvents"], written.losses


def test_a_profile_keeps_its_times(documents):
    step = megengine.read(documents["001"])
    events, _ = events_of(step)
    running = [e for e in events if e["ph"] == "X" and e["name"] != "waiting"]
    device = [e for e in running if e["pid"] == 1]
    host = [e for e in running if e["pid"] == 2]
    assert len(device) == len(host) == 234
    assert sum(e["dur"] for e in device) == pytest.approx(22_050.93, abs=0.2)
    waiting = sum(e["dur"] for e in events if e["name"] == "waiting" and e["pid"] == 1)
    assert waiting == pytest.approx(379.21, abs=0.2)
    assert min(e["ts"] for e in running) >= 0


def test_live_bytes_are_counters_with_the_peak_of_the_step(documents):
    for step in (megengine.read(documents["001"]), chainer.read(documents["000"])):
        events, _ = events_of(step)
        counters = [e for e in events if e["ph"] == "C"]
        assert len(counters) == len(step.graph.ops)
        assert max(e["args"]["bytes"] for e in counters) == step.lifetimes().peak_bytes


def test_lanes_and_processes_have_names(documents):
    events, _ = events_of(megengine.read(documents["001"]))
    names = {(e["name"], e["args"]["name"]) for e in events if e["ph"] == "M"}
    assert {
        ("process_name", "device"),
        ("process_name", "host"),
        ("thread_name", "gpu0:0"),
        ("thread_name", "interpreter"),
    } <= names


def test_times_that_are_not_known_are_said_to_be_drawn(documents):
    _, losses = events_of(chainer.read(documents["000"]))
    assert any("how long 120 of them took" in loss for loss in losses)


def test_events_of_a_lane_are_apart_or_nested(documents):
    events, _ = events_of(megengine.read(documents["001"]))
    lanes = {}
    for event in events:
        if event["ph"] == "X":
            start = round(event["ts"] * 1000)
            lanes.setdefault((event["pid"], event["tid"]), []).append(
                (start, start + round(event["dur"] * 1000))
            )
    for spans in lanes.values():
        spans.sort()
        for (_, end), (start, _) in itertools.pairwise(spans):
            assert end <= start


def test_known_times_are_drawn_in_full():
    graph = Graph((), (Op("a", "k"), Op("b", "k")))
    costs = (Cost(Figure(2e-3, Origin.MEASURED)), Cost(Figure(1e-3, Origin.MEASURED)))
    events, losses = events_of(Step(graph, costs=costs))
    assert [e["dur"] for e in events if e["ph"] == "X"] == [2000, 1000]
    assert not any("how long" in loss for loss in losses)


def test_copies_have_a_lane_of_their_own(documents):
    events, losses = events_of(tensorflow.read(documents["003"]))
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    copies = [e for e in events if e.get("cat") == "copy"]
    assert len(copies) == 10
    assert {lanes[e["tid"]] for e in copies} == {"GPU copies"}
    assert sum(e["args"]["bytes_moved"] for e in copies) == 9_878_784
    assert any("live bytes" in loss for loss in losses)
