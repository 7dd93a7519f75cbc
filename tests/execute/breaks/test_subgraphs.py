"""A step in several graphs: each is planned, together they stay inside one budget, and the results are those of eager."""

import contextlib
import copy
import gc
import random
import weakref

import numpy
import pytest
import torch
from torch import nn

import lowtide
from lowtide.cost.watch import watch_cpu
from lowtide.errors import CaptureError, GraphBreakError, InfeasibleError
from lowtide.execute.breaks.subgraph import Subgraph
from lowtide.torch_internals import free_weak_storage, storage_expired, weak_storage
from tests.execute.modules import CASES

WIDTH = 32


def layers(count, *more):
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), *more) for _ in range(count)))


class Block(nn.Module):
    """A module of the user's: where torch gives up on a loop, it captures what the loop calls."""

    def __init__(self, count):
        super().__init__()
        self.layers = layers(count)

    def forward(self, x):
        return x + self.layers(x)


class Branching(nn.Module):
    """Which way it goes depends on a value."""

    def __init__(self, count=2):
        super().__init__()
        self.first, self.second = layers(count), layers(count, nn.Dropout(0.1))
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        y = self.norm(self.first(x))
        return self.second(y * 2 if y.sum() > 0 else y * 3)


class Reading(Branching):
    """A number is read from a tensor."""

    def forward(self, x):
        y = self.norm(self.first(x))
        return self.second(y / max(1.0, y.abs().max().item()))


class Foreign(Branching):
    """Something that torch knows nothing of stands between."""

    def forward(self, x):
        y = self.norm(self.first(x))
        scale = float(y.detach().numpy().max())
        return self.second(y) * scale


class Recurrent(nn.Module):
    """Torch does not capture an LSTM."""

    def __init__(self):
        super().__init__()
        self.first, self.lstm, self.second = layers(2), nn.LSTM(WIDTH, WIDTH, batch_first=True), layers(2)

    def forward(self, x):
        y = self.first(x).unflatten(0, (8, -1))
        return self.second(self.lstm(y)[0].flatten(0, 1))


class Experts(nn.Module):
    """A mixture of experts: how many rows go to each comes from data."""

    def __init__(self):
        super().__init__()
        self.first, self.router = layers(2), nn.Linear(WIDTH, 3)
        self.experts, self.last = nn.ModuleList(Block(1) for _ in range(3)), layers(2)

    def forward(self, x):
        y = self.first(x)
        weights, chosen = self.router(y).softmax(-1).max(-1)
        out = torch.zeros_like(y)
        for k, expert in enumerate(self.experts):
            rows = (chosen == k).nonzero().squeeze(1)
            if rows.numel():
                out = out.index_add(0, rows, expert(y[rows]) * weights[rows, None])
        return self.last(y + out)


class InLayers(nn.Module):
    """A break in every layer: the same graph is called several times."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(2) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x) if x.sum().item() < 1e9 else x
        return x


MODELS = [Branching, Reading, Foreign, Recurrent, Experts, InLayers]
LONG = pytest.param(Experts, "90%", marks=pytest.mark.extended)


def loss_of(model, x):
    return model(x).square().mean()


def left_behind(model, step, x, seed):
    model.zero_grad()
    torch.manual_seed(seed)
    loss = step(model, x)
    loss.backward()
    drawn = torch.rand(2)
    return [loss.detach(), *(p.grad for p in model.parameters()), *model.buffers(), drawn]


def same(one, other):
    return all((a is None and b is None) or torch.equal(a, b) for a, b in zip(one, other, strict=True))


def fitted(model, x, budget):
    """The step inside a budget, or inside the smallest that is known."""
    try:
        return lowtide.fit(loss_of, model, x, budget=budget, only="recompute", time_limit=0.2)
    except InfeasibleError as error:
        torch._dynamo.reset()
        return lowtide.fit(loss_of, model, x, budget=error.smallest_budget, only="recompute", time_limit=0.2)


@pytest.mark.parametrize(
    ("kind", "budget"), [*((kind, "90%") for kind in MODELS if kind is not Experts), (Branching, "50%"), LONG]
)
def test_steps_in_several_graphs_are_those_of_eager(kind, budget):
    torch.manual_seed(3)
    model, x = kind(), torch.randn(64, WIDTH)
    twin = copy.deepcopy(model)
    step = fitted(model, x, budget)
    assert same(model.state_dict().values(), twin.state_dict().values())
    for seed in range(3):
        x = torch.randn(64, WIDTH)
        assert same(left_behind(model, step, x, seed), left_behind(twin, loss_of, x, seed))
        for one in (model, twin):
            with torch.no_grad():
                for p in one.parameters():
                    p -= 0.1 * p.grad if p.grad is not None else 0
    assert len(step.plans) > 1 or step.explain().count("break")


@pytest.mark.parametrize(("kind", "share"), [(Branching, 1.0), (Reading, 0.6), (InLayers, 0.6)])
def test_the_graphs_of_a_step_stay_inside_one_budget(kind, share):
    """A layer that is called several times fits, as it holds little for its backward."""
    model, x = kind(), torch.randn(256, WIDTH)
    budget = int(share * plain_peak(kind))
    step = lowtide.fit(loss_of, model, x, budget=budget, time_limit=0.2)

    def run():
        step(model, x).backward()

    watch_cpu(lambda _: run())
    model.zero_grad(set_to_none=True)
    leaves = {t.untyped_storage().data_ptr(): t.nbytes for t in (*model.state_dict().values(), x)}
    _, seen = watch_cpu(lambda _: run())
    assert seen.peak_bytes + sum(leaves.values()) <= budget
    assert step.explain().startswith("graphs     ")


class Outside(nn.Module):
    """Code that torch does not capture, which takes more memory than all graphs."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = self.first(x).relu()
        large_workspace(y)
        return self.second(y)


@torch.compiler.disable
def large_workspace(y):
    """Takes memory, and gives it back."""
    (y.detach().repeat(40, 1) + 1).sum()


def test_a_share_is_one_of_the_whole_step():
    model, x = Outside(), torch.randn(256, WIDTH)
    step = fitted(model, x, "100%")
    taken = step._subgraphs.measured_bytes
    assert taken > 40 * x.nbytes
    assert taken <= step._subgraphs.budget_bytes == step._subgraphs.plain_bytes


def plain_peak(kind):
    """What the graphs of the step take without a plan, as is said where the budget is a share."""
    torch._dynamo.reset()
    step = lowtide.fit(loss_of, kind(), torch.randn(256, WIDTH), budget="100%", time_limit=0.2, verify=False)
    torch._dynamo.reset()
    return step._subgraphs.plain_bytes


def test_the_smallest_budget_that_is_named_works():
    model, x = Branching(), torch.randn(256, WIDTH)
    with pytest.raises(
        InfeasibleError, match="for the . graphs of this step; the smallest budget"
    ) as refused:
        lowtide.fit(loss_of, model, x, budget=1000, time_limit=0.2)
    torch._dynamo.reset()
    step = lowtide.fit(loss_of, model, x, budget=refused.value.smallest_budget, time_limit=0.2)
    assert step.plans


def test_breaks_are_listed_with_their_lines():
    model, x = Reading(4), torch.randn(64, WIDTH)
    step = lowtide.fit(loss_of, model, x, budget="70%", time_limit=0.2)
    (line,) = [one for one in step.explain().splitlines() if one.startswith("break")]
    assert "test_subgraphs.py:" in line
    assert "item" in line


def test_fullgraph_refuses_as_ever():
    with pytest.raises(GraphBreakError, match=r"test_subgraphs\.py:\d+: .*cannot be captured as one graph"):
        lowtide.fit(loss_of, Branching(), torch.randn(64, WIDTH), budget="70%", fullgraph=True)


def test_mistakes_of_the_user_are_no_breaks():
    def wrong(model, x):
        return model(x).nothing_of_this_name()

    with pytest.raises(CaptureError, match=r"test_subgraphs\.py:\d+") as refused:
        lowtide.fit(wrong, layers(1), torch.randn(8, WIDTH), budget="70%")
    assert not isinstance(refused.value, GraphBreakError)


def test_other_branches_and_evaluation_are_planned_when_they_come():
    torch.manual_seed(3)
    model = Branching(4)
    twin = copy.deepcopy(model)
    step = lowtide.fit(loss_of, model, torch.randn(64, WIDTH), budget="60%", time_limit=0.2)
    for shift in (3.0, -3.0, 3.0):
        with torch.no_grad():
            for one in (model, twin):
                one.norm.bias.fill_(shift)
        x = torch.randn(64, WIDTH)
        assert same(left_behind(model, step, x, 1), left_behind(twin, loss_of, x, 1))
    x = torch.randn(48, WIDTH)
    assert same(left_behind(model, step, x, 1), left_behind(twin, loss_of, x, 1))
    with torch.no_grad():
        assert torch.equal(step(model.eval(), x), loss_of(twin.eval(), x))


class Mixed(Branching):
    """Half precision around a break, and a teacher that has no gradients behind it."""

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.norm(self.first(x))
            z = self.second(y) if y.sum().item() < 1e9 else y
            with torch.no_grad():
                target = self.first(y)
                target = self.second(target) if target.sum().item() < 1e9 else target
        return z.float() - target.float()


def test_autocast_and_no_grad_around_a_break():
    torch.manual_seed(3)
    model, x = Mixed(), torch.randn(64, WIDTH)
    twin = copy.deepcopy(model)
    step = fitted(model, x, "100%")
    for seed in range(2):
        assert same(left_behind(model, step, x, seed), left_behind(twin, loss_of, x, seed))


class LosesLayers(nn.Module):
    """Leaves layers out at random, by the generator of Python and by that of NumPy."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(1) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            if random.random() > 0.3 and numpy.random.rand() > 0.3:
                x = block(x)
        return x.square().mean()


def test_generators_of_python_and_numpy_are_left_alone():
    model, x = LosesLayers(), torch.randn(8, WIDTH)
    random.seed(1)
    numpy.random.seed(1)
    before = random.getstate(), numpy.random.get_state()
    step = lowtide.fit(model, x, budget="100%", time_limit=1.0)
    assert random.getstate() == before[0]
    assert (numpy.random.get_state()[1] == before[1][1]).all()
    for seed in range(3):
        losses = []
        for run in (step, model):
            random.seed(seed)
            numpy.random.seed(seed)
            losses.append(run(x))
        assert torch.equal(*losses)


def test_closures_and_random_states_are_left_alone():
    model, x = Branching(4), torch.randn(64, WIDTH)
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    lowtide.fit(lambda x: loss_of(model, x), x, budget="60%", time_limit=0.2)
    assert same(model.state_dict().values(), before.values())
    assert torch.equal(state, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("name", [name for name, one in CASES.items() if not one.whole])
def test_what_torch_cannot_capture_whole_runs(name):
    one = CASES[name]
    torch.manual_seed(0)
    model, batch = one.build(), one.batch()
    twin = copy.deepcopy(model)

    def loss(model, *batch):
        return one.forward(model, *batch).square().mean()

    step = lowtide.fit(loss, model, *batch, budget="100%", time_limit=0.3)
    for _ in range(2):
        for net, function in ((model, step), (twin, loss)):
            net.zero_grad()
            function(net, *batch).backward()
        assert all(
            torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), twin.parameters(), strict=True)
        )
        assert same(model.buffers(), twin.buffers())


@pytest.mark.parametrize(("kind", "budget"), [(Branching, "100%"), (Reading, "100%"), (Reading, 1000)])
def test_nothing_of_the_rehearsal_is_held(kind, budget, monkeypatch):
    handed, call = [], Subgraph.__call__

    def watched(self, *arguments):
        results = call(self, *arguments)
        handed.extend(weak_storage(t) for t in results if isinstance(t, torch.Tensor))
        return results

    monkeypatch.setattr(Subgraph, "__call__", watched)
    model, x = kind(), torch.randn(64, WIDTH)
    storage = weakref.ref(x.untyped_storage())
    with contextlib.suppress(InfeasibleError):
        lowtide.fit(loss_of, model, x, budget=budget, time_limit=0.3)
    del x
    gc.collect()
    assert storage() is None
    assert handed
    assert all(storage_expired(one) for one in handed), "activations of the rehearsal are held"
    for one in handed:
        free_weak_storage(one)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", [Branching, Reading, Experts, InLayers])
def test_steps_in_several_graphs_on_cuda_are_those_of_eager(kind):
    torch.manual_seed(3)
    model, x = kind().cuda(), torch.randn(4096, WIDTH, device="cuda")
    twin = copy.deepcopy(model)
    step = fitted(model, x, "100%")
    for seed in range(3):
        x = torch.randn(4096, WIDTH, device="cuda")
        assert same(left_behind(model, step, x, seed), left_behind(twin, loss_of, x, seed))
