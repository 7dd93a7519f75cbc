import json
from functools import partial
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from lowtide import zoo
from lowtide.commands.demo import _planned
from lowtide.commands.main import cli
from lowtide.errors import LowtideError
from lowtide.execute.fit import fit
from lowtide.execute.planning.kept import Kept
from lowtide.plan.make.sweep import sweep_by
from lowtide.plan.request import DeviceRoom, PlanRequest
from lowtide.trace.step.capture import capture
from tests.steps import described

SOURCE = """
import torch
from torch import nn


def step():
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))
    batch = torch.randn(512, 16), torch.randint(0, 4, (512,))
    return model, batch, lambda model, x, y: nn.functional.cross_entropy(model(x), y)


def decayed():
    model, batch, loss = step()
    return model, batch, lambda model, x, y: loss(model, x, y) + model[0].weight.pow(2).sum()


def marked():
    model, batch, loss = step()
    return model, batch, lambda model, x, y: loss(model, x, y) + model[0](x).data.mean()
"""
CONVOLUTIONS = """
import torch
from torch import nn


def step():
    layers = [layer for _ in range(2) for layer in (nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())]
    return lambda model, x: model(x).square().mean(), nn.Sequential(*layers), torch.randn(32, 8, 32, 32)
"""
TILES = ("--only", "recompute,tile", "--device", "cpu")


@pytest.fixture(autouse=True)
def _hurried(monkeypatch, tmp_path):
    """No time is spent on how small a budget may be, costs are the same everywhere, and capturing may take long."""
    torch._dynamo.reset()
    monkeypatch.setattr("lowtide.plan.recompute.smallest_budget._aim", lambda *_, **__: None)
    monkeypatch.setattr("lowtide.plan.time_shares.TILE_PATIENCE", 1000)
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path / "cache"))
    described(tmp_path / "cache")


@pytest.fixture
def network(tmp_path):
    path = tmp_path / "network.py"
    path.write_text(SOURCE)
    return str(path)


def invoke(*arguments):
    return CliRunner().invoke(cli, list(arguments))


def test_a_plan_in_tiles_is_explained_written_and_checked(network, tmp_path):
    plan = str(tmp_path / "plan.json")
    asked = (f"{network}:step", "--budget", "45%", *TILES, "--cost", "estimated", "--time-limit", "0.5")
    made = invoke("plan", *asked, "--explain", "-o", plan)
    assert made.exit_code == 0, made.output
    tiles, region = (line for line in made.output.splitlines() if line.startswith(("tiles ", "region ")))
    assert " of 512, each " in tiles
    assert f"from the inputs to the loss at {network}:9" in region
    assert made.output.endswith(f"Wrote {plan}\nNext: lowtide report {plan}\n")
    assert invoke("check", plan).exit_code == 0
    page = str(tmp_path / "report.json")
    assert invoke("report", plan, "-o", page, "--rivals", "0").exit_code == 0
    before, after = json.loads(Path(page).read_text())["runs"]
    assert before["name"] == "storing everything"
    assert (
        max(before["moments"]["live"]) == before["predicted"]["peak_bytes"] > after["predicted"]["peak_bytes"]
    )
    assert len(before["moments"]["live"]) > 10


def test_the_step_before_tiles_is_drawn_with_its_workspaces(tmp_path):
    """The whole of it was measured before it was cut: its curve reaches the peak that is told of it."""
    plan, page = (str(tmp_path / name) for name in ("plan.json", "report.json"))
    network = tmp_path / "convolutions.py"
    network.write_text(CONVOLUTIONS)
    asked = (f"{network}:step", "--budget", "40%", *TILES, "--time-limit", "2", "-o", plan)
    made = invoke("plan", *asked)
    assert made.exit_code == 0, made.output
    document = json.loads(Path(plan).read_text())
    assert document["decisions"]["tiles"] > 1
    assert max(document["plain_workspace_bytes"]) > 0
    assert invoke("report", plan, "-o", page, "--rivals", "0").exit_code == 0
    before = json.loads(Path(page).read_text())["runs"][0]
    assert (
        max(before["moments"]["live"]) == before["predicted"]["peak_bytes"] == document["plain"]["peak_bytes"]
    )
    assert before["moments"]["seconds"] == pytest.approx(document["plain"]["seconds"])
    document["plain_seconds"].pop()
    Path(plan).write_text(json.dumps(document))
    refused = invoke("report", plan, "-o", page)
    assert "costs of the step before it are no amounts, or another number of them" in str(refused.exception)


def test_a_step_runs_in_tiles_and_again_from_the_program_but_not_for_another(network, tmp_path, monkeypatch):
    monkeypatch.setattr("lowtide.execute.fit.fit", partial(fit, cost="estimated", time_limit=0.5))
    program, other = str(tmp_path / "program.json"), tmp_path / "other.py"
    other.write_text(SOURCE.replace("512", "500"))
    once = ("--device", "cpu", "--repeats", "1", "--json")
    planned = ("--budget", "45%", "--only", "recompute,tile", "--save-program", program)
    ran = invoke("run", f"{network}:step", *planned, *once)
    assert ran.exit_code == 0, ran.output
    view = json.loads(ran.stdout)
    assert view["decisions"]["tiles"] > 1
    assert view["max_rel_grad_diff"] < 1e-4
    again = invoke("run", f"{network}:step", "--program", program, *once)
    assert again.exit_code == 0, again.output
    assert json.loads(again.stdout)["max_rel_grad_diff"] < 1e-4
    refused = invoke("run", f"{other}:step", "--program", program, *once)
    assert isinstance(refused.exception, LowtideError)


def test_a_plan_says_what_prevents_tiles(network):
    asked = (f"{network}:marked", "--budget", "75%", *TILES, "--cost", "estimated", "--time-limit", "0.5")
    result = invoke("plan", *asked, "--explain")
    assert result.exit_code == 0, result.output
    assert (
        "the step says more about gradients than its operators do: it calls _get_data_attr" in result.output
    )


def test_another_term_of_the_loss_stays_outside_of_tiles(network):
    asked = (f"{network}:decayed", "--budget", "40%", *TILES, "--cost", "estimated", "--time-limit", "0.5")
    result = invoke("plan", *asked, "--explain")
    assert result.exit_code == 0, result.output
    assert f"from the inputs to the loss at {network}:9, forward and backward of a tile" in result.output


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (("--sweep", "--only", "recompute,tile"), "--sweep knows no tiles"),
        (("--budget", "50%", "--only", "recompute,tile", "--cost", "unit"), "measured or estimated"),
        (("--budget", "50%", "--only", "tile"), "recompute,tile"),
    ],
)
def test_what_tiles_do_not_go_with_is_said(network, more, told):
    result = invoke("plan", f"{network}:step", "--device", "cpu", *more)
    assert result.exit_code != 0
    assert told in result.output + str(result.exception)


def test_tiles_are_used_where_nothing_else_fits(network):
    """Nothing but the budget is given: recomputation where it is enough, tiles below that."""
    plans = {}
    for budget in ("75%", "40%"):
        asked = [
            "plan",
            f"{network}:step",
            "--budget",
            budget,
            "--cost",
            "estimated",
            "--device",
            "cpu",
            "--time-limit",
            "1",
            "--json",
        ]
        result = CliRunner().invoke(cli, asked, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        plans[budget] = json.loads(result.stdout)
    assert plans["75%"]["only"] == ["recompute"]
    assert plans["75%"]["decisions"]["tiles"] == 0
    assert plans["40%"]["only"] == ["recompute", "tile"]
    assert plans["40%"]["decisions"]["tiles"] > 1


def test_tiles_that_were_asked_for_are_not_taken_where_nobody_asks(network):
    """Plans that were made before: nobody who leaves the methods to us gets one that was made for tiles."""
    built = zoo.build(f"{network}:step", device="cpu")
    graph = capture(built.loss, built.model, *built.batch).step.graph
    asked, left = (PlanRequest.of("70%", only=only).on("cpu") for only in ("recompute,tile", "auto"))
    assert asked.methods == left.methods
    names = {Kept(graph, frozenset(), one, "cpu", DeviceRoom()).name for one in (asked, left)}
    assert len(names) == 2


def test_the_demo_says_that_it_cuts_into_tiles(network, monkeypatch):
    monkeypatch.setattr(
        "lowtide.execute.fit.fit", partial(fit, cost="estimated", time_limit=0.2, cache=False)
    )
    plan, note = _planned(zoo.build(f"{network}:step", device="cpu"), "45%")
    assert note.endswith(f"this one runs in {plan.decisions.tiles} tiles")


def test_a_sweep_with_fused_kernels_is_monotone_and_has_tiles(monkeypatch, network):
    def refused(*_):
        raise NotImplementedError("not here")

    monkeypatch.setattr("lowtide.execute.kernels.compile_groups.compile_kernels", refused)
    monkeypatch.setattr("lowtide.execute.kernels.compile_groups._warn", lambda label, why: None)
    monkeypatch.setattr("lowtide.commands.plan.sweep_by", partial(sweep_by, shares=(1.0, 0.45)))
    options = "--kernels", "fused", "--sweep", "--device", "cpu", "--cost", "estimated", "--time-limit", "0.5"
    result = invoke("plan", f"{network}:step", *options, "--json")
    assert result.exit_code == 0, result.output
    points = json.loads(result.stdout)["points"]
    assert points[0]["seconds"] <= points[-1]["seconds"]
    assert points[0]["decisions"]["tiles"] == 0
    assert points[-1]["decisions"]["tiles"] > 0
