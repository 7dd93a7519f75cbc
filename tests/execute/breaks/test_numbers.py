"""A step that goes on with numbers it reads: one capture and one plan for all of them, inside the budget."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from msgspec.structs import replace
from torch import nn
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.execute.breaks.alike import _renumbered, alike
from lowtide.graph import Graph, Op, Role, Tensor
from lowtide.plan.program.instructions import Drop, Program, Run
from lowtide.trace.shapes.numbers import is_number
from tests.execute.breaks.steps import left, same

WIDTH = 32
NUMBERS = 5


class Reads(nn.Module):
    """Layers, which go on with a number of theirs."""

    def __init__(self, use, read=lambda x: x.abs().max()):
        super().__init__()
        self.first, self.second = (nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)) for _ in range(2))
        self.use, self.read = use, read

    def forward(self, x):
        for layer in self.first:
            x = F.dropout(torch.tanh(layer(x)), 0.1, self.training)
        number = self.read(x).item()
        x = self.use(x, number)
        for layer in self.second:
            x = torch.tanh(layer(x))
        return self.use(x, number)


def loss_of(model, x):
    return model(x).square().mean()


def fitted(model, x, **options):
    known = {"budget": "80%", "time_limit": 0.3, "cache": False, "cost": "estimated", **options}
    return lowtide.fit(loss_of, model, x, **known)


def batches(dtype=torch.float32):
    torch.manual_seed(1)
    return [torch.randn(64, WIDTH).to(dtype) * (1 + k) for k in range(NUMBERS)]


def check(step, model, some):
    """Every step is that of eager PyTorch, inside the budget."""
    for k, x in enumerate(some):
        eager, _ = left(loss_of, model, x, k)
        planned, peak = left(step, model, x, k)
        assert same(eager, planned)
        assert peak <= step._subgraphs.budget_bytes


def arithmetic(x, n):
    return (n * x + n) / max(1.0, 3 * n) * (n - x) + x * (x > n / 2)


def test_a_number_is_an_argument_of_the_graph():
    torch.manual_seed(0)
    model, some = Reads(arithmetic), batches()
    step = fitted(model, some[0])
    graphs = len(step.plans)
    check(step, model, some)
    assert len(step.plans) == graphs, "captured again"
    _check_two_at_once(step, model.eval(), *some[1:3])
    check(step, model.train(), [x[:size] for x, size in zip(some, (60, 60), strict=False)])


def _check_two_at_once(step, model, one, other):
    """A step waits for its backward with its own numbers, as where losses of two batches are added up."""
    found = []
    for way in (loss_of, step):
        model.zero_grad(set_to_none=True)
        (way(model, one) + way(model, other)).backward()
        found.append([p.grad.clone() for p in model.parameters()])
    assert all(map(torch.equal, *found))


SOME = {
    "tensors of one element": lambda x, n: x * (x.mean() * n + 1),
    "a part of the numbers": lambda x, n: F.leaky_relu((x - n).clamp(max=0.5), 0.1),
}


@pytest.mark.parametrize("use", SOME.values(), ids=SOME)
def test_other_uses_of_numbers(use):
    torch.manual_seed(0)
    model, some = Reads(use), batches()[:3]
    step = fitted(model, some[0])
    graphs = len(step.plans)
    check(step, model, some)
    assert len(step.plans) == graphs, "captured again"


@pytest.mark.extended
def test_so_it_is_in_half_precision():
    torch.manual_seed(0)
    model, some = Reads(arithmetic).bfloat16(), batches(torch.bfloat16)[:3]
    step = fitted(model, some[0])
    graphs = len(step.plans)
    check(step, model, some)
    assert len(step.plans) == graphs, "captured again"


CONSTANTS = {
    "an exponent and a limit": lambda x, n: (x.abs() + 0.1).clamp(max=0.9 * n) ** (n + 1.5),
    "in what is checkpointed": lambda x, n: checkpoint(lambda x: torch.tanh(x / n), x, use_reentrant=False),
    "one element in half precision": lambda x, n: F.dropout(x, n / 4) * (x.bfloat16().mean() * n).to(x.dtype),
}


LONG = ("in what is checkpointed", "one element in half precision")


@pytest.mark.parametrize(
    "use",
    [
        pytest.param(use, id=one, marks=pytest.mark.extended if one in LONG else ())
        for one, use in CONSTANTS.items()
    ],
)
def test_a_graph_with_another_constant_runs_by_the_plan_that_is_known(use, monkeypatch):
    """More of them than there may be shapes: each is captured, and takes what the first takes."""
    monkeypatch.setattr("lowtide.execute.breaks.subgraphs._LATER", 3)
    monkeypatch.setattr("lowtide.execute.breaks.subgraphs._SHAPES", 2)
    torch.manual_seed(0)
    model, some = Reads(use), batches()
    step = fitted(model, some[0])
    graphs = len(step.plans)
    check(step, model, some)
    assert len(step.plans) == graphs + 3, "those that are remembered"
    assert step._subgraphs.together.count == graphs + 3
    assert len({id(plan.program) for plan in step.plans}) <= graphs, "no plan was made again"
    assert not step._subgraphs.unplanned


def test_a_count_is_a_constant_at_first_and_then_an_argument():
    """Torch takes an integer for a constant until it changes: one more capture runs by the same plan."""
    torch.manual_seed(0)
    model, some = Reads(lambda x, n: 1000 * x / n, lambda x: (x > 0).sum()), batches()
    step = fitted(model, some[0])
    graphs = len(step.plans)
    check(step, model, some)
    assert len(step.plans) == graphs + 1, "the graph behind the number, once more"
    assert any(map(is_number, step.plans[-1].graph.tensors))
    lines = [len(plan.program.instructions) for plan in step.plans]
    assert lines[-1] in lines[:graphs], "no plan was made again"


def test_fused_kernels_take_the_number_too(one_by_one):
    torch.manual_seed(0)
    model, some = Reads(arithmetic).double(), batches(torch.float64)
    step = fitted(model, some[0], kernels="fused", budget="75%")
    graphs = len(step.plans)
    for k, x in enumerate(some[:4]):
        eager, _ = left(loss_of, model, x, k)
        planned, peak = left(step, model, x, k)
        assert all(torch.allclose(a, b, rtol=1e-9) for a, b in zip(eager, planned, strict=True))
        assert peak <= step._subgraphs.budget_bytes
    assert len(step.plans) == graphs


def test_the_backend_takes_numbers_as_arguments_too():
    torch.manual_seed(0)
    model, some = Reads(arithmetic), batches()[:5]
    compiled = torch.compile(loss_of, backend="lowtide", options={"budget": "80%", "time_limit": 0.3})
    for k, x in enumerate(some):
        eager, _ = left(loss_of, model, x, k)
        planned, _ = left(compiled, model, x, k)
        assert all(torch.allclose(a, b, atol=1e-7) for a, b in zip(eager, planned, strict=True))


class Branches(nn.Module):
    """Layers, and others of the same size where a number is negative."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (
            nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4)) for _ in range(3)
        )

    def forward(self, x):
        given = x
        for layer in self.first:
            x = torch.tanh(layer(x))
        if given.sum().item() > 0:
            for layer in self.second:
                x = torch.tanh(layer(x))
        else:
            for layer in self.third:
                x = torch.sigmoid(layer(x))
        return x


def test_another_branch_takes_no_more_than_the_one_in_its_place():
    torch.manual_seed(0)
    model, some = Branches(), [torch.randn(512, WIDTH) + 0.5 * (-1) ** k for k in range(4)]
    step = fitted(model, some[0], budget="65%")
    graphs = len(step.plans)
    left(step, model, some[1], 0)  # torch holds more while it compiles
    assert len(step.plans) > graphs
    check(step, model, some)


class Scaled(torch.autograd.Function):
    """A product that a user has written."""

    @staticmethod
    def forward(ctx, x, number):
        ctx.number = number
        return x * number

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.number, None


WEIGHTED = {
    "as it is": lambda model, x, weight: model(x).square().mean() * weight,
    "a zero with a sign": lambda model, x, weight: torch.atan2(model(x).abs() * weight, -x.abs() - 1).mean(),
    "in what is checkpointed": lambda model, x, weight: (
        checkpoint(lambda x: model(x) * weight, x, use_reentrant=False).square().mean()
    ),
    "in a function of autograd": lambda model, x, weight: Scaled.apply(model(x), weight).square().mean(),
}


@pytest.mark.parametrize("weighted", WEIGHTED.values(), ids=WEIGHTED)
def test_numbers_of_a_step_of_one_graph(weighted):
    torch.manual_seed(0)
    model, (x, *_) = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)), batches()
    options = {"budget": "100%", "time_limit": 0.3, "cost": "estimated", "cache": False}
    step = lowtide.fit(weighted, model, x, 0.5, **options)
    for weight in (0.25, 0.7, 1.0, 0.0, -0.0, 3.1):
        found = []
        for way in (weighted, step):
            model.zero_grad(set_to_none=True)
            loss = way(model, x, weight)
            loss.backward()
            found.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
        assert all(map(torch.equal, *found)), weight


def test_graphs_are_alike_where_numbers_alone_differ():
    torch.manual_seed(0)
    x = torch.randn(4, 4, requires_grad=True)
    graphs = [
        lowtide.capture(lambda x, f=f: f(x).sum(), x).step.graph
        for f in (lambda x: x * 2.5, lambda x: x * 3, lambda x: x + 3.5, lambda x: (x * 2.5).view(16))
    ]
    assert alike(graphs[0], graphs[1])
    assert not alike(graphs[0], graphs[2])
    assert not alike(graphs[0], graphs[3])


def test_a_graph_with_a_tensor_for_a_number_is_like_one_with_a_constant():
    number = Tensor("n", 8, Role.INPUT, name="number 0", shape=(), dtype="float64")
    x, y, z = (
        Tensor(name, 64, role)
        for name, role in (("x", Role.INPUT), ("y", Role.ACTIVATION), ("z", Role.ACTIVATION))
    )
    first = Op("mul", "aten.mul", inputs=(0,), outputs=(1,), overload="Scalar", arguments=({"input": 0}, 3))
    second = Op("tanh", "aten.tanh", inputs=(1,), outputs=(2,), arguments=({"input": 0},))
    constant = Graph((x, y, z), (first, second), returned=(2,))
    taken = replace(
        first, inputs=(0, 1), outputs=(2,), overload="Tensor", arguments=({"input": 0}, {"input": 1})
    )
    then = replace(second, inputs=(2,), outputs=(3,))
    argument = Graph((x, number, y, z), (taken, then), returned=(3,))
    assert alike(argument, constant)
    assert not alike(replace(argument, ops=(taken, replace(then, kind="aten.exp"))), constant)
    assert not alike(replace(argument, ops=(replace(taken, inputs=(0, 0)), then)), constant)
    program = Program((Run(0), Drop((0,)), Run(1), Drop((1,))))
    assert _renumbered(program, [0, 2, 3]) == Program((Run(0), Drop((0,)), Run(1), Drop((2,))))
