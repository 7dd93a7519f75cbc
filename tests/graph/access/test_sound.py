"""Operators that cannot have been called as a file says: refused by name, before tiles are made of them."""

import msgspec
import pytest
import torch

from lowtide.errors import GraphError
from lowtide.graph import Graph
from lowtide.graph.access import access, check_calls
from tests.graph.access.probe import Probe, aten

IMAGE, FILTERS = torch.randn(1, 2, 8, 8), torch.randn(3, 2, 3, 3)


def convolution(stride=1, padding=1, dilation=1):
    arguments = (IMAGE, FILTERS, None, [stride] * 2, [padding] * 2, [dilation] * 2, False, [0, 0], 1)
    return Probe(aten.convolution.default, arguments).graph


def other(graph, *, kind=None, arguments=(), shape=None):
    """The same call with another kind, other arguments by their position, or another shape of its result."""
    op = graph.ops[0]
    given = list(op.arguments)
    for position, value in dict(arguments).items():
        given[position] = value
    op = msgspec.structs.replace(op, kind=kind or op.kind, arguments=tuple(given))
    tensors = list(graph.tensors)
    if shape is not None:
        tensors[op.outputs[0]] = msgspec.structs.replace(tensors[op.outputs[0]], shape=shape)
    return Graph(tuple(tensors), (op,))


def pool():
    return Probe(aten.max_pool2d_with_indices.default, (IMAGE, [2, 2], [2, 2])).graph


DAMAGED = {
    "stride of text": other(convolution(), arguments={3: ["x", 1]}),
    "stride of zero": other(convolution(), arguments={3: [0, 0]}),
    "stride that is no list": other(convolution(), arguments={3: 1}),
    "padding without end": other(convolution(), arguments={4: [2**62, 0]}),
    "dilation without end": other(convolution(), arguments={5: [1, 2**40]}),
    "no groups": other(convolution(), arguments={8: 0}),
    "image that is no tensor": other(convolution(), arguments={0: None}, kind="aten.convolution_backward"),
    "kernel between elements": other(pool(), arguments={1: [[1], 2]}),
    "fewer results than it gives": other(pool(), kind="aten.convolution"),
    "another rank": other(convolution(), shape=(3, 8)),
    "another operator": other(convolution(), kind="aten.nll_loss_backward"),
    "a slice with a step between elements": other(
        Probe(aten.slice.Tensor, (IMAGE, 2, 0, 8, 2)).graph, arguments={4: 1.5}
    ),
    "dimensions that are not there": other(
        Probe(aten.permute.default, (IMAGE, [0, 2, 3, 1])).graph, arguments={1: [0, 2]}
    ),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_a_call_that_cannot_be_is_named(what):
    with pytest.raises(GraphError, match=r"operator '\w+' cannot be 'aten\.\w+': its arguments") as caught:
        check_calls(DAMAGED[what])
    assert caught.value.op == 0


@pytest.mark.parametrize("rule", ["flip", "upsample", "pad"])
def test_a_dimension_without_end_is_taken_whole(rule):
    calls = {
        "flip": (aten.flip.default, (IMAGE, [3])),
        "upsample": (aten.upsample_nearest2d.default, (IMAGE, [16, 16])),
        "pad": (aten.reflection_pad2d.default, (IMAGE, [1, 1, 1, 1])),
    }
    graph = other(Probe(*calls[rule]).graph, shape=(1, 2, 8, 2**50))
    if rule == "pad":
        graph = other(graph, arguments={1: [2**50, 0, 0, 0]})
    assert not access(graph, graph.ops[0]).known
    assert check_calls(graph) is graph
