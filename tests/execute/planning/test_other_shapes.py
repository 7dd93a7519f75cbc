"""A new shape is planned with what is known from others: quickly, and inside the budget on the way."""

import pytest
import torch
from msgspec.structs import replace
from torch import nn
from torch.nn import functional

import lowtide
from lowtide.errors import CaptureError, InfeasibleError, PlanError
from lowtide.execute.compile import aot
from lowtide.execute.memory.device import Room
from lowtide.execute.planning import plan_step
from lowtide.execute.planning.other_shapes import OtherShapes, ShapePlans, parse_bucket
from lowtide.execute.planning.plan_step import StepPlanner
from lowtide.plan.make.other_sizes import alike, as_good, plan_by, scaled
from lowtide.plan.program.costs import Costs
from lowtide.plan.program.simulate import simulate
from lowtide.plan.request import DeviceRoom, PlanRequest

HERE = DeviceRoom()


class Network(nn.Module):
    """Tokens that look at each other, with dropout."""

    def __init__(self):
        super().__init__()
        self.table, self.keys = nn.Embedding(50, 16), nn.Linear(16, 32)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 50)

    def forward(self, tokens):
        x = self.table(tokens)
        key, value = self.keys(x).chunk(2, -1)
        x = x + (x @ key.transpose(1, 2)).softmax(-1) @ functional.gelu(value).tanh()
        return self.head(functional.dropout(functional.gelu(self.norm(x))))


def loss_of(model, tokens):
    return functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def tokens(length):
    return torch.randint(0, 50, (16, length))


@pytest.fixture(autouse=True)
def _anew():
    torch._dynamo.reset()


@pytest.fixture
def programs(monkeypatch):
    """The graphs and Programs of all interpreters that are made."""
    made = []

    class Seen(aot.Interpreter):
        def __init__(self, joint, program, *args):
            super().__init__(joint, program, *args)
            made.append((joint.graph, program))

    monkeypatch.setattr(aot, "Interpreter", Seen)
    return made


def budget_of(model, length, share):
    """A share of what the step takes, in bytes."""
    step = lowtide.fit(loss_of, model, tokens(length), budget="100%", time_limit=0.2, verify=False)
    torch._dynamo.reset()
    return int(share * step.plan.plain.peak_bytes)


def test_new_lengths_stay_inside_the_budget_from_their_first_step(programs):
    model = Network()
    budget = budget_of(model, 48, 0.7)
    step = lowtide.fit(loss_of, model, tokens(48), budget=budget, only="recompute", time_limit=0.3)
    step(model, tokens(46)).backward()
    methods = set()
    for length in (40, 50, 47, 51, 30):
        programs.clear()
        step(model, tokens(length)).backward()
        plan = step.plan
        methods.add(plan.method)
        assert plan.predicted.peak_bytes <= budget
        mine = [(g, p) for g, p in programs if g.tensors == plan.graph.tensors]
        assert mine
        for graph, program in mine:
            assert simulate(graph, program, workspace_bytes=plan.workspace_bytes).peak_bytes <= budget
    assert "as for another shape" in methods
    assert "plain" in methods  # of the shortest: nothing is recomputed where all fits


def test_several_examples_are_planned_at_once(programs):
    model = Network()
    more = [(model, tokens(length)) for length in (40, 48)]
    step = lowtide.fit(
        loss_of, model, tokens(44), budget="80%", only="recompute", time_limit=0.2, examples=more
    )
    programs.clear()
    for length in (40, 44, 48):
        step(model, tokens(length)).backward()
    assert not programs


@pytest.mark.parametrize("wrong", [torch.zeros(3), [torch.zeros(3)], "ab"])
def test_examples_are_arguments_in_tuples(wrong):
    with pytest.raises(CaptureError, match="in a tuple"):
        lowtide.fit(loss_of, Network(), tokens(4), examples=wrong)


@pytest.mark.parametrize("wrong", [0, -1, True, "64", [], [64, 0], 1.5])
def test_what_is_no_bucket_is_refused(wrong):
    with pytest.raises(PlanError, match="bucket="):
        lowtide.fit(loss_of, Network(), tokens(4), bucket=wrong)


@pytest.mark.parametrize(
    ("bucket", "same", "other"),
    [
        (64, (65, 128), (64, 65)),
        ((100, 400), (101, 400), (100, 101)),
        ((100, 400), (500, 500), (500, 501)),
        (None, (113, 120), (96, 113)),
        (None, (7, 7), (7, 8)),
    ],
)
def test_sizes_of_one_bucket_share_a_plan(bucket, same, other):
    plan = _plan()
    for known, new in (same, other):
        plans = ShapePlans(parse_bucket(bucket))
        plans.add([torch.empty(3, known)], plan)
        found = plans.others([torch.empty(3, new)])
        assert found.plans == (plan,)
        assert found.settled(plan.graph) == ((known, new) == same)


def test_the_nearest_shape_comes_first():
    plans = ShapePlans(1)
    made = {size: _plan(size) for size in (100, 10, 40)}
    for size, plan in made.items():
        plans.add([torch.empty(size)], plan)
    assert plans.others([torch.empty(35)]).plans == (made[40], made[100], made[10])
    assert plans.others([torch.empty(35, 2)]) == OtherShapes(planned=True)


def _plan(size=16):
    return lowtide.fit(
        _square, torch.randn(size, 4, requires_grad=True), budget="100%", time_limit=0, verify=False
    ).plan


def _square(x):
    return x.tanh().exp().square().sum()


def test_a_program_serves_another_size():
    torch.manual_seed(0)
    model = Network()
    first = lowtide.fit(loss_of, model, tokens(40), budget="75%", only="recompute", time_limit=0.3).plan
    torch._dynamo.reset()
    other = lowtide.fit(loss_of, model, tokens(32), budget="100%", only="recompute", time_limit=0.3).plan
    assert alike(first.graph, other.graph)
    assert not alike(first.graph, _plan().graph)
    costs = scaled(first, other.graph)
    assert 0 < sum(costs.seconds) < sum(first.seconds)
    assert costs.workspace_bytes == first.workspace_bytes  # they do not shrink
    least = scaled(first, other.graph, shrinking=True).workspace_bytes
    assert all(a <= b for a, b in zip(least, first.workspace_bytes, strict=True))
    assert sum(scaled(other, first.graph).seconds) > sum(other.seconds)
    real = Costs(other.seconds, other.workspace_bytes)
    request = PlanRequest.of("90%", only="recompute")
    plain = other.program  # all of it fits
    found = plan_by([first.program], other.graph, real, request, HERE, other.able, plain)
    assert found.method == "as for another shape"
    assert found.predicted.peak_bytes <= found.budget_bytes
    assert found.checked
    smaller = PlanRequest.of("30%", only="recompute")
    assert plan_by([first.program, plain], other.graph, real, smaller, HERE, other.able, plain) is None
    whole = PlanRequest.of("100%", only="recompute")
    assert plan_by([plain], other.graph, real, whole, HERE, other.able, plain).method == "plain"
    assert as_good(first, first)
    assert not as_good(replace(first, overhead=first.overhead + 0.02), first)
    assert not as_good(replace(first, budget_bytes=int(1.1 * first.budget_bytes)), first)


def test_a_longer_search_is_for_shapes_that_need_one(monkeypatch):
    """A short search that finds nothing, or only the lowest peak, is not the last word."""
    plan, asked = _plan(), []

    def found(_, __, request, *___, **____):
        asked.append(request.limits.time_limit)
        if len(asked) == 1:
            raise InfeasibleError("", budget=1, smallest_budget=2, floor=1)
        return replace(plan, method="lowest peak" if len(asked) == 2 else "cut")

    monkeypatch.setattr(plan_step, "make_plan", found)
    joint = lowtide.capture(_square, torch.randn(16, 4, requires_grad=True)).joint
    planner, costs = StepPlanner(joint, Room([])), Costs(plan.seconds)
    request = PlanRequest.of("50%", time_limit=7.0)
    assert planner._searched(costs, request, HERE, needed=True).method == "lowest peak"
    assert planner._searched(costs, request, HERE, needed=False).method == "cut"
    assert asked == [0.5, 7.0, 0.5]
