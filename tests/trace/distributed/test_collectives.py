"""A collective and the wait for it are one operator of a captured step."""

import time

import pytest
import torch
from torch import fx

from lowtide.distributed_internals import tensor_holders
from lowtide.graph import Role
from lowtide.torch_internals import FakeTensorMode
from lowtide.trace.distributed import collectives
from lowtide.trace.distributed.collectives import is_collective, join_waits, lacks_joined_form, name_of
from lowtide.trace.step.joint import Leaf, read_joint

functional, aten = torch.ops._c10d_functional, torch.ops.aten


def with_value(node):
    with FakeTensorMode():
        node.meta["val"] = torch.empty(4, 3)
    return node


@pytest.fixture
def graph():
    """``x`` doubled, reduced over the group with two waits, and another one that nobody waits for."""
    made = fx.Graph()
    x = with_value(made.placeholder("primals_1"))
    twice = with_value(made.call_function(aten.mul.Tensor, (x, 2)))
    start = with_value(made.call_function(functional.all_reduce.default, (twice, "sum", "0")))
    waits = [with_value(made.call_function(functional.wait_tensor.default, (start,))) for _ in range(2)]
    with_value(made.call_function(functional.broadcast.default, (twice, 0, "0")))
    both = with_value(made.call_function(aten.add.Tensor, tuple(waits)))
    made.output((both,))
    return made


def targets(graph):
    return [node.target for node in graph.nodes if node.op == "call_function"]


def test_a_collective_is_joined_with_its_waits(graph):
    join_waits(graph)
    joined = torch.ops.lowtide.all_reduce.default
    expected = [aten.mul.Tensor, joined, torch.ops.lowtide.broadcast.default, aten.add.Tensor]
    assert targets(graph) == expected
    (start,) = graph.find_nodes(op="call_function", target=joined)
    assert start.args[1:] == ("sum", "0")
    assert [node.args for node in graph.find_nodes(op="call_function", target=aten.add.Tensor)] == [
        (start, start)
    ]
    join_waits(graph)
    assert targets(graph) == expected


def test_it_is_an_operator_that_runs_once_and_gives_new_memory(graph):
    join_waits(graph)
    joint = read_joint(fx.GraphModule({}, graph), 1, [Leaf("x", Role.INPUT)])
    by_kind = {op.kind: op for op in joint.graph.ops}
    one = by_kind["lowtide.all_reduce"]
    assert one.once
    assert not one.repeatable
    assert joint.graph.tensors[one.outputs[0]].alias is None
    assert not by_kind["aten.mul"].once
    assert joint.marks == "other processes take part in it (collectives)"


def test_operators_that_talk_to_other_processes_are_known():
    assert name_of(functional.wait_tensor.default) == "wait_tensor"
    assert name_of(torch.ops.lowtide.all_reduce.default) == "all_reduce"
    assert name_of(aten.add.Tensor) is None
    assert name_of(len) is None
    assert is_collective(torch.ops.lowtide.reduce_scatter_tensor.default)
    assert not is_collective(functional.all_reduce.default)
    assert lacks_joined_form(functional.all_reduce_coalesced.default)
    assert not lacks_joined_form(torch.ops.lowtide.all_reduce.default)
    assert not lacks_joined_form(aten.add.Tensor)


def test_tensors_that_somebody_holds_for_a_moment_are_waited_for(monkeypatch):
    tensor, looks = torch.ones(2), []
    monkeypatch.setattr(collectives, "tensor_holders", lambda one: looks.append(one) or 4 - len(looks))
    monkeypatch.setattr(time, "sleep", lambda _: None)
    collectives.let_go(tensor, 1)
    assert len(looks) == 3
    assert tensor_holders(tensor) == 1


def test_objects_that_a_step_returns_pass_through_it():
    made, mesh, other = fx.Graph(), object(), object()
    x = with_value(made.placeholder("primals_1"))
    made.placeholder("primals_2").meta["val"] = mesh
    twice = with_value(made.call_function(aten.mul.Tensor, (x, 2)))
    constant = made.get_attr("mesh")
    made.output((twice, constant, next(node for node in made.nodes if node.name == "primals_2")))
    root = torch.nn.Module()
    root.mesh = other
    joint = read_joint(fx.GraphModule(root, made), 3, [Leaf("x", Role.INPUT), Leaf("mesh", Role.INPUT)])
    assert joint.inputs == (0, None)
    assert joint.outputs == (1, None, None)
    assert joint.objects == {1: other}
    assert joint.passed == {2: 1}
