"""Snapshots of the CUDA allocator: the peak, who is live there, and what the allocator reserved."""

import json
import pickle
import random
import re

import pytest
from click.testing import CliRunner
from torch.cuda import _memory_viz as memory_viz

from lowtide.commands.main import cli
from lowtide.errors import FormatError
from lowtide.formats import native
from lowtide.formats.pytorch.frames import is_library
from lowtide.formats.pytorch.snapshot import read_snapshot
from lowtide.formats.registry import FORMATS, recognise
from lowtide.graph import Phase
from tests.formats.snapshots import CONVOLUTION, Allocator, pickled, training_step
from tests.fuzz import use
from tests.mutate import structure


def run(*arguments, code=0):
    result = CliRunner().invoke(cli, [str(one) for one in arguments])
    assert result.exit_code == code, result.output
    return result.stdout


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickled())
    return path


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_the_peak_and_who_is_live_there(protocol):
    data = pickled(protocol=protocol)
    assert recognise(data).name == "snapshot"
    step = read_snapshot(data)
    second = -(-1_500_000 // 512) * 512
    assert step.timeline.peak_bytes == step.lifetimes().peak_bytes == 4096 + (1 << 20) + second + (3 << 20)
    at = step.timeline.peak_step
    op = step.graph.ops[at]
    assert (op.name, op.kind, op.phase) == ("train.py:40 main", "aten.convolution_backward", Phase.BACKWARD)
    live = [step.graph.tensors[one.tensor] for one in step.timeline.live_at(at)]
    assert [t.name for t in live] == ["train.py:40 main", "train.py:31 forward", "train.py:31 forward", ""]
    assert (live[1].source.file, live[1].source.line) == ("/home/user/train.py", 31)
    assert {t.device for t in live} == {"cuda:0"}


def test_the_viewer_of_pytorch_reads_the_same_files():
    """Files of these tests are made as PyTorch makes them: its own viewer finds the same in them."""
    allocator = training_step()
    step, theirs = read_snapshot(pickled(allocator.snapshot())), allocator.snapshot()
    summary = memory_viz.segsum(theirs)
    assert f"total_allocated: {step.timeline.live_bytes[-1] / 1024:.1f}KiB" in summary
    history = memory_viz.trace(theirs)
    names = re.findall(r"^(\w) = a\[", history, re.MULTILINE)
    made = [op for op in step.graph.ops if op.outputs and op.kind != "before the recording"]
    assert len(names) == sum(len(op.outputs) for op in made) == 4


def test_operators_follow_the_history():
    step = read_snapshot(pickled())
    assert [(op.kind, len(op.inputs), len(op.outputs)) for op in step.graph.ops] == [
        ("before the recording", 0, 2),
        ("aten.convolution", 0, 1),
        ("free", 1, 0),
        ("aten.convolution", 0, 1),
        ("aten.convolution_backward", 0, 1),
        ("free", 2, 0),
        ("allocation", 0, 1),
        ("free", 1, 0),
        ("end of the recording", 2, 0),
    ]
    assert [op.phase.value for op in step.graph.ops][4:7] == ["backward", "forward", "update"]
    assert sum(step.timeline.seconds) == pytest.approx(110e-6)
    assert native.read(native.write(step).data) == step


def test_live_bytes_are_those_of_a_plain_replay():
    """Against a reference that adds and subtracts: any history, blocks from before the recording among them."""
    for seed in range(20):
        random_ = random.Random(seed)
        allocator = Allocator()
        held = [
            allocator.alloc(random_.randrange(1, 9000), recorded=False) for _ in range(random_.randrange(4))
        ]
        base = live = most = sum(rounded for _, rounded, _ in allocator.live.values())
        for _ in range(40):
            if held and random_.random() < 0.45:
                address = held.pop(random_.randrange(len(held)))
                live -= allocator.live[address][1]
                allocator.free(address)
            else:
                held.append(allocator.alloc(random_.randrange(1, 9000), CONVOLUTION))
                live += allocator.live[held[-1]][1]
            most = max(most, live)
        step = read_snapshot(pickle.dumps(allocator.snapshot()))
        assert step.timeline.peak_bytes == most
        if live:
            assert step.timeline.live_bytes[-1] == live
        if base:
            assert step.timeline.live_bytes[0] == base


def test_what_the_allocator_reserved():
    allocator = training_step()
    allocator.reserve(8 << 20, sign=-1)
    figures = read_snapshot(pickle.dumps(allocator.snapshot())).graph.attributes["allocator"]
    assert figures["reserved_bytes"] == 64 << 20
    assert figures["most_reserved_bytes"] == 72 << 20  # 8 MiB were given back behind the most
    assert figures["allocated_bytes"] == figures["requested_bytes"] == 8192
    assert figures["free_bytes"] == (64 << 20) - 8192
    assert (figures["segments"], figures["device"]) == (1, "cuda:0")


def test_show_says_what_was_reserved_and_where_memory_ran_out(tmp_path):
    allocator = training_step()
    allocator.out_of_memory(5 << 30, 1 << 20)
    path = tmp_path / "a"
    path.write_bytes(pickle.dumps(allocator.snapshot()))
    text = run("show", path)
    assert "peak        5.43 MiB (5,698,560 bytes) at train.py:40 main, backward operator 1" in text
    assert "reserved    64.00 MiB in 1 segments at the end (100.0% of it free), 64.00 MiB at most" in text
    assert "failed      an allocation of 5.00 GiB; the device had 1.00 MiB left" in text
    assert "out of memory: train.py:31 forward" in [
        op.name for op in read_snapshot(path.read_bytes()).graph.ops
    ]


def test_top_and_diff_go_by_lines_of_the_user(file, tmp_path):
    rows = json.loads(run("top", file, "--json"))["rows"]
    assert [row["name"] for row in rows[:3]] == [
        "train.py:40 main",
        "train.py:31 forward",
        "train.py:31 forward",
    ]
    assert rows[0]["source"] == "/home/user/train.py:40"
    allocator = training_step()
    allocator.alloc(1 << 20, CONVOLUTION)
    more = tmp_path / "more"
    more.write_bytes(pickle.dumps(allocator.snapshot()))
    changes = json.loads(run("diff", file, more, "--json"))["rows"]
    assert (changes[0]["name"], changes[0]["change"]) == ("train.py:31 forward", 1 << 20)
    assert (changes[0]["count_a"], changes[0]["count_b"]) == (2, 3)


def test_addresses_are_planned(file):
    view = json.loads(run("address", file, "--json"))
    assert view["arena_bytes"] == view["live_bytes"] == 5_698_560
    assert view["alignment"] == 512
    assert view["given_bytes"] > view["arena_bytes"]


def test_without_a_history_the_state_is_shown(tmp_path):
    allocator = training_step()
    snapshot = allocator.snapshot() | {"device_traces": [[]]}
    step = read_snapshot(pickle.dumps(snapshot))
    assert [op.kind for op in step.graph.ops] == ["before the recording"]
    assert step.timeline.peak_bytes == 8192
    assert "_record_memory_history" in step.notes[0].text


def test_fields_that_versions_of_torch_do_not_have_may_be_missing():
    snapshot = training_step().snapshot()
    old = {
        "segments": [
            {
                "address": segment["address"],
                "total_size": segment["total_size"],
                "stream": 0,
                "blocks": [
                    {"size": block["size"], "state": block["state"]}
                    | ({"history": [{"real_size": 7, "frames": block["frames"]}]} if block["frames"] else {})
                    for block in segment["blocks"]
                ],
            }
            for segment in snapshot["segments"]
        ],
        "device_traces": [
            [
                {key: entry[key] for key in ("action", "addr", "size", "stream")}
                for entry in snapshot["device_traces"][0]
            ]
        ],
    }
    step = read_snapshot(pickle.dumps(old))
    whole = read_snapshot(pickle.dumps(snapshot))
    assert step.timeline.live_bytes == whole.timeline.live_bytes
    assert step.timeline.seconds == ()
    assert {op.kind for op in step.graph.ops} == {
        "before the recording", "allocation", "free", "end of the recording",
    }  # fmt: skip
    only = read_snapshot(pickle.dumps({"segments": old["segments"]}))
    assert only.timeline.peak_bytes == 8192
    assert read_snapshot(pickle.dumps({"segments": []})).graph.ops == ()


def test_new_fields_and_actions_are_passed_over():
    snapshot = training_step().snapshot() | {"something_new": {"a": (1, 2.5, None, b"x")}}
    trace = snapshot["device_traces"][0]
    trace.insert(2, {"action": "workspace_snapshot", "addr": 0, "size": 0, "compile_context": "0/1"})
    step = read_snapshot(pickle.dumps(snapshot))
    assert step.timeline.live_bytes == read_snapshot(pickled()).timeline.live_bytes


def test_the_line_of_the_model_is_taken_for_compiled_code():
    original = (
        'File "/home/user/train.py", line 9, in step\n  y = f(x)\nFile "/home/user/model.py", line 12, in f\n'
    )
    frames = [
        {
            "filename": "/tmp/torchinductor_user/ab/cabc.py",
            "line": 90,
            "name": "call",
            "fx_original_trace": original,
        },
        {"filename": "/home/user/train.py", "line": 9, "name": "step"},
    ]
    allocator = Allocator()
    allocator.alloc(100, frames)
    allocator.alloc(100, [{**frames[0], "fx_original_trace": ""}, frames[1]])
    names = [op.name for op in read_snapshot(pickle.dumps(allocator.snapshot())).graph.ops]
    assert names[:2] == ["model.py:12 f", "train.py:9 step"]


def test_the_device_with_the_larger_peak_is_shown():
    small, large = training_step(), training_step()
    large.device = 1
    large.alloc(1 << 30)
    both = {
        "segments": small.segments() + large.segments(),
        "device_traces": [small.trace, large.trace],
    }
    step = read_snapshot(pickle.dumps(both))
    assert step.graph.attributes["allocator"]["device"] == "cuda:1"
    assert step.notes[-1].text == "cuda:0 is left out: its peak of 5,698,560 bytes is smaller"


def test_frees_of_what_is_free_count_for_nothing():
    allocator = training_step()
    trace = allocator.trace
    trace += [dict(entry) for entry in trace if entry["action"] == "free_completed"][-1:]
    step = read_snapshot(pickle.dumps(allocator.snapshot()))
    assert step.timeline.live_bytes == read_snapshot(pickled()).timeline.live_bytes
    assert any("1 frees of blocks that were free already" in note.text for note in step.notes)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda s: s.pop("segments"), "a pickle without `segments`"),
        (lambda s: s.update(segments=3), "segments is 3, no list"),
        (lambda s: s["segments"].append([]), "a list where a dict stands"),
        (lambda s: s["segments"][0].update(total_size=-1), "total_size is -1, no whole number"),
        (lambda s: s["segments"][0].update(device=True), "device is True, no whole number"),
        (lambda s: s["segments"][0]["blocks"][0].update(state=None), "state is None, no string"),
        (lambda s: s["device_traces"][0][0].update(size=1.5), "size is 1.5, no whole number"),
        (lambda s: s["device_traces"][0][0].update(time_us="x"), "time_us is a str"),
        (lambda s: s["device_traces"].append((1, 2)), "the history of cuda:1 is no list"),
        (lambda s: s["device_traces"][0][1].update(size=1 << 62), "sizes lie between 0 and 2\\^60"),
        (lambda s: s["segments"][0].update(total_size=1 << 62), "more than 2\\^60 bytes together"),
    ],
)
def test_damage_is_refused(change, problem):
    snapshot = training_step().snapshot()
    change(snapshot)
    with pytest.raises(FormatError, match=problem) as caught:
        read_snapshot(pickle.dumps(snapshot))
    assert caught.value.byte is not None


def test_lists_that_are_part_of_many_entries_take_no_time():
    """Each level of shared lists would double the work, or worse."""
    segment = training_step().segments()[0]
    segment["blocks"] = segment["blocks"] * 1000
    with pytest.raises(FormatError, match="one list is part of more entries than the file has bytes"):
        read_snapshot(pickle.dumps({"segments": [segment] * 1000}))


def test_another_pickle_is_refused_with_what_was_expected(tmp_path):
    path = tmp_path / "other.pickle"
    path.write_bytes(pickle.dumps([1, 2]))
    result = CliRunner().invoke(cli, ["show", str(path)])
    assert isinstance(result.exception, FormatError)
    assert "a pickle without `segments`; expected a memory snapshot" in str(result.exception)


def test_it_is_read_only(file, tmp_path):
    result = CliRunner().invoke(cli, ["convert", str(file), "--to", "snapshot", "-o", str(tmp_path / "x")])
    assert "can only be read" in str(result.exception)
    assert not (tmp_path / "x").exists()
    run("convert", file, "--to", "csv", "-o", tmp_path / "x.csv")
    assert (tmp_path / "x.csv").read_text().startswith("id,lower,upper,size,offset\n")


@pytest.mark.parametrize(
    ("file", "library"),
    [
        ("/env/lib/python3.11/site-packages/torch/nn/modules/conv.py", True),
        ("/usr/lib/python3.11/contextlib.py", True),
        ("torch/nn/modules/module.py", True),
        ("torch/_tensor.py", True),
        ("contextlib.py", True),
        ("<frozen runpy>", True),
        ("/tmp/torchinductor_me/ab/cab.py", True),
        (r"C:\env\Lib\site-packages\torch\nn\functional.py", True),
        ("/home/me/torch/train.py", False),
        ("/home/me/train.py", False),
        ("code/train.py", False),
        ("test/model.py", False),
        ("train.py", False),
    ],
)
def test_files_of_libraries_are_told_from_those_of_the_user(file, library):
    assert is_library(file) is library


def survive_changes(numbers):
    """Read snapshots in which members were changed, dropped or doubled; how many were read."""
    data = json.dumps(training_step().snapshot()).encode()
    kept = 0
    for number in numbers:
        changed = json.loads(structure(random.Random(f"snapshot {number}"), data))
        try:
            step = read_snapshot(pickle.dumps(changed))
        except FormatError as error:
            assert error.byte is not None
            continue
        kept += 1
        if number % 50 == 0:
            use(step, FORMATS["snapshot"])
    return kept


def test_changed_snapshots_are_read_or_refused():
    assert 20 < survive_changes(range(200)) < 200
