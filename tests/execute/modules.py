"""Small steps, each the smallest that has one feature of PyTorch in it.

A case says how to build its model and its batch, which function is compiled, and how a step of training
goes about it. Sizes are as small as the operators allow.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

__all__ = ["CASES", "Case"]


@dataclass(frozen=True)
class Case:
    """One small step."""

    build: Callable[[], nn.Module]
    batch: Callable[[], tuple[Any, ...]]
    forward: Callable[..., Any]
    """``forward(model, *batch)``: what is compiled."""
    drive: Callable[..., Iterator[Any]]
    """``drive(step, model, batch)``: one step of training with ``step`` for ``forward``; gives what to compare."""
    whole: bool = True
    """Whether torch can capture the function as one graph; if not, it compiles the parts that it can."""


CASES: dict[str, Case] = {}


def call(model, *batch):
    return model(*batch)


def objective(outputs: Any) -> Tensor | None:
    """A loss that gives every element of every differentiable output a gradient of its own."""
    terms = []
    for k, output in enumerate(pytree.tree_leaves(outputs)):
        if isinstance(output, Tensor) and output.requires_grad:
            weights = torch.linspace(0.5, 1.5, output.numel(), device=output.device).reshape(output.shape) * (
                k + 1
            )
            terms.append((output.abs() if output.is_complex() else output).mul(weights).sum())
    return torch.stack([term.double() for term in terms]).sum() if terms else None


def once(step, model, batch):
    """Forward, the user's own random numbers, backward."""
    outputs = step(model, *batch)
    yield outputs
    yield torch.rand(3)
    loss = objective(outputs)
    yield loss
    if loss is not None:
        loss.backward()


def case(name, build, *shapes, batch=None, forward=call, drive=once, whole=True):
    """Add a case; ``shapes`` are those of random inputs, which want gradients."""
    if batch is None:

        def batch():
            return tuple(torch.randn(shape, requires_grad=True) for shape in shapes)

    assert name not in CASES
    CASES[name] = Case(build, batch, forward, drive, whole)


class Function(nn.Module):
    """A function with no parameters as a model."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


class With(nn.Module):
    """Named parts, and a function of the model and its inputs as forward."""

    def __init__(self, function, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.function = function

    def forward(self, *inputs):
        return self.function(self, *inputs)


def numbers(below, *shape):
    return torch.randint(below, shape)


def real(*shape, grad=True, dtype=torch.float32):
    return torch.randn(shape, requires_grad=grad, dtype=dtype)


# Dropout and other random operators.

case(
    "dropout, three times",
    lambda: nn.Sequential(
        nn.Dropout(0.5), nn.Linear(6, 8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 4), nn.Dropout(0.1)
    ),
    (5, 6),
)
case(
    "dropout as a function, of channels, of activations, alpha",
    lambda: With(
        lambda m, x: F.feature_alpha_dropout(
            F.alpha_dropout(F.dropout2d(m.conv(F.dropout(x, 0.4)), 0.5), 0.3), 0.3
        ),
        conv=nn.Conv2d(2, 4, 3),
    ),
    (2, 2, 6, 6),
)
case(
    "dropout of bfloat16, and with another layout",
    lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.Dropout(0.1), nn.Conv2d(4, 4, 1), nn.Dropout2d(0.3)).to(
        torch.bfloat16, memory_format=torch.channels_last
    ),
    batch=lambda: (torch.randn(2, 2, 6, 6).to(torch.bfloat16, memory_format=torch.channels_last),),
)
case(
    "dropout in attention",
    lambda: With(
        lambda m, x: F.scaled_dot_product_attention(m.q(x), m.k(x), m.v(x), dropout_p=0.3, is_causal=True),
        q=nn.Linear(4, 4),
        k=nn.Linear(4, 4),
        v=nn.Linear(4, 4),
    ),
    (2, 2, 5, 4),
)
case(
    "random numbers made in the step",
    lambda: With(
        lambda m, x: (
            m.linear(x + 0.1 * torch.randn(x.shape, device=x.device)) * torch.rand_like(x),
            torch.bernoulli(torch.sigmoid(x)) * x,
            F.rrelu(x, training=True),
            torch.normal(x.detach(), 0.5) * x,
            x[torch.randperm(4, device=x.device)],
            F.gumbel_softmax(x),
            torch.randint_like(x, 5) * x,
        ),
        linear=nn.Linear(4, 4),
    ),
    (4, 4),
)


def also_without_gradients(step, model, batch):
    """The step, then the same without gradients."""
    yield from once(step, model, batch)
    with torch.no_grad():
        yield step(model, *batch)
    yield torch.rand(3)


case(
    "a random number nobody uses",
    lambda: With(
        lambda m, x: (
            (torch.rand(3), m.linear(F.dropout(x, 0.5)))[1] + torch.zeros(4, device=x.device).uniform_()
        ),
        linear=nn.Linear(4, 4),
    ),
    (4, 4),
    drive=also_without_gradients,
)


class Straight(torch.autograd.Function):
    """Rounds; its gradient is masked by random numbers drawn in forward, which only backward reads."""

    @staticmethod
    def forward(ctx, x):
        mask = torch.rand_like(x)
        ctx.save_for_backward(x, mask)
        return x.round()

    @staticmethod
    def backward(ctx, gradient):
        x, mask = ctx.saved_tensors
        return gradient * (mask > 0.5) * x.cos()


class Stashed(torch.autograd.Function):
    """Keeps a tensor on ctx without save_for_backward, and draws random numbers in backward."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.kept = x.exp()
        ctx.scale = scale
        ctx.save_for_backward(x)
        return x.sin() * scale, x.cos()

    @staticmethod
    def backward(ctx, first, second):
        (x,) = ctx.saved_tensors
        return first * ctx.kept * ctx.scale + second * x * torch.rand_like(x), None


case(
    "custom autograd function with random numbers for backward",
    lambda: With(
        lambda m, x: m.out(F.dropout(Straight.apply(m.linear(x)))),
        linear=nn.Linear(4, 4),
        out=nn.Linear(4, 2),
    ),
    (3, 4),
)
case(
    "custom autograd function with a tensor kept on ctx",
    lambda: With(lambda m, x: Stashed.apply(F.dropout(m.linear(x)), 2.5), linear=nn.Linear(4, 4)),
    (3, 4),
)

# Normalisation.

case(
    "batch norm 2d and dropout",
    lambda: nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.Conv2d(4, 2, 3)
    ),
    (3, 2, 7, 7),
)
case(
    "batch norm 1d, without statistics, without affine, frozen",
    lambda: nn.Sequential(
        nn.BatchNorm1d(4),
        nn.Linear(4, 5),
        nn.BatchNorm1d(5, track_running_stats=False),
        nn.BatchNorm1d(5, affine=False),
        nn.BatchNorm1d(5).eval(),
    ),
    (6, 4),
)
case(
    "batch norm with a cumulative average, which reads a number from a tensor",
    lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 4)),
    (6, 4),
    whole=False,
)
case(
    "one batch norm used twice",
    lambda: With(lambda m, x: m.norm(m.linear(m.norm(x))), norm=nn.BatchNorm1d(4), linear=nn.Linear(4, 4)),
    (6, 4),
)
case(
    "layer, group, instance and RMS norm",
    lambda: nn.Sequential(
        nn.Conv1d(4, 6, 3),
        nn.GroupNorm(3, 6),
        nn.InstanceNorm1d(6, affine=True, track_running_stats=True),
        nn.LayerNorm(8),
        nn.RMSNorm(8),
        nn.LayerNorm((6, 8), elementwise_affine=False),
        nn.LocalResponseNorm(2),
    ),
    (2, 4, 10),
)

# Layers.

case(
    "embedding with padding, and a bag",
    lambda: With(
        lambda m, i: m.linear(m.embedding(i)).tanh() + m.bag(i)[:, None],
        embedding=nn.Embedding(9, 6, padding_idx=2),
        bag=nn.EmbeddingBag(9, 5),
        linear=nn.Linear(6, 5),
    ),
    batch=lambda: (numbers(9, 3, 7),),
)


class Recurrent(nn.Module):
    """LSTM and GRU cells by hand, over a few instants."""

    def __init__(self, wide=4):
        super().__init__()
        self.gates = nn.Linear(2 * wide, 4 * wide)
        self.reset = nn.Linear(2 * wide, 2 * wide)
        self.new = nn.Linear(2 * wide, wide)

    def forward(self, x):
        h = c = g = x.new_zeros(x.shape[1:])
        for now in x.unbind(0):
            i, f, o, n = self.gates(torch.cat([now, h], 1)).chunk(4, 1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(n)
            h = torch.sigmoid(o) * torch.tanh(c)
            r, z = torch.sigmoid(self.reset(torch.cat([now, g], 1))).chunk(2, 1)
            g = z * g + (1 - z) * torch.tanh(self.new(torch.cat([now, r * g], 1)))
        return h, c, g


case("recurrent cells by hand", Recurrent, (3, 2, 4))


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True)
        self.register_buffer("mask", torch.triu(torch.ones(4, 4, dtype=torch.bool), 1))

    def forward(self, x):
        return self.attention(x, x, x, attn_mask=self.mask, need_weights=True)


case("multi-head attention with weights and a mask", Attending, (2, 4, 8))
case(
    "transformer layer",
    lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True, norm_first=True),
    (2, 4, 8),
)
case(
    "attention without dropout and with a float mask that wants gradients",
    lambda: Function(lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, attn_mask=mask)),
    (1, 2, 4, 4),
    (1, 2, 4, 4),
    (1, 2, 4, 4),
    (4, 4),
)
case(
    "convolutions: 1d, 2d, 3d, groups, dilation, stride, circular padding",
    lambda: With(
        lambda m, x: (m.one(x.flatten(2)), m.three(m.two(m.depthwise(x)).unflatten(1, (2, 2)))),
        one=nn.Conv1d(4, 4, 3, groups=4, padding=2, padding_mode="circular"),
        depthwise=nn.Conv2d(4, 8, 3, groups=4, dilation=2, padding=2),
        two=nn.Conv2d(8, 4, 3, stride=2, bias=False),
        three=nn.Conv3d(2, 2, (1, 2, 2), padding="same"),
    ),
    (2, 4, 7, 7),
)
case(
    "transposed convolutions",
    lambda: nn.Sequential(
        nn.ConvTranspose2d(3, 4, 3, stride=2, padding=1, output_padding=1),
        nn.GELU(),
        nn.ConvTranspose2d(4, 2, 2, groups=2, dilation=2),
        nn.Flatten(2),
        nn.ConvTranspose1d(2, 2, 3),
    ),
    (2, 3, 4, 4),
)
case(
    "pools: with indices and unpooled, average, adaptive, fractional, power",
    lambda: Function(
        lambda x: (
            F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2),
            F.avg_pool2d(x, 3, 2, 1),
            F.adaptive_avg_pool2d(x, (3, 2)),
            F.adaptive_max_pool2d(x, 3),
            F.fractional_max_pool2d(x, 2, output_size=3),
            F.lp_pool2d(x.abs(), 2, 2),
        )
    ),
    (2, 3, 6, 6),
)
case(
    "upsampling and pixel shuffle",
    lambda: Function(
        lambda x: (
            F.interpolate(x, scale_factor=2, mode="nearest"),
            F.interpolate(x, size=(7, 5), mode="bilinear", align_corners=True),
            F.interpolate(x, scale_factor=1.5, mode="bicubic"),
            F.pixel_shuffle(x, 2),
            F.pad(x, (1, 2, 0, 1), mode="reflect"),
            F.grid_sample(x, x.permute(0, 2, 3, 1)[..., :2].tanh(), align_corners=False),
        )
    ),
    (2, 4, 4, 4),
)
case(
    "activations",
    lambda: With(
        lambda m, x: (
            m.prelu(F.gelu(x, approximate="tanh"))
            + F.glu(torch.cat([F.silu(x), F.mish(x)], 1))
            + F.softplus(F.elu(x)) * F.hardswish(x) * F.leaky_relu(x).clamp(-1, 1).sqrt().nan_to_num()
        ),
        prelu=nn.PReLU(4),
    ),
    (3, 4),
)

# Shapes and views.

case(
    "cat, stack, split, chunk, unbind, views, transposes, expand",
    lambda: With(
        lambda m, x: (
            torch.cat([p.t() @ q for p, q in zip(x.split([1, 3]), m.linear(x).split([1, 3]), strict=True)]),
            torch.stack(x.chunk(2, 1)).transpose(0, 2).reshape(4, -1),
            sum(x.unbind(1)).view(2, 2).expand(3, 2, 2).permute(2, 0, 1).contiguous(),
            torch.einsum("ij,kj->ik", x, x.narrow(0, 1, 2)).squeeze().unsqueeze(0).flip(1).roll(1, 1),
            x.unfold(1, 3, 1).movedim(0, 2).diagonal().tril().cumsum(0),
        ),
        linear=nn.Linear(6, 6),
    ),
    (4, 6),
)
case(
    "outputs that are inputs, views of inputs and views of each other",
    lambda: With(
        lambda m, x, y, z: (
            x.view(-1)[2:],
            (h := m.linear(x)),
            h.t(),
            h[0],
            y,
            y.detach(),
            z.expand(2, 3),
            m.shift,
        ),
        linear=nn.Linear(4, 4),
        shift=nn.Parameter(torch.ones(2)),
    ),
    (3, 4),
    (2,),
    (3,),
)

# In place.

case(
    "modules in place",
    lambda: nn.Sequential(
        nn.Linear(4, 6),
        nn.ReLU(inplace=True),
        nn.Linear(6, 6),
        nn.Dropout(0.3, inplace=True),
        nn.Linear(6, 6),
        nn.SELU(inplace=True),
    ),
    (3, 4),
)


def written_over(model, x):
    h = model.linear(x)
    h.add_(1).mul_(x.detach())
    h[:, 1:3] = x[:, :2]
    h[0].neg_()
    view = h.view(-1)
    view[::2].mul_(0.5)
    h += view.view_as(h).sigmoid()
    h.t()[1:].sub_(x.t()[1:])
    filled = torch.zeros_like(h)
    filled.copy_(h).clamp_(max=1)
    return h.masked_fill_(x > 1, 0.25), filled, h.t()


case("in place on activations and on views", lambda: With(written_over, linear=nn.Linear(4, 4)), (3, 4))


def changes_input(model, x, state):
    before = model.linear(torch.tanh(x + state))
    state.mul_(0.9).add_(x.detach().mean(0))
    return before * x + model.linear(x * state) + state.exp()


case(
    "an input that is changed in place",
    lambda: With(changes_input, linear=nn.Linear(4, 4)),
    batch=lambda: (real(3, 4), real(4, grad=False)),
)


def changes_shared(model, row, column):
    row.mul_(2)
    column.add_(row.sum())
    return model.linear(row + column), row


def on_one_storage():
    table = torch.randn(4, 4)
    return table[1], table[:, 2]


case(
    "inputs on one storage, changed in place",
    lambda: With(changes_shared, linear=nn.Linear(4, 4)),
    batch=on_one_storage,
)
case(
    "the only result is changed in place by the user",
    lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)),
    (3, 4),
    drive=lambda step, model, batch: once(lambda *a: step(*a).add_(1).mul_(2), model, batch),
)

# Losses.

case(
    "cross-entropy with ignored labels and label smoothing",
    lambda: With(
        lambda m, x, y: (
            F.cross_entropy(m.linear(x), y, ignore_index=-1, label_smoothing=0.1)
            + F.cross_entropy(m.linear(x), y, ignore_index=-1, weight=m.weight, reduction="sum")
        ),
        linear=nn.Linear(4, 5),
        weight=nn.Parameter(torch.linspace(0.5, 1, 5), requires_grad=False),
    ),
    batch=lambda: (real(6, 4), numbers(6, 6) - 1),
)
case(
    "softmax, log softmax and other losses",
    lambda: With(
        lambda m, x, y, i: (
            F.nll_loss(F.log_softmax(m.linear(x), 1), i)
            + F.mse_loss(x.softmax(0), y)
            + F.smooth_l1_loss(x, y)
            + F.huber_loss(x, y, delta=0.5)
            + F.binary_cross_entropy_with_logits(x, y.sigmoid().detach())
            + F.kl_div(x.log_softmax(1), y.softmax(1), reduction="batchmean")
            + F.cosine_embedding_loss(x, y, i * 2 - 1)
            + torch.logsumexp(x, 1).mean()
            + x.norm()
        ),
        linear=nn.Linear(4, 4),
    ),
    batch=lambda: (real(3, 4), real(3, 4), numbers(2, 3)),
)
case(
    "a loss that wants no gradient",
    lambda: With(lambda m, x: m.linear(F.dropout(x)).mean(), linear=nn.Linear(4, 4).requires_grad_(False)),
    batch=lambda: (real(3, 4, grad=False),),
)

# Number types and layouts.


def under_autocast(step, model, batch):
    with torch.autocast("cpu", torch.bfloat16):
        outputs = step(model, *batch)
    yield outputs
    loss = objective(outputs)
    yield loss
    loss.backward()


def autocast_inside(model, x):
    with torch.autocast("cpu", torch.bfloat16):
        h = model[:3](x)
    return model[3:](h.float())


def mixed():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3),
        nn.BatchNorm2d(4),
        nn.Dropout(0.2),
        nn.Flatten(),
        nn.Linear(16, 4),
        nn.LayerNorm(4),
    )


case("autocast to bfloat16 around the step", mixed, (2, 2, 4, 4), drive=under_autocast)
case("autocast to bfloat16 inside the step", mixed, (2, 2, 4, 4), forward=autocast_inside)
case(
    "channels last",
    lambda: nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 4, 3),
        nn.GroupNorm(2, 4),
    ).to(memory_format=torch.channels_last),
    batch=lambda: (torch.randn(2, 3, 8, 8).contiguous(memory_format=torch.channels_last).requires_grad_(),),
)
case(
    "double precision and complex numbers",
    lambda: With(
        lambda m, x, z: (
            m.linear(x),
            torch.fft.irfft(torch.fft.rfft(m.linear(x)) * z).float(),
            z * z.conj(),
            torch.view_as_real(z.exp()),
            torch.linalg.solve(x.t() @ x + torch.eye(4, device=x.device), x[0]),
        ),
        linear=nn.Linear(4, 4).double(),
    ),
    batch=lambda: (real(3, 4, dtype=torch.float64), real(3, dtype=torch.complex128)),
)
case(
    "half precision parameters",
    lambda: nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2)).bfloat16(),
    batch=lambda: (real(3, 4, dtype=torch.bfloat16),),
)

# Parameters.


class Tied(nn.Module):
    """Embedding and output share their weight; one layer is used twice; one is never used."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.layer = nn.Linear(4, 4)
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.layer(self.layer(self.embedding(tokens)).tanh()))


case("tied, shared and unused parameters", Tied, batch=lambda: (numbers(7, 2, 3),))


def partly_frozen():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    model[2].weight.requires_grad_(False)
    model[3].bias.requires_grad_(False)
    return model


case("frozen parameters", partly_frozen, batch=lambda: (real(3, 4, grad=False),))
case("a step without parameters", lambda: Function(lambda x, y: (x @ y).softmax(1)), (3, 4), (4, 2))
case(
    "parameters in lists and dicts, a weight made from others",
    lambda: With(
        lambda m, x: F.linear(x @ m.list[0] + m.dict["shift"], m.norm.weight * m.list[1], m.norm.bias),
        list=nn.ParameterList([nn.Parameter(torch.eye(4)), nn.Parameter(torch.ones(3, 1))]),
        dict=nn.ParameterDict({"shift": nn.Parameter(torch.zeros(4))}),
        norm=nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)),
    ),
    (2, 4),
)

# What goes in and comes out.

Pair = namedtuple("Pair", ["first", "second"])


@dataclass
class Results:
    loss: Tensor
    parts: dict[str, Any]


pytree.register_dataclass(Results)

case(
    "several outputs: tuple, dict, named tuple, nothing, numbers",
    lambda: With(
        lambda m, x: {
            "logits": m.linear(x),
            "pair": Pair(x.sum(), [m.linear.weight.norm(), None, 3]),
            "hard": x.argmax(1),
            "twice": ((h := x.exp()), h),
        },
        linear=nn.Linear(4, 4),
    ),
    (3, 4),
)
case(
    "a dataclass comes out",
    lambda: With(
        lambda m, x: Results(m.linear(x).mean(), {"x": x * 2, "top": x.topk(2)}), linear=nn.Linear(4, 4)
    ),
    (3, 4),
)
case(
    "dicts, tuples, lists and plain numbers go in",
    lambda: With(
        lambda m, batch, pair, scale, flag, name: (
            m.linear(batch["x"]) * scale + pair[0] if flag and name == "sum" else pair[1][0]
        ),
        linear=nn.Linear(4, 4),
    ),
    batch=lambda: ({"x": real(3, 4), "unused": real(2)}, (real(4), [real(1), None]), 0.5, True, "sum"),
)
case(
    "Python numbers that are others at each step",
    lambda: With(
        lambda m, x, scale, power: m.linear(x * scale).tanh() * power + x.clamp(-scale, scale) ** power,
        linear=nn.Linear(4, 4),
    ),
    batch=lambda: (real(3, 4), torch.rand(()).item(), torch.randint(2, 5, ()).item()),
)
case(
    "integers, booleans and indices",
    lambda: With(
        lambda m, i, mask: m.table[i].masked_fill(mask[..., None], 0) * i[..., None] + (i % 3 == 1).sum(),
        table=nn.Parameter(torch.linspace(-1, 1, 20).view(5, 4)),
    ),
    batch=lambda: (numbers(5, 3, 2), torch.rand(3, 2) > 0.5),
)
case(
    "gathers and scatters",
    lambda: Function(
        lambda x, i: (
            x.gather(1, i),
            x.scatter(1, i, x.exp()),
            x.scatter_add(1, i, x * 2),
            x.scatter_reduce(1, i, x, "amax"),
            torch.zeros_like(x).index_add(0, i[:, 0], x),
            x.index_select(0, i[0]),
            x[i[0], i[1]],
            x.index_put((i[0],), x[0], accumulate=True),
            torch.where(x > 0, x, x.take_along_dim(i, 1)),
            x.sort(1)[0] * x.kthvalue(2, 1)[0][:, None],
            x.cummax(1)[0] + x.amax(0) + x.median(),
        )
    ),
    batch=lambda: (real(3, 3), numbers(3, 3, 3)),
)
case(
    "constants written in the code",
    lambda: Function(
        lambda x: x * torch.tensor([1.0, -2.0, 3.0], device=x.device) + torch.arange(3, device=x.device)
    ),
    (2, 3),
)
case(
    "empty tensors and tensors of one number",
    lambda: Function(lambda x, e: (x * 2, torch.cat([e, x[None]]).sum(), e.exp())),
    (),
    (0,),
)

case(
    "sparse gradients",
    lambda: With(lambda m, i: m.table(i).sum(1), table=nn.Embedding(9, 3, sparse=True)),
    batch=lambda: (numbers(9, 2, 3),),
)

# Buffers of the user's.


class Counting(nn.Module):
    """Buffers that forward changes, by assignment and in place, and reads before and after."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("average", torch.zeros(4))
        self.register_buffer("last", torch.zeros(3, 4))
        self.register_buffer("fixed", torch.linspace(0, 1, 4))

    def forward(self, x):
        before = torch.tanh(x + self.average + self.calls)
        self.calls += 1
        self.average.lerp_(x.detach().mean(0), 0.1)
        self.last = x.detach() * 2
        return self.linear(before + self.average * x / self.calls) * self.fixed


case("buffers that forward changes", Counting, (3, 4))


def clamps(model, x):
    before = model.linear.weight.sum(0).tanh()
    with torch.no_grad():
        model.linear.weight.clamp_(-0.1, 0.1)
    return model.linear(x * before).tanh()


case("a parameter that forward changes", lambda: With(clamps, linear=nn.Linear(4, 4)), (3, 4))

# Checkpoints of the user's.

case(
    "a checkpoint with dropout inside",
    lambda: With(
        lambda m, x: m.last(checkpoint(m.block, m.first(x), use_reentrant=False)),
        first=nn.Linear(4, 4),
        block=nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 4)),
        last=nn.Linear(4, 4),
    ),
    (3, 4),
)

# How the step is called.


def noisy():
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Tanh(), nn.Linear(6, 2))


def accumulated(step, model, batch):
    """Several forward calls, one backward of the sum."""
    losses = [step(model, part).square().mean() for part in batch]
    yield losses
    sum(losses).backward()


def several_backwards(step, model, batch):
    """Gradients add up over several backward calls."""
    for part in batch:
        loss = step(model, part).square().mean()
        yield loss
        loss.backward()
        yield torch.rand(2)


def other_order(step, model, batch):
    """Two forwards alive; the first one's backward runs last."""
    first, second = (step(model, part) for part in batch)
    yield first, second
    torch.rand(1)
    second.square().mean().backward()
    torch.randn(1)
    first.exp().sum().backward()


def evaluated_between(step, model, batch):
    """Evaluation without gradients, in both modes, between the forward and the backward of a step."""
    out = step(model, batch[0])
    model.eval()
    with torch.no_grad():
        yield step(model, batch[1])
    yield step(model, batch[1])
    model.train()
    with torch.no_grad():
        yield step(model, batch[1])
    with torch.inference_mode():
        yield step(model, batch[1].detach()) * 2
    out.square().sum().backward()


def gradients_asked_for(step, model, batch):
    """torch.autograd.grad for some of the leaves; hooks on parameters and outputs."""
    seen = []
    handle = model[0].weight.register_hook(lambda g: seen.append(g.clone()))
    out = step(model, batch[0])
    out.register_hook(lambda g: g * 2)
    yield torch.autograd.grad(out.sum(), [model[0].weight, batch[0]])
    yield seen
    handle.remove()


def twice(*shape):
    return lambda: tuple(real(*shape) for _ in range(2))


def one_input(model, x):
    return model(x)


case("several forward calls before one backward", noisy, batch=twice(5, 4), drive=accumulated)
case("several backward calls", noisy, batch=twice(5, 4), drive=several_backwards)
case("backward calls in the other order", noisy, batch=twice(5, 4), drive=other_order)
case("evaluation with the same model", noisy, batch=twice(5, 4), drive=evaluated_between)
case("gradients of some leaves, and hooks", noisy, batch=twice(5, 4), drive=gradients_asked_for)


def partly_without_gradient(model, x):
    with torch.no_grad():
        target = model[:2](x)
    return F.mse_loss(model(x), target.mean(1, keepdim=True).expand(-1, 2)) + target.sum()


case("no_grad inside the step", noisy, (5, 4), forward=partly_without_gradient)
case(
    "functional gradient of a copy of the model",
    lambda: With(
        lambda m, x: torch.func.functional_call(
            m.linear, {"weight": m.linear.weight * 2, "bias": m.linear.bias}, (x,)
        ),
        linear=nn.Linear(4, 4),
    ),
    (3, 4),
)
