"""``torch.compile(..., backend="lowtide")`` with graph breaks: the graphs share the budget from the third call on."""

import copy
import gc
import warnings

import pytest
import torch
from torch import nn

import lowtide
from lowtide.cost.watch import watch_cpu
from lowtide.errors import CaptureError, InfeasibleError
from lowtide.execute.breaks.live import _STEPS, LiveStep, live_step
from lowtide.plan.request import PlanRequest
from tests.execute.breaks.test_subgraphs import WIDTH, Block, InLayers, left_behind, loss_of, same


class Broken(nn.Module):
    """A number is read between two graphs."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Block(2), Block(2)

    def forward(self, x):
        y = self.first(x)
        return self.second(y / max(1.0, y.abs().max().item()))


def compiled(budget, **options):
    options = {"budget": budget, "time_limit": 0.3, **options}
    return torch.compile(loss_of, backend="lowtide", options=options)


def peak(model, step, x, parts=()):
    """What a step takes, with the batch and the parameters of all ``parts`` of the model."""
    model.zero_grad(set_to_none=True)
    _, seen = watch_cpu(lambda _: step(model, x).backward())
    tensors = [one for part in parts or [model] for one in part.state_dict().values()]
    leaves = {t.untyped_storage().data_ptr(): t.nbytes for t in (*tensors, x)}
    return seen.peak_bytes + sum(leaves.values())


class InTwoLayers(InLayers):
    """The first graph is most of the step."""

    def __init__(self):
        super().__init__()
        self.blocks = self.blocks[:2]


@pytest.mark.parametrize("kind", [Broken, InLayers, InTwoLayers])
def test_graphs_share_the_budget(kind):
    torch.manual_seed(3)
    model, x = kind(), torch.randn(256, WIDTH)
    twin = copy.deepcopy(model)
    budget = int(0.7 * peak(copy.deepcopy(model), loss_of, x))
    step = compiled(budget)
    for seed in range(3):
        assert same(left_behind(model, step, x, seed), left_behind(twin, loss_of, x, seed))
    assert peak(model, step, x) <= budget


class Branches(nn.Module):
    """Its second half depends on a value, and code between the graphs makes a tensor."""

    def __init__(self):
        super().__init__()
        self.first = Block(2)
        self.halves = nn.ModuleList(nn.Sequential(*(Block(2) for _ in range(2 * n + 1))) for n in range(3))

    def forward(self, x):
        y = self.first(x)
        half = self.halves[int(x[0, 0].item())]
        return half(y.clone())


def towards(branch):
    x = torch.randn(256, WIDTH)
    x[0, 0] = branch + 0.5
    return x


def smallest_of(model, x):
    """The smallest budget for calls that go where ``x`` goes."""
    options = {"time_limit": 0.3, "only": "recompute", "cost": "estimated"}
    with pytest.raises(InfeasibleError) as refused:
        lowtide.fit(loss_of, model, x, budget=1, **options)
    return refused.value.smallest_budget


@pytest.fixture(scope="module")
def smallest():
    """The same for branches, by their number."""
    return {branch: smallest_of(Branches(), towards(branch)) for branch in (0, 2)}


def activations():
    """How many tensors of the size of a batch there are."""
    gc.collect()
    return sum(type(one) is torch.Tensor and one.numel() >= 256 * WIDTH for one in gc.get_objects())


def test_later_branches_are_planned_with_those_before(smallest):
    torch.manual_seed(3)
    model = Branches()
    twin = copy.deepcopy(model)
    budget = int(1.15 * smallest[2])
    step = compiled(budget, only="recompute", cost="estimated")
    taken, before = [], activations()
    for seed, branch in enumerate((0, 0, 0, 2, 2, 0, 1, 1, 2)):
        x = towards(branch)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            assert same(left_behind(model, step, x, seed), left_behind(twin, loss_of, x, seed))
            taken.append(peak(model, step, x, [model.first, model.halves[branch]]))
        assert (seed == 3) == any("not planned with" in str(one.message) for one in told)
    assert max(taken[2:]) <= budget
    del x
    assert activations() == before  # graphs that wait for others hold none


@pytest.mark.extended
def test_what_is_around_later_graphs_is_what_is_noted():
    """The calls of one branch as they are noted, and as they are taken to be where another one was noted."""
    torch.manual_seed(3)
    model, kept = Branches(), []
    for noted in (0, 2):
        torch.compiler.reset()
        options = {"budget": 2**40, "time_limit": 0.3, "cost": "estimated"}
        step = torch.compile(loss_of, backend="lowtide", options=options)
        for branch in (noted, noted, noted, 2, 2):
            step(model, towards(branch)).backward()
        kept.append(_STEPS[id(options)]._before[-1])
    taken, seen = kept
    assert len(taken.graphs) == len(seen.graphs) == 3
    assert taken.around == seen.around
    assert taken.end == seen.end


def test_a_branch_that_fits_no_plan_is_told_of(smallest):
    torch.manual_seed(3)
    model = Branches()
    step = compiled(int(1.05 * smallest[0]), only="recompute", cost="estimated")
    for branch in (0, 0, 0, 2):
        step(model, towards(branch)).backward()
    with pytest.warns(UserWarning, match="So may others like it: no plan fits"):
        step(model, towards(0)).backward()


def test_a_budget_that_is_too_small_is_refused_in_every_call():
    model, x = Broken(), torch.randn(64, WIDTH)
    step = compiled(1000)
    for _ in range(2):  # the first call shows that there are several graphs, the next what they are
        step(model, x).backward()
    before = activations()
    for _ in range(3):
        with pytest.raises(InfeasibleError, match="for the . graphs of this step"):
            step(model, torch.randn(256, WIDTH))
    assert activations() == before


class Wide(nn.Module):
    """A layer that is most of a step."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8 * WIDTH, 8 * WIDTH)

    def forward(self, x):
        return self.layer(x).tanh()


class Repeated(nn.Module):
    """One layer, applied as often as a value says: its gradient waits for those of other calls."""

    def __init__(self):
        super().__init__()
        self.part = Wide()

    def forward(self, x):
        for _ in range(int(x[0, 0].item())):
            x = self.part(x)
            torch._dynamo.graph_break()
        return x


@pytest.mark.parametrize("times", [(3, 3, 3), (1, 1, 1, 3)])
def test_gradients_that_wait_for_others_of_their_parameter_count(times):
    torch.manual_seed(3)
    model, options = Repeated(), {"budget": 2**40, "time_limit": 0.3, "cost": "estimated"}
    step = torch.compile(loss_of, backend="lowtide", options=options)
    for count in (*times, 3, 3):
        x = torch.randn(64, 8 * WIDTH)
        x[0, 0] = count + 0.5
        taken = peak(model, step, x)
    assert taken <= _STEPS[id(options)]._before[-1].taken_bytes <= 1.1 * taken


@pytest.mark.extended
def test_functions_with_the_same_options_are_planned_together():
    torch.manual_seed(3)
    models = [Broken(), nn.Sequential(Broken(), Broken())]
    xs = [torch.randn(rows, WIDTH) for rows in (256, 128)]
    budget = int(1.2 * max(map(smallest_of, models, xs)))
    options = {"budget": budget, "time_limit": 0.3, "cost": "estimated", "only": "recompute"}
    ways = [loss_of, lambda model, x: 2 * loss_of(model, x)]
    steps = [torch.compile(way, backend="lowtide", options=options) for way in ways]
    taken = []
    for _ in range(4):
        taken += [peak(model, step, x) for model, step, x in zip(models, steps, xs, strict=True)]
    assert max(taken[6:]) <= budget


def test_other_options_are_another_step():
    options = {}
    first = live_step(options, PlanRequest.of("60%"), None)
    assert live_step(options, PlanRequest.of("60%"), None) is first
    assert live_step(options, PlanRequest.of("50%"), None) is not first


def test_graphs_are_planned_again_only_so_many_times(smallest, monkeypatch):
    monkeypatch.setattr("lowtide.execute.breaks.live.AGAIN", 0)
    torch.manual_seed(3)
    model = Branches()
    step = compiled(int(1.05 * smallest[0]), only="recompute", cost="estimated")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for branch in (0, 0, 0, 2, 2, 2):
            step(model, towards(branch)).backward()
    found = [str(one.message) for one in told if "not planned with" in str(one.message)]
    assert ["no further graphs are planned" in one for one in found] == [True]


def test_what_no_program_runs_is_told_once():
    step = LiveStep({}, PlanRequest.of("60%"))
    with pytest.warns(UserWarning, match="no Program runs a part of the compiled function: it is odd"):
        step.leave("it is odd")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step.leave("it is odd")


def test_state_of_an_optimizer_is_for_one_graph():
    model, x = Broken(), torch.randn(64, WIDTH)
    step = compiled("60%", optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(CaptureError, match="compiled in several graphs"):
        step(model, x)


def test_shapes_of_one_bucket_share_a_plan():
    options = {"budget": "90%", "time_limit": 0.2, "bucket": 64}
    step = torch.compile(loss_of, backend="lowtide", options=options, fullgraph=True)
    model = nn.Linear(WIDTH, WIDTH)
    for rows in (40, 50):
        step(model, torch.randn(rows, WIDTH)).backward()
    shapes = _STEPS[id(options)].shapes.plans
    assert len(shapes._made) == 2
    assert shapes.others([model.weight, model.bias, torch.empty(60, WIDTH)]).near
    assert not shapes.others([model.weight, model.bias, torch.empty(70, WIDTH)]).near
