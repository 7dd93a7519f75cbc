"""Small captured steps of torch, run by any Program without torch.compile, and what eager PyTorch gives for them."""

import copy
import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from lowtide.execute.compile.bits import same_bits
from lowtide.execute.runtime.interpreter import Interpreter
from lowtide.execute.tiling.regions import middles
from lowtide.trace.step.capture import capture
from lowtide.trace.step.joint import Joint
from lowtide.trace.tiles.tiling import Tiling
from tests.execute.tiling.tiles import owning, program_of


class Noisy(nn.Module):
    """Dropout, BatchNorm, operators that can run in place."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)

    def forward(self, x):
        y = F.dropout(torch.tanh(self.norm(self.first(x))), 0.4)
        z = F.dropout((y * 1.5 - x).exp(), 0.3)
        return self.second(z + y)


class Counting(nn.Module):
    """Buffers that forward changes, and reads before and after, under views too."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("average", torch.linspace(0.5, 1, 6))
        self.register_buffer("table", torch.linspace(1, 2, 12))

    def forward(self, x):
        before = torch.tanh(x + self.average + self.calls)
        shown = torch.tanh(before + self.table.view(2, 6)[1])
        self.calls += 1
        self.average.lerp_(x.detach().mean(0), 0.1)
        self.table.mul_(1.5)
        return self.linear(shown * (before + self.average)) * self.table.view(2, 6)[0].sum()


class Marked(torch.autograd.Function):
    """Backward adds to a buffer."""

    @staticmethod
    def forward(ctx, x, buffer):
        ctx.buffer = buffer
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        ctx.buffer.add_(gradient.mean())
        return gradient * 2, None


class Watched(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        return Marked.apply(torch.sigmoid(self.linear(x)), self.seen).cos()


class Image(nn.Module):
    """Convolutions and operators that can run in place; the result has the size of the image."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.three = (nn.Conv2d(2, 2, 3, padding=1) for _ in range(3))

    def forward(self, x):
        a = F.relu(self.one(x))
        b = torch.sigmoid(self.two(a))
        return self.three((b - a * 1.5).exp() - b)


class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = F.dropout(torch.tanh(layer(x)), 0.2) + x
        return x


class Classes(nn.Module):
    """A loss of the batch alone, with an image in front of it."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 2, 3, 2)
        self.last = nn.Linear(60, 3)

    def forward(self, x):
        return self.last(self.two(F.dropout(F.gelu(self.one(x)), 0.2)).flatten(1))


def squared(model, x):
    return model(x).square().mean()


@dataclass(frozen=True)
class Subject:
    """A captured step, the values that go into it, and the Program that runs it plainly, where it is in tiles."""

    joint: Joint
    values: tuple
    tiles: object = None

    def run(self, program):
        """Results, gradients, inputs and random state after a step by a Program."""
        interpreter = Interpreter(self.joint, program)
        joint = self.joint
        given = [value.clone() if isinstance(value, torch.Tensor) else value for value in self.values]
        torch.manual_seed(7)
        with torch.no_grad():
            found = interpreter.forward(list(given))
            count = len(joint.outputs)
            results, passed = found[:count], found[count:]
            del found
            seen = [None if one is None else one.clone() for one in results]
            tangents = [torch.full_like(results[0], 1.25)]
            gradients = interpreter.backward([*passed, *tangents])
        return [*seen, *results, *gradients, *given, torch.get_rng_state()]


def alike(one, other, tolerance=0.0):
    """Whether two steps left the same behind, bit for bit or nearly."""
    for a, b in zip(one, other, strict=True):
        if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
            if a is not b and a != b:
                return False
        elif tolerance and a.is_floating_point():
            if not torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True):
                return False
        elif not same_bits(a, b):
            return False
    return True


MODELS = {
    "noisy": (Noisy, (8, 6)),
    "counting": (Counting, (4, 6)),
    "watched": (Watched, (4, 6)),
    "image": (Image, (2, 2, 6, 6)),
    "rows": (Rows, (8, 6)),
    "classes": (Classes, (3, 2, 14, 12)),
}
"""How to build each, and the shape of its input."""


def _outside(joint):
    return {"end": _before_the_loss(joint)}


TILED = {
    "rows in tiles": ("rows", (4,), lambda _: {}),
    "image in tiles": ("image", (1, 1, 2, 2), lambda _: {}),
    "image outside": ("image", (1, 1, 2, 1), _outside),
    "image owned": ("image", (1, 1, 1, 2), lambda joint: _outside(joint) | {"own": owning((2, 1))(joint)}),
    "tiles in tiles": ("classes", (3,), lambda _: {"inner": _in_strips}),
}
"""The step that is cut, into how many parts of each axis, and how."""


def _in_strips(joint):
    """A loop inside a tile, over two strips of an image."""
    end = middles(joint)[-1]
    return end, Tiling(joint, (), end).boxes((1, 1, 1, 2))


@functools.cache
def captured(name):
    build, shape = MODELS[name]
    torch.manual_seed(3)
    model, x = build(), torch.randn(shape, requires_grad=True)
    torch._dynamo.reset()
    joint = capture(squared, model, x).joint
    named = dict(model.named_parameters()) | dict(model.named_buffers()) | {"x": x}
    values = tuple(named[joint.graph.tensors[t].name].detach() for t in joint.inputs)
    return model, x, Subject(joint, values)


@functools.cache
def subject(name):
    """A captured step, whole or in tiles."""
    if name in MODELS:
        return captured(name)[2]
    whole, parts, how = TILED[name]
    step = captured(whole)[2]
    program, cut = program_of(step.joint, parts, **how(step.joint))
    return Subject(cut, step.values, program)


def _before_the_loss(joint):
    """The tensor that the loss is made from."""
    return joint.graph.tensors[next(op for op in joint.graph.ops if op.kind == "aten.pow").inputs[0]].id


def eager(name):
    """The loss, what eager PyTorch leaves behind by name, and its random state."""
    model, x, _ = captured(name)
    model, x = copy.deepcopy(model), x.detach().clone().requires_grad_()
    torch.manual_seed(7)
    loss = squared(model, x)
    (loss * 1.25).backward()
    left = {name: p.grad for name, p in model.named_parameters()} | dict(model.named_buffers())
    return loss.detach(), left | {"x": x.grad}, torch.get_rng_state()
