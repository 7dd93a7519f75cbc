"""How long a Program takes by the costs of its operators, told by code that shares nothing with planners.

Copies to the host and back go beside the computation, one after the other each way. A drop waits until what
it lets go of is on the host, and an operator until what it reads is back.

Communications go one after the other too. An exchange holds the operators up until it has ended, unless the
Program says that it goes on beside them. A sum does not: whoever reads, sends or drops it waits for it, and
so does the end of forward and of backward. For an exchange that goes on the next communication waits too.

Where the rates say that forward ends with its copies done, as a CUDA graph does, its end waits for those.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from lowtide.graph import RESIDENT_ROLES, SUM, Graph, Op
from lowtide.plan.check.graph import allocated
from lowtide.plan.program.instructions import Drop, Program, Run, Send

__all__ = ["Rates", "seconds_of"]


class Rates(Protocol):
    """What copies between device and host take."""

    @property
    def to_host(self) -> float:
        """Bytes a second."""

    @property
    def to_device(self) -> float:
        """Bytes a second."""

    @property
    def handover(self) -> float:
        """Seconds of the computation itself for each copy."""

    @property
    def beside(self) -> float:
        """Seconds of the computation itself for each byte."""

    @property
    def settles(self) -> bool:
        """Whether forward ends with its copies done."""


def seconds_of(
    graph: Graph,
    program: Program,
    seconds: Sequence[float],
    short: Mapping[int, float],
    rates: Rates | None,
    wire: Mapping[int, float] | None = None,
) -> float:
    """When the last operator of a valid Program has ended; with leaves that travel, when they are back.

    ``short`` are seconds of short second runs, ``rates`` those of copies, which take no time without;
    ``wire`` are seconds of communications, by operator: with those it is when the last has ended too.
    """
    clock = _Clock(graph, rates)
    owner = graph.storages()
    sent = {line.tensor for line in program.instructions if isinstance(line, Send)}
    leaves = any(graph.tensors[t].role in RESIDENT_ROLES and owner[t] == t for t in sent)
    ended, talks = 0.0, wire or {}
    for number, line in enumerate(program.instructions):
        if number == len(program.forward):
            clock.all_summed()
            if rates is not None and rates.settles:
                clock.wait(max(clock.out, clock.into))
        if isinstance(line, Run):
            op = graph.ops[line.op]
            for t in {*op.reads, *(owner[t] for t in op.inputs if leaves)}:
                clock.wait(clock.back.pop(t, 0.0))
                clock.wait(clock.sums.pop(t, 0.0))
            own = seconds[line.op]
            own = short.get(line.op, own) if line.short else own
            clock.work(op, own, talks.get(line.op), beside=line.beside > 0)
            ended = clock.now
        elif isinstance(line, Drop):
            for t in line.tensors:
                clock.wait(clock.sums.pop(t, 0.0))
                clock.wait(clock.away.pop(t, 0.0))
                clock.back.pop(t, None)
        elif isinstance(line, Send):
            clock.wait(clock.sums.pop(line.tensor, 0.0))
            clock.send(line.tensor)
        else:
            clock.fetch(line.tensor)
    if leaves:
        for t in set(owner):
            clock.wait(clock.back.pop(t, 0.0))
    if leaves or talks:
        clock.all_summed()
        ended = clock.now
    return ended


class _Clock:
    def __init__(self, graph: Graph, rates: Rates | None) -> None:
        self.rates = rates
        self.size = [allocated(one) for one in graph.tensors]
        self.now = 0.0
        self.out = self.into = 0.0
        """When each lane is free again."""
        self.away: dict[int, float] = {}
        """When copies to the host end, of what is still on the device."""
        self.there: dict[int, float] = {}
        """When what is on the host has come there."""
        self.back: dict[int, float] = {}
        """When copies to the device end, of what was not read since."""
        self.wire = 0.0
        """When the last communication has ended."""
        self.sums: dict[int, float] = {}
        """When sums end that nobody has waited for, and the exchange that goes on beside others."""
        self.exchanged = -1
        """The result of that exchange."""

    def wait(self, until: float) -> None:
        self.now = max(self.now, until)

    def work(self, op: Op, seconds: float, wire: float | None, *, beside: bool) -> None:
        if wire is None:
            self.now += seconds
            return
        self.wait(self.sums.pop(self.exchanged, 0.0))
        self.now += seconds
        self.wire = max(self.now, self.wire) + wire
        self.exchanged = op.outputs[0] if beside and op.outputs else -1
        if beside or op.kind == SUM:
            self.sums |= dict.fromkeys(op.outputs, self.wire)
        else:
            self.wait(self.wire)

    def all_summed(self) -> None:
        self.wait(max(self.sums.values(), default=0.0))
        self.sums.clear()

    def send(self, tensor: int) -> None:
        took = self._hand_over(tensor, out=True)
        self.out = max(self.now, self.out, self.back.get(tensor, 0.0)) + took
        self.away[tensor] = self.there[tensor] = self.out

    def fetch(self, tensor: int) -> None:
        took = self._hand_over(tensor, out=False)
        self.into = max(self.now, self.into, self.there[tensor]) + took
        self.back[tensor] = self.into

    def _hand_over(self, tensor: int, *, out: bool) -> float:
        if self.rates is None:
            return 0.0
        size, rates = self.size[tensor], self.rates
        self.now += rates.handover + size * rates.beside
        return size / (rates.to_host if out else rates.to_device)
