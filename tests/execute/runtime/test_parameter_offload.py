"""Parameters and optimiser state that leave the device during a step: the same bits, whatever happens."""

import copy
import gc
from dataclasses import replace

import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import PlanError, RunError
from lowtide.execute.compare.compare import compare
from lowtide.execute.memory.optimizer_state import usual_optimizer
from lowtide.execute.runtime import interpreter
from lowtide.execute.runtime.instructions import Running
from lowtide.execute.runtime.parameter_offload import everything_away, may_leave
from lowtide.plan.bounds.relaxation import relax
from lowtide.plan.make import make_plan as make
from lowtide.plan.make.search import search
from lowtide.plan.offload.parameters import movable, with_absences
from lowtide.plan.program.costs import Costs
from lowtide.plan.program.instructions import Drop, Fetch, Send
from lowtide.plan.program.simple import store_all
from lowtide.plan.recompute.portfolio import recompute
from lowtide.plan.request import Limits

WIDTH = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def cache(folder, monkeypatch):
    monkeypatch.setenv("LOWTIDE_CACHE", str(folder))
    gc.freeze()  # what other tests left is none of ours, and takes long to look through
    yield
    gc.unfreeze()
    assert not everything_away()


def network():
    torch.manual_seed(0)
    layers = []
    for _ in range(3):
        layers += [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Dropout(0.2)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 1))


def loss(model, x):
    return model(x).square().mean()


def batch(rows=64):
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module", autouse=True)
def leaving():
    """Plans that send leaves away, and nothing else, though there might be faster ones."""

    def with_leaves_alone(problem, budget, *_, **__):
        never = (False,) * len(problem.ops)
        problem = replace(problem, asked=never, again=never)
        return recompute(problem, budget, relax(problem), Limits())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(make, "_sets", lambda _, leaves: [leaves])
        patch.setattr(make, "search", with_leaves_alone)
        yield


def fitted(model, x, budget="88%", **options):
    torch._dynamo.reset()
    options = {"offload": "parameters", "time_limit": 0.2, "cost": "estimated"} | options
    return lowtide.fit(loss, model, x, budget=budget, **options)


def sent(step):
    """Leaves that the plan sends to the host."""
    plan = step.plan
    found = {line.tensor for line in plan.program.instructions if isinstance(line, Send)}
    return {t for t in found if plan.graph.tensors[t].role.value in ("parameter", "optimizer")}


def away_between(step):
    gone = set()
    for line in step.plan.program.forward:
        if isinstance(line, Drop):
            gone |= sent(step) & set(line.tensors)
        elif isinstance(line, Fetch):
            gone.discard(line.tensor)
    return gone


def left_behind(model, step, x, seed=5):
    torch.manual_seed(seed)
    model.zero_grad()
    result = step(model, x)
    result.backward()
    return [result.detach(), *(p.grad for p in model.parameters()), *model.parameters(), *model.buffers()]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.fixture(scope="module")
def made_once(leaving, folder):
    model, x = network(), batch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOWTIDE_CACHE", str(folder))
        step = fitted(model, x)
    return model, x, step


@pytest.fixture
def made(made_once):
    """A step that sends parameters away, a model that is as new, and a copy of it."""
    model, x, step = made_once
    twin = network()
    model.load_state_dict(twin.state_dict())
    model.train().zero_grad()
    assert away_between(step)
    return model, twin, x, step


def test_parameters_that_were_away_give_the_same_step(made):
    model, twin, x, step = made
    kinds = [type(p) for p in model.parameters()]
    for seed in range(3):
        assert same(left_behind(model, step, x, seed), left_behind(twin, loss, x, seed))
    assert [type(p) for p in model.parameters()] == kinds


def test_their_memory_is_given_back_between_forward_and_backward(made):
    model, _, x, step = made
    result = step(model, x)
    gone = [one.value for one in everything_away()]
    assert len(gone) == len(away_between(step))
    model.zero_grad()  # a usual place for it; it reads no parameter
    assert len(everything_away()) == len(gone)
    result.backward()
    assert not everything_away()


def test_whoever_reads_a_parameter_in_between_gets_it_back(made):
    model, twin, x, step = made
    torch.manual_seed(2)
    (loss(twin, x) + 0.1 * sum(p.square().sum() for p in twin.parameters())).backward()
    torch.manual_seed(2)
    result = step(model, x)
    (result + 0.1 * sum(p.square().sum() for p in model.parameters())).backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(p.grad, q.grad)
        assert torch.equal(p, q)


def test_a_step_without_backward_brings_them_back(made):
    model, twin, x, step = made
    result = step(model, x)
    assert everything_away()
    del result
    gc.collect()
    assert not everything_away()
    assert all(map(torch.equal, model.parameters(), twin.parameters()))


def test_a_step_that_is_kept_without_backward(made):
    model, _, x, step = made
    result = step(model, x)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        model.eval()(x)
    assert not everything_away()
    assert all(torch.isfinite(v).all() for v in state.values())
    result.backward()


def test_two_steps_under_way_at_once(made):
    model, twin, x, step = made
    torch.manual_seed(3)
    (loss(twin, x) + loss(twin, x * 2)).backward()
    torch.manual_seed(3)
    (step(model, x) + step(model, x * 2)).backward()
    assert all(
        torch.allclose(p.grad, q.grad) for p, q in zip(model.parameters(), twin.parameters(), strict=True)
    )
    assert all(map(torch.equal, model.parameters(), twin.parameters()))


class BrokenError(RuntimeError):
    """What the operator raises."""


@pytest.mark.parametrize("part", ["forward", "backward"])
def test_an_error_in_the_middle_brings_them_back(made, part, monkeypatch):
    model, twin, x, step = made
    before = [p.detach().clone() for p in model.parameters()]

    def fail(*_, **__):
        raise BrokenError("no more memory")

    call = Running.__call__

    def broken(self, frame):
        if everything_away() and len(seen) > (4 if part == "forward" else count + 2):
            fail()
        seen.append(self.op)
        call(self, frame)

    seen = []
    count = sum(type(line).__name__ == "Run" for line in step.plan.program.forward)
    monkeypatch.setattr(Running, "__call__", broken)
    monkeypatch.setattr(interpreter, "calls_are_watched", lambda: True)  # then lines run as they are
    with pytest.raises(BrokenError):
        step(model, x).backward()
    monkeypatch.undo()
    gc.collect()
    assert not everything_away()
    assert same(before, model.parameters())
    model.load_state_dict(twin.state_dict())
    assert same(left_behind(model, step, x), left_behind(twin, loss, x))


def test_a_second_backward_is_refused_and_they_are_back(made):
    model, twin, x, step = made
    with pytest.raises(RunError, match="retain_graph"):
        step(model, x).backward(retain_graph=True)
    assert not everything_away()
    assert all(map(torch.equal, model.parameters(), twin.parameters()))


def test_saved_tensors_that_somebody_looks_at(made):
    model, twin, x, step = made
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (seen.append(t.sum()), t)[1], lambda t: t):
        result = step(model, x)
    result.backward()
    assert all(map(torch.equal, model.parameters(), twin.parameters()))


def test_a_parameter_that_changes_in_between_keeps_its_change(made):
    model, _, x, step = made
    result = step(model, x)
    with torch.no_grad():
        model[-1].bias.add_(1.0)
    value = model[-1].bias.detach().clone()
    try:
        result.backward()
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
    assert torch.equal(model[-1].bias, value)


def test_memory_that_others_share_stays():
    flat = torch.randn(20)
    own, half, view = torch.randn(3), flat[:10], flat.view(4, 5)
    twice = nn.Parameter(own)
    assert may_leave([own, half, view, 3, None]) == [True, False, False, False, False]
    assert may_leave([own, twice]) == [False, False]
    assert may_leave([torch.empty(0), torch.randn(2, 3).t(), torch.randn(1, 4).expand(3, 4)]) == [False] * 3


def test_a_tied_parameter():
    torch.manual_seed(0)
    model = network()
    model[4].weight = model[0].weight
    twin, x = copy.deepcopy(model), batch()
    step = fitted(model, x)
    assert sent(step)
    for _ in range(2):
        assert same(left_behind(model, step, x), left_behind(twin, loss, x))


@pytest.mark.parametrize("offload", ["parameters,optimizer"])
def test_training_with_state_that_is_away(offload):
    model, x = network(), batch()
    twin = copy.deepcopy(model)
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, twin))
    step = fitted(model, x, "100%", offload=offload, optimizer=ours)
    step = fitted(model, x, step.plan.plain.peak_bytes + 4096, offload=offload, optimizer=ours)
    for seed in range(4):
        for m, optimizer, way in ((model, ours, step), (twin, theirs, loss)):
            optimizer.zero_grad()
            torch.manual_seed(seed)
            way(m, x).backward()
            optimizer.step()
        assert all(map(torch.equal, model.parameters(), twin.parameters()))
    plan = step.plan  # made anew when the state came
    assert any(plan.graph.tensors[t].role.value == "optimizer" for t in sent(step))
    size = sum(v.nbytes for state in ours.state.values() for v in state.values())
    assert plan.resident_bytes >= size
    assert "optimizer" in plan.explain()
    torch.manual_seed(9)
    result = step(model, x)
    gone = [one.value for one in everything_away() if type(one.value).__name__ == "_AwayTensor"]
    assert gone
    saved = copy.deepcopy(ours.state_dict())  # somebody reads it before backward
    assert not everything_away()
    assert all(torch.isfinite(v).all() for s in saved["state"].values() for v in s.values())
    result.backward()


def test_the_backend_takes_it_too(monkeypatch):
    monkeypatch.setattr(make, "search", search)
    model, x = network(), batch()
    twin = copy.deepcopy(model)
    options = {"budget": "50%", "offload": "parameters", "cost": "estimated", "time_limit": 0.2}
    torch._dynamo.reset()
    step = torch.compile(loss, backend="lowtide", options=options, fullgraph=True)
    torch.manual_seed(5)
    result = step(model, x)
    assert not everything_away()
    torch.manual_seed(5)
    assert torch.equal(result, loss(twin, x))
    result.backward()
    for seed in range(2):
        assert same(left_behind(model, step, x, seed), left_behind(twin, loss, x, seed))


def test_what_is_asked_wrongly():
    model, x = network(), batch()
    with pytest.raises(PlanError, match="there is no 'optimiser'"):
        fitted(model, x, offload="optimiser")
    with pytest.raises(PlanError, match="needs the optimiser itself"):
        fitted(model, x, offload="optimizer")
    with pytest.raises(PlanError, match="give the torch.optim.Optimizer"):
        fitted(model, x, offload="optimizer", optimizer=3)


def test_evaluation_ends_with_everything_on_the_device():
    model, x = network(), batch()
    step = fitted(model, x)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            first = step(model.eval(), x)
            assert not everything_away()
            assert torch.equal(first, loss(model, x))


@pytest.mark.parametrize("offload", ["parameters", "parameters,optimizer"])
def test_the_measured_peak_is_the_predicted_one(offload):
    model, x = network(), batch()
    optimizer = usual_optimizer(model)
    plain = fitted(model, x, "100%", offload=(), optimizer=optimizer).plan
    assert plain.resident_bytes >= 3 * sum(p.nbytes for p in model.parameters())
    budget = plain.plain.peak_bytes - 20_000
    plan = fitted(model, x, budget, offload=offload, optimizer=optimizer).plan
    assert plan.decisions.offloaded
    options = {"in_place": False, "optimizer": optimizer, "repeats": 1}
    found = compare(model, (x,), loss, lambda _: plan.program, **options)
    assert found.bitwise
    assert found.measured.peak_bytes <= budget < found.eager.peak_bytes
    # up to the scalars that autograd may keep
    assert 0 <= found.predicted_peak_bytes - found.measured.peak_bytes <= 48


@pytest.mark.parametrize("crossing", [True, False])
def test_whatever_leaves_is_counted(crossing):
    """Every parameter is away whenever nobody uses it: what is measured is what is simulated."""
    torch._dynamo.reset()

    def planner(graph):
        leaves = movable(graph, ("parameters", "optimizer"))
        return with_absences(graph, store_all(graph), leaves, 0, Costs(()), crossing=crossing)

    model, x = network(), batch()
    found = compare(model, (x,), loss, planner, in_place=False, repeats=1)
    assert found.bitwise
    assert 0 <= found.predicted_peak_bytes - found.measured.peak_bytes <= 48
    assert found.measured.peak_bytes < found.eager.peak_bytes or not crossing
    parts = [
        {line.tensor for line in part if isinstance(line, Fetch)}
        for part in (found.program.forward, found.program.backward)
    ]
    assert parts[0]
    assert parts[1]
    assert max(found.recording.timeline.live_bytes) == found.measured.peak_bytes
