"""A step is traced with the kernels of eager PyTorch."""

import pytest
import torch
from torch import nn

import lowtide


class Attention(nn.Module):
    """With dropout, attention is several operators, some of which autocast would have in half precision."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(16, 48)

    def forward(self, x):
        q, k, v = self.project(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1).float().square().mean()


@pytest.mark.parametrize("around", [False, True])
def test_backward_behind_a_step_under_autocast_is_that_of_eager(around):
    torch.manual_seed(0)
    model, x = Attention(), torch.randn(4, 16, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=around):
        step = lowtide.fit(model, x, budget="100%", time_limit=0.2, cache=False)
    found = []
    for function in (model, step):
        model.zero_grad()
        torch.manual_seed(1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = function(x)
        loss.backward()
        found.append([loss.detach(), model.project.weight.grad, model.project.bias.grad])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
