"""fit: the same step inside a budget."""

import copy
import json
import pickle

import pytest
import torch

import lowtide
from lowtide.cost.measure import measure
from lowtide.errors import GraphBreakError, InfeasibleError, PlanError, RunError
from lowtide.execute.compare.compare import compare
from lowtide.execute.compile import aot
from lowtide.execute.planning import plan_step, step_costs
from lowtide.execute.runtime.interpreter import Interpreter
from lowtide.plan.make.make_plan import make_plan
from lowtide.plan.program.instructions import Run
from tests.cost.busy import Ticking
from tests.execute.small import batch, network
from tests.execute.small import loss_of as loss


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    torch._dynamo.reset()
    return tmp_path


def left_behind(model, step, x):
    torch.manual_seed(5)
    model.zero_grad()
    result = step(model, x)
    result.backward()
    return [result.detach(), *(p.grad for p in model.parameters()), *model.buffers()]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_fitted_step_is_the_same_step():
    model, x = network(), batch()
    twin = copy.deepcopy(model)
    step = lowtide.fit(loss, model, x, budget="60%", time_limit=0.2)
    runs = sum(isinstance(line, Run) for line in step.plan.program.instructions)
    assert runs > len(step.plan.graph.ops)
    assert step.plan.decisions.recomputed > 0
    assert step.plan.predicted.peak_bytes <= step.plan.budget_bytes < step.plan.plain.peak_bytes
    for _ in range(2):
        assert same(left_behind(model, step, x), left_behind(twin, loss, x))


def test_a_fitted_step_says_that_it_cannot_be_copied():
    model, x = network(), batch()
    step = lowtide.fit(loss, model, x, budget="100%", time_limit=0.2)
    for copied in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(RunError, match=r"cannot be pickled or copied.* call lowtide\.fit again"):
            copied(step)
    again = pickle.loads(pickle.dumps(model))
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))


def test_the_measured_peak_stays_inside_the_budget():
    model, x = network(), batch(512)
    plan = lowtide.fit(loss, model, x, budget="55%", time_limit=0.2).plan
    found = compare(model, (x,), loss, lambda _: plan.program, in_place=False, repeats=1)
    assert found.program == plan.program
    assert found.bitwise
    assert found.measured.peak_bytes <= plan.budget_bytes * 1.005
    assert found.measured.peak_bytes < found.eager.peak_bytes


def test_fitting_leaves_no_trace():
    model, x = network(), batch()
    model(x).sum().backward()
    before = [p.grad.clone() for p in model.parameters()] + [t.clone() for t in model.state_dict().values()]
    state = torch.get_rng_state()
    lowtide.fit(loss, model, x, budget="60%", time_limit=0.2)
    after = [p.grad for p in model.parameters()] + list(model.state_dict().values())
    assert same(before, after)
    assert torch.equal(state, torch.get_rng_state())


def test_a_closure_is_left_alone_too():
    model, x = network(), batch()
    before = [t.clone() for t in model.state_dict().values()]
    step = lowtide.fit(lambda x: model(x).square().mean(), x, budget="60%", time_limit=0.2)
    assert same(before, model.state_dict().values())
    step(x).backward()
    assert not same(before, model.state_dict().values())


def test_the_backend_takes_a_budget():
    model, x = network(), batch()
    twin = copy.deepcopy(model)
    step = torch.compile(
        loss, backend="lowtide", options={"budget": "60%", "time_limit": 0.2}, fullgraph=True
    )
    assert same(left_behind(model, step, x), left_behind(twin, loss, x))


def test_other_shapes_are_planned_when_they_come():
    model = network()
    twin = copy.deepcopy(model)
    step = lowtide.fit(loss, model, batch(), budget="60%", time_limit=0.2)
    first = step.plan
    for rows in (128, 64, 128):
        assert same(left_behind(model, step, batch(rows)), left_behind(twin, loss, batch(rows)))
    assert step.plan is not first
    assert step.plan.plain.peak_bytes < first.plain.peak_bytes


def test_evaluation_without_gradients():
    model, x = network(), batch()
    step = lowtide.fit(loss, model, x, budget="60%", time_limit=0.2)
    model.eval()
    with torch.no_grad():
        assert torch.equal(step(model, x), loss(model, x))


def test_too_small_a_budget_names_the_one_that_works():
    model, x = network(), batch()
    with pytest.raises(InfeasibleError) as caught:
        lowtide.fit(loss, model, x, budget=1000, time_limit=0.2)
    step = lowtide.fit(loss, model, x, budget=caught.value.smallest_budget, time_limit=0.2)
    assert step.plan.predicted.peak_bytes <= caught.value.smallest_budget


@pytest.mark.parametrize(
    "options", [{"budget": "much"}, {"budget": "1GiB", "only": "magic"}, {"budget": "1GiB", "cost": "guess"}]
)
def test_nonsense_is_refused(options):
    with pytest.raises(PlanError):
        lowtide.fit(loss, network(), batch(), **options)


def plans(cache):
    return sorted((cache / "plans").glob("plan-*.json"))


def test_a_plan_is_kept_and_used_again(cache, monkeypatch):
    model, x = network(), batch()
    first = lowtide.fit(loss, model, x, budget="60%", time_limit=0.2).plan
    (path,) = plans(cache)
    torch._dynamo.reset()

    def never(*_, **__):
        raise AssertionError("planned again")

    monkeypatch.setattr("lowtide.execute.planning.plan_step.make_plan", never)
    monkeypatch.setattr("lowtide.execute.planning.step_costs.measure", never)
    made = []
    monkeypatch.setattr(aot, "Interpreter", lambda *args: made.append(Interpreter(*args)) or made[-1])
    assert lowtide.fit(loss, model, x, budget="60%", time_limit=0.2).plan == first
    assert [one.program for one in made] == [first.program]
    assert path.exists()


def test_the_time_limit_is_for_measuring_and_the_search_together(cache, monkeypatch):
    limits = {}

    def measured(*args, time_limit, **kwargs):
        limits["measuring"] = time_limit
        return measure(*args, time_limit=time_limit, **kwargs)

    def planned(graph, costs, request, *args, **kwargs):
        limits["search"] = request.limits.time_limit
        return make_plan(graph, costs, request, *args, **kwargs)

    monkeypatch.setattr(step_costs, "measure", measured)
    monkeypatch.setattr(plan_step, "make_plan", planned)
    lowtide.fit(loss, network(), batch(), budget="60%", only="recompute", time_limit=0.4)
    assert limits["measuring"] == 0.2
    assert 0.2 <= limits["search"] < 0.4


def test_no_device_is_measured_where_all_costs_are_known(cache, monkeypatch):
    plan = lowtide.fit(loss, network(), batch(), budget="60%", only="recompute", time_limit=0.4).plan

    def never(_):
        raise AssertionError("the device was measured")

    monkeypatch.setattr(step_costs, "load_device", lambda *_: None)
    monkeypatch.setattr(step_costs, "measure_device", never)
    found = step_costs.costs_of(plan.graph, (), "cpu", None, "known")
    assert len(found.seconds) == len(plan.graph.ops)
    with pytest.raises(AssertionError, match="was measured"):
        step_costs.costs_of(plan.graph, (), "cpu", None, "estimated")


def test_a_plan_from_disturbed_times_says_so_and_is_not_kept(cache, monkeypatch):
    model, x = network(), batch()
    with monkeypatch.context() as patch:
        patch.setattr("lowtide.cost.measure.HostTimer", Ticking)
        patch.setattr(Ticking, "tick", 1e-4)
        busy = lowtide.fit(loss, model, x, budget="60%", time_limit=1.5).plan
    assert busy.disturbed == busy.as_json()["disturbed"] == len(busy.graph.ops)
    assert f"{busy.disturbed} operators were measured while the machine was busy" in busy.explain()
    assert plans(cache) == []
    assert list(cache.glob("costs-*.json")) == []
    torch._dynamo.reset()
    quiet = lowtide.fit(loss, model, x, budget="60%", time_limit=0.2).plan
    assert quiet.disturbed == 0
    assert "busy" not in quiet.explain()
    assert len(plans(cache)) == 1


def test_a_damaged_plan_is_noticed_and_made_again(cache):
    model, x = network(), batch()
    # all of the memory: there is one plan, however long one looks
    options = {"budget": "100%", "cost": "estimated", "time_limit": 0.2}
    first = lowtide.fit(loss, model, x, **options).plan
    (path,) = plans(cache)
    good = path.read_bytes()
    swapped = json.loads(good)
    swapped["program"]["forward"].reverse()
    for data in (good[: len(good) // 2], json.dumps(swapped).encode()):
        path.write_bytes(data)
        torch._dynamo.reset()
        again = lowtide.fit(loss, model, x, **options).plan
        assert again.program == first.program
        assert path.read_bytes() != data


def test_a_folder_that_cannot_be_written_is_no_reason_to_fail(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path / "file"))
    assert lowtide.fit(loss, network(), batch(), budget="60%", time_limit=0.2).plan.checked


class Changing:
    """A step whose way depends on an attribute that changes between calls."""

    def __init__(self):
        self.way = "plain"

    def __call__(self, model, x):
        y = model(x)
        if self.way == "fails":
            raise ValueError("no such way")
        if self.way == "reads":
            y = y * (1.0 + y.abs().max().item())
        return y.square().mean()


def test_an_exception_of_a_later_call_is_that_of_the_users_code():
    model, x, step = network(), batch(), Changing()
    twin = copy.deepcopy(model)
    whole = lowtide.fit(step, model, x, budget="100%", time_limit=0.2)
    step.way = "fails"
    for function, one in ((step, twin), (whole, model)):
        torch.manual_seed(0)
        with pytest.raises(ValueError, match="no such way"):
            function(one, x)
    step.way = "plain"
    assert same(left_behind(model, whole, x), left_behind(twin, step, x))


def test_a_graph_break_of_a_later_call_is_taken_as_in_the_first():
    model, x, step = network(), batch(), Changing()
    twin = copy.deepcopy(model)
    whole = lowtide.fit(step, model, x, budget="100%", time_limit=0.2)
    one_graph = lowtide.fit(step, model, x, budget="100%", time_limit=0.2, fullgraph=True)
    step.way = "reads"
    with pytest.raises(GraphBreakError, match=r"test_fit\.py:\d+: "):
        one_graph(model, x)
    assert same(left_behind(model, whole, x), left_behind(twin, step, x))
    assert len(whole.plans) > 1


def test_a_share_is_no_less_for_a_smaller_batch():
    model = network()
    twin = copy.deepcopy(model)
    step = lowtide.fit(loss, model, batch(256), budget="50%", time_limit=0.2)
    first = step.plan.budget_bytes
    rows = 2  # parameters are most of what they take: half of it is too little
    assert same(left_behind(model, step, batch(rows)), left_behind(twin, loss, batch(rows)))
    assert step.plan.budget_bytes == first > step.plan.plain.peak_bytes


def test_hooks_that_come_and_go_later_run():
    model, x = network(), batch()
    twin = copy.deepcopy(model)
    step = lowtide.fit(loss, model, x, budget="100%", time_limit=0.2)
    hooks = [one[2].register_forward_hook(lambda _, __, result: result * 2) for one in (model, twin)]
    assert same(left_behind(model, step, x), left_behind(twin, loss, x))
    for hook in hooks:
        hook.remove()
    assert same(left_behind(model, step, x), left_behind(twin, loss, x))


def test_many_gradients_at_once_are_refused_with_the_way_out():
    model, x = torch.nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True)
    step = lowtide.fit(lambda x: model(x).tanh(), x, budget="100%", time_limit=0.2)
    with pytest.raises(
        lowtide.LowtideError, match="is_grads_batched=True is not possible.*once for each gradient"
    ):
        torch.autograd.grad(step(x), [x], torch.eye(32).view(32, 4, 8), is_grads_batched=True)
    step(x).sum().backward()
    found, x.grad = x.grad, None
    model(x).tanh().sum().backward()
    assert torch.equal(found, x.grad)


def test_a_linearized_step_runs_as_it_is():
    model, x = torch.nn.Linear(8, 8), torch.randn(4, 8)

    def loss_of(x):
        return model(x).tanh().sum()

    step = lowtide.fit(loss_of, x, budget="100%", time_limit=0.2)
    with pytest.warns(UserWarning, match="inside a transform of torch.func"):
        found, slope = torch.func.linearize(step, x)
    expected, other = torch.func.linearize(loss_of, x)
    assert torch.equal(found, expected)
    assert torch.equal(slope(x), other(x))


@pytest.mark.parametrize("transform", ["grad", "vmap"])
def test_inside_a_transform_of_torch_func_the_step_runs_as_it_is(transform):
    model, x = (
        torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 1)),
        torch.randn(4, 8),
    )

    def loss_of(model, x):
        return model(x).square().mean()

    step = lowtide.fit(loss_of, model, x, budget="100%", time_limit=0.5)

    def applied(function):
        transformed = getattr(torch.func, transform)(lambda x: function(model, x))
        return transformed(x if transform == "grad" else x[None])

    with pytest.warns(UserWarning, match="inside a transform of torch.func"):
        found = applied(step)
    assert torch.equal(found, applied(loss_of))
