"""Products with rows that are not whole get columns of zeros, which nobody sees."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from lowtide.trace.eager.layouts import fake_arguments, learned
from lowtide.trace.groups.functions import values_of
from lowtide.trace.groups.padded import Product, in_padded, products
from tests.trace.groups.test_channels_last import captured


def head(x, weight, bias):
    return functional.linear(x, weight, bias).float().logsumexp(-1).mean()


def operands(inward=16, outward=13, dtype=torch.bfloat16):
    torch.manual_seed(0)
    shapes = (4, 6, inward), (outward, inward), (outward,)
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def faked(function, *given):
    """The function as Dynamo hands it over, and fake tensors for its inputs."""
    module, inputs = captured(function, *given)
    return module, fake_arguments(learned().mode(), inputs)


def changed(function, *given):
    """The function with everything padded that can be."""
    module, inputs = faked(function, *given)
    return in_padded(module, inputs, set(products(values_of(module, inputs)).values()))


@pytest.mark.parametrize(("inward", "outward"), [(16, 13), (11, 16), (11, 13)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_loss_and_gradients_are_the_same_up_to_rounding(inward, outward, dtype):
    given = operands(inward, outward, dtype)
    module, pieces = changed(head, *given)
    (pieces,) = pieces.values()
    assert pieces[-1].target is functional.linear
    assert all(one.target is torch.constant_pad_nd for one in pieces[:-1])
    one = head(*given)
    (other,) = module(*given)
    torch.testing.assert_close(one, other)
    pairs = zip(torch.autograd.grad(one, given), torch.autograd.grad(other, given), strict=True)
    for expected, got in pairs:
        assert got.shape == expected.shape
        torch.testing.assert_close(expected, got)


def test_rows_that_are_whole_stay_as_they_are():
    assert changed(head, *operands(16, 24)) is None
    assert changed(head, *operands(4, 12, torch.float32)) is None
    assert changed(lambda *given: head(*given).double(), *operands(3, 5, torch.float64)) is None


def test_the_features_decide_and_not_the_rows():
    module, inputs = faked(head, *operands())
    (found,) = products(values_of(module, inputs)).values()
    assert found == Product(16, 13, torch.bfloat16)
    assert found.missing == (0, 3)
    assert in_padded(module, inputs, [Product(16, 12, torch.bfloat16)]) is None
    assert in_padded(module, inputs, [found]) is not None


def test_autocast_decides_what_a_row_is():
    def cast(*given):
        with torch.autocast("cpu", torch.bfloat16):
            return head(*given)

    given = operands(16, 12, torch.float32)
    module, pieces = changed(cast, *given)
    assert pieces
    torch.testing.assert_close(cast(*given), module(*given)[0])


def test_a_weight_that_is_read_twice_is_padded_once():
    def twice(x, weight, bias):
        return head(x, weight, bias) + head(x.tanh(), weight, bias)

    module, _ = changed(twice, *operands())
    assert [node.target for node in module.graph.nodes].count(torch.constant_pad_nd) == 2, "weight and bias"


@pytest.mark.parametrize(
    "function",
    [
        functional.linear,
        lambda *given: functional.dropout(functional.linear(*given), 0.5).float().sum(),
        lambda *given: functional.linear(*given).view(-1).float().sum(),
        lambda *given: functional.linear(*given).as_strided((2, 2), (1, 1)).float().sum(),
    ],
    ids=["returned", "random", "view", "strides"],
)
def test_what_sees_the_rows_keeps_them(function):
    assert changed(function, *operands()) is None


def test_a_weight_of_one_row_stays_as_it_is():
    """Of a vector, ``linear`` gives no features."""

    def scored(x, weight, bias, vector):
        return head(x, weight, bias) + functional.linear(x, vector).float().mean()

    module, inputs = faked(scored, *operands(11, 13), torch.randn(11).bfloat16())
    (found,) = products(values_of(module, inputs)).values()
    assert found == Product(11, 13, torch.bfloat16)
    assert in_padded(module, inputs, [found]) is not None


def test_parameters_of_modules_are_padded_too():
    model = nn.Sequential(nn.Linear(16, 13), nn.GELU(), nn.Linear(13, 16)).bfloat16()
    x = torch.randn(6, 16, dtype=torch.bfloat16)
    _, pieces = changed(lambda x: model(x).float().square().mean(), x)
    assert len(pieces) == 2
