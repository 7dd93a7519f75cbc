import functools
from unittest import mock

import msgspec
import pytest
import torch

from lowtide import zoo
from lowtide.errors import GraphError
from lowtide.graph import Graph, Op, Phase, Rect, Tensor
from lowtide.graph.access import Relation, Same, Whole, access, check_calls
from lowtide.trace.step.capture import capture
from lowtide.zoo import locallyconnected
from tests.graph.access.probe import Probe, aten, tensor

NETWORKS = [
    "unet:base=2,batch=1,size=188",
    "alexnet:batch=1,size=64",
    "gpt2:layers=1,batch=1,width=8,heads=2,length=16,vocab=32",
    "gpt2:layers=1,batch=1,width=8,heads=2,length=16,vocab=32,dropout=10",
    "convpool",
    "locallyconnected:batch=3,size=17,channels=4,classes=10",
    "densenet161:batch=2,size=33,classes=10,growth=8,layers=1",
]


@functools.cache
def step(network):
    with mock.patch.object(locallyconnected, "KERNELS", (3, 2)):  # an operator or two for each of 130 places
        built = zoo.build(network)
    return capture(built.loss, built.model, *built.batch).joint.graph


@pytest.mark.parametrize("network", NETWORKS)
def test_every_operator_of_the_zoo_is_known(network):
    graph = step(network)
    assert check_calls(graph) is graph
    assert {op.kind for op in graph.ops if not access(graph, op).known} == set()
    for op in graph.ops:
        relations = access(graph, op).relations
        assert [r.shape for r in relations] == [graph.tensors[t].shape for t in op.outputs]
        for relation in relations:
            for need, t in zip(relation.needs(Rect.of_shape(relation.shape)), op.inputs, strict=True):
                assert need is None or Rect.of_shape(graph.tensors[t].shape).contains(need)


def test_gradients_of_parameters_are_sums():
    graph = step(NETWORKS[0])
    for op in graph.ops:
        for relation, t in zip(access(graph, op).relations, op.outputs, strict=True):
            if graph.tensors[t].gradient_of is not None:
                assert len(relation.sums) == 3, op.id


def pixels(graph, target, rect):
    """The part of every tensor that is needed for a part of one, through all operators of forward."""
    wanted = {target: rect}
    for op in reversed([op for op in graph.ops if op.phase is Phase.FORWARD]):
        for relation, t in zip(access(graph, op).relations, op.outputs, strict=True):
            if t in wanted:
                for need, k in zip(relation.needs(wanted[t]), op.inputs, strict=True):
                    if need is not None:
                        wanted[k] = wanted[k].hull(need) if k in wanted else need
    return wanted


def test_relations_of_a_network_say_what_its_gradient_says():
    """An element of the image counts for a pixel of the result where the pixel's gradient is not zero."""
    torch.manual_seed(0)
    layers = torch.nn.Sequential(
        torch.nn.Conv2d(1, 2, 3, padding=1), torch.nn.Tanh(), torch.nn.AvgPool2d(2),
        torch.nn.Conv2d(2, 2, 3, stride=2, dilation=2), torch.nn.ConvTranspose2d(2, 1, 3, stride=2),
    )  # fmt: skip
    image = torch.randn(1, 1, 24, 20)
    with torch.no_grad():
        graph = capture(layers, image).joint.graph
    result = next(t for op in graph.ops for t in op.outputs if graph.tensors[t].shape == (1, 1, 9, 7))
    given = next(t for t, one in enumerate(graph.tensors) if one.shape == (1, 1, 24, 20))
    for row, column in ((0, 0), (3, 2), (4, 4), (8, 6)):
        image.grad = None
        layers(image.requires_grad_())[0, 0, row, column].backward()
        rows, columns = image.grad[0, 0].nonzero(as_tuple=True)
        named = pixels(graph, result, Rect((0, 0, row, column), (1, 1, row + 1, column + 1)))[given]
        assert named.lo[2:] == (rows.min(), columns.min())
        assert named.hi[2:] == (rows.max() + 1, columns.max() + 1)


def test_an_unknown_operator_needs_everything():
    probe = Probe(aten.linalg_inv_ex.default, (tensor(3, 3),))
    assert not probe.access.known
    first, second = probe.access.relations
    assert first.inputs == second.inputs == ((Whole(), Whole()),)
    assert first.needs(Rect((0, 0), (1, 1))) == (Rect((0, 0), (3, 3)),)
    assert first.sums == ()


def test_operators_of_others_are_unknown():
    tensors = (Tensor("a", 4, shape=(1,)), Tensor("b", 4, shape=(1,)))
    for kind, fields in (("Relu", {}), ("aten.relu", {}), ("mine.relu", {"arguments": ({"input": 0},)})):
        op = Op("op", kind, inputs=(0,), outputs=(1,), **fields)
        found = access(Graph(tensors, (op,)), op)
        assert not found.known
        assert found.relations[0].inputs == ((Whole(),),)


def test_without_shapes_nothing_is_known():
    probe = Probe(aten.relu.default, (tensor(3, 3),))
    tensors = tuple(msgspec.structs.replace(t, shape=None) for t in probe.graph.tensors)
    found = access(Graph(tensors, (probe.op,)), probe.op)
    assert not found.known
    assert found.relations[0].needs(Rect((), ())) == (Rect((), ()),)


def test_a_part_has_the_rank_of_what_it_is_a_part_of():
    relation = Relation((3, 4), ((Same(0), Same(1)),), ((3, 4),))
    with pytest.raises(GraphError, match=r"shape \(3, 4\) summed over \(\) cannot have 1 and 0 dimensions"):
        relation.needs(Rect((0,), (1,)))
    with pytest.raises(GraphError, match="cannot have 2 and 1 dimensions"):
        relation.needs(Rect((0, 0), (1, 1)), Rect((0,), (1,)))
    with pytest.raises(GraphError, match=r"1 indices for an input of shape \(3, 4\)"):
        Relation((3,), ((Same(0),),), ((3, 4),))


def test_an_empty_part_of_a_sum_needs_nothing():
    relation = Probe(aten.mm.default, (tensor(3, 4), tensor(4, 5))).access.relations[0]
    needs = relation.needs(Rect((0, 0), (3, 5)), Rect((2,), (2,)))
    assert all(need.empty for need in needs)
