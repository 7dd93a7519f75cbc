"""Copies beside the computation: the same bytes come back, in time, whatever the layout."""

import os
import signal
import threading

import pytest
import torch
from torch import nn

from lowtide.errors import RunError
from lowtide.execute.backend import compile_with
from lowtide.execute.runtime import copies as transfer
from lowtide.execute.runtime.copies import Form, transfers
from lowtide.plan.program.instructions import Drop, Fetch, Program, Send
from lowtide.plan.program.simple import offload_all

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]
TENSORS = {
    "contiguous": lambda: torch.randn(3, 5),
    "transposed": lambda: torch.randn(3, 5).t(),
    "channels last": lambda: torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
    "part of a storage": lambda: torch.randn(8, 6)[2:5, 1:4],
    "expanded": lambda: torch.randn(1, 4).expand(3, 4),
    "one number": lambda: torch.tensor(2.5),
    "whole numbers": lambda: torch.arange(7),
    "truth": lambda: torch.rand(9) > 0.5,
    "bfloat16": lambda: torch.randn(5).bfloat16(),
    "complex": lambda: torch.randn(4, dtype=torch.complex64),
    "empty": lambda: torch.empty(0, 3),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", TENSORS)
def test_what_was_sent_comes_back(name, device):
    tensor = TENSORS[name]().to(device)
    lanes = transfers(torch.device(device))
    host, sent = lanes.send(tensor)
    lanes.wait(sent)
    expected, form = tensor.clone(), Form.of(tensor)
    del tensor
    back, ticket = lanes.fetch(host, sent, form)
    lanes.wait(ticket)
    assert (back.dtype, back.shape, back.stride()) == (form.dtype, form.shape, form.strides)
    assert torch.equal(back, expected)
    assert back.device.type == device
    lanes.settle()


@pytest.mark.parametrize("device", DEVICES)
def test_many_copies_under_way_at_once(device):
    lanes = transfers(torch.device(device))
    tensors = [torch.full((1 << 16,), float(k), device=device) for k in range(30)]
    sent = [lanes.send(tensor) for tensor in tensors]
    back = [lanes.fetch(host, ticket, Form.of(t)) for (host, ticket), t in zip(sent, tensors, strict=True)]
    for k, (tensor, ticket) in enumerate(back):
        lanes.wait(ticket)
        assert bool((tensor == k).all())


def test_a_fetch_waits_for_the_copy_that_brings_the_bytes(monkeypatch):
    gate = threading.Event()
    copy = transfer._copy

    def slow(pair, after=None):
        if after is None:
            gate.wait(10)
        copy(pair, after)

    monkeypatch.setattr(transfer, "_copy", slow)
    lanes = transfers(torch.device("cpu"))
    tensor = torch.randn(100)
    host, sent = lanes.send(tensor)
    back, ticket = lanes.fetch(host, sent, Form.of(tensor))
    assert not ticket.done()
    gate.set()
    lanes.wait(ticket)
    assert torch.equal(back, tensor)


def test_the_copy_holds_nothing_once_it_has_ended():
    lanes = transfers(torch.device("cpu"))
    tensor = torch.ones(1000)
    storage = tensor.untyped_storage()
    weak = storage._weak_ref()
    host, sent = lanes.send(tensor)
    lanes.wait(sent)
    del tensor, storage
    assert torch.UntypedStorage._expired(weak)
    torch.UntypedStorage._free_weak_ref(weak)
    assert host.numel() == 4000


def test_a_full_host_is_said_clearly(monkeypatch):
    def full(*_, **__):
        raise MemoryError

    monkeypatch.setattr(transfer.np, "empty", full)
    with pytest.raises(RunError, match=r"the host has no 4.00 KiB \(4096 bytes\) left"):
        transfers(torch.device("cpu")).send(torch.ones(1024))


def in_fork(run):
    """What a function gives in a process that is forked from this one, which ends after half a minute."""
    child = os.fork()
    if not child:
        signal.alarm(30)
        code = 3
        try:
            code = 0 if run() else 2
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1] == 0


def test_copies_end_before_a_fork_and_go_on_behind_it(monkeypatch):
    copy, begun = transfer._copy, threading.Event()

    def slow(pair, after=None):
        begun.wait(10)
        copy(pair, after)

    monkeypatch.setattr(transfer, "_copy", slow)
    lanes, tensor = transfers(torch.device("cpu")), torch.randn(100)
    host, sent = lanes.send(tensor)
    threading.Timer(0.2, begun.set).start()

    def there():
        back, ticket = lanes.fetch(host, sent, Form.of(tensor))
        lanes.wait(ticket)
        lanes.settle()
        return torch.equal(back, tensor)

    assert in_fork(there)
    assert there()


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Dropout(0.5), nn.Tanh())


def loss(model, x):
    return model(x).square().sum()


def gradients(model, step):
    torch.manual_seed(1)
    model.zero_grad()
    step(model, torch.randn(4, 8)).backward()
    return [p.grad.clone() for p in model.parameters()]


@pytest.fixture
def compiled():
    torch._dynamo.reset()
    made = []
    step = torch.compile(
        loss, backend=lambda m, i: compile_with(m, i, offload_all, made.append), fullgraph=True
    )
    return step, made


def test_two_steps_under_way_at_once(compiled):
    step, made = compiled
    model = net()
    torch.manual_seed(3)
    batches = [torch.randn(4, 8) for _ in range(3)]
    torch.manual_seed(4)
    sum(loss(model, x) for x in batches).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    torch.manual_seed(4)
    losses = [step(model, x) for x in batches]
    sum(losses).backward()
    lines = made[0].program.instructions
    assert any(isinstance(line, Send) for line in lines)
    assert any(isinstance(line, Fetch) for line in lines)
    assert all(torch.allclose(p.grad, e) for p, e in zip(model.parameters(), expected, strict=True))


def test_a_copy_that_fails_fails_the_step_and_leaves_the_next_one_alone(compiled, monkeypatch):
    step, made = compiled
    model = net()
    expected = gradients(model, loss)
    assert all(map(torch.equal, gradients(model, step), expected))
    with monkeypatch.context() as patch:
        patch.setattr(
            made[0]._transfers, "send", lambda _: (_ for _ in ()).throw(RunError("the host is full"))
        )
        with pytest.raises(RunError, match="the host is full"):
            gradients(model, step)
    assert all(map(torch.equal, gradients(model, step), expected))


def test_a_step_without_backward_leaves_nothing_under_way(compiled):
    step, made = compiled
    model = net()
    for _ in range(3):
        step(model, torch.randn(4, 8))
    made[0]._transfers.settle()
    assert all(map(torch.equal, gradients(model, step), gradients(model, loss)))


def late(graph):
    """offload_all with every drop of what was sent put into backward, right before it is fetched."""
    program = offload_all(graph)
    sent = {line.tensor for line in program.forward if isinstance(line, Send)}
    forward = []
    for line in program.forward:
        if isinstance(line, Drop):
            line = Drop(tuple(t for t in line.tensors if t not in sent))
        forward.append(line)
    backward = []
    for line in program.backward:
        backward += [Drop((line.tensor,)), line] if isinstance(line, Fetch) else [line]
    return Program(tuple(forward), tuple(backward))


def early(graph):
    """offload_all with every fetch at the end of forward."""
    program = offload_all(graph)
    fetches = tuple(line for line in program.backward if isinstance(line, Fetch))
    rest = tuple(line for line in program.backward if not isinstance(line, Fetch))
    return Program((*program.forward, *fetches), rest)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("planner", [offload_all, late, early])
def test_copies_that_cross_from_forward_to_backward(planner, device):
    """Large enough that copies are under way when forward ends."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(*(m for _ in range(6) for m in (nn.Linear(64, 64), nn.Tanh()))).to(device)
    x = torch.randn(16 * 1024, 64).to(device)  # copies of 4 MiB, and little to compute meanwhile
    made = []
    step = torch.compile(loss, backend=lambda m, i: compile_with(m, i, planner, made.append), fullgraph=True)
    loss(model, x).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    for _ in range(2):
        model.zero_grad()
        step(model, x).backward()
        assert all(torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected, strict=True))
    if planner is late:
        sent = {line.tensor for line in made[0].program.forward if isinstance(line, Send)}
        assert sent <= set(made[0].saved)
