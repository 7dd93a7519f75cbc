"""Fused kernels in a step in several graphs: each graph has groups of its own, inside one budget."""

import copy

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import lowtide
from lowtide.cost.watch import watch_cpu
from lowtide.graph import GROUP
from tests.execute.breaks.test_silent import Language
from tests.execute.breaks.test_silent import loss_of as language_loss

WIDTH = 32


class Layer(nn.Module):
    """A normalisation, two products and dropout."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Linear(2 * WIDTH, WIDTH),
        )

    def forward(self, x):
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1, self.training)


class Layers(nn.Module):
    """Layers, with a graph break between two of them."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Sequential(Layer(), Layer()) for _ in range(2))

    def forward(self, x):
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)


def loss_of(model, x):
    return model(x).square().mean()


def left(step, model, x, seed=0):
    torch.manual_seed(seed)
    model.zero_grad(set_to_none=True)
    loss = step(model, x)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def peak(step, model, x):
    torch.manual_seed(0)
    model.zero_grad(set_to_none=True)
    _, seen = watch_cpu(lambda _: step(model, x).backward())
    return seen.peak_bytes + x.nbytes + sum(p.nbytes for p in model.parameters())


def groups(plan):
    return sum(op.kind == GROUP for op in plan.graph.ops)


def test_every_graph_has_groups_and_every_budget_gives_the_same_bits(one_by_one):
    torch.manual_seed(0)
    model, x = Layers().double(), torch.randn(64, WIDTH, dtype=torch.float64)
    exact = left(loss_of, model, x)
    found = []
    for budget in ("100%", "75%"):
        step = lowtide.fit(loss_of, model, x, budget=budget, time_limit=0.3, kernels="fused")
        assert sum(groups(plan) > 0 for plan in step.plans) > 1
        found.append(left(step, model, x))
        assert peak(step, model, x) <= step._subgraphs.budget_bytes
    for one, other, eager in zip(*found, exact, strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, eager, rtol=1e-10, atol=1e-12)


def test_tiles_of_one_of_the_graphs_have_groups_inside(one_by_one):
    torch.manual_seed(0)
    model, words = Language(), torch.randint(0, 256, (8, 64))
    twin = copy.deepcopy(model)
    step = lowtide.fit(language_loss, model, words, budget="70%", time_limit=0.5, kernels="fused")
    assert any(plan.decisions.tiles for plan in step.plans)
    assert step._subgraphs.measured_bytes <= step._subgraphs.budget_bytes
    for one, other in zip(left(step, model, words), left(language_loss, twin, words), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-7)


def test_the_backend_takes_groups_in_several_graphs_too(one_by_one):
    torch.manual_seed(0)
    model, x = Layers().double(), torch.randn(64, WIDTH, dtype=torch.float64)
    budget = int(0.8 * peak(loss_of, model, x))
    options = {"budget": budget, "time_limit": 0.3, "kernels": "fused"}
    step = torch.compile(loss_of, backend="lowtide", options=options)
    for seed in range(3):
        for one, eager in zip(left(step, model, x, seed), left(loss_of, model, x, seed), strict=True):
            torch.testing.assert_close(one, eager, rtol=1e-10, atol=1e-12)
    assert peak(step, model, x) <= budget
