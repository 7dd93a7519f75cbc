"""Convolutions channels-last: the same function, with results laid out as before."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from lowtide.trace.eager.layouts import fake_arguments, learned
from lowtide.trace.groups.channels_last import in_channels_last
from lowtide.trace.groups.functions import values_of


def captured(function, *arguments):
    """The function as Dynamo hands it over, and its inputs."""
    torch._dynamo.reset()
    found = []

    def catch(module, _):
        def run(*inputs):
            found[:] = [module, inputs]
            return module(*inputs)

        return run

    torch.compile(function, backend=catch, fullgraph=True)(*arguments)
    return found


def changed(function, *arguments):
    module, inputs = captured(function, *arguments)
    fakes = fake_arguments(learned().mode(), inputs)
    return module, inputs, fakes, in_channels_last(module, fakes)


CONVOLUTIONS = nn.Sequential(
    nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Conv2d(8, 4, 3)
)


def dropped(x):
    y = CONVOLUTIONS(x)
    return functional.dropout(y, 0.5), y, functional.conv_transpose2d(y, torch.ones(4, 2, 2, 2)).flatten(1)


def test_the_function_is_the_same_and_its_results_lie_as_before():
    torch.manual_seed(0)
    module, inputs, fakes, other = changed(dropped, torch.randn(2, 3, 16, 16))
    inside = [v for v in values_of(other, fakes).values() if isinstance(v, torch.Tensor) and v.dim() == 4]
    assert any(v.is_contiguous(memory_format=torch.channels_last) and not v.is_contiguous() for v in inside)
    results = []
    for one in (module, other):
        torch.manual_seed(1)
        results.append(one(*inputs))
    for a, b in zip(*results, strict=True):
        assert a.stride() == b.stride()
        torch.testing.assert_close(a, b)


def test_of_three_dimensions():
    convolution = nn.Conv3d(2, 4, 3)
    module, inputs, _, other = changed(lambda x: convolution(x).relu(), torch.randn(2, 2, 6, 6, 6))
    torch.testing.assert_close(module(*inputs), other(*inputs))


def test_modes_are_as_before_where_a_function_fails():
    def loss_of(x):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            return CONVOLUTIONS(x).view(2, -1)

    assert changed(loss_of, torch.randn(2, 3, 16, 16))[-1] is None
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.relu(),  # no convolution
        lambda x: CONVOLUTIONS(x).view(2, -1),  # a view that channels-last has not
        lambda x: CONVOLUTIONS(x).as_strided((2,), (1,)),
        lambda x: functional.dropout(CONVOLUTIONS(x), 0.5, inplace=True),
        lambda x: functional.dropout(CONVOLUTIONS(x), 0.5, True, True),
        lambda x: (lambda y: y.bernoulli_(0.5) + y)(CONVOLUTIONS(x).detach()),
        lambda x: torch.vmap(lambda y: CONVOLUTIONS[0](y[None]))(x),
        lambda x: CONVOLUTIONS(x).transpose(1, 2),  # a result in an order of its own
        lambda x: torch.utils.checkpoint.checkpoint(CONVOLUTIONS, x, use_reentrant=False),
    ],
)
def test_what_may_not_be_changed_stays(function):
    assert changed(function, torch.randn(2, 3, 16, 16))[-1] is None
