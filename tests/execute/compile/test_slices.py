"""Convolutions in slices of the batch, in a step that fits no other way."""

import textwrap

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import lowtide
from lowtide.commands.main import cli
from lowtide.cost.watch import watch_cpu
from lowtide.documents import read_document, write_document
from lowtide.execute.compile.planned import Planned
from lowtide.execute.kernels import compile_groups
from lowtide.graph import GROUP, Phase
from lowtide.plan.check.checker import check
from lowtide.plan.result.plan import Plan
from lowtide.trace.step.split_convolutions import ALL

from ..small import loss_of


@pytest.fixture(autouse=True)
def lean(monkeypatch):
    """All convolutions that can be split or sliced are, from the first plan on."""

    def make(self, arguments, witness):
        self._split = ALL
        return self._as_planned(arguments, witness)

    torch._dynamo.reset()
    monkeypatch.setattr(Planned, "make", make)
    monkeypatch.setattr("lowtide.trace.groups.slices.slices_for", lambda arguments: len(arguments[0]))


def network():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.ConvTranspose2d(4, 4, 3, bias=False)]
    return nn.Sequential(*layers, nn.Conv2d(4, 4, 3, padding=1)), torch.randn(3, 3, 12, 12)


def sliced(graph):
    """Phases of convolutions in slices."""
    return [
        op.phase
        for op in graph.ops
        if op.kind == GROUP and [one.kind for one in op.body.ops].count("aten.convolution") == 3
    ]


def left(step, model, x):
    model.zero_grad()
    loss = step(model, x)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("kernels", ["eager", "fused"])
def test_a_step_with_slices_gives_the_same(kernels, monkeypatch, tmp_path):
    monkeypatch.setattr(compile_groups, "compile_kernels", lambda body, mode: lambda given: body(*given))
    model, x = network()
    exact = left(loss_of, model, x)
    step = lowtide.fit(
        loss_of, model, x, budget="90%", time_limit=0.3, only="recompute", kernels=kernels, cache=False
    )
    phases = sliced(step.plan.graph)
    assert phases.count(Phase.FORWARD) == 3
    assert "3 convolutions run in slices" in step.plan.explain() or Phase.BACKWARD in phases
    for one, other in zip(left(step, model, x), exact, strict=True):
        torch.testing.assert_close(one, other)
    model.zero_grad()
    _, seen = watch_cpu(lambda _: step(model, x).backward())
    resident = x.nbytes + sum(value.nbytes for value in model.state_dict().values())
    assert seen.peak_bytes + resident <= step.plan.budget_bytes
    write_document(tmp_path / "plan.json", step.plan)
    kept = read_document(tmp_path / "plan.json", Plan)
    assert kept == step.plan
    check(kept.graph, kept.program)


def test_a_plan_with_slices_is_run_from_the_command_line(tmp_path):
    source = textwrap.dedent(
        """
        import torch
        from tests.execute.compile.test_slices import loss_of, network

        def step():
            model, x = network()
            return loss_of, model, x
        """
    )
    (tmp_path / "own.py").write_text(source)
    asked = ["run", f"{tmp_path}/own.py:step", "--budget", "95%", "--only", "recompute", "--repeats", "1"]
    result = CliRunner().invoke(cli, asked)
    assert result.exit_code == 0, result.output
    assert "loss, gradients and buffers:" in result.output


def test_tiles_are_cut_from_convolutions_that_are_whole():
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Conv2d(3, 3, 3, padding=1), nn.ReLU())]
    model, x = nn.Sequential(*layers), torch.randn(3, 3, 64, 64)
    exact = left(loss_of, model, x)
    step = lowtide.fit(loss_of, model, x, budget="50%", time_limit=1, only="recompute,tile", cache=False)
    assert step.plan.decisions.tiles
    assert not any(sliced(body.graph) for body in step.plan.program.bodies)
    for one, other in zip(left(step, model, x), exact, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
