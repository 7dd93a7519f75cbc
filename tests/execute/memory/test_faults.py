"""Memory that others took, a full host, copies that fail, Ctrl-C: an error that says so, and a model that goes on."""

import contextlib
import copy
import gc
import itertools
import threading

import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import RunError
from lowtide.execute.backend import compile_with
from lowtide.execute.memory import host
from lowtide.execute.memory.out_of_memory import OutOfMemoryError
from lowtide.execute.runtime import copies as transfer
from lowtide.execute.runtime import interpreter
from lowtide.execute.runtime.copies import transfers
from lowtide.execute.runtime.instructions import Running
from lowtide.execute.runtime.snapshot import Snapshot
from lowtide.graph import Graph, Tensor
from lowtide.plan.program.instructions import Body, Fetch, Program, Send
from lowtide.plan.program.simple import offload_all
from lowtide.units import format_bytes
from tests.execute.runtime.test_copies import late
from tests.execute.small import batch, loss_of, network

OOM = "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 80.00 GiB of which 3.00 MiB is free."


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    torch._dynamo.reset()
    gc.freeze()  # what other tests left is none of ours, and takes long to look through
    yield tmp_path
    gc.unfreeze()


def fitted(model, x):
    return lowtide.fit(loss_of, model, x, budget="60%", time_limit=0.2)


def backend(model, x):
    step = torch.compile(
        loss_of, backend="lowtide", options={"budget": "60%", "time_limit": 0.2}, fullgraph=True
    )
    step(copy.deepcopy(model), x).backward()
    return step


def train(step, model, x):
    """One step with the same random numbers each time; what it leaves behind."""
    torch.manual_seed(5)
    model.zero_grad()
    loss = step(model, x)
    loss.backward()
    kept = [loss, *(p.grad for p in model.parameters()), *model.buffers()]
    return [t.detach().clone() for t in kept]


def state(model):
    return [t.clone() for t in model.state_dict().values()] + [
        p.grad.clone() for p in model.parameters() if p.grad is not None
    ]


def same(one, other):
    return len(one) == len(other) and all(map(torch.equal, one, other))


def alive():
    gc.collect()
    return {
        id(one): tuple(one.shape) for one in gc.get_objects() if type(one) in (torch.Tensor, nn.Parameter)
    }


class Failing:
    """A function that fails at its nth call, and what was done before."""

    def __init__(self, function, calls, error):
        self.function, self.left, self.error = function, calls, error

    def __call__(self, *args, **kwargs):
        self.left -= 1
        if not self.left:
            raise self.error
        return self.function(*args, **kwargs)


class Faulty:
    """Makes one of the operators to come raise."""

    def __init__(self, monkeypatch):
        self.error, self.left = None, 0
        run = Running.__call__

        def call(line, frame):
            self.left -= 1
            if self.error is None or self.left:
                return run(line, frame)
            function, line.function = line.function, self.fail
            try:
                return run(line, frame)
            finally:
                line.function = function

        monkeypatch.setattr(Running, "__call__", call)
        monkeypatch.setattr(interpreter, "calls_are_watched", lambda: True)  # then lines run as they are

    def at(self, operator, error):
        self.left, self.error = operator + 1, error

    def fail(self, *args, **kwargs):
        error, self.error = self.error, None
        raise error


@pytest.fixture
def faulty(monkeypatch):
    return Faulty(monkeypatch)


@pytest.mark.parametrize("make", [fitted, backend])
def test_memory_that_others_took(make, faulty):
    model, x = network(), batch()
    step = make(model, x)
    train(step, model, x)
    for operator in (0, 12):
        before, known = state(model), alive()
        faulty.at(operator, torch.OutOfMemoryError(OOM))
        with pytest.raises(RunError) as caught:
            step(model, x)
        assert isinstance(caught.value, torch.OutOfMemoryError)
        said = str(caught.value)
        assert "CUDA out of memory. Tried to allocate 20.00 MiB." in said
        assert "GPU 0" not in said
        assert "Somebody else holds memory" in said
        assert "a smaller budget" in said
        assert "'auto'" in said
        if make is fitted:
            peak, budget = (format_bytes(b) for b in (step.plan.predicted.peak_bytes, step.plan.budget_bytes))
            assert f"a peak of {peak} inside a budget of {budget}" in said
        assert same(state(model), before)
        assert not alive().keys() - known.keys(), "alive in the frames of the error"
        expected = train(loss_of, copy.deepcopy(model), x)
        assert same(train(step, model, x), expected)


@pytest.mark.parametrize("make", [fitted, backend])
def test_memory_that_others_took_before_backward(make, faulty):
    model, x = network(), batch()
    step = make(model, x)
    train(step, model, x)
    for operator in (0, 12):
        known = alive()
        loss = step(model, x)
        before = state(model)
        faulty.at(operator, torch.OutOfMemoryError(OOM))
        with pytest.raises(RunError, match="as they were before backward") as caught:
            loss.backward()
        assert isinstance(caught.value, torch.OutOfMemoryError)
        assert same(state(model), before)
        del loss, before
        assert {alive()[k] for k in alive().keys() - known.keys()} <= {()}, "alive in the frames of the error"
        del caught
        expected = train(loss_of, copy.deepcopy(model), x)
        assert same(train(step, model, x), expected)


def test_memory_that_is_not_there_for_a_copy_of_the_buffers(faulty, monkeypatch):
    model, x = network(), batch()
    step = fitted(model, x)
    train(step, model, x)
    before, known = state(model), alive()
    with monkeypatch.context() as patch:
        patch.setattr(Snapshot, "take", Failing(None, 1, torch.OutOfMemoryError(OOM)))
        with pytest.raises(RunError, match="no memory is left") as caught:
            step(model, x)
    assert caught.value.__traceback__ is not None
    assert not alive().keys() - known.keys(), "alive in the frames of the error"
    assert same(state(model), before)


OTHER_WAYS = (
    MemoryError(),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:113] data. DefaultCPUAllocator: not enough memory: you tried to"
    ),
    RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
)


def test_other_ways_to_say_it(faulty):
    model, x = network(), batch()
    step = fitted(model, x)
    for error in OTHER_WAYS:
        faulty.at(3, error)
        with pytest.raises(OutOfMemoryError, match="no memory is left for the step"):
            step(model, x)
        faulty.at(3, RuntimeError("something else"))
        with pytest.raises(RuntimeError, match="^something else$"):
            step(model, x)


def test_memory_that_runs_out_while_the_step_is_measured(faulty):
    model, x = network(), batch()
    for operator in (3, 60):
        before = state(model)
        torch._dynamo.reset()
        faulty.at(operator, torch.OutOfMemoryError(OOM))
        with pytest.raises(RunError, match="no memory left to measure the step.*cost='estimated'"):
            fitted(model, x)
        assert same(state(model), before)
    expected = train(loss_of, copy.deepcopy(model), x)
    assert same(train(fitted(model, x), model, x), expected)


def test_ctrl_c_while_the_step_is_measured(faulty, cache):
    model, x = network(), batch()
    before = state(model)
    faulty.at(20, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        fitted(model, x)
    assert same(state(model), before)
    assert not list(cache.glob("plans/*"))
    expected = train(loss_of, copy.deepcopy(model), x)
    assert same(train(fitted(model, x), model, x), expected)


def test_ctrl_c_while_planning_runs_by_the_best_plan_and_keeps_none(cache):
    def interrupt(seconds, best, bound, gap):
        if best is not None:
            raise KeyboardInterrupt

    model, x = network(), batch()
    with pytest.warns(UserWarning, match="the search was interrupted"):
        step = lowtide.fit(loss_of, model, x, budget="60%", time_limit=0.2, progress=interrupt)
    assert step.plan.interrupted
    assert not list(cache.glob("plans/*"))
    expected = train(loss_of, copy.deepcopy(model), x)
    assert same(train(step, model, x), expected)
    torch._dynamo.reset()
    assert not fitted(model, x).plan.interrupted


# ── copies to the host ──────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(params=[offload_all, late])
def offloaded(request):
    """A step that keeps what it can on the host, and the interpreter that runs it."""
    made = []
    step = torch.compile(
        loss_of, backend=lambda m, i: compile_with(m, i, request.param, made.append), fullgraph=True
    )
    model, x = network(), batch()
    train(step, model, x)
    assert any(isinstance(line, Send) for line in made[0].program.forward)
    return step, model, x, made[0]


def test_a_full_host(offloaded, monkeypatch):
    step, model, x, interpreter = offloaded
    settle = interpreter._transfers.settle
    for call in (1, 3):
        before, known = state(model), alive()
        settled = []
        with monkeypatch.context() as patch:
            patch.setattr(interpreter._transfers, "settle", lambda: (settled.append(1), settle()))  # noqa: B023
            patch.setattr(transfer.np, "empty", Failing(transfer.np.empty, call, MemoryError()))
            with pytest.raises(
                RunError, match=r"the host has no .* \(\d+ bytes\) left .*only='recompute'"
            ) as caught:
                step(model, x)
        assert settled
        assert caught.value.__traceback__ is not None
        assert same(state(model), before)
        assert not alive().keys() - known.keys(), "alive in the frames of the error"
        expected = train(loss_of, copy.deepcopy(model), x)
        assert same(train(step, model, x), expected)
        del caught, expected


def test_a_host_that_promises_more_than_it_has(monkeypatch):
    monkeypatch.setattr(transfer, "available_bytes", lambda: 100 << 20)
    lanes = transfers(torch.device("cpu"))
    with pytest.raises(RunError, match="the host has no 128.00 MiB"):
        lanes.send(torch.empty(128 << 20, dtype=torch.uint8))
    lanes.settle()


def test_a_plan_that_wants_more_of_the_host_than_it_has(monkeypatch):
    monkeypatch.setattr(host, "available_bytes", lambda: 10_000)
    graph = Graph((Tensor("a", 9000), Tensor("b", 9000), Tensor("c", 2000, device="cuda:0")), ())
    host.refuse_too_much(graph, Program((Send(0), Fetch(0), Send(1))))
    with pytest.raises(
        RunError, match=r"17.58 KiB \(18000 bytes\) on the host at once, which has only 9.77 KiB"
    ):
        host.refuse_too_much(graph, Program((Send(0), Send(1))))
    with pytest.raises(RunError, match="11048 bytes"):  # the pool takes powers of two
        host.refuse_too_much(graph, Program((Send(0), Send(2))))


def test_pinned_buffers_of_every_size_stay(monkeypatch):
    monkeypatch.setattr(host, "available_bytes", lambda: 10_000)
    sizes = (4096, 4096, 8000)
    graph = Graph(tuple(Tensor(f"t{k}", size, device="cuda:0") for k, size in enumerate(sizes)), ())
    host.refuse_too_much(graph, Program((Send(0), Fetch(0), Send(1), Fetch(1))))  # one after the other
    with pytest.raises(RunError, match="12288 bytes"):  # never at once, but no buffer serves both
        host.refuse_too_much(graph, Program((Send(0), Fetch(0), Send(2), Fetch(2))))
    bodies = tuple(Body(graph, Program(lines)) for lines in ((Send(0), Fetch(0)), (Send(2), Fetch(2))))
    host.refuse_too_much(graph, Program((), (), bodies[:1]))
    with pytest.raises(RunError, match="on the host at once"):  # buffers of both tiles stay
        host.refuse_too_much(graph, Program((), (), bodies))
    assert not host.fits_host(graph, Program((), (), bodies))


@pytest.mark.parametrize("version", [1, 2])
def test_limits_of_containers(version, tmp_path, monkeypatch):
    own, root = tmp_path / "own", tmp_path / "groups"
    base = root / "memory" if version == 1 else root
    names = (
        ("memory.limit_in_bytes", "memory.usage_in_bytes")
        if version == 1
        else ("memory.max", "memory.current")
    )
    cached = "total_inactive_file" if version == 1 else "inactive_file"
    for group, limit, used in (("", "max", 900), ("job", 1000, 800), ("job/step", 5000, 700)):
        (base / group).mkdir(parents=True, exist_ok=True)
        for name, value in zip(names, (limit, used), strict=True):
            (base / group / name).write_text(f"{value}\n")
        (base / group / "memory.stat").write_text(f"anon 500\n{cached} 30\n")
    own.write_text("4:memory:/job/step\n" if version == 1 else "0::/job/step\n")
    monkeypatch.setattr(host, "_ROOT", root)
    monkeypatch.setattr(host, "_OWN", own)
    assert host.available_bytes() == 1000 - 800 + 30
    own.write_text("nothing of the kind\n")
    assert host.available_bytes() > 1 << 20


def test_a_limit_of_addresses_counts(monkeypatch, tmp_path):
    taken = tmp_path / "statm"
    taken.write_text("100 50 20 1 0 30 0\n")
    monkeypatch.setattr(host, "_ADDRESSES", taken)
    page = host.resource.getpagesize()
    monkeypatch.setattr(host.resource, "getrlimit", lambda kind: (130 * page, 1 << 40))
    assert host.available_bytes() == 30 * page
    monkeypatch.setattr(host.resource, "getrlimit", lambda kind: (host.resource.RLIM_INFINITY,) * 2)
    assert host.available_bytes() > 30 * page


def no_memory(kind):
    return kind("CUDA error: out of memory")


@pytest.mark.parametrize("kind", [RuntimeError, torch.OutOfMemoryError, MemoryError])
def test_pinned_memory_that_runs_out(kind, monkeypatch):
    """First what is under way is waited for, then plain memory will do, and only then is it an error."""
    lanes = object.__new__(transfer.CudaTransfers)
    done = []
    lanes._pool = transfer.PinnedPool()
    monkeypatch.setattr(lanes._pool, "shrink", lambda: done.append("shrunk"))
    monkeypatch.setattr(transfer.CudaTransfers, "settle", lambda _: done.append("settled"))
    monkeypatch.setattr(transfer, "empty_host_cache", lambda: done.append("given back"))
    plain = torch.empty

    def pinned(failures):
        def empty(size, *, dtype, pin_memory):
            assert pin_memory
            done.append("asked")
            if done.count("asked") <= failures:
                raise no_memory(kind)
            return plain(size, dtype=dtype)

        return empty

    for failures, expected in ((0, ["asked"]), (1, ["asked", "settled", "shrunk", "given back", "asked"])):
        done.clear()
        monkeypatch.setattr(torch, "empty", pinned(failures))
        assert lanes._pinned(1000).numel() == 1000
        assert done == expected
    monkeypatch.setattr(torch, "empty", pinned(9))
    assert lanes._pinned(1000).numel() == 1000
    monkeypatch.setattr(transfer.np, "empty", Failing(None, 1, MemoryError()))
    with pytest.raises(RunError, match=r"the host has no 1000 B \(1000 bytes\)"):
        lanes._pinned(1000)


def test_a_copy_that_fails_in_its_thread(offloaded, monkeypatch):
    step, model, x, _ = offloaded
    for call, hooks in itertools.product((1, 4), (False, True)):
        expected = train(loss_of, copy.deepcopy(model), x)
        twin = copy.deepcopy(model)
        watched = torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t)
        with monkeypatch.context() as patch, watched if hooks else contextlib.nullcontext():
            patch.setattr(transfer, "_copy", Failing(transfer._copy, call, OSError("the lane is broken")))
            with pytest.raises(OSError, match="the lane is broken"):
                train(step, twin, x)
        assert same(train(step, model, x), expected), (call, hooks)


def test_a_thread_that_cannot_be_started(monkeypatch):
    lanes = transfers(torch.device("cpu"))
    monkeypatch.setattr(threading.Thread, "start", Failing(None, 1, RuntimeError("can't start new thread")))
    with pytest.raises(RunError, match="can't start new thread"):
        lanes.send(torch.ones(10))


def test_memory_that_others_took_before_a_fetch(offloaded, monkeypatch):
    step, model, x, interpreter = offloaded
    loss = step(model, x)
    with monkeypatch.context() as patch:
        lanes = interpreter._transfers
        patch.setattr(lanes, "fetch", Failing(lanes.fetch, 2, torch.OutOfMemoryError(OOM)))
        with pytest.raises(torch.OutOfMemoryError):
            loss.backward()
    expected = train(loss_of, copy.deepcopy(model), x)
    assert same(train(step, model, x), expected)


FULL = """
import copy, re, resource, torch
from pathlib import Path
from torch import nn
from lowtide.errors import RunError
from lowtide.execute.backend import compile_with
from lowtide.plan.program.simple import offload_all

torch.manual_seed(0)
model = nn.Sequential(*(m for _ in range(2) for m in (nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Tanh())))
x = torch.randn(40 * 4096, 64)  # 40 MiB

def loss(model, x):
    return model(x).square().mean()

def left(step, model):
    model.zero_grad()
    step(model, x).backward()
    return [*(p.grad for p in model.parameters()), *model.buffers()]

step = torch.compile(loss, backend=lambda m, i: compile_with(m, i, offload_all), fullgraph=True)
step(copy.deepcopy(model), x)
soft, hard = resource.getrlimit(resource.RLIMIT_AS)
for more in (k << 20 for k in range(0, 181, 30)):
    before = [t.clone() for t in model.state_dict().values()]
    used = int(re.search(r"VmSize:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
    resource.setrlimit(resource.RLIMIT_AS, (used + more, hard))
    try:
        step(model, x)
    except (RunError, RuntimeError, MemoryError) as error:  # or the step's own memory ran out first
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        print(error)
        assert all(map(torch.equal, before, model.state_dict().values()))
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
expected = left(loss, copy.deepcopy(model))
assert all(map(torch.equal, left(step, model), expected))
"""


def test_a_host_whose_memory_is_limited(forks):
    result = forks.run(FULL)
    assert result.returncode == 0, result.stderr
    assert "the host has no 40.00 MiB (41943040 bytes) left to keep a tensor in" in result.stdout
