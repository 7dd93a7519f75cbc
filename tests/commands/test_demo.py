"""The demo: its network is one whose memory is activations, and it says which it is."""

import json
import re

import pytest
import torch
from click.testing import CliRunner

from lowtide import capture, zoo
from lowtide.commands.demo import ABOUT, SHARES, TARGET
from lowtide.commands.main import cli
from lowtide.cost.estimate import estimate
from lowtide.execute.runtime.in_place import able_in_place
from lowtide.plan.budget import Budget
from lowtide.plan.program.costs import Costs
from tests.planning import plan_for
from tests.steps import DEVICE


@pytest.fixture(autouse=True)
def _apart(tmp_path, monkeypatch):
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path / "cache"))
    torch._dynamo.reset()


def test_the_network_has_one_spelling():
    assert zoo.parse(TARGET).name == TARGET


@pytest.mark.extended
def test_recomputation_reaches_every_budget_with_room_for_workspaces():
    """Three fifths of the smallest share are enough, so that no kernel of some processor decides."""
    built = zoo.build(TARGET)
    captured = capture(built.loss, built.model, *built.batch)
    graph, less = captured.step.graph, 0.6 * float(SHARES[-1].rstrip("%")) / 100
    costs = Costs(tuple(float(cost.seconds.value) for cost in estimate(graph, DEVICE)), (), "estimated")
    able = able_in_place(captured.joint)
    plan = plan_for(graph, costs, Budget(share=less), able=able, time_limit=1)
    assert plan.predicted.peak_bytes <= 0.15 * plan.plain.peak_bytes
    assert plan.resident_bytes < 0.05 * plan.plain.peak_bytes


def test_it_says_what_the_network_is(tmp_path, monkeypatch):
    small = "gpt2:batch=2,layers=1,width=16,heads=2,length=16,vocab=16"
    monkeypatch.setattr("lowtide.commands.demo.TARGET", small)
    monkeypatch.setattr("lowtide.commands.demo.SHARES", ("100%",))
    page = tmp_path / "page.html"
    for json_wanted in (False, True):
        arguments = ["demo", small, "--repeats", "1", "-o", str(page), *(["--json"] if json_wanted else [])]
        result = CliRunner().invoke(cli, arguments)
        assert result.exit_code == 0, result.output
        text = json.loads(result.stdout)["about"] if json_wanted else result.stdout
        assert re.search(re.escape(ABOUT) + r"; [0-9.]+ k parameters, batch of 2x17", text)
        assert ABOUT in page.read_text()
