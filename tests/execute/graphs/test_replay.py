"""When a step is captured, replayed or run as always: told by tapes of the host, which run it again.

What a tape has returned is written anew at each replay, as by a CUDA graph. So whoever gives away memory that
is still in use gets other bits than the step without graphs.
"""

import copy
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import lowtide
from lowtide.device_internals import uses_of_storage
from lowtide.execute.compile.family import Shapes
from lowtide.execute.graphs.captured_step import undisturbed
from lowtide.execute.graphs.part import SharedStorage, Value
from lowtide.execute.graphs.replay import Replay
from lowtide.execute.runtime.copies import Form
from lowtide.plan.program.instructions import Run
from tests.execute.graphs.loops import (
    LOOPS,
    Network,
    accumulated,
    batches,
    held,
    loss_of,
    trained,
    two_at_once,
    usual,
)


class _Graph:
    """Computes again what it has computed once, into the same memory."""

    def __init__(self, run, arguments, results):
        self.run, self.arguments, self.replays = run, arguments, 0
        given = {one.data_ptr() for one in arguments if isinstance(one, torch.Tensor)}
        self.results = [one if one is None or one.data_ptr() in given else one.clone() for one in results]

    def replay(self):
        self.replays += 1
        for old, new in zip(self.results, self.run(list(self.arguments)), strict=True):
            if old is not None and old.data_ptr() != new.data_ptr():
                old.copy_(new)


class _Storage(SharedStorage):
    rest = 0

    @property
    def held(self):
        return uses_of_storage(self.base) > self.rest


class _Tape:
    def __init__(self, number):
        self.number, self.storages, self.used, self.graphs = number, [], {number}, []

    def captured(self, run, arguments, groups, large, generators):
        known = list(arguments)
        before = [one.clone() if isinstance(one, torch.Tensor) else one for one in known]
        random = torch.get_rng_state()
        self.graphs.append(_Graph(run, known, run(arguments)))
        assert not arguments
        torch.set_rng_state(random)  # nothing is computed while a graph is captured
        for one, value in zip(known, before, strict=True):
            if isinstance(one, torch.Tensor) and not torch.equal(one, value):
                one.copy_(value)
        return self.graphs[-1], list(self.graphs[-1].results)

    def value(self, tensor):
        flat = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        self.storages.append(_Storage(flat, range(0), frozenset([self.number])))
        return Value(self.storages[-1], Form.of(tensor))

    def again(self, form, address):
        known = [one for graph in self.graphs for one in (*graph.results, *graph.arguments)]
        storages = (one.untyped_storage() for one in known if isinstance(one, torch.Tensor))
        (found, *_) = (one for one in storages if one.data_ptr() == address)
        return form.over(torch.empty(0, dtype=torch.uint8).set_(found))

    def settle(self):
        least = min((uses_of_storage(one.base) for one in self.storages), default=0)
        for one in self.storages:  # the graph holds them too
            one.rest = least

    def close(self):
        self.storages.clear()


class _Beside:
    """Nothing: on the host, copies and random numbers are those of the interpreter."""

    @contextmanager
    def watching(self, part):
        yield

    def generators(self, part):
        return ()

    def capturing(self, part):
        return self.watching(part)

    def set_out(self, part):
        pass

    def as_saved(self, value):
        return value


class _Stopwatch:
    def __init__(self, took):
        self.took = took

    @contextmanager
    def timing(self, part):
        self.took[part].append(self.took[part][-1])
        yield

    def seconds(self):
        return [part[1:] for part in self.took]


class _Tapes:
    device_type = "cpu"
    unplanned_bytes = 0
    took = (1.0, 1.0)
    """Seconds as always, and as graphs."""

    def __init__(self):
        self.made, self.listed, self.size = [], [], 0
        self.watches = iter(self.took)

    def possible(self):
        return True

    def beside(self, interpreter, device):
        return _Beside()

    def stopwatch(self):
        seconds = next(self.watches)
        return _Stopwatch([[seconds], [seconds]])

    def watched(self):
        pass

    def sizes(self, device):
        class Nothing:
            large = frozenset()

            @contextmanager
            def watching(self, groups):
                yield

        return Nothing()

    def listing(self, device):
        found = _Tape(-1)
        found.layout = object
        self.listed.append(found)
        return found

    def new(self, device, layout, held, most):
        assert layout is not None
        self.made.append(_Tape(len(self.made)))
        return self.made[-1]

    def forget(self):
        pass


@pytest.fixture
def tapes(monkeypatch):
    found = []

    def replayed(self, interpreter, how, lost_bytes):
        if how == "off":
            return None
        found.append(_Tapes())
        replay = Replay(interpreter, found[-1])
        self.graphs.add(replay)
        return replay

    monkeypatch.setattr(Shapes, "replayed", replayed)
    return found


@pytest.mark.parametrize("loop", LOOPS)
def test_the_bits_are_those_without_graphs(loop, tapes):
    torch.manual_seed(0)
    model = Network(width=4)
    other = copy.deepcopy(model)
    x, y = next(batches(model, 1))
    options = {"budget": "100%", "time_limit": 1.0, "verify": False}
    plain = lowtide.fit(loss_of, model, x, y, **options)
    graphs = lowtide.fit(loss_of, other, x, y, **options, graphs="auto")
    expected, found = trained(model, plain, loop), trained(other, graphs, loop)
    assert len(expected) == len(found)
    for one, two in zip(expected, found, strict=True):
        assert torch.equal(one, two)
    replays = [graph.replays for one in tapes for tape in one.made for graph in tape.graphs]
    assert sum(replays) >= 2
    if loop is two_at_once:
        assert "before the backward of the one before" in graphs.explain()
    elif loop is held:
        assert "held in more ways" in graphs.explain()
    else:
        assert "each replay as one CUDA graph" in graphs.explain()
        assert max(replays) > 2


class Drawing(nn.Module):
    """Numbers are drawn in every layer, and no layer has a workspace."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(192, 1024)
        self.layers = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(4))
        self.last = nn.Linear(1024, 10)

    def forward(self, x):
        x = self.first(x.flatten(1)).repeat(16, 1)
        for layer in self.layers:
            x = x + nn.functional.gelu(x * layer.bias) * torch.rand_like(x)
        return self.last(x).unflatten(0, (16, -1)).mean(0)


@pytest.mark.parametrize("loop", [usual, accumulated])
@pytest.mark.parametrize("only", ["recompute", "offload"])
def test_what_runs_beside_is_replayed(loop, only, tapes):
    """Dropouts that are recomputed, and copies to the host."""
    torch.manual_seed(0)
    model = Drawing()
    other = copy.deepcopy(model)
    x, y = next(batches(model, 1))
    budget = "50%" if only == "recompute" else "60%"  # at 50% some dropouts have to run again
    options = {"budget": budget, "cost": "estimated", "time_limit": 1.0, "verify": False, "only": only}
    plain = lowtide.fit(loss_of, model, x, y, **options)
    graphs = lowtide.fit(loss_of, other, x, y, **options, graphs="auto")
    decisions, steps = graphs.plan.decisions, graphs.plan.graph.ops
    assert decisions.offloaded if only == "offload" else decisions.recomputed
    ran = [line.op for line in graphs.plan.program.instructions if isinstance(line, Run)]
    assert only == "offload" or any(steps[op].random for op in ran if ran.count(op) > 1)
    for one, two in zip(trained(model, plain, loop), trained(other, graphs, loop), strict=True):
        assert torch.equal(one, two)
    assert "each replay as one CUDA graph" in graphs.explain()


def test_graphs_that_are_slower_are_given_up(tapes, monkeypatch):
    monkeypatch.setattr(_Tapes, "took", (1.0, 1.2))
    torch.manual_seed(0)
    model = Network(width=4)
    x, y = next(batches(model, 1))
    step = lowtide.fit(loss_of, model, x, y, verify=False, graphs="auto")
    found = []
    for _ in range(8):
        model.zero_grad()
        step(model, x, y).backward()
        found.append("each replay as one CUDA graph" in step.explain())
    assert found == [False, False, False, True, True, True, False, False]
    assert "the step was measured to take longer as graphs" in step.explain()


def test_arguments_on_the_host_are_named(tapes, monkeypatch):
    torch.manual_seed(0)
    model, x = nn.Linear(4, 4), torch.randn(8, 4)
    step = lowtide.fit(lambda model, x: model(x).square().sum(), model, x, verify=False, graphs="auto")
    monkeypatch.setattr(_Tapes, "device_type", "cuda")  # all of them are, then
    step(model, x).backward()
    assert not any(one.made for one in tapes)
    assert "graphs     none: an argument of the step is on the host" in step.explain()


def test_a_batch_that_never_moves_is_read_in_place(tapes):
    torch.manual_seed(0)
    model = Network(width=4)
    x, y = next(batches(model, 1))
    step = lowtide.fit(loss_of, model, x, y, verify=False, graphs="auto")
    for _ in range(5):
        step(model, x, y).backward()
        model.zero_grad()
    (tape,) = tapes[-1].made
    assert any(one is x for one in tape.graphs[0].arguments)
    step(model, x.clone(), y).backward()  # from here on, batches are copied
    again = tapes[-1].made[-1]
    assert len(tapes[-1].made) == 2
    assert not any(one is x for one in again.graphs[0].arguments)
    for _ in range(3):
        model.zero_grad()
        step(model, x, y).backward()
    assert len(tapes[-1].made) == 2


@pytest.mark.parametrize("part", [0, 1])
def test_a_capture_that_is_interrupted_is_made_again(tapes, monkeypatch, part):
    captured = _Tape.captured

    def interrupted(self, *given):
        if self.number == 0 and len(self.graphs) == part:
            raise KeyboardInterrupt
        return captured(self, *given)

    torch.manual_seed(0)
    model = Network(0.0, width=4)
    x, y = next(batches(model, 1))
    step = lowtide.fit(loss_of, model, x, y, verify=False, graphs="auto")
    monkeypatch.setattr(_Tape, "captured", interrupted)
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - which call it is depends on the part
        for _ in range(5):
            model.zero_grad()
            step(model, x, y).backward()
    model.zero_grad()
    twin = copy.deepcopy(model)
    loss, expected = step(model, x, y), loss_of(twin, x, y)
    assert torch.equal(loss, expected)
    loss.backward()
    expected.backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
    assert "each replay as one CUDA graph" in step.explain()


@pytest.mark.parametrize("steps", [4, 6])
def test_a_model_that_moves_between_forward_and_backward(tapes, steps):
    """In the fourth step, which is captured, and later: backward reads what the step without graphs reads."""
    torch.manual_seed(0)
    model = Network(0.0, width=4)
    twin = copy.deepcopy(model)
    x, y = next(batches(model, 1))
    ways = [
        (one, lowtide.fit(loss_of, one, x, y, budget="100%", verify=False, graphs=how))
        for one, how in ((model, "auto"), (twin, "off"))
    ]
    for number in range(steps + 3):
        for one, step in ways:
            one.zero_grad()
            loss = step(one, x, y)
            if number == steps - 1:
                for parameter in one.parameters():
                    parameter.data = torch.full_like(parameter, 0.1)
            loss.backward()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)
    assert "each replay as one CUDA graph" in ways[0][1].explain()


def test_a_batch_that_is_updated_is_not_copied(tapes):
    def loss_of(model, x, mean, variance):
        return nn.functional.batch_norm(model(x), mean, variance, training=True).square().sum()

    torch.manual_seed(0)
    model, x = nn.Linear(4, 4), torch.randn(8, 4)
    own = [torch.zeros(4), torch.ones(4)]
    eager = [one.clone() for one in own]
    step = lowtide.fit(loss_of, model, x, *own, budget="100%", time_limit=0.5, graphs="auto")
    for _ in range(3):
        step(model, x, *own).backward()
        loss_of(model, x, *eager).backward()
    assert "updates a tensor of the batch" in step.explain()
    assert all(map(torch.equal, own, eager))


def test_nothing_is_replayed_over_what_is_held():
    def tape(used, *storages):
        return SimpleNamespace(
            used=set(used), storages=[SimpleNamespace(held=h, pages=frozenset(p)) for h, p in storages]
        )

    free = [tape([0, 1], (False, [0])), tape([2, 3], (False, [2]))]
    assert undisturbed(free, 0)
    assert undisturbed(free, 1)
    large = [tape([0, 1], (True, [0])), tape([2, 3], (False, [2]))]
    assert not undisturbed(large, 0)
    assert undisturbed(large, 1)
    overlapping = [tape([0, 1], (False, [0])), tape([1, 3], (True, [1]))]
    assert not undisturbed(overlapping, 0)
    small_of_the_first = [tape([0], (True, [])), tape([2], (False, []))]
    assert undisturbed(small_of_the_first, 1)
    small_of_the_second = [tape([0], (False, [])), tape([2], (True, []))]
    assert not undisturbed(small_of_the_second, 0)
