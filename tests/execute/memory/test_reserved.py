"""Budgets for what is reserved on a device."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import lowtide
from lowtide.commands.main import main
from lowtide.errors import PlanError, RunError
from lowtide.execute.memory import reserved
from lowtide.execute.memory.device import Room
from lowtide.plan.request import PlanRequest

TOTAL = 1000


class Step:
    """What is fitted."""


class Pages:
    """Memory that PyTorch's allocator does not count."""

    def __init__(self, index, size):
        self.index, self.size = index, size


@pytest.fixture
def device(monkeypatch):
    """A device that notes the limits that PyTorch's allocator is given."""
    cuda = SimpleNamespace(limits=[])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (400, TOTAL))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 100)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(
        torch.cuda,
        "set_per_process_memory_fraction",
        lambda share, index: cuda.limits.append((index, round(TOTAL * share))),
    )
    yield cuda
    reserved._LIMITS.clear()
    reserved._COUNTED.clear()


GIVEN = [SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0))]


def test_the_plan_is_made_again_with_less(device):
    request, tried = PlanRequest.of("500 reserved"), []
    assert (request.budget.bytes, request.reserved) == (500, 500)

    def make(asked):
        tried.append(asked.budget.bytes)
        if len(tried) < 3:
            raise reserved.FragmentedError("no")
        return Step()

    step = reserved.inside(make, request, GIVEN)
    assert tried == [int(share * 500) for share in reserved._SHARES[:3]]
    assert device.limits == [(0, 500)]
    del step
    gc.collect()
    assert device.limits[1:] == [(0, TOTAL)]


def test_it_is_an_error_that_says_what_to_do(device):
    def make(_):
        raise reserved.FragmentedError("the step does not run in 500 B")

    with pytest.raises(reserved.FragmentedError, match=r"does not run in 500 B.*expandable_segments"):
        reserved.inside(make, PlanRequest.of("500 reserved"), GIVEN)


def test_running_out_is_seen_and_the_limit_taken_away(device):
    def runs_out():
        assert device.limits == [(0, 300)]
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB.\nand more")

    with pytest.raises(
        reserved.FragmentedError, match=r"300 B of reserved memory: CUDA out of memory\. Tried"
    ):
        reserved.tried_within(300, torch.device("cuda", 0), runs_out)
    assert device.limits == [(0, 300), (0, TOTAL)]


def test_nothing_runs_without_a_limit(device):
    assert reserved.tried_within(0, torch.device("cpu"), lambda: pytest.fail("it ran"))
    assert device.limits == []
    assert reserved.told(0) == []


def test_the_smallest_limit_holds_less_what_graphs_have(device):
    steps = [
        reserved.inside(lambda _: Step(), PlanRequest.of(f"{size} reserved"), GIVEN) for size in (500, 300)
    ]

    pages = Pages(0, 120)
    reserved.count(pages)
    reserved.lift(0)
    reserved.settle(0)
    assert device.limits[-2:] == [(0, TOTAL), (0, 180)]
    reserved.settle(1)  # has none
    reserved.lift(1)
    assert len(device.limits) == 4
    del pages, steps[1]
    gc.collect()
    assert device.limits[-1] == (0, 500)
    assert reserved.told(500) == [
        "reserved   at most 500 B; the CUDA context and other programs take 500 B beside it"
    ]
    steps.clear()
    gc.collect()
    assert device.limits[-1] == (0, TOTAL)


def test_graphs_of_other_steps_are_outside_of_a_step(device, monkeypatch):
    """PyTorch's allocator does not count their memory, and neither is it free."""
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 50)
    monkeypatch.setattr(Room, "_settled", lambda self: None)
    room = Room(())
    room.device = torch.device("cuda", 0)
    before = room.outside_bytes(), room.free_bytes()
    pages, elsewhere = Pages(0, 300), Pages(1, 300)
    for one in (pages, elsewhere):
        reserved.count(one)
    assert (room.outside_bytes(), room.free_bytes()) == (before[0] + 300, before[1] + 300)
    room.device = torch.device("cuda")
    assert room.outside_bytes() == before[0] + 300
    room.counts_reserved = True
    assert room.outside_bytes() == before[0] + 50 + 300
    del pages, one
    gc.collect()
    assert room.outside_bytes() == before[0] + 50


def test_a_step_on_the_host_is_refused():
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    with pytest.raises(PlanError, match=r"on the CPU: leave out `reserved`"):
        lowtide.fit(lambda model, x: model(x).sum(), model, x, budget="1GiB reserved")


@pytest.mark.parametrize(
    "command", [["plan", "alexnet"], ["run", "alexnet"], ["shard", "alexnet", "--devices", "2"]]
)
def test_commands_refuse_it(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main([*command, "--budget", "8GiB reserved"])
    assert ended.value.code == 2
    assert "is for `lowtide.fit`" in capsys.readouterr().err


def test_a_step_of_several_processes_is_refused():
    with pytest.raises(PlanError, match="with a mesh, leave out `reserved`"):
        lowtide.fit(lambda x: x.sum(), torch.ones(2), budget="1GiB reserved", mesh=2)


def test_the_backend_refuses_it():
    with pytest.raises(RunError, match=r"give it to lowtide\.fit"):
        torch.compile(nn.Linear(4, 4), backend="lowtide", options={"budget": "1GiB reserved"})(torch.ones(4))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("graphs", ["off", "auto"])
def test_no_more_is_reserved_on_a_device(graphs):
    torch._dynamo.reset()
    gc.collect()  # steps of other tests, whose graphs count
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(0)
    layers = [
        nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.GELU()) for _ in range(12)
    ]
    model = nn.Sequential(nn.Conv2d(3, 16, 3), *layers).cuda()
    x = torch.randn(16, 3, 160, 160, device="cuda")

    def loss_of(model, x):
        return model(x).square().mean()

    loss_of(model, x).backward()
    plain = torch.cuda.max_memory_allocated()
    model.zero_grad()
    limit = int(0.7 * plain)
    step = lowtide.fit(loss_of, model, x, budget=f"{limit} reserved", graphs=graphs, time_limit=2.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    seen = []
    for _ in range(8):
        optimizer.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        before = step.graph_bytes
        step(model, x).backward()
        optimizer.step()
        if step.graph_bytes == before:  # while a graph is captured, addresses without memory count too
            seen.append(torch.cuda.max_memory_reserved() + step.graph_bytes)
        assert torch.cuda.memory_reserved() + step.graph_bytes <= limit
    assert len(seen) >= 7
    assert max(seen) <= limit < plain
    assert "the CUDA context and other programs take" in step.explain()
    assert graphs == "off" or step.graph_bytes
    del step
    torch._dynamo.reset()
    gc.collect()
    torch.ones(plain // 2, dtype=torch.float32, device="cuda")  # nothing limits it any more
