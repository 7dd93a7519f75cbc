"""``lowtide shard``."""

import json
import re

import pytest
from click.testing import CliRunner

from lowtide.commands.main import cli, main
from lowtide.documents import read_document
from lowtide.errors import RunError
from lowtide.execute.shards.ranks import on_ranks
from lowtide.graph import EXCHANGE
from lowtide.plan.result.shard_plan import ShardPlan, valid_shard_plan


def shard(*words):
    return CliRunner().invoke(cli, ["shard", *words], catch_exceptions=False)


def test_says_how_a_step_is_split():
    done = shard("unet:base=1,batch=1,size=188", "--devices", "2", "--cut", "height")
    assert done.exit_code == 0
    assert "of 72 operators of forward are split" in done.output
    assert re.search("conv_d0b_c +aten.convolution +dimension 2", done.output)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["resnet50-inference", "--devices", "2"], "does not train"),
        (["convpool", "--devices", "2", "--budget", "8QiB"], "there is no unit 'QiB'"),
        (["convpool", "--devices", "0"], "is not in the range"),
        (["convpool", "--devices", "2", "--cut", "hight"], "Did you mean 'height'"),
        (["convpool", "--devices", "2", "--draw", "a.png"], "--draw writes one of .svg, .dot"),
        (["convpool", "--devices", "2", "--device", "2", "--draw", "a.svg"], "counted from 0 to 1"),
        (["convpool", "--devices", "2", "--device", "1"], "give --draw FILE too"),
        (["convpool", "--devices", "100"], "more than 64 devices are simulated"),
        (["convpool", "--devices", "2", "--link", "fast"], "write bytes a second and a delay"),
        (["convpool", "--mesh", "2x2", *(["--link", "1GB/s,5us"] * 3)], "3 links are given for 2 axes"),
        (["convpool", "--mesh", "2by2"], "write devices along each axis, as 2x4"),
        (["convpool", "--mesh", "2x2", "--devices", "4"], "--devices 4, or --mesh 2x2"),
        (["convpool"], "--devices 4, or --mesh 2x2"),
        (["convpool", "--mesh", "64x64", "--simulate"], "a mesh has 1024 devices at most"),
        (
            ["convpool", "--devices", "2", "--simulate", "--run"],
            "--simulate runs, draws, compares and writes nothing",
        ),
        (["convpool", "--devices", "2", "--simulate", "-o", "shards.json"], "leave one of them out"),
    ],
)
def test_bad_input_is_refused(words, told, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["shard", *words])
    assert caught.value.code == 2
    assert told in capsys.readouterr().err


def test_many_devices_are_simulated():
    words = ["--devices", "1024", "--simulate", "--json", "--link", "10GB/s,5us", "--time-limit", "2"]
    done = shard("convpool", *words)
    assert done.exit_code == 0
    view = json.loads(done.output)
    assert view["mesh"] == [8, 8, 8, 2]
    assert 0 < view["predicted_compute_seconds"] < view["predicted_seconds"]
    assert view["predicted_wire_bytes"] == 1024 * view["predicted_wire_bytes_per_device"]


def test_links_of_each_axis_of_a_mesh():
    """Slow ones between hosts and fast ones inside: less moves along the slow axis. No bound holds for both."""
    words = ["--mesh", "2x2", "--json", "--time-limit", "2", "--simulate"]
    slow, fast = ["--link", "1MB/s,1000us"], ["--link", "100GB/s,0us"]
    found = {}
    for name, links in (("slow", slow), ("fast", fast), ("each", slow + fast), ("turned", fast + slow)):
        done = shard("convpool", *words, *links)
        assert done.exit_code == 0
        found[name] = json.loads(done.output)["predicted_seconds"]
    assert found["fast"] < found["each"] < found["slow"] * (1 + 1e-9)
    assert found["fast"] < found["turned"] < found["slow"] * (1 + 1e-9)
    done = shard("convpool", "--mesh", "2x2", "--link", "100GB/s,0us", "--time-limit", "2")
    assert "no bound is known for all" in done.output


def test_draws_a_device(tmp_path):
    out = tmp_path / "second.dot"
    words = ["--devices", "2", "--cut", "height", "--device", "1", "--draw", str(out)]
    done = shard("convpool", *words)
    assert done.exit_code == 0
    assert "conv1\\nresult_dim=[1 1 16 16]\\ndist_input=Rect(array([0, 0, 7, 0]" in out.read_text()


@pytest.mark.parametrize(
    ("target", "least"),
    [("convpool", 3), pytest.param("unet:base=1,batch=1,size=188", 60, marks=pytest.mark.extended)],
)
def test_processes_give_the_gradients_of_one(target, least, tmp_path):
    words = ["--cut", "height", "--run", "--check", "--double", "--time-limit", "1", "--json"]
    out = tmp_path / "shards.json"
    done = shard(target, "--devices", "2", *words, "-o", str(out))
    assert done.exit_code == 0
    view = json.loads(done.output)
    assert view["devices"] == 2
    assert view["split_operators"] > least
    assert view["max_rel_grad_diff"] < 1e-10
    assert view["max_rel_update_diff"] < 1e-10
    assert view["wire_bytes"] == view["planned_wire_bytes"] == sum(view["wire_bytes_per_rank"]) > 0
    assert max(view["wire_bytes_per_rank"]) == view["predicted_wire_bytes"], "known before a process started"
    for peak, planned in zip(view["bytes_per_rank"], view["planned_bytes_per_rank"], strict=True):
        assert peak <= planned <= view["budget_bytes"]
    found = valid_shard_plan(read_document(out, ShardPlan))
    assert [one.peak_bytes for one in found.measured] == view["bytes_per_rank"]
    assert [sum(move.sent_bytes[rank] for move in found.moves) for rank in range(2)] == view[
        "wire_bytes_per_rank"
    ]
    page = tmp_path / "report.html"
    shown = CliRunner().invoke(cli, ["report", str(out), "-o", str(page)], catch_exceptions=False)
    assert shown.exit_code == 0
    assert "data-card" in page.read_text()


@pytest.mark.extended
def test_a_budget_that_is_too_small_for_a_share_ends_with_its_own_code(capsys):
    words = ["shard", "convpool", "--devices", "2", "--cut", "height", "--budget", "20%", "--run"]
    with pytest.raises(SystemExit) as ended:
        main([*words, "--time-limit", "1"])
    assert ended.value.code == 3
    assert "rank " in capsys.readouterr().err


def test_a_process_that_fails_is_named_and_others_are_ended(tmp_path, monkeypatch):
    program = "import sys, time\nif sys.argv[2] == '1': sys.exit('no memory left')\ntime.sleep(60)\n"
    (tmp_path / "failing.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(RunError, match="rank 1 has ended with 1: no memory left"):
        on_ranks("failing", [], 3, 30.0)


def test_an_error_of_several_lines_is_told_whole(tmp_path, monkeypatch):
    said = "InfeasibleError: a budget of 1 B is too small\\nthe smallest is 2 B\\nwhat would help:\\n  more\\n  and more"
    (tmp_path / "failing.py").write_text(
        f"import sys\nprint('a warning', file=sys.stderr)\nsys.exit('{said}')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(
        RunError, match="with 1: InfeasibleError: a budget of 1 B is too small / the smallest is 2 B"
    ):
        on_ranks("failing", [], 1, 30.0)


def test_a_process_that_hangs_is_named(tmp_path, monkeypatch):
    (tmp_path / "hanging.py").write_text(
        "import sys, time\nprint('at', sys.argv[2], flush=True)\ntime.sleep(60)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(
        RunError, match="rank 0 has not ended after 1 s, nor have 1 others: at 0; give more time"
    ):
        on_ranks("hanging", [], 2, 1.0)


def test_a_mesh_of_several_axes_gives_the_gradients_of_one(tmp_path):
    out = tmp_path / "last.dot"
    links = ["--link", "100GB/s,0us", "--link", "200GB/s,0us"]
    words = ["--mesh", "2x2", *links, "--device", "3", "--draw", str(out)]
    words += ["--run", "--check", "--double", "--time-limit", "1", "--json"]
    done = shard("convpool", *words)
    assert done.exit_code == 0
    view = json.loads(done.output)
    assert (view["devices"], view["mesh"], len(view["bytes_per_rank"])) == (4, [2, 2], 4)
    assert [one["bytes_per_second"] for one in view["links"]] == [100e9, 200e9]
    assert (view["bound_seconds"], view["gap"]) == (None, None)
    assert any(None not in one["cut"] for one in view["results"])
    assert view["max_rel_grad_diff"] < 1e-10
    assert view["wire_bytes"] == view["planned_wire_bytes"] > 0
    assert "dist_input=Rect" in out.read_text()


def test_what_moves_takes_the_time_of_its_axis(tmp_path):
    out = tmp_path / "shards.json"
    links = ["--link", "100GB/s,0us", "--link", "50GB/s,3us"]
    words = ["--mesh", "2x2", "--cut", "height", *links, "--time-limit", "2", "-o", str(out)]
    done = shard("convpool", *words)
    assert done.exit_code == 0
    found = valid_shard_plan(read_document(out, ShardPlan))
    assert {one.axis for one in found.moves} == {0, 1}
    assert {one.dim < 0 for one in found.moves} == {False, True}, "pieces and sums"
    for one in found.moves:
        delay, rate = [(0.0, 100e9), (3e-6, 50e9)][one.axis]
        times = (
            1 if one.dim >= 0 else 2
        )  # a sum of two devices goes around in two rounds, with half of it each
        assert one.seconds == pytest.approx(times * delay + max(one.sent_bytes) / rate)
    assert found.plan is not None
    exchanged = [k for k, op in enumerate(found.plan.graph.ops) if op.kind == EXCHANGE]
    taken = [found.plan.wire_seconds[k] for k in exchanged if k in found.plan.wire_seconds]
    assert any(one < 3e-6 for one in taken), "over the fast connection"
    assert any(one > 3e-6 for one in taken), "over the slow one"
