"""Steps captured from PyTorch in the formats of other frameworks: all that a format can hold, the rest by name."""

import re

import pytest
import torch

import lowtide
from lowtide import zoo
from lowtide.errors import ConvertError
from lowtide.formats import chainer
from lowtide.graph import RESIDENT_ROLES, Graph, Op, Phase, Role, Tensor

NETWORKS = (
    "unet",
    "gpt2",
    "alexnet",
    "convpool",
    "resnet50-inference",
)


@pytest.fixture(scope="module", params=NETWORKS)
def step(request):
    torch._dynamo.reset()
    built = zoo.build(zoo.small(request.param))
    with torch.set_grad_enabled(built.trains):
        return lowtide.capture(built.loss, built.model, *built.batch).step


def there_and_back(step, name, folder):
    written = lowtide.write(step, name, folder / "out")
    back = lowtide.read(folder / "out")
    assert back.format.name == name
    return back.step.graph, written.losses


def of_phase(graph, phase):
    return [op for op in graph.ops if op.phase is phase]


def test_a_chainer_graph_holds_forward_and_says_so(step, tmp_path):
    back, losses = there_and_back(step, "chainer", tmp_path)
    ops = of_phase(step.graph, Phase.FORWARD)
    assert [op.kind for op in back.ops] == [op.kind for op in ops]
    for one, other in zip(back.ops, ops, strict=True):
        assert [back.tensors[t].bytes for t in one.inputs] == [
            step.graph.tensors[t].bytes for t in other.inputs
        ]
        made = [step.graph.tensors[t] for t in other.outputs]
        assert [back.tensors[t].bytes for t in one.outputs] == [
            t.bytes for t in made if t.role not in RESIDENT_ROLES
        ]
    over = sum(step.graph.tensors[t].role in RESIDENT_ROLES for op in ops for t in op.outputs)
    assert any(loss.startswith(f"{over} leaves that operators write over") for loss in losses) == bool(over)
    for role in (Role.INPUT, Role.ACTIVATION):
        made = {t for op in ops for t in (*op.inputs, *op.outputs)}
        wanted = [
            t.bytes
            for k, t in enumerate(step.graph.tensors)
            if t.role is role and (k in made or t.role in RESIDENT_ROLES)
        ]
        assert [t.bytes for t in back.tensors if t.role is role] == wanted
    backward = len(of_phase(step.graph, Phase.BACKWARD))
    said = [loss for loss in losses if loss.startswith(f"all {backward} operators of backward")]
    assert bool(said) == bool(backward)


def test_a_megengine_profile_holds_every_operator_and_tensor(step, tmp_path):
    back, losses = there_and_back(step, "megengine", tmp_path)
    graph = step.graph
    assert [(op.id, op.kind, op.inputs, op.outputs) for op in back.ops] == [
        (op.id, op.kind, op.inputs, op.outputs) for op in graph.ops
    ]
    assert [(t.id, t.bytes, t.shape) for t in back.tensors] == [
        (t.id, t.bytes, t.shape) for t in graph.tensors
    ]
    if of_phase(graph, Phase.BACKWARD):
        assert "phases: all operators are read back as forward" in losses
    assert any(re.match(r"\d+ views: without an address", loss) for loss in losses)


def test_a_tensorflow_list_holds_a_line_an_operator(step, tmp_path):
    back, losses = there_and_back(step, "tensorflow", tmp_path)
    graph = step.graph
    assert len(back.ops) == len(graph.ops)
    text = (tmp_path / "out").read_text()
    assert len(text.splitlines()) == len(graph.ops)
    for wanted in ("which tensor each one reads", "all outputs but the first of", "views that share storage"):
        assert any(wanted in loss for loss in losses), wanted


X, Y = Tensor("x", 4, Role.INPUT), Tensor("y", 4)
FORWARD = Op("f", "k", inputs=(0,), outputs=(1,))


@pytest.mark.parametrize(
    ("more", "backward"),
    [
        ((Tensor("mask", 4),), Op("b", "k", Phase.BACKWARD, inputs=(1,), outputs=(2,))),
        (
            (Tensor("g", 4, Role.GRADIENT, gradient_of=0), Tensor("gg", 4, Role.GRADIENT, gradient_of=2)),
            Op("b", "k", Phase.BACKWARD, inputs=(1,), outputs=(2, 3)),
        ),
        (
            (Tensor("tangent", 4, Role.GRADIENT), Tensor("g", 4, Role.GRADIENT, gradient_of=0)),
            Op("b", "k", Phase.BACKWARD, inputs=(1, 2), outputs=(3,)),
        ),
    ],
    ids=["no gradient", "gradient of a gradient", "incoming gradient of nothing"],
)
def test_a_backward_that_a_chainer_graph_cannot_hold_is_left_out_and_named(more, backward):
    written = chainer.write(lowtide.Step(Graph((X, Y, *more), (FORWARD, backward))))
    odd = next(t.id for t in more if t.id != "g")
    assert (
        f"all 1 operators of backward and what they write: 1 values there, '{odd}' the first"
        in (written.losses[-1])
    )
    back = chainer.read(written.data).graph
    assert [op.kind for op in back.ops] == ["k"]
    assert [t.bytes for t in back.tensors] == [4, 4]
    alone = lowtide.Step(Graph((X, Y, *more), (backward,)))
    with pytest.raises(ConvertError, match="a Chainer graph cannot hold this step"):
        chainer.write(alone)
