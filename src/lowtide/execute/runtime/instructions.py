"""The instructions of a Program, prepared so that running one is a few lookups and a call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from lowtide.cost.short import saved_results, short_run
from lowtide.cost.watch import Marker
from lowtide.distributed_internals import may_be_answered_for
from lowtide.execute.runtime.copies import Form
from lowtide.execute.runtime.frame import Frame
from lowtide.execute.runtime.in_place import in_place_variant
from lowtide.execute.runtime.parameter_offload import Traveller
from lowtide.plan.program.instructions import Run
from lowtide.plan.program.memory import rounded
from lowtide.plan.program.short_reruns import JOINED
from lowtide.trace.distributed.exchange import begin_exchange, bytes_on_their_way, exchanged
from lowtide.trace.distributed.wires import Wire, wire_of
from lowtide.trace.eager.updates import without_update
from lowtide.trace.step.builder import Call
from lowtide.trace.step.joint import Joint

__all__ = [
    "AlreadyRun", "Dropping", "Exchanging", "Fetching", "FetchingLeaf", "Line", "Nested", "Running",
    "Sending", "SendingLeaf", "Summing", "filled", "run_lines",
]  # fmt: skip


class Line:
    """One prepared instruction."""

    __slots__ = ()

    def __call__(self, frame: Frame) -> None:
        """Change the frame as the instruction says."""
        raise NotImplementedError(f"{type(self).__name__}: {len(frame.table)} tensors")


class Dropping(Line):
    """Clears places of the table, and takes memory from leaves; what is still being copied is waited for."""

    __slots__ = ("leaves", "tensors", "travelling")

    def __init__(self, tensors: tuple[int, ...], travelling: tuple[int, ...], leaves: frozenset[int]) -> None:
        self.leaves = tuple(t for t in tensors if t in leaves)
        self.tensors = tuple(t for t in tensors if t not in leaves)
        self.travelling = tuple(t for t in travelling if t not in leaves)

    @property
    def simple(self) -> bool:
        """Whether it clears places of the table and does nothing else."""
        return not self.travelling and not self.leaves

    def __call__(self, frame: Frame) -> None:
        """Let go."""
        for tensor in self.travelling:
            ticket = frame.outgoing.pop(tensor, None)
            if ticket is not None:
                assert frame.transfers is not None
                frame.transfers.wait(ticket)
            frame.arrive(tensor)
        table = frame.table
        for tensor in self.tensors:
            table[tensor] = None
        for tensor in self.leaves:
            frame.incoming.pop(tensor, None)
            if tensor in frame.travellers:
                frame.travellers[tensor].leave()


class Sending(Line):
    """Starts a copy to the host."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: int) -> None:
        self.tensor = tensor

    def __call__(self, frame: Frame) -> None:
        """Start."""
        assert frame.transfers is not None
        frame.arrive(self.tensor)
        value = frame.table[self.tensor]
        host, ticket = frame.transfers.send(value)
        frame.hosts[self.tensor] = host
        frame.sent[self.tensor] = ticket, Form.of(value)
        frame.outgoing[self.tensor] = ticket


class SendingLeaf(Line):
    """Starts to copy a leaf to the host, where it is alone on its memory."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: int) -> None:
        self.tensor = tensor

    def __call__(self, frame: Frame) -> None:
        """Start."""
        assert frame.transfers is not None
        if self.tensor in frame.able:
            frame.travellers[self.tensor] = Traveller(frame.table[self.tensor], frame.transfers)


class FetchingLeaf(Line):
    """Takes memory for a leaf again and starts to copy it back."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: int) -> None:
        self.tensor = tensor

    def __call__(self, frame: Frame) -> None:
        """Start."""
        if self.tensor in frame.travellers:
            frame.incoming[self.tensor] = frame.travellers[self.tensor].come_back()


class Fetching(Line):
    """Takes memory and starts a copy from the host."""

    __slots__ = ("last", "tensor")

    def __init__(self, tensor: int, last: bool) -> None:
        self.tensor, self.last = tensor, last

    def __call__(self, frame: Frame) -> None:
        """Start."""
        assert frame.transfers is not None
        host, (sent, form) = frame.hosts[self.tensor], frame.sent[self.tensor]
        value, ticket = frame.transfers.fetch(host, sent, form)
        frame.table[self.tensor] = value
        frame.incoming[self.tensor] = ticket
        if self.last:
            del frame.hosts[self.tensor]


class Nested:
    """A function that runs operators itself, and tells its marker of them."""

    marker: Marker | None = None


class Running(Line):
    """Calls an operator with its arguments filled in, and puts the results into the table."""

    __slots__ = (
        "args", "awaited", "fill", "function", "in_place", "kwargs", "op", "outputs", "several", "state",
        "store_state", "told",
    )  # fmt: skip

    def __init__(
        self,
        joint: Joint,
        run: Run,
        state: int | None,
        first: bool,
        awaited: tuple[int, ...],
        function: Any = None,
        joined: Sequence[int] = (),
    ) -> None:
        """``joined`` are operators whose runs, after this short one, are part of it."""
        call = joint.calls[run.op]
        self.op = run.op
        self.in_place = run.in_place is not None
        self.told = not run.short
        """Whether a witness is told of it: the first run of an operator, or one like it."""
        self.function = function or call.target
        if run.in_place is not None:
            self.function = in_place_variant(call.target)
        self.state = state
        self.store_state = first
        self.awaited = awaited
        if run.short:
            self._shorten(joint, call, joined)
            return
        self.args, self.kwargs = list(call.args), dict(call.kwargs)
        self.fill = tuple(_fill(joint, enumerate(call.args))), tuple(_fill(joint, call.kwargs.items()))
        op = joint.graph.ops[run.op]
        if not first and op.updates:
            updates = {op.inputs[k] for k in op.updates}
            likes = {place: joint.values[t] for place, t, _ in self.fill[0] if t in updates}
            self.function = without_update(self.function, list(likes), list(likes.values()))
            self.told = False
            self.fill = tuple(one for one in self.fill[0] if one[1] not in updates), self.fill[1]
        self.outputs, self.several = call.results, call.several

    def _shorten(self, joint: Joint, call: Call, joined: Sequence[int]) -> None:
        """Run from what the first run saved, for the first result alone, or for that of the last joined."""
        kinds = {JOINED[joint.graph.ops[op].kind]: op for op in joined}
        saved = [call.results[place] for place in saved_results(call.target, call.args)]
        others = [joint.graph.ops[kinds["add"]].inputs[1]] if "add" in kinds else []
        self.function = short_run
        self.args = [*call.args[:3], *(None for _ in saved), call.args[-1], None, "relu" in kinds]
        self.kwargs = {}
        places = (*enumerate(saved, 3), *enumerate(others, 4 + len(saved)))
        filled = tuple((place, tensor, None) for place, tensor in places)
        self.fill = (*_fill(joint, enumerate(call.args[:3])), *filled), ()
        last = joint.calls[joined[-1]] if joined else call
        self.outputs, self.several = last.results[:1], False

    def read(self) -> Iterator[int]:
        """The tensors that it takes from the table."""
        for _, tensor, items in (*self.fill[0], *self.fill[1]):
            yield from (tensor,) if items is None else (item[0] for item in items if type(item) is tuple)

    def __call__(self, frame: Frame) -> None:
        """Run the operator."""
        table = frame.table
        for tensor in self.awaited:
            frame.arrive(tensor)
        args, kwargs = self.args.copy(), self.kwargs
        for position, tensor, items in self.fill[0]:
            args[position] = table[tensor] if items is None else filled(items, table)
        if self.fill[1]:
            kwargs = kwargs.copy()
            for name, tensor, items in self.fill[1]:
                kwargs[name] = table[tensor] if items is None else filled(items, table)
        if self.state is None:
            result = self.function(*args, **kwargs)
        elif self.store_state:
            frame.states[self.state] = frame.drawing.by.before(args, kwargs)
            result = self.function(*args, **kwargs)
        else:
            state = frame.states[self.state]
            assert state is not None
            with frame.drawing.by.again(state, args, kwargs):
                result = self.function(*args, **kwargs)
        if frame.witness is not None and self.told:
            frame.witness(self.op, args, kwargs, result, self.in_place)
        if not self.several:
            tensor = self.outputs[0]
            if tensor >= 0 and table[tensor] is None:
                table[tensor] = result
            return
        for tensor, value in zip(self.outputs, result, strict=True):
            if tensor >= 0 and table[tensor] is None:
                table[tensor] = value


class Summing(Running):
    """Starts a sum over processes, which goes on beside what follows: who needs the result first waits.

    Where somebody looks at operators it is one like others, which gives the sum.
    """

    __slots__ = ()

    def __call__(self, frame: Frame) -> None:
        """Start."""
        wire = _wire(self, frame)
        if wire is None:
            super().__call__(frame)
            return
        _begin(self, frame)
        ((_, source, _),) = self.fill[0]
        value = frame.table[source].clone(memory_format=torch.contiguous_format)
        frame.sums[self.outputs[0]] = wire.begin_sum(value)
        frame.table[self.outputs[0]] = value


class Exchanging(Running):
    """Exchanges parts of a tensor; beside what follows, where the plan has room for the parts on their way.

    One exchange at a time is on its way: the next communication waits for it.
    """

    __slots__ = ("beside",)

    def __init__(
        self, joint: Joint, run: Run, state: int | None, first: bool, awaited: tuple[int, ...]
    ) -> None:
        super().__init__(joint, run, state, first, awaited)
        self.beside = run.beside

    def __call__(self, frame: Frame) -> None:
        """Start, or run."""
        wire = _wire(self, frame)
        goes_on = wire is not None and self.beside and self._takes(frame) <= self.beside
        if wire is None or (frame.wires is None and not goes_on):
            if frame.exchanged is not None:
                frame.arrive(frame.exchanged)
            super().__call__(frame)
            return
        _begin(self, frame)
        ((_, source, _),), (_, dim, sends, receives, length, _, _) = self.fill[0], self.args
        (result,), value = self.outputs, frame.table[source]
        if not goes_on:
            frame.table[result] = exchanged(value, dim, sends, receives, length, wire)
            return
        frame.table[result], frame.sums[result] = begin_exchange(value, dim, sends, receives, length, wire)
        frame.exchanged = result

    def _takes(self, frame: Frame) -> int:
        """Bytes of what it sends and receives: a plan may be that of another shape."""
        ((_, source, _),), (_, dim, sends, receives, _, _, wire) = self.fill[0], self.args
        value = frame.table[source]
        parts = bytes_on_their_way(value, dim, sends, receives, wire_of(wire).place)
        return sum(rounded(size, value.device.type) for size in parts)


def _wire(line: Running, frame: Frame) -> Wire | None:
    """What a communication talks by; None where it is one operator for whoever looks."""
    if frame.wires is not None:
        return frame.wires(line.args[-1])
    return wire_of(line.args[-1]) if frame.quick and not may_be_answered_for() else None


def _begin(line: Running, frame: Frame) -> None:
    """Wait for what it reads, and for an exchange that is on its way."""
    for tensor in line.awaited:
        frame.arrive(tensor)
    if frame.exchanged is not None:
        frame.arrive(frame.exchanged)


class AlreadyRun(Running):
    """An operator that ran as part of the short run before it."""

    __slots__ = ()

    def __call__(self, frame: Frame) -> None:
        """Nothing is left to do."""


def run_lines(lines: Iterable[Callable[[Frame], None]], frame: Frame, marker: Marker | None = None) -> None:
    """Run prepared instructions; a marker is told of each operator."""
    if marker is None:
        for line in lines:
            line(frame)
        return
    for line in lines:
        if not isinstance(line, Running):
            line(frame)
            continue
        nested = line.function if isinstance(line.function, Nested) else None
        marker.before(line.op)
        try:
            if nested is not None:
                nested.marker = marker.inside()
            line(frame)
        finally:
            if nested is not None:
                nested.marker = None
            marker.after(line.op)
        marker.left({t: frame.table[t] for t in line.outputs if t >= 0})


def _fill(joint: Joint, arguments: Iterable[tuple[Any, Any]]) -> Iterator[tuple[Any, int, list[Any] | None]]:
    """Which arguments are tensors, or lists with tensors in them: place, tensor, and the list."""
    for place, value in arguments:
        if isinstance(value, fx.Node):
            yield place, joint.tensor_of[value], None
        elif isinstance(value, list | tuple) and any(isinstance(item, fx.Node) for item in value):
            yield place, -1, [(joint.tensor_of[i],) if isinstance(i, fx.Node) else i for i in value]


def filled(items: list[Any], table: list[Any]) -> list[Any]:
    """A list of arguments with its tensors from the table."""
    return [table[item[0]] if type(item) is tuple else item for item in items]
