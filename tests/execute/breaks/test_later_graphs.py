"""A call that meets a graph which the step was not planned with: taken back, planned for, and made again."""

import copy
import gc
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import distributed, nn

import lowtide
from lowtide.errors import InfeasibleError
from lowtide.execute.breaks.attempt import _MOST, Attempt
from tests.execute.breaks.steps import left, same

WIDTH, ROWS = 32, 1024
TENSOR = 4 * ROWS * WIDTH
SLACK = 16 * 1024
"""What random states and numbers of single elements take while a step is planned again."""


class Branches(nn.Module):
    """Layers, then one of two branches: the second takes more."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (
            nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4)) for _ in range(3)
        )
        self.norm = nn.BatchNorm1d(WIDTH)
        self.calls = 0

    def forward(self, x):
        positive = x.sum().item() > 0
        x = F.dropout(self.norm(x), 0.1, self.training)
        for layer in self.first:
            x = torch.tanh(layer(x))
        if positive:
            for layer in self.second:
                x = torch.tanh(layer(x))
        else:
            for layer in self.third:
                x = F.gelu(layer(x))
        return x


def loss_of(model, x):
    return model(x).square().mean()


def batches():
    torch.manual_seed(1)
    return [torch.randn(ROWS, WIDTH) + 0.5 * (-1) ** k for k in range(6)]


def fitted(model, *example, **options):
    known = {"time_limit": 0.3, "cache": False, "cost": "estimated", "only": "recompute", **options}
    return lowtide.fit(loss_of, model, *example, **known)


@pytest.fixture(scope="module")
def branches():
    """A batch for each branch, each with the smallest budget that it has; the smaller one first."""
    found = []
    for x in batches()[:2]:
        with pytest.raises(InfeasibleError) as refused:
            fitted(Branches(), x, budget=1)
        found.append((refused.value.smallest_budget, x))
    return sorted(found, key=lambda one: one[0])


@pytest.mark.parametrize(
    ("order", "factor", "more"),
    [((0, 1, 0, 1), 1.2, SLACK), ((0, 1, 0, 1), 1.02, 2 * TENSOR)],
    ids=["the smaller first", "inside the smallest budget"],
)
def test_another_branch_stays_inside_the_budget_from_its_first_call_on(order, factor, more, branches):
    budget = int(factor * branches[1][0])
    torch.manual_seed(0)
    model = Branches()
    twin = copy.deepcopy(model)
    step = fitted(model, branches[order[0]][1], budget=budget)
    for k, which in enumerate(order):
        x = branches[which][1]
        expected, _ = left(loss_of, twin, x, k)
        found, peak = left(step, model, x, k)
        assert same(found, expected), "buffers and random states change once"
        assert peak <= budget + more * (k == 1)


def test_examples_plan_all_branches_without_a_trace():
    some = batches()
    model = Branches()
    before = copy.deepcopy(model.state_dict())
    step = fitted(model, some[0], budget="70%", examples=[(model, some[1])])
    graphs = len(step.plans)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(one.grad is None for one in model.parameters())
    left(step, model, some[1], 0)
    assert len(step.plans) == graphs


def test_a_branch_that_does_not_fit_is_refused_and_the_others_go_on(branches):
    (low, small), (high, large) = branches
    budget = (low + high) // 2
    assert low < budget < high
    torch.manual_seed(0)
    model = Branches()
    twin = copy.deepcopy(model)
    step = fitted(model, small, budget=budget)
    told = step.explain().splitlines()[1]
    for k in range(2):
        expected, _ = left(loss_of, twin, small, k)
        found, peak = left(step, model, small, k)
        assert same(found, expected)
        assert peak <= budget
        before = [one.clone() for one in (*model.buffers(), torch.get_rng_state())]
        with pytest.raises(InfeasibleError, match="smallest budget with a known plan"):
            step(model, large)
        assert same(before, [*model.buffers(), torch.get_rng_state()])
    assert step.explain().splitlines()[1] == told


def test_a_call_that_cannot_be_taken_back_goes_on_and_says_so(monkeypatch, branches):
    (low, small), (high, large) = branches
    torch.manual_seed(0)
    model = Branches()
    twin = copy.deepcopy(model)
    step = fitted(model, small, budget=(low + high) // 2)
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    with pytest.warns(UserWarning, match="may take more than its budget"):
        found, _ = left(step, model, large, 0)
    assert same(found, left(loss_of, twin, large, 0)[0])


@pytest.mark.extended
def test_no_handler_of_the_user_sees_a_call_end(branches):
    (low, small), (high, large) = branches
    model, caught = Branches(), []

    def guarded(model, x):
        try:
            return loss_of(model, x)
        except Exception as error:
            caught.append(error)
            raise

    known = {"time_limit": 0.3, "cache": False, "cost": "estimated", "only": "recompute"}
    step = lowtide.fit(guarded, model, small, budget=(low + high) // 2, **known)
    with pytest.raises(InfeasibleError):
        step(model, large)
    assert not caught


def test_what_a_call_changes_is_put_back():
    module = nn.BatchNorm1d(4)
    attempt = Attempt([module], [torch.zeros(3)])
    attempt.begin(())
    module(torch.randn(8, 4))
    before = [one.clone() for one in module.buffers()]
    state = torch.get_rng_state()
    attempt.begin(())
    module(torch.randn(8, 4))
    assert attempt.can_be_taken_back()
    attempt.take_back()
    assert same(before, module.buffers())
    assert torch.equal(state, torch.get_rng_state())
    attempt.end()
    assert not attempt.can_be_taken_back()


def test_a_call_that_changes_its_arguments_is_not_taken_back():
    x = torch.zeros(3)
    attempt = Attempt([], [x])
    attempt.begin([x])
    assert attempt.can_be_taken_back()
    x.add_(1)
    assert not attempt.can_be_taken_back()


def test_large_buffers_are_not_copied():
    module = nn.Module()
    module.register_buffer("cache", torch.zeros(_MOST // 4 + 1))
    attempt = Attempt([module], [])
    attempt.begin(())
    module.cache.add_(1)
    attempt.learn()
    attempt.begin(())
    module.cache.add_(1)
    assert not attempt.can_be_taken_back()


class Trips(nn.Module):
    """A layer that runs as often as the batch says, in a graph of its own."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.last = nn.Linear(WIDTH, WIDTH)

    def _trip(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x

    def forward(self, x):
        for _ in range(int(x[0, 0].item())):
            x = self._trip(x)
            torch._dynamo.graph_break()
        return self.last(x)


@pytest.mark.extended
def test_graphs_that_are_known_fit_in_another_order_too():
    """A loop that makes more trips than it was planned for holds more."""
    some = batches()
    for x, trips in zip(some, (1, 4, 2, 4), strict=False):
        x[0, 0] = trips + 0.5
    with pytest.raises(InfeasibleError) as refused:
        fitted(Trips(), some[1], budget=1)
    budget = int(1.3 * refused.value.smallest_budget)
    torch.manual_seed(0)
    model = Trips()
    twin = copy.deepcopy(model)
    step = fitted(model, some[0], budget=budget)
    for k, x in enumerate(some[:4]):
        expected, _ = left(loss_of, twin, x, k)
        found, peak = left(step, model, x, k)
        assert same(found, expected)
        assert peak <= budget + TENSOR * (k == 1)


class Assigns(Branches):
    """Has a buffer that forward assigns."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return super().forward(x)


@pytest.mark.parametrize(
    "how", [pytest.param("assigned buffers", marks=pytest.mark.extended), "a handler for everything"]
)
def test_a_call_that_is_taken_back_leaves_nothing(how, branches):
    (_, small), (high, large) = branches
    torch.manual_seed(0)
    model = Assigns()
    twin = copy.deepcopy(model)

    def loss_in_any_case(model, x):
        try:
            return loss_of(model, x)
        except BaseException:
            if how == "assigned buffers":
                raise
            return x.sum() * 0

    known = {"time_limit": 0.3, "cache": False, "cost": "estimated", "only": "recompute"}
    step = lowtide.fit(loss_in_any_case, model, small, budget=int(1.4 * high), **known)
    again = step._subgraphs.rehearse = counted(step._subgraphs.rehearse)
    for k, x in enumerate((small, large, small, large)):
        assert same(left(step, model, x, k)[0], left(loss_of, twin, x, k)[0])
    assert again.calls <= 1


def counted(function):
    def call(*args, **keywords):
        call.calls += 1
        return function(*args, **keywords)

    call.calls = 0
    return call


@pytest.mark.extended
def test_a_copy_of_the_model_is_planned_for_in_its_second_call(branches):
    (low, small), (high, large) = branches
    torch.manual_seed(0)
    model = Branches()
    other, twin = copy.deepcopy(model), copy.deepcopy(model)
    step = fitted(model, small, budget=(low + high) // 2)
    with pytest.warns(UserWarning, match="may take more than its budget"):
        assert same(left(step, other, large, 0)[0], left(loss_of, twin, large, 0)[0])
    with pytest.raises(InfeasibleError):
        step(other, large)
    assert same(left(step, other, small, 1)[0], left(loss_of, twin, small, 1)[0])


@pytest.mark.extended
def test_a_step_that_torch_no_longer_captures_says_so(branches):
    """An error in code that torch captures has it run that code as it is from then on."""
    _, (high, large) = branches

    class Fails(Branches):
        fails = False

        def forward(self, x):
            x = super().forward(x)
            if self.fails:
                raise ValueError("no")
            return x

    model = Fails()
    step = fitted(model, large, budget=2 * high)
    model.fails = True
    with pytest.raises(ValueError, match="no"):
        step(model, large)
    model.fails = False
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        _, peak = left(step, model, large, 0)
    assert peak <= 2 * high or any("Call lowtide.fit again" in str(one.message) for one in told)


@pytest.mark.extended
def test_an_error_that_is_made_of_the_end_of_a_call_is_not_the_users(branches):
    (_, small), (high, large) = branches
    model = Branches()

    def renamed(model, x):
        try:
            return loss_of(model, x)
        except BaseException as error:
            raise RuntimeError("something went wrong") from error

    known = {"time_limit": 0.3, "cache": False, "cost": "estimated", "only": "recompute"}
    step = lowtide.fit(renamed, model, small, budget=int(1.4 * high), **known)
    assert left(step, model, large, 0)[1] <= 1.4 * high + SLACK


@pytest.mark.extended
def test_batches_of_inference_mode_are_evaluated():
    """Their tensors count no versions."""
    model = Branches()
    some = batches()
    step = fitted(model, some[0], budget="100%")
    with torch.inference_mode():
        given = some[0].clone()
        assert torch.equal(step(model.eval(), given), loss_of(model, given))


def test_a_step_keeps_no_model_alive():
    model = Branches()
    step = fitted(model, batches()[0], budget="100%")
    kept = weakref.ref(model.norm.running_mean)
    del model
    gc.collect()
    assert step.plans
    assert kept() is None
