"""The gradients of the uses of an input, and strides in which gradients arrive."""

import torch
from torch._functorch.partitioners import default_partition

from lowtide.torch_internals import aot_autograd
from lowtide.trace.step.boundary import Arriving, Boundary, return_uses, traced_with, uses_apart


def joint_of(function, *inputs, boundary=None):
    """The joint graph of a function with one result."""
    found = []

    def partition(joint, given, **options):
        found.append(joint)
        return default_partition(joint, given, **options)

    def backend(module, inputs):
        with traced_with(boundary or Boundary()):
            return aot_autograd(fw_compiler=lambda module, _: module, partition_fn=partition)(module, inputs)

    torch.compile(function, backend=backend, fullgraph=True)(*inputs)
    return found[0]


def leaf(*shape):
    return torch.randn(*shape, requires_grad=True)


def test_each_use_of_an_input_has_a_gradient_in_the_order_of_autograd():
    def function(x, y):
        z = x + 1  # hands on a sum of its own: that is one use of x
        return z.sin() * z.cos() + x.exp() + y.tanh()

    joint = joint_of(function, leaf(3), leaf(3))
    (uses,) = uses_apart(joint, 1).values()
    assert [str(one.target) for one in uses] == ["aten.mul.Tensor", "aten.add.Tensor"]
    assert "lowtide" not in str(joint.graph)
    assert return_uses(joint, 1, {0: uses}) == [0]
    _, first, _, other = joint.graph.output_node().args[0]
    assert [first, other] == uses


def test_inputs_that_are_used_once_have_one_gradient():
    joint = joint_of(lambda x, y: (x * y).sin() + 1, leaf(3), leaf(3))
    before = str(joint.graph)
    assert uses_apart(joint, 1) == {}
    assert str(joint.graph) == before


def test_gradients_are_traced_in_the_strides_in_which_they_arrive():
    boundary = Boundary(arriving={0: Arriving((3, 4), (1, 3))}, incoming=1)
    joint = joint_of(lambda x: x.sin(), leaf(3, 4), boundary=boundary)
    (given,) = [one for one in joint.graph.nodes if one.name.startswith("tangents")]
    assert given.meta["val"].stride() == (1, 3)


def test_the_order_of_axes_holds_for_other_shapes():
    known = Arriving((4, 8, 16), (128, 1, 8))
    assert known.at((4, 8, 16)) == (128, 1, 8)
    assert known.at((2, 5, 3)) == (15, 1, 5)
    assert known.at((2, 5)) is None


def test_gradients_that_somebody_else_takes_meanwhile_are_left_alone():
    """As those of a small step, by which libraries take the memory that they keep."""
    x = leaf(3)
    with traced_with(Boundary()):
        (found,) = torch.autograd.grad((x * x).sum(), x)
    assert torch.equal(found, 2 * x)
