"""Losses of several terms, and gradients that a model stops: tiles give what the whole step gives."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.checkpoint import checkpoint

from lowtide.trace.step.capture import capture
from lowtide.trace.tiles.tiling import Tiling
from tests.execute.tiling.tiles import gradients, in_tiles

CLASSES = 8


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


class Tokens(nn.Module):
    """A small network over tokens, with what people add to one."""

    def __init__(self):
        super().__init__()
        self.embedding, self.mix, self.head = nn.Embedding(CLASSES, 6), nn.Linear(6, 6), nn.Linear(6, CLASSES)
        self.teacher = nn.Linear(6, 6)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def hidden(self, tokens):
        x = self.embedding(tokens)
        return x + torch.tanh(self.mix(x))

    def forward(self, tokens):
        return self.head(self.hidden(tokens)).flatten(0, 1)


def smoothed(model, tokens, labels):
    return F.cross_entropy(model(tokens), labels, label_smoothing=0.1)


def divided(model, tokens, labels):
    return F.cross_entropy(model(tokens), labels, reduction="sum") / (labels >= 0).sum()


def decayed(model, tokens, labels):
    return F.cross_entropy(model(tokens), labels) + 0.1 * sum(p.square().sum() for p in model.parameters())


def penalised(model, tokens, labels):
    logits = model(tokens)
    return F.cross_entropy(logits, labels) + 1e-2 * logits.logsumexp(-1).square().mean()


def balanced(model, tokens, labels):
    hidden = model.hidden(tokens)
    return F.cross_entropy(model.head(hidden).flatten(0, 1), labels) + 0.1 * hidden.square().mean()


def rooted(model, tokens, labels):
    return F.cross_entropy(model(tokens), labels).exp().sqrt() + 1.0


def detached(model, tokens, labels):
    hidden = model.hidden(tokens)
    gate = torch.sigmoid(hidden).detach()
    return F.cross_entropy(model.head(hidden * gate + torch.detach(hidden)).flatten(0, 1), labels)


@torch.no_grad()
def turned(hidden):
    return (hidden.shape[1] * torch.arange(hidden.shape[-1], dtype=hidden.dtype)).cos() * hidden.mean()


def without(model, tokens, labels):
    hidden = model.hidden(tokens)
    with torch.no_grad():
        taught = model.teacher(model.embedding(tokens))
    return F.mse_loss(hidden * turned(hidden), taught)


def switched(model, tokens, labels):
    torch.set_grad_enabled(False)
    taught = model.teacher(model.embedding(tokens))
    torch.set_grad_enabled(True)
    return F.mse_loss(model.hidden(tokens), taught)


def averaged(model, tokens, labels):
    hidden = model.hidden(tokens)
    with torch.no_grad():
        model.mean.mul_(0.9).add_(hidden.mean((0, 1)), alpha=0.1)
        model.count.add_(1)
    return F.cross_entropy(model.head(hidden).flatten(0, 1), labels)


def checkpointed(model, tokens, labels):
    logits = checkpoint(model, tokens, use_reentrant=False)
    return F.cross_entropy(logits, labels)


STEPS = (
    smoothed, divided, decayed, penalised, balanced, rooted, detached, without, switched, averaged, checkpointed,
)  # fmt: skip


def state():
    torch.manual_seed(0)
    model, tokens = Tokens().double(), torch.randint(0, CLASSES, (6, 5))
    labels = tokens.flatten().masked_fill(torch.rand(30) < 0.3, -100)
    return model, tokens, labels


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_tiles_give_the_loss_the_gradients_and_the_buffers_of_the_whole(step):
    model, *batch = state()
    expected = gradients(step, model, batch, scale=3.0)
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    model, *batch = state()
    got = gradients(in_tiles(step, (3,)), model, batch, scale=3.0)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(dict(model.named_buffers()), buffers)


@pytest.mark.parametrize(
    ("step", "kinds"),
    [
        (smoothed, ["aten.nll_loss_forward", "aten.sum"]),
        (penalised, ["aten.nll_loss_forward", "aten.mean"]),
        (decayed, ["aten.nll_loss_forward"]),
        (balanced, ["aten.nll_loss_forward"]),
    ],
)
def test_sums_over_the_same_axes_are_cut_together(step, kinds):
    model, *batch = state()
    tiling = Tiling(capture(step, model, *batch).joint)
    assert [op.kind for op in tiling.adds] == kinds
    assert tiling.axes == (30,)
