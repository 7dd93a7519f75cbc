"""Exchanges beside the computation: on their way where the plan has room, and there before anybody looks."""

import pytest
import torch
from msgspec.structs import replace

from lowtide.cost.wire import WireEnd, WireSpeed, exchanged_bytes
from lowtide.cost.wire import wire_seconds as wire_seconds_of
from lowtide.errors import RunError
from lowtide.execute.calls.random_state import Drawing
from lowtide.execute.calls.views import Views
from lowtide.execute.runtime.frame import Frame
from lowtide.execute.runtime.launch import Launch
from lowtide.execute.runtime.prepare import prepared
from lowtide.graph import EXCHANGE, SUM
from lowtide.plan.program.costs import Costs
from lowtide.plan.program.instructions import Drop, Program, Run
from lowtide.plan.result.validate import valid_plan
from lowtide.trace.distributed.exchange import ADD_UP, bytes_on_their_way
from lowtide.trace.distributed.exchange import EXCHANGE as EXCHANGED
from lowtide.trace.step.capture import capture
from tests.execute.runtime.wires import NAME, looked_at
from tests.planning import plan_for

SENDS, RECEIVES = [0, 0, 3, 1, 2, 4], [0, 1, 4, 1, 0, 2]
"""Device 0 keeps rows 0 to 2 and sends rows 2 and 3; two rows come from device 1, one of them to where its own are."""


class SlowWire:
    """The other device has sevens; nothing is there until it is asked for."""

    place = 0

    def __init__(self):
        self.events, self.sent, self.fails = [], [], False

    def swap(self, sends, receives):
        self.events.append("at once")
        self._arrive(sends, receives)

    def begin_swap(self, sends, receives):
        self.events.append("begin")

        def ended():
            if self.fails:
                raise RunError("rank 1 has died")
            self.events.append("end")
            self._arrive(sends, receives)

        return ended

    def begin_sum(self, x):
        self.events.append("begin a sum")
        return lambda: self.events.append("end of a sum")

    def add_up(self, x):
        self.events.append("a sum")

    def _arrive(self, sends, receives):
        self.sent += [(to, x.clone()) for to, x in sends]
        for _, x in receives:
            x.fill_(7)


@pytest.fixture
def wire():
    with looked_at(SlowWire()) as found:
        yield found


def moved(x, y):
    """An exchange, something that takes long, a reader of the exchange; two communications at the end."""
    part = EXCHANGED(x * 2, 0, SENDS, RECEIVES, 5, False, NAME)
    long = (y @ y).tanh()
    z = part.view(-1).sum() + long.sum()
    return z + EXCHANGED(x * 3, 0, SENDS, RECEIVES, 5, False, NAME).sum() + ADD_UP(long, True, NAME).sum()


def values():
    torch.manual_seed(0)
    return torch.randn(4, 3, dtype=torch.float64), torch.randn(16, 16, dtype=torch.float64)


@pytest.fixture
def joint(wire):
    return capture(lambda _, x, y: moved(x, y), torch.nn.Module(), *values()).joint


def line_up(joint):
    """All operators in their order."""
    return Program(tuple(Run(k) for k in range(len(joint.graph.ops))))


def ran(joint, program, beside, wire, quick=True):
    """What forward leaves in the table, by its lines, and by the calls that run when nobody watches."""
    forward = [
        replace(line, beside=1 << 20) if getattr(line, "op", None) in beside else line
        for line in program.forward
    ]
    lines, _ = prepared(joint, replace(program, forward=tuple(forward)), ())
    frames = []
    for quick_calls in (False, True):
        wire.events.clear()
        frame = Frame(len(joint.graph.tensors), [], Drawing(), None, quick=quick)
        for tensor, value in zip(joint.inputs, values(), strict=True):
            frame.table[tensor] = value
        steps = lines
        if quick_calls:
            held = [*joint.inputs, *joint.constants]
            launch = Launch(joint, Views(joint), held, [t for t in joint.outputs if t is not None])
            for line in lines:
                launch.add(line)
            steps = launch.steps
        for step in steps:
            name = getattr(step, "op", None)
            step(frame)
            wire.events.append(joint.graph.ops[name].kind if name is not None else "call")
        frame.settle()
        frames.append((frame, list(wire.events)))
    return frames


def kinds(joint, kind):
    return [k for k, op in enumerate(joint.graph.ops) if op.kind == kind]


@pytest.mark.parametrize("which", [(), (0,), (1,), (0, 1)])
def test_results_are_those_of_exchanges_that_are_waited_for(joint, wire, which):
    exchanges = kinds(joint, EXCHANGE)
    assert len(exchanges) == 2
    beside = frozenset(exchanges[k] for k in which)
    (at_once, _), *_ = ran(joint, line_up(joint), frozenset(), wire)
    sent = list(wire.sent)
    wire.sent.clear()
    for frame, events in ran(joint, line_up(joint), beside, wire):
        assert events.count("begin") == events.count("end") == len(which)
        assert events.count("at once") == 2 - len(which)
        (result,) = [t for t in joint.outputs if t is not None]
        assert torch.equal(frame.table[result], at_once.table[result])
        assert not frame.sums
    assert len(wire.sent) == len(sent)
    for (to, one), (other, two) in zip(sorted(sent, key=total), sorted(wire.sent, key=total), strict=True):
        assert to == other
        assert torch.equal(one, two)


def total(sent):
    return float(sent[1].sum())


def test_others_run_while_it_is_on_its_way_and_who_reads_it_waits(joint, wire):
    first, second = kinds(joint, EXCHANGE)
    for _, events in ran(joint, line_up(joint), frozenset([first]), wire):
        begin, end = events.index("begin"), events.index("end")
        assert end - begin > 2  # the product and more run
        assert events.index("at once") > end
    for _, events in ran(joint, line_up(joint), frozenset([second]), wire):
        assert events.index("end") > events.index("begin") > events.index("at once")


def test_the_next_communication_waits_for_it(joint, wire):
    """One at a time is on its way."""
    first, second = kinds(joint, EXCHANGE)
    (add,) = kinds(joint, SUM)
    needed = set()
    for op in (first, second, add):
        todo = [op]
        while todo:
            k = todo.pop()
            needed.add(k)
            makers = {t: j for j, one in enumerate(joint.graph.ops) for t in one.outputs}
            todo += [makers[t] for t in joint.graph.ops[k].inputs if t in makers and makers[t] not in needed]
    before = sorted(needed - {first, second, add})
    talks = {"begin", "end", "at once", "begin a sum"}
    for later, told in ((second, ["begin", "end", "begin", "end"]), (add, ["begin", "end", "begin a sum"])):
        program = Program(tuple(Run(k) for k in (*before, first, later)))
        for _, events in ran(joint, program, frozenset([first, second]), wire):
            assert [one for one in events if one in talks] == told


def test_memory_is_not_given_back_before_it_is_there(joint, wire):
    first, _ = kinds(joint, EXCHANGE)
    makers = [k for k in range(first) if set(joint.graph.ops[k].outputs) & set(joint.graph.ops[first].inputs)]
    (result,) = joint.graph.ops[first].outputs
    program = Program((*(Run(k) for k in makers), Run(first), Drop((result,))))
    for frame, events in ran(joint, program, frozenset([first]), wire):
        assert [one for one in events if one in ("begin", "end")] == ["begin", "end"]
        assert frame.table[result] is None
        assert not frame.sums


def test_it_is_waited_for_while_somebody_looks_at_operators(joint, wire):
    for _, events in ran(joint, line_up(joint), frozenset(kinds(joint, EXCHANGE)), wire, quick=False)[:1]:
        assert "begin" not in events
        assert events.count("at once") == 2


def test_one_that_fails_is_told_where_it_is_waited_for(joint, wire):
    wire.fails = True
    with pytest.raises(RunError, match="rank 1 has died"):
        ran(joint, line_up(joint), frozenset(kinds(joint, EXCHANGE)), wire)
    assert wire.events.count("begin") == 1


def test_a_plan_says_which_may(joint, wire):
    """Those with room for what they send and for what comes."""
    x = torch.zeros(4, 3, dtype=torch.float64)
    row = 3 * 8
    assert bytes_on_their_way(x, 0, SENDS, RECEIVES, 0) == [3 * row, 2 * row, 2 * row]
    assert bytes_on_their_way(x, 0, SENDS, RECEIVES, 1) == [3 * row, 2 * row, 3 * row]
    count = len(joint.graph.ops)
    first, second = kinds(joint, EXCHANGE)
    ends = {NAME: WireEnd(WireSpeed(), 0, 2)}
    parts = exchanged_bytes(joint.graph, ends)
    assert parts == {first: [3 * row, 2 * row, 2 * row], second: [3 * row, 2 * row, 2 * row]}
    coming, wire_seconds = {k: sum(one) for k, one in parts.items()}, wire_seconds_of(joint.graph, ends)
    for more, found in ((0, {}), (1 << 20, {first: coming[first]})):  # room, as the last operator takes more
        workspace = (*(0 for _ in range(count - 1)), more)
        costs = Costs((1.0,) * count, workspace, wire_seconds=wire_seconds, on_their_way=coming)
        plan = plan_for(joint.graph, costs, 1 << 30)
        lines = [line for line in plan.program.instructions if isinstance(line, Run)]
        assert {line.op: line.beside for line in lines if line.beside} == found
        assert valid_plan(plan) == plan
        assert (plan.predicted.seconds < plan.plain.seconds) == bool(found)


def test_one_that_is_larger_than_planned_is_waited_for(joint, wire):
    """As in a plan that was made for another shape."""
    first, _ = kinds(joint, EXCHANGE)
    row, program = 3 * 8, line_up(joint)
    for size, told in ((7 * row - 1, "at once"), (7 * row, "begin")):
        forward = [replace(line, beside=size) if line.op == first else line for line in program.forward]
        lines, _ = prepared(joint, replace(program, forward=tuple(forward)), ())
        frame = Frame(len(joint.graph.tensors), [], Drawing(), None, quick=True)
        for tensor, value in zip(joint.inputs, values(), strict=True):
            frame.table[tensor] = value
        wire.events.clear()
        for line in lines:
            line(frame)
        assert wire.events[0] == told
