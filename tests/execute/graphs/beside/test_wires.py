"""Communications of a captured part: when they happen, on what, and what holds memory until then."""

import gc
import weakref
from contextlib import contextmanager
from functools import partial

import pytest
import torch

from lowtide.execute.graphs.beside.wires import WireAside, WireBetween
from lowtide.trace.distributed.wires import connect


class _Wire:
    """Remembers what it was asked."""

    place = 3

    def __init__(self):
        self.said = []

    def swap(self, sends, receives):
        self.said.append(("swap", _numbers(sends), _numbers(receives)))

    def begin_swap(self, sends, receives):
        self.said.append(("begin swap", _numbers(sends), _numbers(receives)))
        return lambda: self.said.append("swapped")

    def add_up(self, x):
        self.said.append(("add up", x.item()))

    def begin_sum(self, x):
        self.said.append(("begin sum", x.item()))
        return lambda: self.said.append("summed")


def _numbers(messages):
    return [(other, x.item()) for other, x in messages]


def number(value):
    return torch.tensor(float(value))


@pytest.fixture
def wire():
    found = _Wire()
    connect("a wire", found)
    yield found
    connect("a wire", None)


@pytest.fixture
def captured(wire):
    """A wire, what the host does between graphs, and the wire that is captured."""
    calls = []
    return wire, calls, WireBetween("a wire", calls.append, lambda x: partial(number, x.item() + 100))


def test_nothing_is_said_while_a_part_is_captured(captured):
    wire, calls, between = captured
    assert between.place == 3
    between.add_up(number(1))
    between.swap([(0, number(2))], [(1, number(3))])
    ended = between.begin_sum(number(4))
    swapped = between.begin_swap([(0, number(5))], [])
    ended()
    swapped()
    assert not wire.said
    for _ in range(2):  # on what lies there in a replay
        wire.said.clear()
        for call in calls:
            call()
        assert wire.said == [
            ("add up", 101.0), ("swap", [(0, 102.0)], [(1, 103.0)]), ("begin sum", 104.0),
            ("begin swap", [(0, 105.0)], []), "summed", "swapped",
        ]  # fmt: skip


def test_memory_is_held_until_the_end_of_a_communication_was_waited_for(captured):
    _, _, between = captured
    for begin in (
        between.begin_sum,
        lambda x: between.begin_swap([(0, x)], []),
        lambda x: between.begin_swap([], [(0, x)]),
    ):
        x = number(1)
        gone = weakref.ref(x)
        ended = begin(x)
        del x
        assert gone() is not None
        ended()
        assert gone() is None


def test_a_replay_that_has_failed_leaves_nothing_for_the_next_one(captured):
    wire, calls, between = captured
    between.begin_sum(number(1))()
    start, end = calls
    start()  # and then an operator fails
    wire.said.clear()
    for call in (start, end):
        call()
    assert wire.said == [("begin sum", 101.0), "summed"]
    with pytest.raises(IndexError):
        end()


def test_a_replay_talks_by_the_wire_that_has_the_name_then(captured):
    """What runs as always does so too: another step may have been split on the same mesh since."""
    wire, calls, between = captured
    between.add_up(number(1))
    between.swap([], [])
    between.begin_sum(number(1))()
    between.begin_swap([], [])()
    other = _Wire()
    connect("a wire", other)
    for call in calls:
        call()
    assert not wire.said
    assert len(other.said) == 6


def test_what_is_replayed_holds_nothing_of_the_capture(wire):
    """Its recorder has the pools of all operators: they would not be given back."""

    class Capture:
        def __init__(self):
            self.calls = []

        def between(self, call):
            self.calls.append(call)

    capture = Capture()
    between = WireBetween("a wire", capture.between, lambda x: lambda: number(0))
    between.add_up(number(1))
    between.swap([(0, number(1))], [])
    between.begin_sum(number(1))()
    between.begin_swap([(0, number(1))], [])()
    calls, gone = capture.calls, (weakref.ref(capture), weakref.ref(between))
    del capture, between
    gc.collect()
    assert [one() for one in gone] == [None, None]
    for call in calls:
        call()
    assert len(wire.said) == 6


def test_what_others_are_told_is_not_counted_while_a_part_is_watched():
    aside, wire = [], _Wire()

    @contextmanager
    def uncounted():
        aside.append(len(wire.said))
        yield
        aside.append(len(wire.said))

    watched = WireAside(wire, uncounted)
    assert watched.place == 3
    watched.add_up(number(1))
    watched.swap([], [])
    watched.begin_sum(number(2))()
    watched.begin_swap([], [])()
    assert len(wire.said) == 6
    assert aside == [0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6]
