"""A call that torch cannot trace runs as it is; what is before and behind it is planned."""

import copy

import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import GraphBreakError


@torch.library.custom_op("lowtide_tests::by_group", mutates_args=())
def by_group(x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Each group of rows by its own number."""
    return torch.cat([part * (k + 1) for k, part in enumerate(x.split(sizes.tolist()))])


@by_group.register_fake
def _(x, sizes):
    return torch.empty_like(x)


def _backward(ctx, gradient):
    (sizes,) = ctx.saved_tensors
    parts = gradient.split(sizes.tolist())  # what torch cannot trace: sizes are values
    return torch.cat([part * (k + 1) for k, part in enumerate(parts) if part.shape[0] != 0]), None


by_group.register_autograd(
    _backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[1])
)


class Grouped(nn.Module):
    """Two layers of experts, as libraries write them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.1)) for _ in range(3)
        )

    def forward(self, x):
        sizes = (x[:, 0] > 0).sum().reshape(1)
        sizes = torch.cat([sizes, x.shape[0] - sizes])
        for layer in self.layers[:-1]:
            x = by_group(layer(x), sizes)
        return self.layers[-1](x)


def loss_of(model, x):
    return model(x).square().mean()


def stepped(model, step, x):
    model.zero_grad()
    torch.manual_seed(1)
    loss = step(model, x)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


def test_what_torch_cannot_trace_is_left_as_it_is():
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Grouped()
    twin = copy.deepcopy(model)
    step = lowtide.fit(loss_of, model, torch.randn(64, 16), budget="100%", time_limit=0.3)
    assert len(step.plans) == 3
    assert "test_split.py:" in step.explain()
    for _ in range(2):
        x = torch.randn(64, 16)
        got, right = stepped(model, step, x), stepped(twin, loss_of, x)
        assert all(torch.equal(a, b) for a, b in zip(got, right, strict=True))


def test_it_is_refused_where_one_graph_is_asked_for():
    torch._dynamo.reset()
    with pytest.raises(GraphBreakError, match=r"test_split\.py:\d+"):
        lowtide.fit(loss_of, Grouped(), torch.randn(64, 16), budget="100%", fullgraph=True)
