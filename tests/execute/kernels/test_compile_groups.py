"""Groups as compiled kernels, and what happens where they cannot be had."""

import shutil
import warnings

import msgspec
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import lowtide
from lowtide.cost.watch import watch_cpu
from lowtide.execute.kernels import compile_groups
from lowtide.graph import Graph
from lowtide.plan.program.instructions import Run
from lowtide.trace.groups import decompose
from lowtide.trace.step import group

compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler on a CPU")


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    torch._dynamo.reset()


class Gated(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.gate, self.up = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return F.silu(self.gate(x)) * self.up(x)


def loss_of(model, x):
    return model(x).square().mean()


def case():
    torch.manual_seed(0)
    return nn.Sequential(Gated(), Gated(), Gated()), torch.randn(6, 16)


def fitted(model, x, **options):
    options = {"budget": "100%", "time_limit": 0.2, "cache": False, **options}
    return lowtide.fit(loss_of, model, x, kernels="fused", **options)


def gradients(step, model, x):
    model.zero_grad()
    step(model, x).backward()
    return [p.grad.clone() for p in model.parameters()]


@compiler
def test_compiled_groups_give_the_gradients_of_eager(monkeypatch):
    made = []
    compile_kernels = compile_groups.compile_kernels

    def counted(body, mode):
        made.append(body)
        return compile_kernels(body, mode)

    monkeypatch.setattr(compile_groups, "compile_kernels", counted)
    model, x = case()
    step = fitted(model, x)
    groups = [op for op in step.plan.graph.ops if op.body is not None]
    assert len(made) < len(groups), "equal groups are compiled once"
    assert step.plan.cost == "measured"
    for one, other in zip(gradients(loss_of, model, x), gradients(step, model, x), strict=True):
        torch.testing.assert_close(one, other)


def test_a_group_that_cannot_be_compiled_is_named_and_runs_all_the_same(monkeypatch):
    def refused(*_):
        raise RuntimeError("no compiler found")

    monkeypatch.setattr(compile_groups, "compile_kernels", refused)
    model, x = case()
    with pytest.warns(
        UserWarning, match="cannot be compiled: no compiler found. Its operators run one by one"
    ):
        step = fitted(model, x, cost="estimated")
    for one, other in zip(gradients(loss_of, model, x), gradients(step, model, x), strict=True):
        torch.testing.assert_close(one, other)


def test_without_a_compiler_eager_kernels_are_taken(monkeypatch):
    monkeypatch.setattr("lowtide.execute.kernels.compiler.kernel_compiler", lambda kind: None)
    model, x = case()
    with pytest.warns(UserWarning, match="eager kernels are taken.*a C\\+\\+ compiler"):
        step = fitted(model, x)
    assert all(op.body is None for op in step.plan.graph.ops)
    for one, other in zip(gradients(loss_of, model, x), gradients(step, model, x), strict=True):
        assert torch.equal(one, other)


def test_operators_leave_no_larger_piece_of_memory_behind_than_the_capture_says(monkeypatch):
    """PyTorch's mean squared error leaves one number where all squares were."""

    def refused(*_):
        raise RuntimeError("no compiler found")

    def distance(model, x):
        return F.mse_loss(model(x), x)

    monkeypatch.setattr(compile_groups, "compile_kernels", refused)
    model, x = (value.bfloat16() for value in case())
    with pytest.warns(UserWarning, match="one by one"):
        step = lowtide.fit(distance, model, x, budget="100%", cost="estimated", kernels="fused", cache=False)
    assert distance(model, x).untyped_storage().nbytes() == x.nbytes
    assert step(model, x).untyped_storage().nbytes() == x.itemsize


def test_operators_find_what_was_captured(monkeypatch):
    """The forward of this GroupNorm gives something else than torch says; its backward would go wrong."""

    def refused(*_):
        raise RuntimeError("no compiler found")

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.norm = nn.Linear(8, 8), nn.GroupNorm(1, 8)

        def forward(self, x):
            return self.norm(self.linear(x.movedim(1, -1)).movedim(-1, 1))

    def distance(model, x):
        return F.mse_loss(model(x), x)

    monkeypatch.setattr(compile_groups, "compile_kernels", refused)
    torch.manual_seed(0)
    model, x = Net(), torch.randn(6, 8, 8, 8)
    with pytest.warns(UserWarning, match="one by one"):
        step = lowtide.fit(distance, model, x, budget="100%", cost="estimated", kernels="fused", cache=False)
    for one, other in zip(gradients(distance, model, x), gradients(step, model, x), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("wrong", ["strides", "shared", "roomy"])
def test_kernels_that_give_something_else_are_not_used(monkeypatch, wrong):
    def compile_kernels(body, mode):
        def run(arguments):
            results = body(*arguments)
            if wrong == "strides":
                return [r.t().contiguous().t() if r.dim() == 2 else r for r in results]
            if wrong == "roomy":
                return [torch.cat([r.flatten(), r.flatten()])[: r.numel()].view(r.shape) for r in results]
            return [next((a for a in arguments if a.shape == r.shape), r) for r in results]

        return run

    monkeypatch.setattr(compile_groups, "compile_kernels", compile_kernels)
    model, x = case()
    with pytest.warns(UserWarning, match="does not give what the capture says"):
        step = fitted(model, x, cost="estimated")
    for one, other in zip(gradients(loss_of, model, x), gradients(step, model, x), strict=True):
        torch.testing.assert_close(one, other)


def test_what_is_not_possible_is_said():
    model, x = case()
    with pytest.raises(lowtide.LowtideError, match="kernels are eager or fused, not 'fuse'"):
        lowtide.fit(loss_of, model, x, kernels="fuse")


class Bent(nn.Module):
    """Between two products: a chain of pointwise operators whose first input nobody else reads."""

    def __init__(self, width=64):
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return self.second(F.relu(self.first(x) * 0.5 + 1.0))


def groups_in_place(plan):
    runs = (line for line in plan.program.instructions if isinstance(line, Run) and line.in_place is not None)
    return sum(plan.graph.ops[line.op].body is not None for line in runs)


def within(step, model, x):
    """Whether a step takes no more than was predicted."""
    model.zero_grad()
    _, seen = watch_cpu(lambda _: step(model, x).backward())
    leaves = sum(p.nbytes for p in model.parameters()) + x.nbytes
    return seen.peak_bytes + leaves <= step.plan.predicted.peak_bytes


@compiler
def test_a_group_takes_the_memory_of_what_it_reads_last():
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Bent() for _ in range(3))), torch.randn(512, 64)
    step = fitted(model, x)
    assert groups_in_place(step.plan)
    for one, other in zip(gradients(loss_of, model, x), gradients(step, model, x), strict=True):
        torch.testing.assert_close(one, other)
    assert within(step, model, x)


def test_a_group_without_kernels_is_not_planned_in_place(monkeypatch):
    def refuse(body, mode):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(compile_groups, "compile_kernels", refuse)
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Bent() for _ in range(3))), torch.randn(512, 64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = fitted(model, x)
    assert not groups_in_place(step.plan)
    assert within(step, model, x)


@compiler
def test_in_place_or_not_a_group_gives_the_same_bits(monkeypatch):
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Bent() for _ in range(3))), torch.randn(64, 64)
    over = gradients(fitted(model, x), model, x)
    monkeypatch.setattr(group, "_replaces", lambda body: False)
    torch._dynamo.reset()
    apart = fitted(model, x)
    assert not groups_in_place(apart.plan)
    for one, other in zip(over, gradients(apart, model, x), strict=True):
        assert torch.equal(one, other)


@compiler
def test_a_group_that_cannot_be_compiled_in_place_runs_all_the_same(monkeypatch):
    def refuse(body):
        raise RuntimeError("no kernel for this")

    monkeypatch.setattr(compile_groups, "_written_over", refuse)
    torch.manual_seed(0)
    model, x = nn.Sequential(Bent(), Bent()), torch.randn(64, 64)
    with pytest.warns(UserWarning, match="no kernel for this"):
        step = fitted(model, x)
    assert groups_in_place(step.plan)
    for one, other in zip(gradients(loss_of, model, x), gradients(step, model, x), strict=True):
        torch.testing.assert_close(one, other)


@compiler
@pytest.mark.parametrize("budget", ["100%", pytest.param("60%", marks=pytest.mark.extended)])
def test_the_bias_of_a_convolution_is_added_by_a_group(monkeypatch, budget):
    gains = decompose._gains

    def as_on_cuda(node):
        convolution = node.target is torch.ops.aten.convolution.default
        return isinstance(node.args[2], torch.fx.Node) if convolution else gains(node)

    monkeypatch.setattr(decompose, "_gains", as_on_cuda)
    monkeypatch.setattr("lowtide.execute.kernels.ways.in_faster_layout", lambda module, *_: module)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.ConvTranspose2d(8, 4, 2, stride=2),
        nn.ReLU(),
        nn.Conv2d(4, 1, 1),
    )
    x = torch.randn(2, 3, 16, 16)
    step = fitted(model, x, budget=budget)
    if budget == "100%":
        assert groups_in_place(step.plan) >= 2
    for one, other in zip(gradients(loss_of, model, x), gradients(step, model, x), strict=True):
        torch.testing.assert_close(one, other)


def test_a_group_without_kernels_runs_in_place_by_its_operators():
    body = make_fx(lambda x: (torch.relu(x * 2),), tracing_mode="fake")(torch.randn(4))
    one = group.Group(body, Graph())
    assert one.replaces
    one.over = compile_groups._as_it_is  # as while ways to run a step are compared
    compile_groups._give(one, "a group", None, {msgspec.json.encode(Graph()): None})
    x = torch.tensor([1.0, -1.0, 2.0, 0.0])
    (found,) = one.over_first(x)
    assert found is x
    assert x.tolist() == [2.0, 0.0, 4.0, 0.0]


@pytest.mark.parametrize(
    ("function", "replaces"),
    [
        (lambda x: (torch.relu(x * 2) + 1,), True),
        (lambda x: (x.t().relu(),), False),  # other places
        (lambda x: (x - x.sum(0),), False),  # all values of a column
        (lambda x: (x.double() * 2,), False),  # of another type
        (lambda x: (x * 2, x + 1), False),  # two results
        (lambda x: (x.relu()[:, :2],), False),  # of another shape
        (lambda x: (torch.ones_like(x) * 2,), False),  # not from its values
    ],
)
def test_which_groups_may_run_in_place(function, replaces):
    body = make_fx(function, tracing_mode="fake")(torch.randn(3, 3))
    assert group.Group(body, Graph()).replaces is replaces
