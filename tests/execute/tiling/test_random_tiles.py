"""Random networks in random tiles: loss and gradients are those of the whole step, in float64 to 1e-10,
in float32 to 1e-5.

Their operators: convolutions with stride, dilation, padding and groups, transposed ones, pools, upsampling,
skips that are added or joined, norms that look at one sample or at none; and every loss that is a sum.
"""

import math
import random

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.execute.tiling.tiles import gradients, in_tiles

SEEDS = 6


def convolution(draw, channels, width):
    """A convolution that leaves an image of at least three pixels."""
    kernel, dilation = draw.choice([(1, 1), (2, 1), (3, 1), (3, 2), (5, 1)])
    padding = draw.randrange(dilation * (kernel - 1) // 2 + 2)
    stride = draw.choice([1, 1, 2, 3]) if width > 8 else 1
    if (width + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1 < 3:
        padding, stride = dilation * (kernel - 1), 1
    out, groups = draw.choice([(4, 1), (4, 2), (6, 2), (4, 4)])
    bias = draw.random() < 0.5
    layer = nn.Conv2d(
        channels, out, kernel, stride, padding, dilation, groups if channels % groups == 0 else 1, bias
    )
    return layer, out


def transposed(draw, channels):
    kernel, stride = draw.choice([(2, 2), (3, 1), (3, 2), (2, 3)])
    padding = draw.randrange(2) if kernel > 1 else 0
    more = draw.randrange(stride) if stride > 1 else 0
    dilation = draw.choice([1, 1, 2])
    groups = draw.choice([1, 2]) if channels % 2 == 0 else 1
    return nn.ConvTranspose2d(channels, 4, kernel, stride, padding, more, groups, dilation=dilation), 4


def pool(draw):
    kernel, stride = draw.choice([(2, 2), (3, 2), (3, 1), (2, 1)])
    padding, ceil = draw.randrange(2), draw.random() < 0.5
    if draw.random() < 0.5:
        return nn.MaxPool2d(
            kernel, stride, padding, draw.choice([1, 2]) if kernel == 2 else 1, ceil_mode=ceil
        )
    return nn.AvgPool2d(kernel, stride, padding, ceil, draw.random() < 0.5)


def upsampling(draw):
    mode = draw.choice(["nearest", "bilinear", "nearest-exact"])
    return nn.Upsample(scale_factor=2, mode=mode, align_corners=False if mode == "bilinear" else None)


def norm(draw, channels):
    kind = draw.choice(["group", "batch", "last"])
    if kind == "group":
        return nn.GroupNorm(2, channels)
    if kind == "last":
        return Last(channels)
    made = nn.BatchNorm2d(channels).eval()
    made.running_mean.uniform_(-1, 1)
    made.running_var.uniform_(0.5, 2)
    return made


class Last(nn.Module):
    """A layer norm over the channels of each pixel."""

    def __init__(self, channels):
        super().__init__()
        self.norm = nn.LayerNorm(channels)

    def forward(self, x):
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Skip(nn.Module):
    """Two ways for an image, added or joined."""

    def __init__(self, draw, channels):
        super().__init__()
        dilation = draw.choice([1, 2])
        self.way = nn.Conv2d(channels, channels, 3, padding=dilation, dilation=dilation)
        self.joined = draw.random() < 0.5

    def forward(self, x):
        other = functional.gelu(self.way(x))
        return torch.cat((x, other), 1) if self.joined else x + other


class Network(nn.Module):
    """A chain of layers; dropout and activations in between."""

    def __init__(self, seed, width):
        super().__init__()
        draw = random.Random(seed)
        layers, channels, image = [], 2, torch.zeros(1, 2, *width)
        for _ in range(draw.randint(3, 6)):
            wide = min(image.shape[2:])
            kind = draw.choice(["conv", "conv", "skip", "pool", "up", "transposed", "norm", "drop", "act"])
            if (kind in ("up", "transposed") and max(image.shape[2:]) > 16) or (kind == "pool" and wide < 5):
                kind = "conv"
            made, channels = self.layer(draw, kind, channels, wide)
            layers.append(made)
            image = made.eval()(image) if kind != "drop" else image
        self.layers = nn.Sequential(*layers)
        self.head = nn.Conv2d(channels, 3, 1)

    def layer(self, draw, kind, channels, width):
        if kind == "conv":
            return convolution(draw, channels, width)
        if kind == "transposed":
            return transposed(draw, channels)
        if kind == "skip":
            made = Skip(draw, channels)
            return made, channels * (1 + made.joined)
        plain = {
            "pool": lambda: pool(draw),
            "up": lambda: upsampling(draw),
            "norm": lambda: norm(draw, channels),
        }
        plain |= {"drop": lambda: nn.Dropout(0.3), "act": lambda: draw.choice([nn.ReLU, nn.SiLU, nn.Tanh])()}
        return plain[kind](), channels

    def forward(self, x):
        return self.head(self.layers(x))


def mse_mean(scores, target, labels, weight):
    return functional.mse_loss(scores, target)


def mse_sum(scores, target, labels, weight):
    return functional.mse_loss(scores, target, reduction="sum") / 7


def entropy(scores, target, labels, weight):
    return functional.cross_entropy(scores, labels, ignore_index=-1)


def weighted(scores, target, labels, weight):
    return functional.cross_entropy(scores, labels, weight, ignore_index=1)


def entropy_sum(scores, target, labels, weight):
    return functional.cross_entropy(scores, labels, weight, ignore_index=-1, reduction="sum")


def square_sum(scores, target, labels, weight):
    return -(scores.square() * target).sum() * 0.5


def mean(scores, target, labels, weight):
    return torch.sigmoid(scores).mean()


LOSSES = (mse_mean, mse_sum, entropy, weighted, entropy_sum, square_sum, mean)


def drawn(seed, loss):
    """A network, a batch, a step of it, and a grid for the axes of its loss."""
    torch.manual_seed(seed)
    draw = random.Random(seed)
    rows, width = draw.randint(2, 4), (draw.randint(9, 14), draw.randint(9, 14))
    model = Network(seed, width).double()
    for module in model.modules():
        module.train(isinstance(module, nn.Dropout))
    image = torch.randn(rows, 2, *width, dtype=torch.float64)
    with torch.no_grad():
        scores = model(image)
    target = torch.randn_like(scores)
    labels = torch.randint(-1 if loss in (entropy, entropy_sum) else 0, 3, (rows, *scores.shape[2:]))
    weight = torch.tensor([0.5, 2.0, 1.25], dtype=torch.float64)

    def step(model, image, target, labels, weight):
        return loss(model(image), target, labels, weight)

    axes = labels.shape if "entropy" in loss.__name__ or loss is weighted else scores.shape
    parts = [1] * len(axes)
    for axis in draw.sample([0, 0, 1, len(axes) - 2, len(axes) - 1, len(axes) - 1], 3):
        parts[axis] = draw.randint(1, min(3, axes[axis]))
    if math.prod(parts) in (1, 18, 27):
        parts = [min(2, length) for length in axes[:1]] + [1] * (len(axes) - 2) + [min(3, axes[-1])]
    return model, (image, target, labels, weight), step, tuple(parts)


def single(model, batch):
    return model.float(), tuple(x.float() if x.is_floating_point() else x for x in batch)


def compared(model, batch, step, parts):
    torch._dynamo.reset()
    want = gradients(step, model, batch)
    got = gradients(in_tiles(step, parts), model, batch)
    pairs = list(zip([want[0], *want[1]], [got[0], *got[1]], strict=True))
    least = 1e-6 * max(float(a.abs().max()) for a, _ in pairs)  # a bias before a norm has a gradient of 0
    return max(float((a - b).abs().max() / a.abs().max().clamp(min=least)) for a, b in pairs)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_networks(seed):
    model, batch, step, parts = drawn(seed, LOSSES[seed % len(LOSSES)])
    assert compared(model, batch, step, parts) < 1e-10


@pytest.mark.parametrize("seed", range(SEEDS, SEEDS + 2))
def test_random_networks_in_single_precision(seed):
    model, batch, step, parts = drawn(seed, LOSSES[seed % len(LOSSES)])
    assert compared(*single(model, batch), step, parts) < 1e-5
