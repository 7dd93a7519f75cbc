"""Steps replayed as CUDA graphs give the bits of those that are not, whatever users do between."""

import copy
import gc
import os
import signal
import weakref

import pytest
import torch
from torch import nn
from torch._inductor import config as inductor

import lowtide
from lowtide.execute.graphs import replay, room
from lowtide.execute.graphs.arena.driver import Addresses
from lowtide.execute.graphs.arena.segments import Pages
from lowtide.execute.graphs.replay import Replay
from lowtide.execute.graphs.step_capture import StepCapture
from lowtide.execute.kernels import ways
from lowtide.formats.pytorch.snapshot import read_snapshot
from lowtide.plan.program.instructions import Run, Send
from tests.execute.graphs.loops import (
    LOOPS,
    Dropping,
    Network,
    accumulated,
    batches,
    evaluated,
    held,
    loss_of,
    many,
    other_shapes,
    shapes_at_once,
    shapes_in_turn,
    trained,
    two_at_once,
    usual,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def _deterministic(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    # which layout is faster is measured in each fit, and changes the bits of fused kernels
    monkeypatch.setattr(ways, "in_faster_layout", lambda module, *_: module)
    # and so is which of several kernels of Inductor's is faster, unless it is told not to
    if hasattr(inductor, "deterministic"):
        monkeypatch.setattr(inductor, "deterministic", True)
    torch._dynamo.reset()
    gc.collect()  # what other tests left counts as outside of the step
    torch.cuda.empty_cache()


def compared(loop, budget="1GiB", kernels="eager", dropout=0.1, only="recompute", kind=Network):
    torch.manual_seed(0)
    model = kind(dropout).cuda()
    other = copy.deepcopy(model)
    x, y = next(batches(model, 1))
    options = {"budget": budget, "kernels": kernels, "time_limit": 2.0, "only": only}
    plain = lowtide.fit(loss_of, model, x, y, **options)
    graphs = lowtide.fit(loss_of, other, x, y, **options, graphs="auto")
    plan = graphs.plan
    expected, found = trained(model, plain, loop), trained(other, graphs, loop)
    assert len(expected) == len(found)
    other_bits = [k for k, pair in enumerate(zip(expected, found, strict=True)) if not torch.equal(*pair)]
    assert not other_bits, f"{other_bits} of {len(found)}, the first losses of steps; {graphs.explain()}"
    return graphs, plan


@pytest.fixture(autouse=True)
def faster(monkeypatch):
    """Graphs are never given up as they were measured to take longer: the device may have other work."""
    monkeypatch.setattr(replay, "slower", lambda always, replayed: False)


@pytest.mark.parametrize("loop", LOOPS)
def test_the_bits_are_those_without_graphs(loop):
    graphs, _ = compared(loop)
    if loop not in (two_at_once, held, shapes_in_turn, shapes_at_once):  # these may be given up
        assert "each replay as one CUDA graph" in graphs.explain()


@pytest.mark.parametrize("kernels", ["eager", "fused"])
def test_one_fit_gives_the_same_bits_by_graphs_and_without(kernels):
    """The kernels are the same objects: nothing is measured or compiled between."""
    torch.manual_seed(0)
    model = Network(0.0).cuda()
    x, y = next(batches(model, 1))
    step = lowtide.fit(
        loss_of, model, x, y, budget="80%", kernels=kernels, only="recompute", graphs="auto", time_limit=2.0
    )
    state = copy.deepcopy(model.state_dict())
    by_graphs = trained(model, step, usual)
    assert "each replay as one CUDA graph" in step.explain()
    for one in gc.get_objects():
        if isinstance(one, Replay):
            one.release("a test")
    model.load_state_dict(state)
    model.zero_grad()
    assert all(map(torch.equal, by_graphs, trained(model, step, usual)))
    assert "a test" in step.explain()


def test_fused_steps_have_the_same_bits_by_other_plans():
    """Without graphs: what is compared above may have other plans."""
    torch.manual_seed(0)
    model = Network(0.0).cuda()
    x, y = next(batches(model, 1))
    found = []
    for budget in ("100%", "80%", "70%"):
        options = {"budget": budget, "kernels": "fused", "time_limit": 2.0, "only": "recompute"}
        step = lowtide.fit(loss_of, model, x, y, **options)
        found.append(trained(copy.deepcopy(model), step, usual))
    for one in found[1:]:
        assert all(map(torch.equal, found[0], one))


@pytest.mark.extended
def test_ten_thousand_steps_have_the_bits_of_those_without_graphs():
    graphs, _ = compared(many)
    assert "each replay as one CUDA graph" in graphs.explain()


@pytest.mark.parametrize("kernels", ["eager", "fused"])
def test_recomputed_steps_are_replayed(kernels):
    graphs, plan = compared(usual, "80%", kernels, dropout=0.0)
    assert "each replay as one CUDA graph" in graphs.explain()
    assert plan.decisions.recomputed
    assert 0 < graphs.graph_bytes < graphs.plan.budget_bytes
    assert torch.cuda.memory_allocated() + graphs.graph_bytes <= graphs.plan.budget_bytes


@pytest.mark.parametrize("loop", [usual, accumulated, evaluated])
@pytest.mark.parametrize("kernels", ["eager", "fused"])
def test_random_operators_that_run_again_are_replayed(loop, kernels):
    graphs, plan = compared(loop, "75%", kernels, kind=Dropping)
    again = "captured at the next step again: evaluation" if loop is evaluated else "replay as one CUDA graph"
    assert again in graphs.explain()
    ran = [line.op for line in plan.program.instructions if isinstance(line, Run)]
    assert kernels == "fused" or any(plan.graph.ops[op].random for op in ran if ran.count(op) > 1)


@pytest.mark.parametrize("loop", [usual, accumulated, other_shapes])
def test_copies_to_the_host_are_replayed(loop):
    graphs, plan = compared(loop, "75%", only="offload", kind=Dropping)
    assert "each replay as one CUDA graph" in graphs.explain()
    assert plan.decisions.offloaded


def test_another_seed_draws_other_numbers():
    """Between forward and backward too, where recomputed operators draw those of forward."""
    torch.manual_seed(0)
    model = Dropping().cuda()
    twin = copy.deepcopy(model)
    x, y = next(batches(model, 1))
    step = lowtide.fit(loss_of, model, x, y, budget="75%", only="recompute", graphs="auto", time_limit=2.0)
    losses = []
    for seed in range(6):
        for one, run in ((model, step), (twin, loss_of)):
            one.zero_grad()
            torch.manual_seed(seed)
            loss = run(one, x, y)
            torch.manual_seed(100)
            loss.backward()
            losses.append(loss.detach().clone())
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)
    assert losses[::2] == losses[1::2]
    assert len({float(one) for one in losses}) == 6
    assert "each replay as one CUDA graph" in step.explain()


def test_memory_is_given_back():
    torch.manual_seed(0)
    model = Network().cuda()
    x, y = next(batches(model, 1))
    pages = []

    def once():
        step = lowtide.fit(loss_of, model, x, y, budget="1GiB", graphs="auto", time_limit=1.0)
        for _ in range(4):
            step(model, x, y).backward()
            model.zero_grad()
        assert step.graph_bytes > 0
        pages.extend(weakref.ref(one) for one in gc.get_objects() if isinstance(one, Pages | Addresses))
        assert pages[-1]() is not None

    def reserved():
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    once()  # libraries keep what the first takes
    before = reserved()
    for _ in range(3):
        once()
        gc.collect()
        assert not any(one() for one in pages)  # though torch still has what it compiled
    assert reserved() <= before


def test_the_budget_holds_for_all_shapes_and_evaluation_together():
    torch.manual_seed(0)
    model = Network(0.0).cuda()
    large, small = next(batches(model, 1)), next(batches(model, 1, 16))
    options = {"budget": "80%", "only": "recompute", "graphs": "auto", "time_limit": 1.0}
    step = lowtide.fit(loss_of, model, *large, **options)
    budget = step.plan.budget_bytes

    def trains(batch):
        model.zero_grad(set_to_none=True)
        step(model, *batch).backward()

    def evaluates(batch):
        with torch.no_grad():
            step(model, *batch)

    def taken(run, batch):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        run(batch)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() + step.graph_bytes

    for run in (trains, evaluates):
        for _ in range(5):
            for batch in (large, small):
                run(batch)
    for _ in range(3):
        for batch in (large, small):
            assert taken(evaluates, batch) <= budget
        for batch in (large, small):
            trains(batch)  # is captured, where evaluation needed the memory
            assert taken(trains, batch) <= budget
    assert "each replay as one CUDA graph" in step.explain()


def test_tools_for_memory_go_on_working(tmp_path):
    torch.manual_seed(0)
    model = Network(0.0).cuda()
    x, y = next(batches(model, 1))
    step = lowtide.fit(loss_of, model, x, y, budget="1GiB", graphs="auto", time_limit=1.0)
    torch.cuda.memory._record_memory_history()
    try:
        for _ in range(6):
            model.zero_grad(set_to_none=True)
            step(model, x, y).backward()
        torch.cuda.synchronize()
        torch.cuda.memory._dump_snapshot(str(tmp_path / "snapshot.pickle"))
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    assert step.graph_bytes > 0
    stats = torch.cuda.memory_stats()
    assert 0 < stats["allocated_bytes.all.current"] <= stats["reserved_bytes.all.current"]
    assert sum(one["total_size"] for one in torch.cuda.memory_snapshot()) == torch.cuda.memory_reserved()
    assert "Allocated memory" in torch.cuda.memory_summary()
    snapshot = read_snapshot((tmp_path / "snapshot.pickle").read_bytes())
    assert snapshot.timeline.peak_bytes > 0


def test_gradients_outlive_the_step():
    torch.manual_seed(0)
    model = Network(0.0).cuda()
    x, y = next(batches(model, 1))
    step = lowtide.fit(loss_of, model, x, y, budget="1GiB", graphs="auto", time_limit=1.0)
    for _ in range(3):
        model.zero_grad()
        step(model, x, y).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    assert step.graph_bytes > 0
    del step
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    others = [torch.full((64 << 20,), 7, dtype=torch.uint8, device="cuda") for _ in range(8)]
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, gradient)
    del others


def test_a_capture_that_fails_leaves_nothing_behind(monkeypatch):
    torch.manual_seed(0)
    model = Network(0.0).cuda()
    x, y = next(batches(model, 1))
    options = {"budget": "1GiB", "time_limit": 2.0, "only": "recompute"}
    plain = lowtide.fit(loss_of, model, x, y, **options)

    def steps(step):
        for _ in range(3):
            model.zero_grad(set_to_none=True)
            step(model, x, y).backward()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        model.zero_grad(set_to_none=True)
        step(model, x, y).backward()
        return torch.cuda.max_memory_allocated()

    expected = steps(plain)
    graphs = lowtide.fit(loss_of, model, x, y, **options, graphs="auto")
    monkeypatch.setattr(
        StepCapture, "_room", lambda self, copies: 4 << 20
    )  # of pages: the second operator fails
    found = steps(graphs)
    assert "more than the budget leaves for them" in graphs.explain()
    assert graphs.graph_bytes == 0
    assert found <= expected + (1 << 20)


def test_a_forked_process_is_told_and_takes_nothing_away():
    torch.manual_seed(0)
    model = Network(0.0).cuda()
    x, y = next(batches(model, 1))
    step = lowtide.fit(loss_of, model, x, y, budget="1GiB", graphs="auto", time_limit=1.0)

    def gradients():
        model.zero_grad()
        step(model, x, y).backward()
        return [p.grad.clone() for p in model.parameters()]

    expected = [gradients() for _ in range(5)][-1]
    assert step.graph_bytes > 0
    child = os.fork()
    if not child:
        signal.alarm(60)
        code = 3
        try:
            step(model, x, y)
        except lowtide.LowtideError as error:
            code = 0 if "forked" in str(error) else 2
        finally:
            del step
            gc.collect()
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    for one, two in zip(expected, gradients(), strict=True):
        assert torch.equal(one, two)


def test_another_program_takes_the_memory():
    """Between planning and capturing: the step runs as always, or says what is missing."""
    torch.manual_seed(0)
    model = Network(0.0).cuda()
    x, y = next(batches(model, 1))
    step = lowtide.fit(loss_of, model, x, y, budget="1GiB", graphs="auto", time_limit=1.0)
    expected = lowtide.fit(loss_of, model, x, y, budget="1GiB", time_limit=1.0)
    expected(model, x, y).backward()
    known = [p.grad.clone() for p in model.parameters()]
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        step(model, x, y).backward()
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    spare = 96 << 20  # for the step as always, which takes what PyTorch's allocator still has; not for pages
    taken = torch.empty(torch.cuda.mem_get_info()[0] - spare, dtype=torch.uint8, device="cuda")
    model.zero_grad(set_to_none=True)
    try:
        step(model, x, y).backward()
    except torch.OutOfMemoryError as error:
        assert "Somebody else holds memory" in str(error)
    del taken
    gc.collect()
    torch.cuda.empty_cache()
    model.zero_grad(set_to_none=True)
    step(model, x, y).backward()
    for parameter, gradient in zip(model.parameters(), known, strict=True):
        assert torch.equal(parameter.grad, gradient)


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(12))

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.softmax(layer(x), 1)
        return x


def test_copies_inside_of_tiles_are_replayed(monkeypatch):
    """A tile is one of two sequences, as each token depends on all others: it needs copies to the host."""
    monkeypatch.setattr(room, "_SLOWER", 10.0)  # they leave much less room here, for a copy of the batch
    torch.manual_seed(0)
    model = Deep().cuda()
    x, y = torch.randn(2, 2, 32768, 256, device="cuda")

    def loss_of(model, x, y):
        return ((model(x) - y) ** 2).sum()

    options = {"only": ("offload", "tile"), "graphs": "auto", "time_limit": 6.0, "cost": "estimated"}
    step = lowtide.fit(loss_of, model, x, y, budget="45%", **options)
    lines = [one for body in step.plan.program.bodies for one in body.program.instructions]
    assert any(isinstance(one, Send) for one in lines)
    found = []
    for _ in range(8):
        model.zero_grad(set_to_none=True)
        step(model, x, y).backward()
        found.append([p.grad.clone() for p in model.parameters()])
    assert "each replay as one CUDA graph" in step.explain()
    for gradients in found[1:]:
        assert all(map(torch.equal, gradients, found[0]))
