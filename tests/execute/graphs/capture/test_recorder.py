"""What a recorder is shown: operators one by one, and those of a group as one."""

import pytest
import torch
from torch import fx

from lowtide.execute.graphs.capture import recorder
from lowtide.execute.graphs.capture.operator_parts import parts_of
from lowtide.graph import Graph
from lowtide.trace.step.group import Group


class _Counted(recorder._Operators):
    def __init__(self):
        super().__init__("cpu")
        self.seen = []

    def operator(self, number, call, parts):
        self.seen.append(number)
        return call()


def test_operators_of_a_group_are_one():
    body = fx.Graph()
    x = body.placeholder("x")
    body.output((body.call_function(torch.sin, (body.call_function(torch.cos, (x,)),)),))
    group = Group(fx.GraphModule({}, body), Graph(name="", ops=(), tensors=()))
    counted = _Counted()
    with counted.watching([group]):
        x = torch.ones(3)
        y = group(x)[0] + 1
    assert torch.equal(y, x.cos().sin() + 1)
    assert counted.seen == [1, 2, 3]
    assert group.measured is None
    group(x)
    assert counted.seen == [1, 2, 3]


@pytest.mark.parametrize("mask", [[True] * 3, [True, True, False]])
@pytest.mark.parametrize("by_name", [False, True])
def test_the_backward_of_a_convolution_has_the_same_bits_in_parts(mask, by_name):
    backward = torch.ops.aten.convolution_backward.default
    x, weight, gradient = torch.randn(2, 3, 9, 9), torch.randn(4, 3, 3, 3), torch.randn(2, 4, 4, 4)
    args = (gradient, x, weight, [4], [2, 2], [0, 0], [1, 1], False, [0, 0], 1)
    args, kwargs = (args, {"output_mask": mask}) if by_name else ((*args, mask), {})
    whole = backward(*args, **kwargs)
    parts = parts_of(backward, args, kwargs)
    found = [call() for call in parts.calls]
    assert [[one is not None for one in result] for result in found] == [
        [True, False, False],
        [False, *mask[1:]],
    ]
    for one, other in zip(whole, parts.together(found), strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


def test_other_operators_are_called_as_a_whole():
    backward = torch.ops.aten.convolution_backward.default
    assert parts_of(torch.ops.aten.add.Tensor, (1, 2), {}) is None
    assert parts_of(backward, (None,) * 10, {"output_mask": [False, True, True]}) is None
