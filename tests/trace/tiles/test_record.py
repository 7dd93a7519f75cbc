"""What is recorded of a graph is what AOTAutograd traces of it."""

import msgspec
import pytest
import torch
from torch import fx, nn
from torch._subclasses import FakeTensorMode

from lowtide import zoo
from lowtide.errors import CaptureError
from lowtide.graph import Graph, Phase, Role
from lowtide.trace.eager.layouts import Layouts
from lowtide.trace.step.capture import capture
from lowtide.trace.step.joint import Joint, Leaf
from lowtide.trace.tiles import differentiate
from lowtide.trace.tiles.differentiate import Example, Forward, differentiated, evaluated
from lowtide.trace.tiles.loop import looped
from lowtide.trace.tiles.record import recorded
from lowtide.trace.tiles.tiling import Tiling

aten = torch.ops.aten


def aot_alone(monkeypatch):
    monkeypatch.setattr(differentiate, "_record", lambda *_: False)


def compared(graph: Graph) -> Graph:
    """Without what AOTAutograd says in another way.

    It calls inputs of forward alone otherwise, and the result of the loop without its gradient, says of all sums of gradients that they belong to the last
    operator of forward and to no module, has other strides than eager PyTorch for expanded dimensions of one element, and does
    not know which operators around the tiles run in place.
    """
    ops = []
    for op in graph.ops:
        pairs = zip(op.strides, op.inputs, strict=True)
        strides = tuple(strides_of(graph.tensors[t].shape, strides) for strides, t in pairs)
        told = "" if op.kind == "aten.add" else op.differentiates
        name = "" if op.kind == "aten.add" and op.phase is Phase.BACKWARD else op.name
        changed = {"strides": strides, "differentiates": told, "name": name, "in_place": False}
        changed["id"] = called(op.id)
        ops.append(msgspec.structs.replace(op, **changed))
    tensors = [
        msgspec.structs.replace(
            one, id=f"input {k}" if one.id.startswith(("primals_", "arg")) else called(one.id)
        )
        for k, one in enumerate(graph.tensors)
    ]
    return msgspec.structs.replace(graph, tensors=tuple(tensors), ops=tuple(ops))


def called(name):
    return "detach" if name.startswith("detach_") else name


def strides_of(shape, strides):
    return [stride for size, stride in zip(shape, strides, strict=True) if size > 1]


def told(joint: Joint) -> list:
    """Everything of a captured step but the nodes, which are new each time."""
    values = [(v.shape, strides_of(v.shape, v.stride()), v.dtype, v.device) for v in joint.values]
    targets = [one.source if hasattr(one.target, "_schema") else type(one.target) for one in joint.calls]
    calls = [(target, one.results, one.several) for target, one in zip(targets, joint.calls, strict=True)]
    sides = joint.inputs, joint.tangents, joint.outputs, joint.gradients, joint.plain
    return [compared(joint.graph), values, calls, sides, sorted(joint.constants)]


def bodies(whole: Joint) -> list[Joint]:
    """The step around its loops, and what is inside of them."""
    inside = [one for call in whole.calls for one in getattr(call.target, "bodies", ())]
    return [whole, *(found for one in inside for found in bodies(one))]


@pytest.mark.parametrize(
    ("target", "parts", "end"),
    [
        ("unet:base=2,batch=1,size=188", (1, 1, 2), ""),
        ("vgg16body:batch=1,size=64,width=2", (1, 3, 3), ""),
        ("vgg16body:batch=2,size=32,width=2", (2, 1, 2, 2), "convolution_13"),
        ("gpt2:batch=2,layers=1,width=32,heads=4,length=16,vocab=64", (2,), ""),
        ("alexnet:batch=4,size=67", (2, 1, 1, 1), ""),
        ("convpool", (1, 1, 2, 2), ""),
    ],
)
def test_tiles_are_the_same_as_by_aot_autograd(target, parts, end, monkeypatch):
    torch._dynamo.reset()
    built = zoo.build(target)
    joint = capture(built.loss, built.model, *built.batch).joint
    boxes = Tiling(joint, end=end).boxes(parts)
    with monkeypatch.context() as without:
        without.setattr(differentiate, "aot_autograd", None)  # all of it is recorded
        found = looped(joint, boxes, end=end)
    aot_alone(monkeypatch)
    for mine, theirs in zip(bodies(found), bodies(looped(joint, boxes, end=end)), strict=True):
        assert told(mine) == told(theirs)


def graph_of(function, *shapes):
    """A graph of ATen operators, with examples that have gradients."""
    graph = fx.Graph()
    given = [graph.placeholder(f"x{k}") for k in range(len(shapes))]
    graph.output(function(graph, *given))
    examples = [
        Example(shape, torch.empty(shape).stride(), torch.float32, torch.device("cpu"), True)
        for shape in shapes
    ]
    return graph, examples, [Leaf(f"x{k}", Role.INPUT) for k in range(len(shapes))]


def is_recorded(graph, examples):
    mode = FakeTensorMode()
    with mode:
        inputs = [torch.empty(one.shape, requires_grad=one.differentiable) for one in examples]
    return recorded(graph, nn.Module(), inputs, mode, Layouts()) is not None


def written_over(graph, x):
    square = graph.call_function(aten.mul.Tensor, (x, x))
    return (graph.call_function(aten.add_.Tensor, (square, 1)),)


def own_memory(graph, x):
    square = graph.call_function(aten.mul.Tensor, (x, x))
    return square, graph.call_function(aten.view.default, (square, [6]))


def an_input(graph, x):
    return (graph.call_function(aten.view.default, (x, [6])),)


def a_number(graph, x):
    most = graph.call_function(aten.max.default, (x,))
    item = graph.call_function(aten._local_scalar_dense.default, (most,))
    return (graph.call_function(aten.mul.Tensor, (x, item)),)


@pytest.mark.parametrize("function", [written_over, own_memory])
def test_what_only_aot_autograd_can_put_right_is_left_to_it(function, monkeypatch):
    graph, examples, leaves = graph_of(function, (2, 3))
    assert not is_recorded(graph, examples)
    found = differentiated(Forward(graph, examples, leaves, Layouts()))
    aot_alone(monkeypatch)
    assert told(found) == told(differentiated(Forward(graph, examples, leaves, Layouts())))


def test_a_result_that_is_an_input_has_no_backward():
    graph, examples, leaves = graph_of(an_input, (2, 3))
    assert not is_recorded(graph, examples)
    with pytest.raises(CaptureError, match="nothing that has a gradient"):
        differentiated(Forward(graph, examples, leaves, Layouts()))


def test_numbers_read_from_tensors_are_not_recorded():
    graph, examples, _ = graph_of(a_number, (2, 3))
    assert not is_recorded(graph, examples)


def test_forward_alone_is_recorded_too(monkeypatch):
    graph, examples, leaves = graph_of(
        lambda g, x, y: (g.call_function(aten.mm.default, (x, y)),), (2, 3), (3, 2)
    )
    assert is_recorded(graph, examples)
    found = evaluated(Forward(graph, examples, leaves, Layouts()))
    assert [op.kind for op in found.graph.ops] == ["aten.mm"]
    aot_alone(monkeypatch)
    assert told(found) == told(evaluated(Forward(graph, examples, leaves, Layouts())))


def test_a_graph_without_gradients_has_no_backward():
    graph, examples, leaves = graph_of(lambda g, x: (g.call_function(aten.sign.default, (x,)),), (2, 3))
    plain = [one._replace(differentiable=False) for one in examples]
    with pytest.raises(CaptureError, match="nothing that has a gradient"):
        differentiated(Forward(graph, plain, leaves, Layouts()))


def test_autocast_around_it_changes_nothing():
    graph, examples, leaves = graph_of(
        lambda g, x, y: (g.call_function(aten.mm.default, (x, y)),), (2, 3), (3, 2)
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = differentiated(Forward(graph, examples, leaves, Layouts()))
    assert {value.dtype for value in found.values} == {torch.float32}
    assert {op.kind for op in found.graph.ops if op.inputs} == {"aten.mm", "aten.t"}
