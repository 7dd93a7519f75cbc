"""``capture`` gives the whole step as data, and leaves no trace."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from lowtide.errors import CaptureError
from lowtide.graph import Phase, Role
from lowtide.trace.step.capture import capture


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def network():
    return nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.ReLU(), nn.Linear(6, 2))


def loss_of(model, x):
    return model(x).square().mean()


def test_a_loss_is_captured_with_its_backward():
    model = network()
    captured = capture(loss_of, model, torch.randn(5, 3))
    graph = captured.step.graph
    assert captured.step.format == "capture"
    assert captured.joint.graph is graph
    phases = [op.phase for op in graph.ops]
    assert phases == sorted(phases, key=[Phase.FORWARD, Phase.BACKWARD].index)
    assert set(phases) == {Phase.FORWARD, Phase.BACKWARD}
    assert len(captured.joint.calls) == len(graph.ops)
    parameters = {t.name: t for t in graph.tensors if t.role is Role.PARAMETER}
    assert set(parameters) == {name for name, _ in model.named_parameters()}
    graded = {graph.tensors[t.gradient_of].name for t in graph.tensors if t.gradient_of is not None}
    assert graded == set(parameters)
    assert {t.name for t in graph.tensors if t.role is Role.BUFFER} == {
        name for name, _ in model.named_buffers()
    }
    updated = {graph.tensors[t].name for t in graph.updated}
    assert updated == {name for name, _ in model.named_buffers()}
    assert len(captured.joint.tangents) == 1
    assert graph.tensors[captured.joint.tangents[0]].shape == ()
    assert any(op.random for op in graph.ops)
    assert {op.source.file for op in graph.ops if op.source} == {__file__}


def test_a_module_with_several_results_has_an_incoming_gradient_for_each():
    def several(x, y):
        return {"sum": x + y, "product": (x * y, x.argmax()), "same": y.detach()}

    captured = capture(several, torch.randn(3, requires_grad=True), y=torch.randn(3))
    assert len(captured.joint.tangents) == 2
    assert captured.joint.gradients[1:] == (None,)


@pytest.mark.parametrize("frozen", [True, False])
def test_without_gradients_there_is_no_backward(frozen):
    model = network().requires_grad_(not frozen)
    with torch.set_grad_enabled(frozen):
        captured = capture(model, torch.randn(5, 3))
    assert {op.phase for op in captured.step.graph.ops} == {Phase.FORWARD}
    assert not captured.joint.tangents
    assert not captured.joint.gradients


def test_nothing_changes():
    torch.manual_seed(1)
    model, x = network(), torch.randn(5, 3, requires_grad=True)
    loss_of(model, x).backward()
    before = copy.deepcopy(model), x.detach().clone(), x.grad.clone(), torch.get_rng_state()
    gradients = [p.grad.clone() for p in model.parameters()]
    versions = [t._version for t in (*model.parameters(), *model.buffers())]
    capture(loss_of, model, x)
    capture(model.eval(), x)
    model.train()
    assert versions == [t._version for t in (*model.parameters(), *model.buffers())]
    for one, other in zip(model.state_dict().values(), before[0].state_dict().values(), strict=True):
        assert torch.equal(one, other)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert torch.equal(parameter.grad, gradient)
    assert torch.equal(x, before[1])
    assert torch.equal(x.grad, before[2])
    assert torch.equal(torch.get_rng_state(), before[3])


def test_the_same_function_can_be_captured_often_and_still_runs():
    model = network()
    graphs = [capture(loss_of, model, torch.randn(2 + k, 3)).step.graph for k in range(10)]
    shapes = [next(t.shape for t in graph.tensors if t.role is Role.INPUT) for graph in graphs]
    assert shapes == [(2 + k, 3) for k in range(10)]
    assert capture(loss_of, model, torch.randn(4, 3)).step.graph == graphs[2]
    loss_of(model, torch.randn(4, 3)).backward()


# What cannot be captured.


def branches(model, x):
    y = model(x)
    if y.sum() > 0:
        y = y * 2
    return y


def wrong_size(model, x):
    return model(x) @ torch.ones(7, 7)


def selects(model, x):
    y = model(x)
    return y[y > 0].sum()


def calls_backward(model, x):
    loss = model(x).sum()
    loss.backward()
    return loss


def cumulative(model, x):
    return nn.functional.batch_norm(model(x), None, None, training=True, momentum=1 / float(x.sum()))


@pytest.mark.parametrize(
    ("function", "text", "reason"),
    [
        (branches, "if y.sum()", "Data-dependent branching.*Move it out of the compiled function"),
        (wrong_size, "torch.ones", r"the step fails on these inputs: a and b must have same reduction dim"),
        (selects, "y[y > 0]", "the shape of what aten.index gives depends on values"),
        (calls_backward, "loss.backward()", "Return the loss and call its backward outside"),
        (cumulative, "float(x.sum())", "data-dependent"),
    ],
)
def test_an_error_names_the_line_and_the_way_out(function, text, reason):
    lines = Path(__file__).read_text().splitlines()
    line = next(k for k, one in enumerate(lines, 1) if k >= function.__code__.co_firstlineno and text in one)
    with pytest.raises(CaptureError, match=reason) as caught:
        capture(function, network(), torch.randn(5, 3))
    assert str(caught.value).startswith(f"{__file__}:{line}: ")
    assert "TORCHDYNAMO" not in str(caught.value)


def test_a_function_without_tensors_is_refused():
    with pytest.raises(CaptureError, match="runs no operator on a tensor"):
        capture(lambda: 3)


def test_wrong_arguments_are_the_callers_error():
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        capture(loss_of, network())


def test_a_part_that_is_written_in_place_takes_the_same_bytes_each_time():
    """The second time torch has seen the call before, and says less of the memory under a view."""

    def step(x):
        y = x * 2
        y[:, 1:3] += 1
        return y.square().sum()

    x = torch.randn(64, 64, requires_grad=True)
    first, second = (_captured_anew(step, x) for _ in range(2))
    assert first == second
    gaps = [
        one
        for one in first.tensors
        if one.shape == (64, 2) and one.alias is None and one.id.startswith("copy")
    ]
    assert gaps
    assert {one.bytes for one in gaps} == {x.nbytes}


def _captured_anew(step, x):
    torch._dynamo.reset()
    return capture(step, x).joint.graph
