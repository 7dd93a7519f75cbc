"""A mixture of experts by ``grouped_mm`` is captured in every type that its kernels take."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import lowtide

pytestmark = pytest.mark.skipif(not hasattr(functional, "grouped_mm"), reason="torch has no grouped_mm")


class Experts(nn.Module):
    """Each row goes to the expert that a router chooses."""

    def __init__(self):
        super().__init__()
        self.router, self.weights = nn.Linear(16, 4), nn.Parameter(torch.randn(4, 16, 16))

    def forward(self, x):
        weight, expert = self.router(x).softmax(-1).max(-1)
        order = expert.argsort(stable=True)
        ends = torch.histc(expert.float(), 4, 0, 3).cumsum(0, dtype=torch.int32)
        y = functional.grouped_mm(x[order], self.weights, offs=ends) * weight[order, None]
        return torch.zeros_like(x).index_add(0, order, y)


def loss_of(model, x):
    return model(x).square().mean()


def test_a_step_in_float32_is_one_graph_with_the_bits_of_eager(tmp_path, monkeypatch):
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Experts(), torch.randn(64, 16)
    twin = copy.deepcopy(model)
    step = lowtide.fit(loss_of, model, x, budget="100%", time_limit=0.2, fullgraph=True)
    for _ in range(2):
        losses = [step(model, x), loss_of(twin, x)]
        for loss in losses:
            loss.backward()
        assert torch.equal(*losses)
        assert all(
            torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), twin.parameters(), strict=True)
        )


def test_other_compilers_are_told_what_torch_says():
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.TorchRuntimeError, match="BF16"):
        torch.compile(loss_of, backend="eager", fullgraph=True)(Experts(), torch.randn(32, 16))
