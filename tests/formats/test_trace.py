import itertools
import json
from collections import Counter

import pytest

from lowtide.cost import Cost, Figure, Origin, Step
from lowtide.formats import chainer, megengine, tensorflow, trace
from lowtide.formats.pytorch.profiler import read_profile
from lowtide.formats.pytorch.snapshot import read_snapshot
from lowtide.graph import Graph, Op, Source, Tensor
from tests.formats.perfetto import TraceProcessor, needs_perfetto
from tests.formats.profiles import exported, gpu_events
from tests.formats.snapshots import pickled


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
    assert {lanes[e["tid"]] for e in copies} == {"GPU copies to the host"}
    assert sum(e["args"]["bytes_moved"] for e in copies) == 9_878_784
    assert any("does not say who reads what" in loss for loss in losses)


def test_counters_by_role_add_up_to_the_live_bytes(documents):
    step = chainer.read(documents["000"])
    events, _ = events_of(step)
    for event in events:
        if event["ph"] == "C":
            values = dict(event["args"])
            assert values.pop("bytes") == sum(values.values())
            assert set(values) == {"parameter", "input", "activation", "gradient"}


def test_each_tensor_has_a_track_from_its_first_to_its_last_operator():
    tensors = (Tensor("a", 100, name="</script>"), Tensor("b", 50, source=Source("m.py", 7)))
    ops = (Op("x", "k", outputs=(0,)), Op("y", "k", inputs=(0,), outputs=(1,)), Op("z", "k", inputs=(1,)))
    costs = tuple(Cost(Figure(seconds, Origin.MEASURED)) for seconds in (1e-3, 2e-3, 4e-3))
    events, losses = events_of(Step(Graph(tensors, ops), costs=costs))
    tracks = {e["id2"]["local"]: e for e in events if e["ph"] == "b"}
    ends = {e["id2"]["local"]: e["ts"] for e in events if e["ph"] == "e"}
    assert [(t["name"], t["ts"], ends[k], t["args"]) for k, t in tracks.items()] == [
        ("</script>", 0, 3000, {"bytes": 100, "role": "activation"}),
        ("b", 1000, 7000, {"bytes": 50, "role": "activation", "source": "m.py:7"}),
    ]
    assert losses == ("when the 3 operators ran: they are drawn one after another",)


def test_small_tensors_beyond_the_limit_have_no_track(monkeypatch):
    monkeypatch.setattr(trace, "MAX_TRACKS", 2)
    tensors = tuple(Tensor(f"t{k}", k + 1) for k in range(5))
    events, losses = events_of(Step(Graph(tensors, (Op("x", "k", outputs=tuple(range(5))),))))
    assert [e["id2"]["local"] for e in events if e["ph"] == "b"] == ["t4", "t3"]
    assert "3 small tensors: the 2 largest have a track of their own" in losses


def test_a_measured_timeline_is_written_as_it_was_measured():
    step = read_snapshot(pickled())
    events, losses = events_of(step)
    assert [e["args"]["bytes"] for e in events if e["ph"] == "C"] == list(step.timeline.live_bytes)
    assert not any("how long" in loss for loss in losses)
    assert sum(e["dur"] for e in events if e["ph"] == "X") == pytest.approx(110, abs=0.01)


PHASES = {
    "X": {"ts", "dur"},
    "C": {"ts"},
    "b": {"ts", "id2", "cat"},
    "e": {"ts", "id2", "cat"},
    "M": {"args"},
}


def test_events_are_those_of_the_documented_format(documents):
    """The keys that the trace event format asks of each phase, and every begin with its end."""
    steps = [
        megengine.read(documents["001"]), chainer.read(documents["000"]), tensorflow.read(documents["003"]),
        read_snapshot(pickled()), read_profile(exported(gpu_events())),
    ]  # fmt: skip
    for step in steps:
        events, _ = events_of(step)
        open_ids = Counter()
        for event in events:
            assert PHASES[event["ph"]] <= set(event)
            assert isinstance(event["name"], str)
            assert isinstance(event["pid"], int)
            assert event.get("ts", 0) >= 0
            assert event.get("dur", 0) >= 0
            assert event["ph"] != "C" or all(type(value) is int for value in event["args"].values())
            open_ids[event.get("id2", {}).get("local")] += {"b": 1, "e": -1}.get(event["ph"], 0)
        assert set(open_ids.values()) == {0}


@pytest.fixture(scope="module")
def loaded(documents):
    """What Perfetto's own trace processor makes of a profile with copies, kernels and memory."""
    step = read_profile(exported(gpu_events()))
    with TraceProcessor(trace.write(step).data) as processor:
        yield step, processor


@needs_perfetto
def test_perfetto_finds_the_lanes(loaded):
    step, processor = loaded
    lanes = processor.query(
        "select process.name as process, thread.name as lane, count(*) as count, sum(dur) as dur from slice "
        "join thread_track on slice.track_id = thread_track.id join thread using (utid) join process using (upid) "
        "group by 1, 2 order by 1, 2"
    )
    assert [(process, lane, count) for process, lane, count, _ in lanes] == [
        ("device", "cuda:0 stream 7", 5),
        ("device", "cuda:0 stream 7 copies to the device", 1),
        ("host", "thread 100", 3),
        ("host", "thread 200", 1),
    ]
    device = {span.op: 0.0 for span in step.spans}
    for span in step.spans:
        device[span.op] += 0.0 if span.host else span.running
    assert sum(dur for process, _, _, dur in lanes if process == "device") == pytest.approx(
        sum(device.values()) * 1e9
    )
    assert processor.query("select name, value from stats where severity = 'error' and value > 0") == []


@needs_perfetto
def test_perfetto_counts_the_bytes(loaded):
    step, processor = loaded
    ((name, most, count),) = processor.query(
        "select track.name as name, max(value) as most, count(*) as count from counter "
        "join counter_track track on counter.track_id = track.id group by 1"
    )
    assert (name, most, count) == ("live bytes", step.timeline.peak_bytes, len(step.graph.ops))


@needs_perfetto
def test_perfetto_has_a_track_for_each_tensor(loaded):
    step, processor = loaded
    rows = processor.query(
        "select slice.name as name, slice.track_id as track, dur, extract_arg(slice.arg_set_id, 'args.bytes') as bytes from slice "
        "join process_track on slice.track_id = process_track.id join process using (upid) "
        "where category = 'lifetime' and process.name = 'memory'"
    )
    assert len({track for _, track, _, _ in rows}) == len(rows) == len(step.graph.tensors)
    assert sorted(size for *_, size in rows) == sorted(tensor.bytes for tensor in step.graph.tensors)
    assert all(dur >= 0 for _, _, dur, _ in rows)
