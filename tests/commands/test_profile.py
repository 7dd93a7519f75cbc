"""``lowtide profile``: what it writes reads back with every figure, in every format that holds it."""

import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from click.testing import CliRunner

from lowtide.commands.main import cli, main
from lowtide.cost import Origin
from lowtide.cost.device import cache_folder
from lowtide.formats.registry import read_file

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
    assert summary["ops"] == {"forward": 72, "backward": 119}
    assert summary["flop_by_phase"].keys() == {"forward", "backward"}
    assert summary["traffic_bytes"] == view["bytes_moved"] > 0
    assert summary["peak"]["bytes"] == view["peak_bytes"] > 0
    assert all(value is not None for value in summary["seconds"].values())
    assert summary["seconds"]["span"] == view["step_seconds"] > 0
    for row in shown("top", path, "--limit", "0")["rows"]:
        for key in ("seconds", "flop", "bytes", "workspace_bytes"):
            assert row[key] is not None, row
        assert row["seconds"] > 0
        assert set(row["estimated"]) <= {"flop"}, row
    assert all(row["seconds"] > 0 for row in shown("top", path, "--limit", "0", "--host")["rows"])
    most = shown("top", path, "--sort", "workspace", "--limit", "1")["rows"][0]
    assert most["workspace_bytes"] == view["workspace_bytes"] > 0


def test_the_step_has_what_the_views_need(profile_of_unet):
    path, view = profile_of_unet
    step = read_file(path).step
    assert step.format == "capture"
    assert len(step.costs) == len(step.graph.ops) == view["operators"] == 191
    assert len(step.spans) == 2 * len(step.graph.ops)
    assert step.graph.attributes["environment"]["versions"]["torch"] == str(torch.__version__)
    names = {tensor.name for tensor in step.graph.tensors if tensor.role.value == "parameter"}
    assert "conv_d0b_c.weight" in names
    assert all(op.source is not None for op in step.graph.ops if op.kind == "aten.convolution")


def test_other_views_take_the_profile(profile_of_unet, tmp_path):
    path, _ = profile_of_unet
    assert shown("diff", path, path, "--limit", "0")["rows"][0]["change"] == 0
    run("convert", path, "--to", "trace", "-o", tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_bytes())["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    assert len(complete) == 2 * 191
    assert all(
        {"kind", "phase", "flop", "bytes_moved", "workspace_bytes"} <= event["args"].keys()
        for event in complete
    )


def test_a_megengine_profile_of_it_has_the_keys_of_the_document(profile_of_unet, documents, tmp_path):
    path, _ = profile_of_unet
    out = tmp_path / "megengine.json"
    run("convert", path, "--to", "megengine", "-o", out)
    ours, theirs = json.loads(out.read_bytes()), json.loads(documents["001"])
    assert sorted(ours) == sorted(theirs)
    for section in ("profiler", "graph_exec"):
        assert sorted(ours[section]) == sorted(theirs[section])

    def of_records(document, section, part):
        return {key for record in document[section][part].values() for key in record}

    for section, part in (
        ("graph_exec", "var"),
        ("graph_exec", "operator"),
        ("graph_exec", "mem_chunk"),
        ("profiler", "opr_footprint"),
    ):
        assert of_records(ours, section, part) == of_records(theirs, section, part), part
    for part in ("device", "host"):
        clocks = [c for lanes in ours["profiler"][part].values() for c in lanes.values()]
        assert len(clocks) == 191
        assert all(sorted(clock) == ["end", "kern", "start"] for clock in clocks)
    assert all(
        footprint["computation"] is not None for footprint in ours["profiler"]["opr_footprint"].values()
    )
    back = read_file(out)
    assert back.format.name == "megengine"
    assert [op.kind for op in back.step.graph.ops] == [op.kind for op in read_file(path).step.graph.ops]


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


def test_inference_is_a_step_without_backward(own, tmp_path):
    view = profile(f"{own}:frozen", tmp_path / "a.json")
    assert shown("show", tmp_path / "a.json")["ops"] == {"forward": view["operators"]}


def refused(*arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    printed = capsys.readouterr()
    assert caught.value.code == 2, printed.err
    assert "Traceback" not in printed.err
    assert printed.out == ""
    return printed.err


BAD = {
    "not_a_scalar": "must be a single number",
    "wrong_shape": "the step fails on these inputs",
    "breaks": "own.py:20: the step cannot be captured as one graph",
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
