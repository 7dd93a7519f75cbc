"""Second derivatives inside of a step: the graph that is differentiated runs as it is, the others as planned."""

import torch
from torch import nn

import lowtide
from tests.execute.breaks.test_subgraphs import left_behind, same


def with_penalty(model, x):
    """The step of a critic whose gradients are to have a length of one."""
    x = x.clone().requires_grad_()
    scores = model(x)
    (slopes,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
    return scores.mean() + (slopes.norm(dim=1) - 1).square().mean()


def test_a_gradient_penalty_is_that_of_eager():
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 1)),
        torch.randn(64, 16),
    )
    step = lowtide.fit(with_penalty, model, x, budget="100%", time_limit=0.2, cache=False)
    for seed in range(2):
        assert same(left_behind(model, step, x, seed), left_behind(model, with_penalty, x, seed))
    assert "create_graph" in step.explain()
