"""What a function says about gradients beside its operators: a step of tiles would lose it, and says so."""

import inspect

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lowtide.errors import CaptureError
from lowtide.trace.step.capture import capture
from lowtide.trace.tiles.tiling import Tiling


def detached_in_place(model, x):
    y = model(x).detach_()  # here
    return (y * model(x)).sum()


def taken(model, x):
    y = model(x).data  # here
    return (y * model(x)).sum()


class Fivefold(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 5


def own(model, x):
    y = Fivefold.apply(model(x))  # here
    return y.sum()


def hooked(model, x):
    y = model(x)
    y.register_hook(lambda gradient: gradient * 2)  # here
    return y.sum()


def checkpointed(model, x):
    y = checkpoint(model, x, use_reentrant=False)  # here
    return y.sum()


def plain(model, x):
    return (torch.tanh(model(x)) * x).sum()


SAID = {
    detached_in_place: "it calls detach_",
    taken: "it calls _get_data_attr",
    own: "it has a part with rules of its own (autograd_function_apply)",
    hooked: "it has a part with rules of its own (register_hook)",
}


def captured(function):
    torch._dynamo.reset()
    return capture(function, nn.Linear(4, 4), torch.randn(6, 4)).joint


@pytest.mark.parametrize("function", SAID)
def test_marks_of_a_function_stand_against_tiles(function):
    joint = captured(function)
    assert SAID[function] in joint.marks
    with pytest.raises(CaptureError) as caught:
        Tiling(joint)
    lines, first = inspect.getsourcelines(function)
    here = first + next(k for k, line in enumerate(lines) if line.endswith("# here\n"))
    assert str(caught.value).endswith(f" {__file__}:{here}")


@pytest.mark.parametrize("function", [plain, checkpointed])
def test_a_function_without_marks_can_be_cut(function):
    joint = captured(function)
    assert joint.marks is None
    assert Tiling(joint).axes == (6, 4)
