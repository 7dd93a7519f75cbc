"""``lowtide profile``: what it writes reads back with every figure, in every format that holds it."""

import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from click.testing import CliRunner

from lowtide import zoo
from lowtide.commands.main import cli
from lowtide.cost import Origin
from lowtide.cost.device import cache_folder
from lowtide.formats import native
from lowtide.formats.registry import read_file
from lowtide.zoo import locallyconnected
from tests.commands.refusal import refused
from tests.cost.busy import Ticking

UNET = "unet:base=2,batch=1,size=188"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="module")
def profile_of_unet(tmp_path_factory):
    """A profile of a small U-Net, and what the command said about it."""
    folder = tmp_path_factory.mktemp("unet")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOWTIDE_CACHE", str(folder / "cache"))
        view = profile(UNET, folder / "unet.json")
    return folder / "unet.json", view


def run(*arguments):
    result = CliRunner().invoke(cli, list(map(str, arguments)))
    assert result.exit_code == 0, (result.output, result.exception)
    return result


def profile(target, output, *options):
    return json.loads(run("profile", target, "-o", output, "--device", "cpu", "--json", *options).stdout)


def shown(command, path, *options):
    return json.loads(run(command, path, "--json", *options).stdout)


def test_a_measured_step_reads_back_with_every_figure(profile_of_unet):
    path, view = profile_of_unet
    summary = shown("show", path)
    assert summary["format"] == "native"
    assert summary["ops"] == {"forward": 72, "backward": 73}
    assert summary["flop_by_phase"].keys() == {"forward", "backward"}
    assert summary["traffic_bytes"] == view["bytes_moved"] > 0
    assert summary["peak"]["bytes"] == view["peak_bytes"] > 0
    assert all(value is not None for value in summary["seconds"].values())
    assert summary["seconds"]["span"] == view["step_seconds"] > 0
    assert view["alone_seconds"] == view["host_seconds"] > 0, "on a CPU operators run on the host"
    for row in shown("top", path, "--limit", "0")["rows"]:
        for key in ("seconds", "flop", "bytes", "workspace_bytes"):
            assert row[key] is not None, row
        assert row["seconds"] > 0
        assert set(row["estimated"]) <= {"flop"}, row
    assert all(row["seconds"] > 0 for row in shown("top", path, "--limit", "0", "--host")["rows"])
    most = shown("top", path, "--sort", "workspace", "--limit", "1")["rows"][0]
    assert most["workspace_bytes"] == view["workspace_bytes"] >= 0  # some processors need none


def test_the_step_has_what_the_views_need(profile_of_unet):
    path, view = profile_of_unet
    step = read_file(path).step
    assert step.format == "capture"
    assert len(step.costs) == len(step.graph.ops) == view["operators"] == 145
    assert len(step.spans) == 2 * len(step.graph.ops)
    assert step.environment.versions["torch"] == str(torch.__version__)
    names = {tensor.name for tensor in step.graph.tensors if tensor.role.value == "parameter"}
    assert "conv_d0b_c.weight" in names
    assert all(op.source is not None for op in step.graph.ops if op.kind == "aten.convolution")


def test_other_views_take_the_profile(profile_of_unet, tmp_path):
    path, _ = profile_of_unet
    assert shown("diff", path, path, "--limit", "0")["rows"][0]["change"] == 0
    run("convert", path, "--to", "trace", "-o", tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_bytes())["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    assert len(complete) == 2 * 145
    assert all(
        {"kind", "phase", "flop", "bytes_moved", "workspace_bytes"} <= event["args"].keys()
        for event in complete
    )


RECORDS = {
    "profiler": ("device", "host", "opr_footprint", "opr_internal_pf"),
    "graph_exec": ("var", "operator", "mem_chunk"),
}
"""Objects whose keys are ids."""


def key_paths(value, at=()):
    """Every key with the keys above it; ids, lanes, tags and places in a list are all alike."""
    if at[-1:] != ("[]",):
        yield at
    if isinstance(value, dict):
        section = len(at) == 2 and at[1] in RECORDS.get(at[0], ())
        lanes = len(at) == 3 and at[1] in ("device", "host")
        alike = section or lanes or at[-1:] == ("static_infer_tags",)
        for key, one in value.items():
            yield from key_paths(one, (*at, "*" if alike else key))
    elif isinstance(value, list):
        for one in value:
            yield from key_paths(one, (*at, "[]"))


def test_a_megengine_profile_of_the_same_network_has_the_keys_of_the_document(documents, tmp_path):
    profile(zoo.small("resnet50-inference"), tmp_path / "native.json", "--time-limit", "0")
    run("convert", tmp_path / "native.json", "--to", "megengine", "-o", tmp_path / "megengine.json")
    ours = json.loads((tmp_path / "megengine.json").read_bytes())
    theirs = json.loads(documents["001"])
    assert set(key_paths(ours)) == set(key_paths(theirs))
    assert {tag for var in ours["graph_exec"]["var"].values() for tag in var["static_infer_tags"]} == {
        tag for var in theirs["graph_exec"]["var"].values() for tag in var["static_infer_tags"]
    }

    def params(document, *kinds):
        operators = document["graph_exec"]["operator"]
        footprints = document["profiler"]["opr_footprint"]
        return {frozenset(footprints[k]["param"]) for k, one in operators.items() if one["type"] in kinds}

    for kinds, kind in (
        (("aten.convolution",), "ConvolutionForward"),
        (("aten.max_pool2d_with_indices",), "PoolingForward"),
        (("aten.addmm",), "MatrixMul"),
        (("aten.mean",), "Reduce"),
        (("aten.relu", "aten.add"), "Elemwise"),
    ):
        assert params(ours, *kinds) == params(theirs, kind), kind


def test_a_megengine_profile_of_a_training_step_reads_back(profile_of_unet, documents, tmp_path):
    path, view = profile_of_unet
    out = tmp_path / "megengine.json"
    run("convert", path, "--to", "megengine", "-o", out)
    ours = json.loads(out.read_bytes())
    assert set(key_paths(ours)) <= set(key_paths(json.loads(documents["001"])))
    for part in ("device", "host"):
        assert sum(len(lanes) for lanes in ours["profiler"][part].values()) == 145
    footprints = ours["profiler"]["opr_footprint"].values()
    assert all(footprint["computation"] is not None for footprint in footprints)
    back, step = read_file(out), read_file(path).step
    assert back.format.name == "megengine"
    assert [op.kind for op in back.step.graph.ops] == [op.kind for op in step.graph.ops]
    for one, other in zip(back.step.costs, step.costs, strict=True):
        for name in ("flop", "bytes_moved"):
            assert getattr(one, name).value == getattr(other, name).value
    assert shown("show", out)["traffic_bytes"] == view["bytes_moved"]


def test_native_views_are_those_of_the_step_in_memory(profile_of_unet, tmp_path):
    """What ``show`` and ``top`` print of the file is what they print of the step before it was written."""
    path, _ = profile_of_unet
    step = read_file(path).step
    assert native.read(native.write(step).data) == step
    again = tmp_path / "again.json"
    run("convert", path, "--to", "native", "-o", again)
    for command, options in (
        ("show", ()),
        ("top", ("--limit", "0")),
        ("top", ("--limit", "0", "--by", "type")),
    ):
        one, other = shown(command, again, *options), shown(command, path, *options)
        assert {**one, "file": None} == {**other, "file": None}
    summary = shown("show", path)
    figures = {
        key: summary[key]
        for key in ("flop", "after_forward_bytes", "traffic_bytes", "curve", "largest", "slowest")
    }
    assert all(figures.values()), figures
    timeline = step.lifetimes()
    assert summary["peak"]["bytes"] == timeline.peak_bytes
    assert summary["peak"]["op"] == step.graph.ops[timeline.peak_step].label
    rows = {row["name"]: row for row in shown("top", path, "--limit", "0")["rows"]}
    for op, cost in zip(step.graph.ops, step.costs, strict=True):
        row = rows.get(op.label)
        if row is not None and row["count"] == 1 and sum(o.label == op.label for o in step.graph.ops) == 1:
            assert row["flop"] == cost.flop.value
            assert row["bytes"] == cost.bytes_moved.value
            assert row["workspace_bytes"] == cost.workspace_bytes.value


def test_a_second_profile_takes_its_figures_from_the_cache(tmp_path):
    first = profile("convpool", tmp_path / "a.json")
    assert (first["target"], first["from_cache"], first["timed_once"]) == ("convpool", 0, 0)
    second = profile("convpool", tmp_path / "b.json")
    assert second["from_cache"] == second["operators"] == first["operators"]
    one, other = (read_file(tmp_path / name).step for name in ("a.json", "b.json"))
    assert one.costs == other.costs
    text = run("profile", "convpool", "-o", tmp_path / "c.json", "--device", "cpu").stdout
    assert f"{first['operators']} from the cache" in text
    assert f"Wrote {tmp_path / 'c.json'}" in text
    assert "Next: lowtide top" in text
    assert profile("convpool", tmp_path / "d.json", "--fresh")["from_cache"] == 0


def test_a_damaged_cache_is_said_and_measured_anew(tmp_path):
    profile("convpool", tmp_path / "a.json")
    (path,) = cache_folder().glob("costs-*.json")
    path.write_text("{")
    result = run("profile", "convpool", "-o", tmp_path / "a.json", "--device", "cpu", "--json")
    assert "ignored" in result.stderr
    assert json.loads(result.stdout)["from_cache"] == 0
    assert profile("convpool", tmp_path / "a.json")["from_cache"] == 10


def test_a_cache_that_cannot_be_kept_is_said_and_no_more(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path / "file" / "cache"))
    result = run("profile", "convpool", "-o", tmp_path / "a.json", "--device", "cpu")
    assert "not kept" in result.stderr
    assert read_file(tmp_path / "a.json").step.costs


def test_without_time_figures_are_taken_once_and_say_so(tmp_path):
    view = profile("convpool", tmp_path / "a.json", "--time-limit", "0")
    assert view["timed_once"] == view["operators"]
    assert "single run" in run("show", tmp_path / "a.json").stdout
    assert (
        "10 timed on a single run"
        in run(
            "profile", "convpool", "-o", tmp_path / "a.json", "--device", "cpu", "--time-limit", "0"
        ).stdout
    )


def test_estimates_are_marked_and_need_no_run(tmp_path):
    view = profile("convpool", tmp_path / "a.json", "--cost", "estimated")
    assert (view["cost"], view["step_seconds"], view["workspace_bytes"]) == ("estimated", None, None)
    assert view["host_seconds"] is None
    step = read_file(tmp_path / "a.json").step
    origins = {f.origin for c in step.costs for f in (c.seconds, c.flop, c.bytes_moved)}
    assert origins == {Origin.ESTIMATED}
    measured = profile("convpool", tmp_path / "b.json")
    assert (measured["flop"], measured["bytes_moved"]) == (view["flop"], view["bytes_moved"])
    assert list(cache_folder().glob("device-cpu-*.json"))
    assert (
        "~"
        in run(
            "profile", "convpool", "-o", tmp_path / "a.json", "--device", "cpu", "--cost", "estimated"
        ).stdout
    )


OWN = """
    import torch
    from torch import nn

    def make():
        return nn.Linear(8, 4), (torch.randn(2, 8),), lambda model, x: model(x).square().sum()

    def frozen():
        return nn.Linear(8, 4).requires_grad_(False), (torch.randn(2, 8),), lambda model, x: model(x)

    def not_a_scalar():
        return nn.Linear(8, 4), (torch.randn(2, 8),), lambda model, x: model(x)

    def wrong_shape():
        return nn.Linear(8, 4), (torch.randn(2, 9),), lambda model, x: model(x).sum()

    def breaks():
        def loss(model, x):
            y = model(x).sum()
            print("hello", y.item())
            return y * 2
        return nn.Linear(8, 4), (torch.randn(2, 8),), loss

    def in_pieces():
        return nn.LSTM(8, 4), (torch.randn(2, 3, 8),), lambda model, x: model(x)[0].sum()

    def no_parameters():
        return nn.Linear(8, 4), (torch.randn(2, 8),), lambda model, x: x.sum()
"""


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(textwrap.dedent(OWN))
    return path


def test_a_function_of_ones_own_is_profiled(own, tmp_path):
    view = profile(f"{own}:make", tmp_path / "a.json")
    assert view["target"] == f"{own}:make"
    step = read_file(tmp_path / "a.json").step
    assert any(op.source is not None and op.source.file == str(own) for op in step.graph.ops)
    # 2 x 8 times 8 x 4, and the gradient of the weight
    products = [c.flop.value for c in step.costs if c.flop.origin is Origin.MEASURED]
    assert products == [2 * 2 * 8 * 4] * 2


def test_an_update_belongs_to_the_step(tmp_path, monkeypatch):
    monkeypatch.setattr(locallyconnected, "KERNELS", (3, 2))  # an operator or two for each of 130 places
    view = profile(
        "locallyconnected:batch=3,size=17,channels=4,classes=10", tmp_path / "a.json", "--cost", "estimated"
    )
    counts = shown("show", tmp_path / "a.json")["ops"]
    assert counts["update"] == 7
    assert sum(counts.values()) == view["operators"]
    rows = shown("top", tmp_path / "a.json", "--filter", "^update_", "--limit", "0")["rows"]
    assert {row["kind"] for row in rows} == {"aten.add_"}
    assert all(row["seconds"] is not None and row["flop"] for row in rows)
    parameters = sum(
        t.bytes for t in read_file(tmp_path / "a.json").step.graph.tensors if t.role.value == "parameter"
    )
    assert sum(row["bytes"] for row in rows) == 3 * parameters


def test_inference_is_a_step_without_backward(own, tmp_path):
    view = profile(f"{own}:frozen", tmp_path / "a.json")
    assert shown("show", tmp_path / "a.json")["ops"] == {"forward": view["operators"]}


BAD = {
    "not_a_scalar": "must be a single number",
    "wrong_shape": "the step fails on these inputs",
    "breaks": "own.py:20: the step depends on the num",
    "in_pieces": "cannot be captured as one graph",
    "no_parameters": "no backward pass",
    "nobody": "does not exist",
}


@pytest.mark.parametrize("function", BAD)
def test_a_step_that_cannot_be_profiled_exits_2_and_writes_nothing(function, own, tmp_path, capsys):
    out = tmp_path / "a.json"
    assert BAD[function] in refused(
        "profile", f"{own}:{function}", "-o", out, "--device", "cpu", capsys=capsys
    )
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("unett", "-o", "a.json"), "Did you mean 'unet'"),
        (("unet:base=0", "-o", "a.json"), "base"),
        (("convpool", "-o", "no/such/folder/a.json"), "no folder"),
        (("convpool",), "Missing option"),
        (("convpool", "-o", "a.json", "--time-limit", "-1"), "time-limit"),
        (("convpool", "-o", "a.json", "--cost", "guessed"), "estimated"),
    ],
)
def test_bad_usage_exits_2(arguments, problem, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert problem in refused("profile", *arguments, capsys=capsys)
    assert list(tmp_path.iterdir()) == []


def test_what_a_busy_machine_disturbs_is_said(tmp_path, monkeypatch):
    path = tmp_path / "busy.json"
    with monkeypatch.context() as patch:
        patch.setattr("lowtide.cost.measure.HostTimer", Ticking)
        view = profile("convpool", path)
        said = run("profile", "convpool", "-o", path, "--device", "cpu").stdout
    assert view["disturbed"] == view["operators"]
    assert view["from_cache"] == 0
    assert f"{view['operators']} measured while the machine was busy" in said
    assert "were measured while the machine was busy" in run("show", path).stdout
    said = run("plan", path, "--budget", "100%", "--explain").stdout
    assert f"{view['operators']} operators were measured while the machine was busy" in said
    assert "measured while the machine was busy" in run("plan", path, "--budget", "100%").stderr
    assert profile("convpool", path)["disturbed"] == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_gpu_that_is_not_there_exits_2(tmp_path, capsys):
    err = refused("profile", "convpool", "-o", tmp_path / "a.json", "--device", "cuda", capsys=capsys)
    assert "cuda" in err


def test_without_torch_it_says_how_to_get_it(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')\n")
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    command = [sys.executable, "-m", "lowtide", "profile", "convpool", "-o", str(tmp_path / "a.json")]
    environment = os.environ | {"PYTHONPATH": paths}
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 2
    assert 'pip install "lowtide[torch]"' in result.stderr
    assert "Traceback" not in result.stderr
