"""A step traced with symbols is the step of each shape, once their numbers are put in."""

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from lowtide.graph import Role
from lowtide.trace.eager.layouts import learned
from lowtide.trace.shapes.concrete import Concrete, NotConcrete, SymbolicInputs
from lowtide.trace.shapes.template import Template, with_symbols_in_place
from lowtide.trace.step.joint import Leaf, read_joint, read_symbolic


def function(x):
    whole = x.sin()
    part = whole[: x.shape[0] // 2].reshape(-1)
    size = x.shape[0]
    return part * size, torch.full((size,), 1 / size).sum() + whole.t().sum()


LEAVES = [Leaf("x", Role.INPUT)]


def twice(x):
    return (x * torch.cat([x, x]).shape[0],)


def symbolic(x, function=function):
    mode = learned().mode(symbolic=True)
    inputs = SymbolicInputs(mode, [x], [frozenset({0})])
    with mode:
        module = make_fx(function, tracing_mode="real")(*inputs.fakes)
    with_symbols_in_place(module)
    return inputs, module


def alone(x):
    mode = learned().mode()
    with mode:
        return read_joint(make_fx(function)(mode.from_tensor(x)), 2, LEAVES)


def facts(joint):
    tensors = [(t.bytes, t.shape, t.dtype, t.alias) for t in joint.graph.tensors]
    ops = [(op.kind, op.inputs, op.outputs, op.arguments, op.options, op.strides) for op in joint.graph.ops]
    calls = [[a for a in call.args if isinstance(a, int | float | list)] for call in joint.calls]
    layouts = [joint.layout(t) for t in range(len(tensors))]
    values = [(tuple(v.shape), v.stride(), v.untyped_storage().nbytes()) for v in joint.values]
    return tensors, ops, calls, layouts, values


def test_it_is_the_step_that_each_shape_has_by_itself():
    inputs, module = symbolic(torch.randn(8, 3))
    template = Template(read_symbolic(module, 2, LEAVES))
    for rows in (8, 12, 7):
        x = torch.randn(rows, 3)
        made = template.at(Concrete(learned().mode(), inputs.sizes([x])))
        assert facts(made) == facts(alone(x))


def test_nothing_but_tensors_is_left_in_the_graph():
    _, module = symbolic(torch.randn(8, 3), twice)
    targets = [node.target for node in module.graph.nodes if node.op == "call_function"]
    assert targets == [torch.ops.aten.mul.Tensor]  # of the other tensor a size was asked, and no value


def test_sizes_that_torch_treats_otherwise_are_not_put_in():
    inputs, module = symbolic(torch.randn(8, 3))
    template = Template(read_symbolic(module, 2, LEAVES))
    with pytest.raises(NotConcrete):  # half of it is one row
        template.at(Concrete(learned().mode(), inputs.sizes([torch.randn(3, 3)])))


def test_a_number_that_comes_in_is_refused():
    mode = learned().mode(symbolic=True)
    inputs = SymbolicInputs(mode, [torch.randn(8, 3)], [frozenset({0})])
    with mode:
        module = make_fx(lambda x, n: x * n)(inputs.fakes[0], inputs.fakes[0].shape[0])
    with pytest.raises(NotConcrete):
        with_symbols_in_place(module)


def test_values_are_made_when_they_are_asked_for():
    inputs, module = symbolic(torch.randn(8, 3))
    mode = learned().mode()
    made = Template(read_symbolic(module, 2, LEAVES)).at(Concrete(mode, inputs.sizes([torch.randn(6, 3)])))
    assert len(made.values) == len(made.graph.tensors)
    assert made.values[0].shape == (6, 3)
    assert made.values[0] is made.values[0]
    assert [v.fake_mode for v in made.values[:2]] == [mode, mode]
    assert isinstance(made.values[0], torch.Tensor)
    assert not isinstance(made.values[0], nn.Parameter)
