"""When a step is captured, replayed or run as always: told by tapes of the host, which run it again.

What a tape has returned is written anew at each replay, as by a CUDA graph. So whoever gives away memory that
is still in use gets other bits than the step without graphs.
"""

import copy
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import lowtide
from lowtide.device_internals import uses_of_storage
from lowtide.execute.compile.family import Shapes
from lowtide.execute.graphs import part
from lowtide.execute.graphs.captured_step import CapturedStep
from lowtide.execute.graphs.common_memory import CommonMemory
from lowtide.execute.graphs.part import SharedStorage, Tapes, Value
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
    """Computes again what it has computed once, into the same memory, and writes over whatever else is there."""

    graphs = 1

    def __init__(self, tape, run, arguments, results):
        self.tape, self.run, self.arguments, self.replays = tape, run, arguments, 0
        given = {one.data_ptr() for one in arguments if isinstance(one, torch.Tensor)}
        self.results = [one if one is None or one.data_ptr() in given else one.clone() for one in results]

    def replay(self):
        self.replays += 1
        self.tape.tapes.runs = True
        for one in self.tape.others():
            one.base.fill_(0x7F)
        for old, new in zip(self.results, self.run(list(self.arguments)), strict=True):
            if old is not None and old.data_ptr() != new.data_ptr():
                old.copy_(new)


class _Storage(SharedStorage):
    rest = 0

    @property
    def held(self):
        return uses_of_storage(self.base) > self.rest


class _Tape:
    order = 0

    def __init__(self, tapes, number, pages):
        self.tapes, self.number, self.pages = tapes, number, pages
        self.storages, self.used, self.graphs = [], set(pages), []

    def others(self):
        """Storages of other tapes on pages of this one."""
        return [one for one in self.tapes.storages if one not in self.storages and one.pages & self.used]

    def captured(self, run, arguments, groups, large, generators):
        run, known = partial(run, between=None), list(arguments)
        before = [one.clone() if isinstance(one, torch.Tensor) else one for one in known]
        random = torch.get_rng_state()
        self.graphs.append(_Graph(self, run, known, run(arguments)))
        assert not arguments
        torch.set_rng_state(random)  # nothing is computed while a graph is captured
        for one, value in zip(known, before, strict=True):
            if isinstance(one, torch.Tensor) and not torch.equal(one, value):
                one.copy_(value)
        return self.graphs[-1], list(self.graphs[-1].results)

    def value(self, tensor):
        flat = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        page = self.pages[len(self.storages) % len(self.pages)]
        self.storages.append(_Storage(flat, range(0), frozenset([page]), self.order))
        self.tapes.storages.append(self.storages[-1])
        return Value(self.storages[-1], Form.of(tensor))

    def there(self, tensor):
        raise AssertionError("nothing is said to other processes")

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
        assert self in self.tapes.listed or not self.tapes.runs  # on what is given back
        self.storages = [one for one in self.storages if one.held]


class _Beside:
    """Nothing: on the host, copies and random numbers are those of the interpreter."""

    @contextmanager
    def watching(self, part, aside):
        yield

    def generators(self, part):
        return ()

    def capturing(self, part, between, there):
        return self.watching(part, None)

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


PAGES = 4
"""Of each tape."""


class _Tapes:
    device_type = "cpu"
    unplanned_bytes = 0
    took, watches = (1.0, 1.0), 0
    """Seconds as always, and as graphs."""
    size = 0

    def __init__(self):
        self.made, self.listed, self.storages, self.forgotten = [], [], [], 0
        self.runs = False
        """Whether something was replayed that may not have ended."""
        self.calls = []

    def possible(self):
        return True

    def wait(self):
        self.runs = False

    def alone(self):
        self.calls.append("alone")

    def beside(self, interpreter, device):
        return _Beside()

    def stopwatch(self):
        self.watches += 1
        seconds = self.took[(self.watches - 1) % 2]
        return _Stopwatch([[seconds], [seconds]])

    def watched(self):
        pass

    def sizes(self, device):
        class Nothing:
            large = frozenset()

            @contextmanager
            def watching(self, groups):
                yield

            def aside(self):
                raise AssertionError("nothing is said to other processes")

        return Nothing()

    def listing(self, device):
        found = _Tape(self, -1, [0])
        found.layout = lambda room: object()
        self.listed.append(found)
        return found

    def new(self, device, layout, held, most):
        assert layout is not None
        free = [page for page in range(PAGES + len(held)) if page not in held]
        self.made.append(_Tape(self, len(self.made), free[:PAGES]))
        return self.made[-1]

    def forget(self):
        self.storages.clear()  # others get other pages
        self.forgotten += 1


@pytest.fixture
def tapes(monkeypatch):
    found = []

    def replayed(self, interpreter, how, room):
        if how == "off":
            return None
        if not self.common:
            found.append(_Tapes())
            self.common[torch.device("cpu")] = CommonMemory(found[-1])
        replay = Replay(interpreter, self.common[torch.device("cpu")], why_not=room.no_graphs)
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


def taught(budget="100%"):
    """A step that is replayed for two shapes: batches of both."""
    torch.manual_seed(0)
    model = Network(width=4)
    large, small = next(batches(model, 1)), next(batches(model, 1, 16))
    step = lowtide.fit(loss_of, model, *large, budget=budget, verify=False, graphs="auto", time_limit=0.5)
    for _ in range(5):
        for x, y in (large, small):
            model.zero_grad()
            step(model, x, y).backward()
    return model, step, large, small


def replays(tapes):
    return [[graph.replays for graph in tape.graphs] for tape in tapes.made]


def test_shapes_share_their_memory_and_the_copies_of_batches(tapes):
    model, step, large, _small = taught()
    (memory,) = tapes
    assert [min(one) > 0 for one in replays(memory)] == [True] * 2
    assert memory.forgotten == 0
    assert memory.made[0].used == memory.made[1].used
    for _ in range(2):  # batches are copied from here on
        for x, y in (large, next(batches(model, 1, 16))):
            model.zero_grad()
            step(model, x.clone(), y.clone()).backward()
    (common,) = step._shapes.common.values()
    first, second = (one.static for one in common._steps[-2:])
    assert [one.data_ptr() for one in first.values()] == [one.data_ptr() for one in second.values()]
    assert common.copied_bytes(()) == large[0].nbytes + large[1].nbytes


@pytest.mark.parametrize("counted", ["size", "unplanned_bytes"])
def test_graphs_are_given_up_where_evaluation_needs_their_memory(tapes, counted, monkeypatch):
    model, step, large, small = taught()
    (memory,) = tapes

    def evaluated():
        with torch.no_grad():
            step(model, *large)

    def both():
        for x, y in (large, small):
            model.zero_grad()
            step(model, x, y).backward()

    evaluated()  # is planned, so nothing may be there
    assert memory.forgotten == 1
    assert "captured at the next step again" in step.explain()
    both()
    evaluated()
    assert memory.forgotten == 1
    monkeypatch.setattr(_Tapes, counted, step.plan.budget_bytes)  # there is no room for both
    other = large[0].clone(), large[1]  # what lies beside the pages is looked up for new captures
    for batch in (other, other):
        model.zero_grad()
        step(model, *batch).backward()
    made = len(memory.made)
    evaluated()
    assert memory.forgotten == 2
    model.zero_grad()
    step(model, *large).backward()
    assert len(memory.made) == made + 1  # it is captured again, and replayed
    assert min(memory.made[-1].graphs[0].replays, memory.made[-1].graphs[1].replays) == 1


def test_libraries_keep_nothing_else_while_graphs_are_replayed(tapes):
    _model, _step, *_ = taught()
    (memory,) = tapes
    assert memory.calls == ["alone"] * sum(tape.graphs[0].replays for tape in memory.made)


@pytest.mark.parametrize("libraries", [False, True])
def test_library_workspaces_are_freed_where_graphs_have_their_own(libraries, monkeypatch):
    freed = []
    monkeypatch.setattr(part, "free_library_workspaces", lambda: freed.append(1))
    tapes = Tapes()
    tapes._libraries = libraries
    tapes.alone()
    assert len(freed) == libraries


def test_graphs_that_are_given_up_again_and_again_are_captured_no_more(tapes):
    model, step, large, _ = taught()
    (memory,) = tapes
    memory.size = step.plan.budget_bytes
    for _ in range(20):
        model.zero_grad()
        step(model, *large).backward()
        with torch.no_grad():
            step(model, *large)
    assert (
        "evaluation, or a step of another shape, needs the memory of its graphs too often" in step.explain()
    )
    assert memory.forgotten < 20


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
    def steps(*tapes):
        memory, found = CommonMemory(_Tapes()), []
        for used, is_held, pages in tapes:
            storage = SimpleNamespace(held=is_held, pages=frozenset(pages), order=len(found) + 1)
            tape = SimpleNamespace(used=set(used), storages=[storage], close=lambda: None)
            found.append(CapturedStep(tape))
            memory.add(found[-1])
        return memory, found

    def undisturbed(*tapes):
        memory, found = steps(*tapes)
        return [memory.is_undisturbed(one) for one in found]

    assert undisturbed(([0, 1], False, [0]), ([2, 3], False, [2])) == [True, True]
    assert undisturbed(([0, 1], True, [0]), ([2, 3], False, [2])) == [False, True]
    assert undisturbed(([0, 1], False, [0]), ([1, 3], True, [1])) == [False, False]
    small_of_the_first, small_of_the_second = ([0], True, []), ([2], True, [])
    assert undisturbed(small_of_the_first, ([2], False, [])) == [False, True]
    assert undisturbed(([0], False, []), small_of_the_second) == [False, False]
    memory, (first, second) = steps(([0, 1], True, [0]), ([0, 2], False, [2]))
    memory.remove([first])
    assert not memory.is_undisturbed(second)  # users hold what graphs have left that were given up
    first.tape.storages[0].held = False
    assert memory.is_undisturbed(second)


@pytest.mark.parametrize("backward_first", [True, False])
def test_memory_is_given_back_with_the_step(backward_first, tapes):
    """Whatever torch keeps of it; a backward that is still to come runs as ever."""
    torch.manual_seed(0)
    model = Network(dropout=0.0, width=4)
    other = copy.deepcopy(model)
    x, y = next(batches(model, 1))
    step = lowtide.fit(loss_of, model, x, y, budget="100%", time_limit=1.0, verify=False, graphs="auto")
    for _ in range(6):
        model.zero_grad()
        other.zero_grad()
        loss_of(other, x, y).backward()
        loss = step(model, x, y)
        loss.backward()
    assert "each replay as one CUDA graph" in step.explain()
    (made,) = tapes
    assert not made.forgotten
    if not backward_first:
        model.zero_grad()
        loss = step(model, x, y)
    del step
    assert made.forgotten == backward_first
    if not backward_first:
        loss.backward()
        assert made.forgotten == 1
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.allclose(one.grad, two.grad, rtol=1e-4, atol=1e-6)


def test_memory_of_a_step_whose_backward_never_comes_is_given_back_before_the_next_plan(tapes):
    torch.manual_seed(0)
    model = Network(dropout=0.0, width=4)
    x, y = next(batches(model, 1))
    options = {"budget": "100%", "time_limit": 1.0, "verify": False, "graphs": "auto"}
    step = lowtide.fit(loss_of, model, x, y, **options)
    for _ in range(6):
        step(model, x, y).backward()
    loss = step(model, x, y)
    (made,) = tapes
    del step
    assert not made.forgotten  # its backward may still come
    del loss
    lowtide.fit(loss_of, model, x, y, **options)
    assert made.forgotten


def test_a_step_that_goes_while_its_last_backward_ends_has_its_gradients(tapes, monkeypatch):
    """As where the collector runs then."""
    torch.manual_seed(0)
    model = Network(dropout=0.0, width=4)
    x, y = next(batches(model, 1))
    step = lowtide.fit(loss_of, model, x, y, budget="100%", time_limit=1.0, verify=False, graphs="auto")
    for _ in range(6):
        model.zero_grad()
        step(model, x, y).backward()
    model.zero_grad()
    loss, (made,), held = step(model, x, y), tapes, [step]
    del step
    given, now = [], Value.now

    def meanwhile(self):
        held.clear()
        given.append(made.forgotten)
        return now(self)

    monkeypatch.setattr(Value, "now", meanwhile)
    loss.backward()
    assert given
    assert not any(given)
    assert made.forgotten == 1
