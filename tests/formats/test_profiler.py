"""Traces of torch.profiler: operators with their times, kernels on streams, and memory."""

import gzip
import json

import pytest
import torch
from click.testing import CliRunner
from torch.profiler import ProfilerActivity, profile

from lowtide.commands.main import cli
from lowtide.errors import FormatError
from lowtide.formats import native, trace
from lowtide.formats.pytorch.profiler import read_profile
from lowtide.formats.registry import recognise
from lowtide.graph import Category, Phase
from lowtide.report.rows import rows_by_name
from tests.formats.profiles import call, exported, gpu_events, kernel, memory


def run(*arguments):
    result = CliRunner().invoke(cli, [str(one) for one in arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def gpu():
    return read_profile(exported(gpu_events()))


def named(step, name):
    (found,) = [k for k, op in enumerate(step.graph.ops) if op.name == name]
    return found


def test_operators_are_the_outermost_calls(gpu):
    assert [(op.name, op.kind, op.phase.value) for op in gpu.graph.ops] == [
        ("", "before the recording", "forward"),
        ("aten::to", "aten.to", "forward"),
        ("aten::conv2d (Conv2d_0)", "aten.conv2d", "forward"),
        ("aten::convolution_backward (Conv2d_0)", "aten.convolution_backward", "backward"),
        ("aten::add_", "aten.add_", "update"),
        ("ncclAllReduce", "ncclAllReduce", "forward"),
        ("", "end of the recording", "forward"),
    ]
    assert gpu.graph.ops[3].differentiates == gpu.graph.ops[2].id
    assert native.read(native.write(gpu).data) == gpu


def test_lines_are_those_of_the_user(gpu):
    sources = [op.source and (op.source.file, op.source.line) for op in gpu.graph.ops]
    assert sources == [None, ("train.py", 31), ("train.py", 31), ("train.py", 31), None, None, None]


def test_kernels_belong_to_the_operator_that_launched_them(gpu):
    backward = named(gpu, "aten::convolution_backward (Conv2d_0)")
    assert [kernel.name for kernel in gpu.graph.ops[backward].kernels] == ["wgrad", "dgrad"]
    device = [span for span in gpu.spans if span.op == backward and not span.host]
    assert [(s.lane, s.running) for s in device] == [
        ("cuda:0 stream 7", pytest.approx(250e-6)),
        ("cuda:0 stream 7", pytest.approx(150e-6)),
    ]
    host = [span for span in gpu.spans if span.op == backward and span.host]
    assert [(s.lane, s.running) for s in host] == [("thread 200", pytest.approx(160e-6))]
    assert min(span.start for span in gpu.spans) == 0.0
    times = {row.name: row.seconds for row in rows_by_name(gpu)}
    assert times["aten::convolution_backward (Conv2d_0)"] == pytest.approx(400e-6)
    assert times["ncclAllReduce"] == pytest.approx(30e-6)
    on_host = {row.name: row.seconds for row in rows_by_name(gpu, host=True)}
    assert on_host["aten::conv2d (Conv2d_0)"] == pytest.approx(100e-6)
    assert on_host["ncclAllReduce"] is None


def test_copies_between_devices_are_copies(gpu):
    copy = named(gpu, "aten::to")
    assert gpu.graph.ops[copy].category is Category.COPY
    assert gpu.costs[copy].bytes_moved.value == 4096
    assert all(op.category is Category.COMPUTE for k, op in enumerate(gpu.graph.ops) if k != copy)


def test_live_bytes_are_those_that_the_profiler_counted(gpu):
    """``Total Allocated`` is PyTorch's own count: the most of it is the peak."""
    totals = [
        e["args"]["Total Allocated"]
        for e in gpu_events()
        if e["name"] == "[memory]" and e["args"]["Device Type"]
    ]
    assert gpu.timeline.peak_bytes == max(totals) == 10_000 + 4096 + 8192 + 2048
    assert gpu.timeline.live_bytes == (10_000, 14_096, 22_800, 24_336, 16_144, 15_144, 15_144)
    at = gpu.timeline.peak_step
    assert gpu.graph.ops[at].name == "aten::convolution_backward (Conv2d_0)"
    live = [(gpu.graph.tensors[one.tensor].name, one.bytes) for one in gpu.timeline.live_at(at)]
    assert live == [
        ("before the recording", 9000),
        ("aten::conv2d (Conv2d_0)", 8192),
        ("aten::to", 4096),
        ("aten::convolution_backward (Conv2d_0)", 2048),
        ("before the recording", 1000),
    ]
    assert {tensor.device for tensor in gpu.graph.tensors} == {"cuda:0"}
    assert gpu.lifetimes().peak_bytes >= gpu.timeline.peak_bytes


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Conv2d(3, 8, 3), torch.nn.Linear(8 * 14 * 14, 10)

    def forward(self, x):
        return self.second(self.first(x).relu().flatten(1)).square().mean()


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """A step of torch's own profiler on the CPU, at two batch sizes; the second is compressed."""
    folder = tmp_path_factory.mktemp("profiles")
    model = Net()
    files = []
    for batch, name in ((4, "a.json"), (16, "b.json.gz")):
        x = torch.randn(batch, 3, 16, 16)
        model(x).backward()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, with_stack=True) as taken:
            model(x).backward()
        taken.export_chrome_trace(str(folder / name))
        files.append(folder / name)
    return files


def test_a_profile_of_this_torch_is_read(exports):
    data = exports[0].read_bytes()
    assert recognise(data).name == recognise(exports[1].read_bytes()).name == "profiler"
    step = read_profile(data)
    first = step.graph.ops[named(step, "aten::conv2d (Conv2d_0)")]
    assert first.source.file.endswith("test_profiler.py")
    assert first.phase is Phase.FORWARD
    backward = step.graph.ops[named(step, "aten::convolution_backward (Conv2d_0)")]
    assert (backward.phase, backward.differentiates) == (Phase.BACKWARD, first.id)
    assert any(op.name == "aten::mm (Linear_0)" and op.phase is Phase.BACKWARD for op in step.graph.ops)
    assert not any(span.host for span in step.spans)  # on the CPU the calls are the work


def test_its_peak_is_the_one_that_torch_counted(exports):
    """Against torch's own running total, which knows nothing of memory from before the first profile."""
    events = [e for e in json.loads(exports[0].read_text())["traceEvents"] if e["name"] == "[memory]"]
    events = [event["args"] for event in sorted(events, key=lambda event: event["ts"])]
    made, unknown = set(), 0
    for event in events:
        if event["Bytes"] > 0:
            made.add(event["Addr"])
        elif event["Addr"] not in made:
            unknown -= event["Bytes"]
    base = events[0]["Total Allocated"] - events[0]["Bytes"]
    most = max(event["Total Allocated"] for event in events)
    step = read_profile(exports[0].read_bytes())
    assert step.timeline.peak_bytes == most + max(0, unknown - base)


def test_show_top_and_diff(exports):
    shown = json.loads(run("show", exports[0], "--json"))
    step = read_profile(exports[0].read_bytes())
    assert shown["peak"]["bytes"] == step.timeline.peak_bytes
    assert shown["seconds"]["device"] > 0
    assert {"forward", "backward"} <= set(shown["ops"])
    rows = json.loads(run("top", exports[0], "--json", "--limit", 0))["rows"]
    assert any(row["name"] == "aten::conv2d (Conv2d_0)" and row["seconds"] > 0 for row in rows)
    changes = json.loads(run("diff", *exports, "--sort", "bytes", "--json", "--limit", 0))["rows"]
    change = next(one for one in changes if one["name"].startswith("aten::threshold_backward"))
    assert change["ratio"] == pytest.approx(4.0)
    assert "aten.convolution_backward" in run("diff", *exports, "--by", "type", "--limit", 0)


def test_it_can_be_written_as_a_trace_again(exports, tmp_path):
    run("convert", exports[0], "--to", "trace", "-o", tmp_path / "out.json")
    assert recognise((tmp_path / "out.json").read_bytes()).name == "profiler"
    with pytest.raises(FormatError, match="no operator among"):
        read_profile((tmp_path / "out.json").read_bytes())


def test_without_memory_no_peak_is_made_up():
    events = [event for event in gpu_events() if event["name"] != "[memory]"]
    step = read_profile(exported(events))
    assert not step.graph.ordered
    assert step.timeline is None
    assert "profile_memory=True" in step.notes[-1].text
    assert len(step.graph.ops) == 5


def test_calls_of_the_compiler_are_passed_through():
    events = [
        call("Torch-Compiled Region: 0/0", 0, 100),
        call("CompiledFunction", 10, 80, **{"External id": 1}),
        call("triton_poi_fused_relu_0", 20, 10, **{"External id": 2}),
        kernel("triton_poi_fused_relu_0", 50, 20, 2),
    ]
    step = read_profile(exported(events))
    assert [(op.name, len(op.kernels)) for op in step.graph.ops] == [("triton_poi_fused_relu_0", 1)]


def test_memory_between_operators_belongs_to_the_one_before():
    events = [
        call("aten::a", 0, 10),
        call("aten::b", 100, 10),
        memory(5, 100, 1, 100, kind=0),
        memory(50, -100, 1, 0, kind=0),
        memory(105, 70, 2, 70, kind=0),
        memory(200, -70, 2, 0, kind=0),
    ]
    step = read_profile(exported(events))
    assert step.timeline.live_bytes == step.lifetimes().live_bytes == (100, 70)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b'{"traceEvents": [', "breaks off or is damaged"),
        (b'{"traceEvents": 3}', "breaks off or is damaged"),
        (b'{"traceEvents": [{"ts": "x"}]}', "breaks off or is damaged"),
        (b'{"traceEvents": [{"args": ' + b"[" * 100_000, "breaks off|too deeply"),
        (b'{"traceEvents": []}', "no operator among 0 events"),
        (exported([{"ph": "X", "cat": "cpu_op", "name": "a", "ts": 1e300}]), "event 0 begins at 1e\\+300"),
        (exported([call("aten::a", 0, -1)]), "takes -1 microseconds"),
        (exported([call("aten::a", 0, 1), memory(0, 1 << 61, 1, 0)]), "sizes lie between"),
        (gzip.compress(b'{"traceEvents": [' + b" " * (8 << 20)), "grow more than 300 times"),
        (gzip.compress(exported(gpu_events()))[:-20], "break off"),
        (b"\x1f\x8b\x08" + bytes(40), "damaged"),
    ],
)
def test_damage_is_refused(data, problem):
    with pytest.raises(FormatError, match=problem) as caught:
        read_profile(data)
    assert caught.value.byte is not None
    assert "export_chrome_trace" in caught.value.expected or "times" in caught.value.expected


def test_traces_of_others_are_no_profiles_of_torch(documents):
    from lowtide.formats import chainer

    with pytest.raises(FormatError, match="no operator among"):
        read_profile(trace.write(chainer.read(documents["000"])).data)
