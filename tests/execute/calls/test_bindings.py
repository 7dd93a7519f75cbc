"""The quickest way to an operator is a way to that operator."""

import pytest
import torch

from lowtide.execute.calls.bindings import _AS_THEY_ARE, _OF_TENSORS, quickest
from lowtide.torch_internals import TorchDispatchMode

aten = torch.ops.aten


class Calls(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append((function, args, kwargs or {}))
        return function(*args, **(kwargs or {}))


def tensors_for(target):
    square = torch.rand(3, 3) + 0.5
    if target is aten.bmm.default:
        return [square[None], square[None]]
    count = sum(str(argument.type) == "Tensor" for argument in target._schema.arguments)
    return [square.clone() for _ in range(count)]


@pytest.mark.parametrize("target", [*_OF_TENSORS, *_AS_THEY_ARE, aten._to_copy.default], ids=str)
def test_the_quickest_way_reaches_the_very_operator(target):
    given = {
        aten.native_layer_norm.default: ([torch.rand(2, 3), [3], torch.rand(3), None, 1e-5], {}),
        aten.embedding.default: ([torch.rand(4, 2), torch.tensor([1, 3]), 3], {}),
        aten.sum.dim_IntList: ([torch.rand(2, 3), [0], True], {}),
        aten._to_copy.default: ([torch.rand(2, 3)], {"dtype": torch.float64}),
        aten.convolution.default: (
            [torch.rand(1, 2, 5, 5), torch.rand(3, 2, 3, 3), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1],
            {},
        ),
    }
    args, options = given.get(target) or (tensors_for(target), {})
    graph = torch.fx.Graph()
    nodes = [graph.placeholder(f"x{k}") if isinstance(a, torch.Tensor) else a for k, a in enumerate(args)]
    function, called_with, rest = quickest(target, nodes, options)
    assert function is not target
    places = {id(node): value for node, value in zip(nodes, args, strict=True)}
    copies = {id(a): a.clone() for a in args if isinstance(a, torch.Tensor)}
    with Calls() as calls:
        found = function(*(places.get(id(a), a) for a in called_with), **rest)
    ((reached, reached_args, reached_options),) = calls.seen
    assert reached is target
    wanted = target(*(copies.get(id(a), a) for a in args), **options)
    for one, other in zip(_several(found), _several(wanted), strict=True):
        assert torch.equal(one, other)
        assert (one.dtype, one.stride()) == (other.dtype, other.stride())
    assert [a for a in reached_args if not isinstance(a, torch.Tensor)] == [
        a for a in args if not isinstance(a, torch.Tensor)
    ][: len(reached_args)]
    assert set(reached_options) <= set(options) | {"dtype"}


def _several(value):
    return value if isinstance(value, tuple) else (value,)
