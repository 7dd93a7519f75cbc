"""Copies of captured parts, by streams that do at once what they are told and remember what they wait for."""

import dataclasses
from collections import Counter
from contextlib import nullcontext
from itertools import count

import pytest
import torch
from torch import nn

import lowtide
from lowtide.execute.graphs.arena.errors import CannotCaptureError
from lowtide.execute.graphs.beside.same_copies import SameCopies, SeenTurns
from lowtide.execute.runtime import interpreter as interpreters
from lowtide.execute.runtime.copies import Form
from lowtide.plan.program.instructions import Send


class _Stream:
    def __init__(self, device=None):
        self.waited, self.events = [], count()

    def wait_stream(self, other):
        self.waited.append(other)

    def wait_event(self, event):
        self.waited.append(event)

    def record_event(self):
        return self, next(self.events)


@pytest.fixture
def streams(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Stream", _Stream)
    computing = _Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: computing)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: True)
    taken = []

    def pinned(self, size):
        taken.append(torch.empty(size, dtype=torch.uint8))
        return taken[-1]

    monkeypatch.setattr(SameCopies, "_pinned", pinned)
    monkeypatch.setattr(SameCopies, "send", super(SameCopies, SameCopies).send)  # tensors of the host too
    return taken


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(12))

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.sigmoid(layer(x))
        return x


def test_tiles_share_the_memory_that_they_copy_to(streams, monkeypatch):
    """The values are those of the step, and the second time everything is copied to the same places."""
    made = []
    begun = interpreters.Interpreter.__init__
    monkeypatch.setattr(
        interpreters.Interpreter, "__init__", lambda self, *rest: made.append(self) or begun(self, *rest)
    )
    torch.manual_seed(0)
    model, x, y = Deep(), torch.randn(4096, 64), torch.randn(4096, 64)

    def loss_of(model, x, y):
        return ((model(x) - y) ** 2).sum()

    for budget in (
        "15%",
        "12%",
        "20%",
        "10%",
    ):  # what is faster, smaller tiles or copies, changes with the machine
        step = lowtide.fit(loss_of, model, x, y, budget=budget, only=("offload", "tile"), cost="estimated")
        interpreter, bodies = made[-1], step.plan.program.bodies
        sends = [sum(isinstance(one, Send) for one in body.program.instructions) for body in bodies]
        if any(sends):
            break
    assert any(sends)

    def gradients():
        model.zero_grad()
        step(model, x, y).backward()
        return [p.grad.clone() for p in model.parameters()]

    expected, seen = gradients(), SeenTurns()
    with interpreter.lent(in_turns=seen):
        assert all(map(torch.equal, gradients(), expected))
    (sizes,) = seen.sizes
    assert max(sends) <= sum(sizes.values()) <= sum(sends)  # not once for each tile
    copies = SameCopies(torch.device("cpu"), [[], []], seen.sizes)
    assert sorted(one.numel() for one in streams) == sorted(sizes.elements())
    for _ in range(2):
        for one in streams:
            one.fill_(0x7F)
        copies.begin(0)
        with interpreter.lent(copies, in_turns=copies):
            assert all(map(torch.equal, gradients(), expected))
        assert all((one != 0x7F).any() for one in streams)
    assert len(streams) == sum(sizes.values())


def test_a_tile_waits_for_the_one_before_to_have_read_what_it_writes_over(streams):
    copies = SameCopies(torch.device("cpu"), [[], []], [Counter({64: 1})])
    copies.begin(0)
    value, reads = torch.arange(16.0), []
    for number in range(3):
        with copies.turn([64], copies) as lanes:
            assert lanes is copies
            before = len(copies._out.waited)
            host, sent = lanes.send(value + number)
            waited = copies._out.waited[before:]
            assert [one for one in waited if one in reads] == reads[-1:]
            found, arrived = lanes.fetch(host, sent, dataclasses.replace(Form.of(value), on_host=False))
            assert torch.equal(found, value + number)
            reads.append(arrived)
    copies.begin(1)  # the part before has ended with its copies
    with copies.turn([64], copies) as lanes:
        before = len(copies._out.waited)
        lanes.send(value)
        assert not [one for one in copies._out.waited[before:] if one in reads]


def test_tiles_inside_of_tiles_have_memory_of_their_own(streams):
    seen = SeenTurns()
    for sizes in ([8, 8], [8]):
        with seen.turn(sizes, None):
            for inner in ([8], [16]):
                with seen.turn(inner, None):
                    pass
    assert seen.sizes == [Counter({8: 2}), Counter({8: 1, 16: 1})]
    copies = SameCopies(torch.device("cpu"), [[8], []], seen.sizes)
    copies.begin(0)
    places = [copies.take(8).data_ptr()]
    with copies.turn([8, 8], copies):
        places += [copies.take(8).data_ptr(), copies.take(8).data_ptr()]
        with copies.turn([8], copies):
            places.append(copies.take(8).data_ptr())
            with pytest.raises(CannotCaptureError, match="of another size"):
                copies.take(8)
            with (
                pytest.raises(CannotCaptureError, match="did not in the step before"),
                copies.turn([8], None),
            ):
                pass
    assert len(set(places)) == 4
    with pytest.raises(CannotCaptureError, match="of another size"):
        copies.take(8)


def test_copies_end_with_the_graph_that_began_them(streams):
    """Behind a communication another graph is captured: it cannot wait for an event of the one before."""
    copies = SameCopies(torch.device("cpu"), [[64], []], [])
    copies.begin(0)
    value = torch.arange(16.0)
    host, sent = copies.send(value)
    computing = torch.cuda.current_stream(None)
    copies.wait(sent)
    assert computing.waited == [sent]
    copies.join()  # a graph ends
    assert computing.waited == [sent, copies._out]
    copies.wait(sent)
    assert computing.waited == [sent, copies._out]
    form = dataclasses.replace(Form.of(value), on_host=False)
    found, arrived = copies.fetch(host, sent, form)
    assert torch.equal(found, value)
    assert sent not in copies._in.waited
    copies.wait(arrived)
    assert computing.waited == [sent, copies._out, arrived]
    copies.join()
    assert computing.waited[3:] == [copies._in]  # nothing went out in this graph
