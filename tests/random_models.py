"""Random steps of training, each made from a number alone: layers, layouts, types, writes in place, losses.

A model works on rows ``(batch, features)``, sequences ``(batch, length, features)`` or images ``(batch, channels,
height, width)``. Layers keep the kind of data, and nearly always its size, so that any of them may follow any other.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

__all__ = ["Step", "random_step"]

FEATURES = 8
SIZES = {"rows": (FEATURES,), "sequence": (6, FEATURES), "image": (FEATURES, 8, 8)}
TYPES = (torch.float32, torch.float32, torch.float32, torch.float64, torch.bfloat16)


@dataclass(frozen=True)
class Step:
    """A model with its batch, and the function that gives the loss."""

    build: Callable[[], nn.Module]
    batch: Callable[[], tuple[Any, ...]]
    loss: Callable[..., torch.Tensor]
    dtype: torch.dtype
    words: str
    """What is in it."""
    outside: bool = False
    """Whether the function gives the model's result, and the loss is outside."""


class Layer(nn.Module):
    """A function of what comes in, with modules and parameters of its own."""

    def __init__(self, function: Callable[..., torch.Tensor], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x)


class Chain(nn.Module):
    """Layers one after the other; now and then an earlier value is added or joined again."""

    def __init__(self, layers: list[nn.Module], skips: dict[int, int], frozen: set[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.skips = skips
        for k in frozen:
            layers[k].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = []
        for k, layer in enumerate(self.layers):
            seen.append(x)
            x = layer(x)
            if k in self.skips and seen[self.skips[k]].shape == x.shape:
                x = x + seen[self.skips[k]]
        return x


# layers for any kind of data, whose features are along axis ``at``


def _along(at: int, function: Callable[[Any, torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The function, which wants features last, on data that has them along another axis."""
    return lambda self, x: function(self, x.movedim(at, -1)).movedim(-1, at)


def _linear(draw: random.Random, at: int) -> nn.Module:
    bias = draw.random() < 0.7
    return Layer(_along(at, lambda s, x: s.a(x)), a=nn.Linear(FEATURES, FEATURES, bias=bias))


def _mlp(draw: random.Random, at: int) -> nn.Module:
    act = draw.choice([F.gelu, F.silu, torch.tanh, F.relu, F.mish, F.hardswish, F.elu])
    parts = {"a": nn.Linear(FEATURES, 16), "b": nn.Linear(16, FEATURES)}
    return Layer(_along(at, lambda s, x: s.b(act(s.a(x)))), **parts)


def _layer_norm(draw: random.Random, at: int) -> nn.Module:
    made = nn.LayerNorm(FEATURES, elementwise_affine=draw.random() < 0.8)
    return Layer(_along(at, lambda s, x: s.n(x)), n=made)


def _rms_norm(draw: random.Random, at: int) -> nn.Module:
    return Layer(_along(at, lambda s, x: s.n(x)), n=nn.RMSNorm(FEATURES))


def _activation(draw: random.Random, at: int) -> nn.Module:
    function = draw.choice(
        [
            F.relu, F.gelu, torch.tanh, torch.sigmoid, F.silu, F.leaky_relu, F.softplus, F.elu, F.selu, F.hardtanh,
            F.logsigmoid, F.softsign, F.tanhshrink, torch.sin, lambda x: x.clamp(-1, 1), lambda x: x.abs().sqrt(),
            lambda x: F.softmax(x, -1), lambda x: F.log_softmax(x, 1), lambda x: x * torch.sigmoid(x), torch.exp,
            lambda x: (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1), lambda x: x.square() + x,
            lambda x: F.normalize(x, dim=1), lambda x: x.cumsum(-1) * 0.1, lambda x: x - x.detach() * 0.5,
            lambda x: x.pow(3) * 0.1, lambda x: torch.where(x > 0, x, x * 0.3), lambda x: torch.hypot(x, x + 1),
            lambda x: torch.maximum(x, x.flip(-1)), lambda x: x.sort(-1).values, lambda x: x.roll(1, -1),
            lambda x: F.rrelu(x, training=True), lambda x: F.dropout(x, 0.3), lambda x: F.alpha_dropout(x, 0.2),
            lambda x: x + torch.randn_like(x) * 0.1, lambda x: x * torch.rand(x.shape[-1], dtype=x.dtype),
        ]
    )  # fmt: skip
    return Layer(lambda s, x: function(x))


def _in_place(draw: random.Random, at: int) -> nn.Module:
    function = draw.choice(
        [
            lambda x: x.mul_(0.7), lambda x: x.add_(0.5), lambda x: F.relu(x, inplace=True), torch.Tensor.tanh_,
            lambda x: x.clamp_(min=-1), lambda x: x.masked_fill_(x > 1, 0.5), lambda x: x.div_(3).sub_(0.1),
            lambda x: F.leaky_relu(x, 0.1, inplace=True), lambda x: x.addcmul_(x.detach(), x.detach(), value=0.1),
            lambda x: F.dropout(x, 0.4, inplace=True), lambda x: x.sigmoid_(), lambda x: x.lerp_(x.detach() * 2, 0.3),
        ]
    )  # fmt: skip
    scale = draw.uniform(0.5, 1.5)
    return Layer(lambda s, x: function(x * scale))


def _writes_a_part(draw: random.Random, at: int) -> nn.Module:
    def function(_: Any, x: torch.Tensor) -> torch.Tensor:
        y = x * 1.5
        if kind == "slice":
            y[..., 1:3] = x[..., :2].tanh()
        elif kind == "row":
            y[0].mul_(0.5)
        elif kind == "index":
            y[:, 0] = y[:, 1].detach() + x[:, 2]
        else:
            y[..., ::2].add_(x[..., ::2].sin())
        return y

    kind = draw.choice(["slice", "row", "index", "strided"])
    return Layer(function)


def _turn(draw: random.Random, at: int) -> nn.Module:
    how = draw.choice(
        [
            lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
            lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1),
            lambda x: x.flip(0).contiguous(),
            lambda x: torch.stack(x.unbind(0)),
            lambda x: torch.cat(x.chunk(2, -1)[::-1], -1),
            lambda x: x.reshape(x.shape[0], -1).t().contiguous().t().reshape(x.shape),
            lambda x: x.expand(2, *x.shape).mean(0),
            lambda x: x.unfold(-1, 1, 1).squeeze(-1),
            lambda x: F.pad(x, (1, 1))[..., 1:-1],
        ]
    )
    return Layer(lambda s, x: how(x))


def _buffer(draw: random.Random, at: int) -> nn.Module:
    class Running(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x + self.mean
            if before:
                y = y * self.mean
            self.mean.mul_(0.9).add_(x.detach().mean() * 0.1)
            return y * (1 + self.mean)

    before = draw.random() < 0.5
    return Running()


def _batch_norm(draw: random.Random, at: int) -> nn.Module:
    made = {1: nn.BatchNorm1d, 3: nn.BatchNorm2d}
    kind = made[1] if at != -3 else made[3]
    norm = kind(FEATURES, affine=draw.random() < 0.8, track_running_stats=draw.random() < 0.8)
    if at == -1:
        return Layer(lambda s, x: s.n(x.flatten(0, -2)).view(x.shape), n=norm)
    return norm


def _parameter(draw: random.Random, at: int) -> nn.Module:
    kind = draw.choice(["scale", "mix", "einsum"])
    weight = nn.Parameter(
        torch.linspace(0.5, 1.5, FEATURES) if kind == "scale" else torch.eye(FEATURES) * 0.9
    )

    def function(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = x.movedim(at, -1)
        if kind == "scale":
            y = y * self.w + self.w.sum() * 0.01
        elif kind == "mix":
            y = y @ (self.w + self.w.t())
        else:
            y = torch.einsum("...i,ij->...j", y, self.w)
        return y.movedim(-1, at)

    return Layer(function, w=weight)


# layers for one kind of data


def _attention(draw: random.Random, at: int) -> nn.Module:
    if draw.random() < 0.5:
        made = nn.MultiheadAttention(FEATURES, 2, dropout=draw.choice([0.0, 0.2]), batch_first=True)
        return Layer(lambda s, x: s.a(x, x, x, need_weights=False)[0], a=made)
    causal = draw.random() < 0.5

    def function(self: Any, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.a(x).unflatten(-1, (3, 2, FEATURES // 2)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return self.b(y.transpose(1, 2).flatten(2))

    return Layer(function, a=nn.Linear(FEATURES, 3 * FEATURES), b=nn.Linear(FEATURES, FEATURES))


def _conv1d(draw: random.Random, at: int) -> nn.Module:
    groups, mode = draw.choice([1, 2, 8]), draw.choice(["zeros", "circular", "reflect"])
    made = nn.Conv1d(FEATURES, FEATURES, 3, padding=1, groups=groups, padding_mode=mode)
    return Layer(lambda s, x: s.c(x.transpose(1, 2)).transpose(1, 2), c=made)


def _conv2d(draw: random.Random, at: int) -> nn.Module:
    kernel, dilation = draw.choice([(1, 1), (3, 1), (3, 2), (5, 1)])
    mode = draw.choice(["zeros", "zeros", "circular", "reflect", "replicate"])
    return nn.Conv2d(
        FEATURES, FEATURES, kernel, padding=dilation * (kernel // 2), dilation=dilation,
        groups=draw.choice([1, 1, 2, 8]), bias=draw.random() < 0.7, padding_mode=mode,
    )  # fmt: skip


def _down_and_up(draw: random.Random, at: int) -> nn.Module:
    down = draw.choice(
        [
            nn.MaxPool2d(2),
            nn.AvgPool2d(2),
            nn.Conv2d(FEATURES, FEATURES, 3, stride=2, padding=1),
            nn.AdaptiveAvgPool2d(4),
        ]
    )
    up = draw.choice(
        [
            nn.Upsample(scale_factor=2),
            nn.Upsample(scale_factor=2, mode="bilinear"),
            nn.ConvTranspose2d(FEATURES, FEATURES, 2, 2),
        ]
    )
    return nn.Sequential(down, up)


def _group_norm(draw: random.Random, at: int) -> nn.Module:
    return (
        nn.GroupNorm(draw.choice([1, 2, 4]), FEATURES)
        if draw.random() < 0.7
        else nn.InstanceNorm2d(FEATURES, affine=True)
    )


def _patches(draw: random.Random, at: int) -> nn.Module:
    return Layer(lambda s, x: F.fold(F.unfold(x, 3, padding=1), x.shape[2:], 3, padding=1) / 9)


def _channels(draw: random.Random, at: int) -> nn.Module:
    made = draw.choice([nn.Dropout2d(0.3), nn.PReLU(FEATURES), nn.ChannelShuffle(2), nn.LocalResponseNorm(2)])
    return Layer(lambda s, x: s.a(x), a=made)


ANY = (_linear, _mlp, _layer_norm, _rms_norm, _activation, _activation, _in_place, _writes_a_part, _turn, _buffer, _batch_norm, _parameter)  # fmt: skip
OWN = {
    "rows": (),
    "sequence": (_attention, _attention, _conv1d),
    "image": (_conv2d, _conv2d, _conv2d, _down_and_up, _group_norm, _patches, _channels),
}


# losses: what the model gives, and a target


def _loss(draw: random.Random, kind: str) -> tuple[str, Callable[..., torch.Tensor], Callable[..., Any]]:
    """A name, the loss of a result and a target, and how to make a target for results of a shape."""

    def like(shape: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype)

    def share(shape: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.rand(shape, dtype=dtype)

    def classes(shape: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.randint(shape[1], (shape[0], *shape[2:]))

    smooth, reduction = draw.choice([0.0, 0.1]), draw.choice(["mean", "sum"])
    losses = {
        "mse": (lambda y, t: F.mse_loss(y, t, reduction=reduction), like),
        "l1": (lambda y, t: F.l1_loss(y, t, reduction=reduction), like),
        "huber": (lambda y, t: F.huber_loss(y, t, reduction=reduction), like),
        "smooth l1": (lambda y, t: F.smooth_l1_loss(y, t, reduction=reduction), like),
        "square": (lambda y, t: (y - t).square().mean(), like),
        "soft margin": (lambda y, t: F.soft_margin_loss(y, t.sign(), reduction=reduction), like),
        "bce": (lambda y, t: F.binary_cross_entropy(torch.sigmoid(y), t, reduction=reduction), share),
        "bce logits": (lambda y, t: F.binary_cross_entropy_with_logits(y, t, reduction=reduction), share),
        "kl": (lambda y, t: F.kl_div(F.log_softmax(y, 1), F.softmax(t, 1), reduction="batchmean"), like),
        "cross entropy": (
            lambda y, t: F.cross_entropy(y, t, label_smoothing=smooth, reduction=reduction, ignore_index=3), classes,
        ),
        "nll": (lambda y, t: F.nll_loss(F.log_softmax(y, 1), t), classes),
        "sum": (lambda y, t: (y * t).sum() / t.numel(), like),
        "norm": (lambda y, t: (y - t).norm() + y.mean(), like),
        "logsumexp": (lambda y, t: (y * t).logsumexp(-1).mean(), like),
    }  # fmt: skip
    name = draw.choice(sorted(losses))
    return (f"{name} ({reduction})", *losses[name])


def _laid_out(draw: random.Random) -> tuple[str, Callable[[torch.Tensor], torch.Tensor]]:
    """A way for an input to lie in memory."""
    ways = {
        "contiguous": lambda x: x,
        "transposed": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2) if x.dim() > 1 else x,
        "channels last": lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1) if x.dim() > 2 else x,
        "a part of more": lambda x: torch.stack([x, x, x])[1],
        "every second": lambda x: torch.stack([x, x], -1)[..., 0],
    }
    name = draw.choice(["contiguous", *ways])
    return name, ways[name]


def random_step(number: int) -> Step:
    """The step of a number."""
    draw = random.Random(f"step {number}")
    kind = draw.choice(sorted(SIZES))
    at = {"rows": -1, "sequence": -1, "image": -3}[kind]
    choices = ANY + OWN[kind] * 2
    makers = [draw.choice(choices) for _ in range(draw.randint(2, 7))]
    seed, dtype = draw.randrange(1 << 30), draw.choice(TYPES)
    name, loss, target = _loss(draw, kind)
    layout, lay_out = _laid_out(draw)
    rows, wants = draw.choice([2, 4, 6]), draw.random() < 0.3
    skips = {k: draw.randrange(k + 1) for k in range(len(makers)) if draw.random() < 0.25}
    frozen = {k for k in range(len(makers)) if draw.random() < 0.1}
    autocast = dtype is torch.float32 and draw.random() < 0.15
    outside, tied = draw.random() < 0.15, draw.random() < 0.1

    def build() -> nn.Module:
        own = random.Random(seed)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            layers = [nn.Sequential(_linear(own, at))] + [make(own, at) for make in makers]
            if tied:
                layers.append(layers[0])
            return Chain(layers, skips, frozen).to(dtype)

    def batch() -> tuple[Any, ...]:
        x = lay_out(torch.randn(rows, *SIZES[kind]).to(dtype)).requires_grad_(wants)
        return (x, target((rows, *SIZES[kind]), dtype))

    def whole(model: nn.Module, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = model(x)
        return loss(y.to(x.dtype), t)

    def result(model: nn.Module, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return model(x)

    layers = ", ".join(make.__name__.strip("_") for make in makers)
    precision = "autocast" if autocast else str(dtype).removeprefix("torch.")
    words = f"{kind}, {layout}, {precision}: {layers}; {'loss outside' if outside else name}"
    return Step(build, batch, result if outside else whole, dtype, words, outside)
