"""A library that asks whether it is compiled takes the way that it takes in eager."""

import copy

import pytest
import torch
from torch import nn

import lowtide
from lowtide.execute.compare.compare import compare
from lowtide.plan.program.simple import store_all


class Asking(nn.Module):
    """Computes something else where it is compiled."""

    def __init__(self, question):
        super().__init__()
        self.layer, self.question = nn.Linear(8, 8), question

    def forward(self, x):
        y = self.layer(x)
        return y.tanh() if self.question() else y.sin()


class Checking(Asking):
    """Looks at values where it is not compiled, and says the same."""

    def forward(self, x):
        if not self.question() and (x == 0).sum().item() > 1000:
            return x
        return self.layer(x)


def loss_of(model, x):
    return model(x).square().mean()


def library():
    """As libraries wrap the question."""
    from torch.compiler import is_compiling

    return is_compiling()


QUESTIONS = [
    *(torch.compiler.is_compiling, torch.compiler.is_dynamo_compiling, torch.compiler.is_exporting),
    library,
]


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_fitted_step_takes_the_way_of_eager(question):
    model, x = Asking(question), torch.randn(16, 8)
    twin = copy.deepcopy(model)
    step = lowtide.fit(loss_of, model, x, budget="100%", time_limit=0.3)
    loss, right = step(model, x), loss_of(twin, x)
    assert torch.equal(loss, right)
    loss.backward()
    right.backward()
    assert torch.equal(model.layer.weight.grad, twin.layer.weight.grad)


@pytest.mark.parametrize("kind", [Asking, Checking])
def test_capture_and_commands_take_the_way_of_a_fitted_step(kind):
    model, x = kind(torch.compiler.is_compiling), torch.randn(16, 8)
    plan = lowtide.fit(loss_of, model, x, budget="100%", time_limit=0.3).plan
    assert lowtide.capture(loss_of, model, x).step.graph.ops == plan.graph.ops
    graphs = []

    def planner(graph):
        graphs.append(graph)
        return plan.program

    found = compare(model, (x,), loss_of, planner, in_place=False, repeats=0)
    assert found.bitwise
    assert graphs[-1].ops == plan.graph.ops


class Branching(nn.Linear):
    """Goes one of two ways, by its input."""

    def forward(self, x):
        y = super().forward(x)
        return y.sin() if x.sum() > 0 else y.cos()


@pytest.mark.parametrize("sign", [1, -1])
def test_a_comparison_follows_branches_on_values(sign):
    model, x = Branching(8, 8), sign * torch.rand(16, 8)
    found = compare(model, (x,), loss_of, store_all, repeats=0)
    assert found.bitwise


def test_what_breaks_so_is_captured_as_compilers_do():
    model, x = Checking(torch.compiler.is_compiling), torch.randn(16, 8)
    step = lowtide.fit(loss_of, model, x, budget="100%", time_limit=0.3)
    assert len(step.plans) == 1
    assert "break" not in step.explain()
    assert torch.equal(step(model, x), loss_of(model, x))


def test_where_torch_cannot_run_an_operator_on_shapes_that_file_alone_is_told():
    @torch.library.custom_op("lowtide_tests::halved", mutates_args=())
    def halved(x: torch.Tensor) -> torch.Tensor:
        return x / 2

    @halved.register_fake
    def _(x):
        raise RuntimeError("no shapes are known")

    class Failing(Asking):
        def forward(self, x):
            y = self.layer(x)
            return y / 2 if self.question() else halved(y)

    model, x = Failing(torch.compiler.is_compiling), torch.randn(16, 8)
    step = lowtide.fit(loss_of, model, x, budget="100%", time_limit=0.3, fullgraph=True)
    assert step._answers.files == {__file__}
    assert not step._answers.everybody


def test_a_capture_is_told_the_truth():
    """It has no second try."""
    captured = lowtide.capture(loss_of, Checking(torch.compiler.is_compiling), torch.randn(16, 8))
    assert captured.step.graph.ops


def test_the_backend_and_other_compilers_are_told_the_truth():
    model, x = Asking(torch.compiler.is_compiling), torch.randn(16, 8)
    compiled = model.layer(x).tanh().square().mean()
    for name in ("lowtide", "eager"):
        torch._dynamo.reset()
        assert torch.equal(torch.compile(loss_of, backend=name)(model, x), compiled)
