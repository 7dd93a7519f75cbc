"""Gradients of what passes between graphs: added up in the order of eager, in the strides in which they arrive."""

import copy

import pytest
import torch
from torch import nn

import lowtide

WIDTH = 32


@torch.compiler.disable
def between(x):
    """Torch captures nothing of this."""
    return x


@torch.compiler.disable
def added(x, y):
    """Nor of this."""
    return x + y


class Layer(nn.Module):
    """Reads what the first part has made in three places, as a decoder does."""

    def __init__(self):
        super().__init__()
        self.key, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, h):
        return x + (x * self.key(h)).tanh() * self.value(h) + h.sin()


class Decoder(nn.Module):
    """Layers are calls of one graph, and all of them read one tensor."""

    def __init__(self):
        super().__init__()
        self.first, self.layers = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x):
        h = self.first(x).relu()
        for layer in self.layers:
            x = layer(x, h) if x.sum().item() < 1e9 else x
        return x


class Tied(nn.Module):
    """A weight and a bias that several graphs use in several places."""

    def __init__(self):
        super().__init__()
        self.one = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.one(self.one(self.one(x).tanh()).tanh()).tanh()
        return self.one(self.one(between(x)).tanh())


class Residual(nn.Module):
    """Code that torch does not capture adds what went into a graph to a transposed result of it.

    It uses the one behind the graph, and the gradient of the other arrives in strides of its own.
    """

    def __init__(self):
        super().__init__()
        self.first, self.layer, self.norm = nn.Linear(WIDTH, WIDTH), Layer(), nn.LayerNorm(WIDTH)

    def forward(self, x):
        h = between(self.first(x).relu())
        y = nn.functional.pad(self.layer(x, h).transpose(1, 2), (0, 1))[..., :-1]
        return self.norm(added(h, nn.functional.gelu(y).transpose(1, 2)))


def loss_of(model, x):
    return between(model(x)).square().mean()


def gradients(model, step, x):
    model.zero_grad()
    loss = step(model, x)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


def differing(model, twin, step, x):
    """The gradients that are not those of eager."""
    names = ["loss", *(name for name, _ in model.named_parameters())]
    found = zip(names, gradients(model, step, x), gradients(twin, loss_of, x), strict=True)
    return [name for name, one, other in found if not torch.equal(one, other)]


@pytest.mark.parametrize(("kind", "lengths"), [(Decoder, [50]), (Tied, [50]), (Residual, [50, 40])])
def test_gradients_between_graphs_are_those_of_eager(kind, lengths):
    torch.manual_seed(0)
    model = kind()
    twin = copy.deepcopy(model)
    step = lowtide.fit(loss_of, model, torch.randn(7, lengths[0], WIDTH), budget="100%", time_limit=0.2)
    assert len(step.plans) > 1
    for length in lengths:
        assert differing(model, twin, step, torch.randn(7, length, WIDTH)) == []
