"""A snapshot and a profile that PyTorch recorded of one step on a real GPU (h200/record.py)."""

import gzip
import json
import pickle
from pathlib import Path

import pytest
from click.testing import CliRunner

from lowtide.commands.main import cli
from lowtide.formats.pytorch.profiler import read_profile
from lowtide.formats.pytorch.snapshot import read_snapshot
from lowtide.graph import Phase

HERE = Path(__file__).parent / "h200"


@pytest.fixture(scope="module")
def snapshot():
    return read_snapshot((HERE / "snapshot.pickle").read_bytes())


@pytest.fixture(scope="module")
def traced():
    return read_profile(gzip.decompress((HERE / "profiler.json.gz").read_bytes()))


def test_live_bytes_are_those_of_the_allocators_own_events(snapshot):
    recorded = pickle.loads((HERE / "snapshot.pickle").read_bytes())
    (events,) = [one for one in recorded["device_traces"] if one]
    at_the_end = sum(segment["allocated_size"] for segment in recorded["segments"])
    changes = [
        -(-one["size"] // 512) * (512 if one["action"] == "alloc" else -512)
        for one in events
        if one["action"] in ("alloc", "free_requested")
    ]
    live, most = at_the_end - sum(changes), 0
    for change in changes:
        live += change
        most = max(most, live)
    assert live == at_the_end == snapshot.timeline.live_bytes[-1]
    assert snapshot.timeline.peak_bytes == most == 193_151_488


def test_both_files_have_the_same_peak(snapshot, traced):
    assert traced.timeline.peak_bytes == snapshot.timeline.peak_bytes


def test_who_is_live_at_the_peak_has_the_line_of_the_user(snapshot):
    at = snapshot.timeline.peak_step
    assert snapshot.graph.ops[at].phase is Phase.BACKWARD
    live = [snapshot.graph.tensors[one.tensor] for one in snapshot.timeline.live_at(at)]
    files = {one.source.file for one in live if one.source is not None}
    assert "/home/user/train/steps.py" in files
    eight = [one for one in live if one.bytes == 8 << 20 and one.source is not None]
    assert {one.source.line for one in eight} == {10}  # up and gelu, in `Block.forward`
    assert len(eight) >= 8


def test_kernels_of_the_device_have_times(traced):
    assert {"aten.linear", "aten.gelu", "aten.layer_norm"} <= {op.kind for op in traced.graph.ops}
    events = json.loads(gzip.decompress((HERE / "profiler.json.gz").read_bytes()))["traceEvents"]
    kernels = sum(one["dur"] for one in events if one.get("cat") in ("kernel", "gpu_memset", "gpu_memcpy"))
    result = CliRunner().invoke(cli, ["show", str(HERE / "profiler.json.gz")])
    assert result.exit_code == 0
    assert f"device {kernels / 1e3:.3f} ms" in result.output


def test_the_page_shows_both(tmp_path):
    profile = tmp_path / "profile.json"
    profile.write_bytes(gzip.decompress((HERE / "profiler.json.gz").read_bytes()))
    files = [str(HERE / "snapshot.pickle"), str(profile)]
    result = CliRunner().invoke(cli, ["report", *files, "-o", str(tmp_path / "page.html")])
    assert result.exit_code == 0, result.output
    page = (tmp_path / "page.html").read_text()
    assert "steps.py" in page
    assert len(page) < 1_000_000
