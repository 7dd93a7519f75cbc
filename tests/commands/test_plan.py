import itertools
import json
import re
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from lowtide.commands.main import cli, main
from lowtide.commands.plan import _progress
from lowtide.plan.make import make_plan

SEED = str(next((Path(__file__).parents[2] / "examples" / "documents").glob("000_*.txt")))
KEYS = {
    "budget_bytes", "plain", "predicted", "overhead", "bound", "gap", "smallest_budget_bytes", "decisions",
    "solve_seconds", "checked",
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _hurried():
    """Little time is spent on how small a budget may be."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["lowtide.commands.plan"], "_SMALLEST_SECONDS", 0.1)
        yield


def invoke(*arguments):
    return CliRunner().invoke(cli, list(arguments))


def test_seed_000_at_70_percent_costs_31_units_proven():
    proven = ("--time-limit", "600")  # it ends where nothing is left to gain
    result = invoke(
        "plan", SEED, "--cost", "unit", "--only", "recompute", "--budget", "70%", "--json", *proven
    )
    assert result.exit_code == 0, result.output
    view = json.loads(result.stdout)
    assert set(view) >= KEYS
    assert view["plain"]["peak_bytes"] == 7_329_956_112
    assert round(view["overhead"] * 267) == 31
    assert view["gap"] == 0
    assert view["checked"] is True
    assert view["predicted"]["peak_bytes"] <= view["budget_bytes"]
    assert set(view["decisions"]) == {"kept", "recomputed", "offloaded", "in_place", "tiles"}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A plan for 90%, in a file."""
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    assert invoke("plan", SEED, "--cost", "unit", "--budget", "90%", "-o", str(path)).exit_code == 0
    return path


def test_a_plan_is_written_and_checked(written):
    result = invoke("check", str(written), "--json")
    assert result.exit_code == 0, result.output
    view = json.loads(result.stdout)
    assert view["peak_bytes"] <= view["budget_bytes"]
    assert view["peak_bytes"] == view["promised_peak_bytes"]


def test_a_plan_that_lies_is_caught(written, tmp_path, capsys):
    path = tmp_path / "plan.json"
    plan = json.loads(written.read_text())
    plan["budget_bytes"] //= 2
    path.write_text(json.dumps(plan))
    with pytest.raises(SystemExit) as caught:
        main(["check", str(path)])
    assert caught.value.code == 2
    assert "more than the budget" in capsys.readouterr().err


def test_a_plan_that_promises_too_little_is_caught(written, tmp_path, capsys):
    path = tmp_path / "plan.json"
    plan = json.loads(written.read_text())
    plan["predicted"]["peak_bytes"] -= 1
    path.write_text(json.dumps(plan))
    with pytest.raises(SystemExit) as caught:
        main(["check", str(path)])
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert "plan.json: the plan promises a peak of" in said
    assert "plan again" in said


def test_a_budget_and_all_of_them_contradict_each_other():
    result = invoke("plan", SEED, "--cost", "unit", "--budget", "90%", "--sweep")
    assert result.exit_code == 2
    assert "leave out --budget" in result.output


def test_a_plan_that_skips_an_operator_is_caught(written, tmp_path, capsys):
    path = tmp_path / "plan.json"
    plan = json.loads(written.read_text())
    runs = [k for k, line in enumerate(plan["program"]["forward"]) if line["type"] == "run"]
    del plan["program"]["forward"][runs[3]]
    path.write_text(json.dumps(plan))
    with pytest.raises(SystemExit) as caught:
        main(["check", str(path)])
    assert caught.value.code == 2
    assert "instruction" in capsys.readouterr().err


def test_a_damaged_plan_is_refused_in_a_line(written, tmp_path, capsys):
    path = tmp_path / "plan.json"
    for keys, value, said in (
        (["workspace_bytes"], [1], "1 workspaces for 120 operators"),
        (["seconds"], [1.0], "1 times for 120 operators"),
        (["seconds"], [-1.0] * 120, "no amount"),
        (["graph", "returned"], [1000000], "'returned' of the graph"),
        (["graph", "updated"], "x", "graph.updated"),
        (["graph", "updated_early"], [True], "graph.updated_early"),
        (["graph", "ops", 0, "updates"], [9], "does not list inputs"),
        (["graph", "ops", 0, "short"], [1, 7], "does not list outputs"),
        (["graph", "ops", 0, "arguments"], [{"input": 9}], "does not list arguments"),
        (["graph", "ops", 0, "strides"], [[1]], "does not hold strides"),
        (["graph", "tensors", 0, "bytes"], -1, "has -1 bytes"),
        (["beside_bytes"], -(10**12), "beside_bytes is no amount"),
        (["budget_bytes"], 10**400, "budget_bytes is no amount"),
        (["workspace_bytes"], [-(10**400)] * 120, "no amount"),
        (["able"], [99999], "operator 99999; the step has 120"),
        (["short"], {"99999": 1.0}, "operator 99999; the step has 120"),
        (["short"], {"0": -1.0}, "less than no time"),
        (["offload"], ["zzz"], "'zzz' leave the device; parameters and optimizer may"),
    ):
        plan = inner = json.loads(written.read_text())
        for key in keys[:-1]:
            inner = inner[key]
        inner[keys[-1]] = value
        path.write_text(json.dumps(plan))
        with pytest.raises(SystemExit) as caught:
            main(["check", str(path)])
        assert caught.value.code == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("limit", ["inf", "nan"])
def test_a_time_limit_is_a_number_of_seconds(limit, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["plan", SEED, "--cost", "unit", "--budget", "60%", "--time-limit", limit])
    assert caught.value.code == 2
    assert f"time_limit={limit}" in capsys.readouterr().err


def test_a_budget_that_is_too_small_exits_3_and_says_what_works(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["plan", SEED, "--cost", "unit", "--budget", "10%"])
    assert caught.value.code == 3
    said = capsys.readouterr().err
    assert "the smallest budget with a known plan is" in said
    assert "live at its peak" in said
    assert "what would help" in said


def test_explain_names_what_is_made_again():
    result = invoke("plan", SEED, "--cost", "unit", "--budget", "70%", "--explain", "--time-limit", "600")
    assert "recomputed" in result.stdout
    assert "live at the peak" in result.stdout
    assert "proven optimal" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([SEED], "--budget"),
        ([SEED, "--budget", "50%", "--sweep"], "--budget"),
        ([SEED, "--budget", "50%"], "no times"),
        ([SEED, "--budget", "lots", "--cost", "unit"], "8GiB"),
        ([SEED, "--budget", "50%", "--cost", "nowhere.json"], "nowhere.json"),
        ([SEED, "--budget", "50%", "--cost", "unit", "--only", "magic"], "magic"),
        (["unett", "--budget", "50%"], "Did you mean 'unet'"),
    ],
)
def test_bad_usage_exits_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["plan", *arguments])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_a_target_is_captured_measured_and_planned(tmp_path, monkeypatch):
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    looked, look = [], make_plan._with_smallest

    def looking(*given):
        looked.append(given)
        return look(*given)

    monkeypatch.setattr(make_plan, "_with_smallest", looking)
    target = "gpt2:batch=2,layers=1,width=32,heads=2,length=32,vocab=100"
    result = invoke("plan", target, "--budget", "75%", "--device", "cpu", "--json", "--time-limit", "0.5")
    assert result.exit_code == 0, result.output
    view = json.loads(result.stdout)
    assert view["predicted"]["peak_bytes"] <= view["budget_bytes"] < view["plain"]["peak_bytes"]
    assert view["cost"] == "measured"
    assert len(looked) <= 1, "the smallest budget is looked for once, not while the step is captured"


SECONDS = r"[0-9] (s|ms|µs|ns)\b|second"


@pytest.mark.parametrize("options", [["--budget", "50%", "--explain"], ["--budget", "50%"], ["--sweep"]])
def test_unit_costs_are_never_printed_as_seconds(options):
    result = invoke("plan", SEED, "--cost", "unit", "--time-limit", "0.2", *options)
    assert result.exit_code == 0, result.output
    assert not re.search(SECONDS, result.stdout), result.stdout
    assert "267 units" in result.stdout
    if "--explain" in options:
        assert "recomputed, by cost" in result.stdout
        assert re.search(r"\n +10 units  Convolution2DFunction", result.stdout)


def test_progress_counts_units_too(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    _progress("unit", 0.5, 85.0, 80.0, 0.0142)
    assert capsys.readouterr().err == "\r  0.5 s  best 85 units more, bound 80 units, gap 1.4%   "


def test_a_wrong_promise_in_units_is_told_in_units(written, tmp_path, capsys):
    for side, key, said in (("predicted", "seconds", "promises"), ("bound", "seconds", "the bound of")):
        plan = json.loads(written.read_text())
        plan[side][key] += 100
        changed = tmp_path / "changed.json"
        changed.write_text(json.dumps(plan))
        with pytest.raises(SystemExit) as caught:
            main(["check", str(changed)])
        assert caught.value.code == 2
        problem = capsys.readouterr().err
        assert said in problem
        assert " units" in problem
        assert "seconds" not in problem


def test_a_sweep_is_monotone(tmp_path):
    path = tmp_path / "sweep.json"
    result = invoke(
        "plan", SEED, "--cost", "unit", "--sweep", "--time-limit", "0.2", "-o", str(path), "--json"
    )
    assert result.exit_code == 0, result.output
    view = json.loads(result.stdout)
    points = view["points"]
    assert len(points) >= 5
    assert all(a["budget_bytes"] > b["budget_bytes"] for a, b in itertools.pairwise(points))
    assert all(a["overhead"] <= b["overhead"] for a, b in itertools.pairwise(points))
    assert all(p["bound_overhead"] <= p["overhead"] + 1e-12 for p in points)
    assert json.loads(path.read_text())["lowtide"] == "sweep"


def test_parameters_of_a_document_may_leave(tmp_path):
    path = tmp_path / "plan.json"
    options = ["--cost", "unit", "--budget", "90%", "--offload", "parameters", "--time-limit", "0.5"]
    result = invoke("plan", SEED, *options, "-o", str(path), "--json")
    assert result.exit_code == 0, result.output
    view = json.loads(result.stdout)
    assert view["offload"] == ["parameters"]
    assert view["only"] == ["recompute", "offload"]
    assert 0 < view["resident_bytes"] < view["budget_bytes"]
    assert invoke("check", str(path)).exit_code == 0
