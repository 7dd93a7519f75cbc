"""``--kernels fused`` on the commands that run a step."""

import json

import pytest
import torch
from click.testing import CliRunner

from lowtide.commands.main import cli
from lowtide.execute.kernels import compile_groups
from lowtide.formats.registry import read_file
from lowtide.graph import GROUP
from tests.commands.refusal import refused

GPT2 = "gpt2:batch=2,layers=1,width=16,heads=2,length=8,vocab=32"


@pytest.fixture(autouse=True)
def _one_by_one(monkeypatch, tmp_path):
    """Groups run operator by operator: nothing is compiled."""

    def not_here(*_):
        raise NotImplementedError("not here")

    monkeypatch.setattr(compile_groups, "compile_kernels", not_here)
    monkeypatch.setattr(compile_groups, "_warn", lambda label, why: None)
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path / "cache"))
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def operators():
    """How many the step has with eager kernels."""
    torch._dynamo.reset()
    result = CliRunner().invoke(cli, ["run", GPT2, "--repeats", "1", "--json"])
    return json.loads(result.stdout)["operators"]


@pytest.mark.parametrize("how", [["--program", "recompute-all"], ["--budget", "95%", "--only", "recompute"]])
def test_run_compares_a_program_of_groups(how, operators, monkeypatch):
    monkeypatch.setattr(compile_groups, "_SAID_EVERY", 0.0)
    result = CliRunner().invoke(cli, ["run", GPT2, "--kernels", "fused", "--repeats", "1", "--json", *how])
    assert result.exit_code == 0, result.output
    assert "kernels …" not in result.stderr
    view = json.loads(result.stdout)
    assert view["operators"] < operators
    assert view["max_rel_grad_diff"] < 1e-4


def test_profile_measures_groups(tmp_path, monkeypatch):
    monkeypatch.setattr(compile_groups, "_SAID_EVERY", 0.0)
    path = tmp_path / "step.json"
    result = CliRunner().invoke(cli, ["profile", GPT2, "--kernels", "fused", "-o", str(path)])
    assert result.exit_code == 0, result.output
    said = [line for line in result.stderr.splitlines() if line.startswith("compiled ")]
    assert said[-1] == f"compiled {len(said)} of {len(said)} kernels …"
    step = read_file(path).step
    groups = [k for k, op in enumerate(step.graph.ops) if op.kind == GROUP]
    assert groups
    assert all(step.costs[k].seconds.value > 0 for k in groups)


def test_fused_kernels_are_not_estimated(tmp_path, capsys):
    how = ["--kernels", "fused", "--cost", "estimated", "-o", tmp_path / "step.json"]
    said = refused("profile", GPT2, *how, capsys=capsys)
    assert "leave out --cost" in said
