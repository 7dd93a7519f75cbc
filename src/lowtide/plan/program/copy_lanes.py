"""Four clocks: compute, copies to the host, copies to the device, communication; and who waits for whom.

    compute        ──run──run──┤drop waits├──run──┤waits├──run reads x──sum y──run──┤waits├──run reads y──
    to host          └─send x──────────┘
    to device                                     └─fetch x─┘
    communication                                                          └─sum y────────┘

Each lane works first in, first out, beside the operators. A sum goes on beside the operators after it, and
who reads it first waits. An exchange is waited for where it stands, unless its instruction says that it goes
on beside others too; then the next communication waits for it as well. Forward and backward end with all
done, and forward with its copies where the link says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from lowtide.errors import PlanError
from lowtide.graph import SUM, Graph
from lowtide.plan.program.instructions import Run
from lowtide.plan.program.memory import allocated_bytes

__all__ = ["Lanes", "Link"]


@dataclass(frozen=True, slots=True)
class Link:
    """Bytes a second between device and host, each way."""

    to_host: float
    to_device: float
    handover: float = 0.0
    """Seconds that the computation itself spends on a copy: it says when that may start, and waits for it."""
    beside: float = 0.0
    """Seconds by which a byte on its way holds the computation up: the device's memory serves both."""
    settles: bool = False
    """Whether forward ends with its copies done, as it does as a CUDA graph."""

    def taken(self, size: int) -> float:
        """Seconds that a copy of so many bytes takes from the computation."""
        return self.handover + size * self.beside


class Lanes:
    """The clocks of a program while it is simulated; without a link copies take no time."""

    def __init__(
        self, graph: Graph, link: Link | None, wire_seconds: Mapping[int, float] | None = None
    ) -> None:
        """``wire_seconds`` are what communications take on their lane, by operator."""
        self.graph = graph
        self.link = link
        self.wire_seconds = wire_seconds or {}
        self.now = 0.0
        self._spoken_for = 0.0
        """Waiting that is not part of any operator's time yet."""
        self._out = self._in = 0.0
        self._sent: dict[int, float] = {}
        self._coming: dict[int, float] = {}
        self._on_host: dict[int, float] = {}
        self._wire = 0.0
        self._summed: dict[int, float] = {}
        """When sums and exchanges are there that nobody has waited for."""
        self._exchange = -1
        """The result of the exchange that goes on beside others."""
        self.waited: dict[int, float] = {}
        """Seconds that were spent waiting for copies and sums of each tensor."""

    def send(self, tensor: int, is_here: Callable[[int], bool]) -> None:
        """Queue a copy to the host."""
        if not is_here(tensor):
            raise PlanError(f"the program sends {self._label(tensor)!r}, which it does not hold")
        self._wait(tensor, self._summed.pop(tensor, 0.0))
        self._hand_over(tensor)
        start = max(self.now, self._out, self._coming.get(tensor, 0.0))
        self._out = start + self._seconds(tensor, out=True)
        self._sent[tensor] = self._on_host[tensor] = self._out

    def drop(self, tensors: Iterable[int], is_here: Callable[[int], bool]) -> None:
        """Wait for copies of what is let go of."""
        for tensor in tensors:
            self._wait(tensor, self._summed.pop(tensor, 0.0))
            if tensor in self._sent and not is_here(tensor):
                self._wait(tensor, self._sent.pop(tensor))
            self._coming.pop(tensor, None)

    def fetch(self, tensor: int) -> None:
        """Queue a copy back to the device."""
        if tensor not in self._on_host:
            raise PlanError(f"the program fetches {self._label(tensor)!r}, which was never sent")
        self._hand_over(tensor)
        start = max(self.now, self._in, self._on_host[tensor])
        self._in = self._coming[tensor] = start + self._seconds(tensor, out=False)

    def run(self, reads: Iterable[int], seconds: float) -> float:
        """Run an operator; what it takes with what was waited for before it."""
        for tensor in reads:
            if tensor in self._coming:
                self._wait(tensor, self._coming.pop(tensor))
            if tensor in self._summed:
                self._wait(tensor, self._summed.pop(tensor))
        waited, self._spoken_for = self._spoken_for, 0.0
        self.now += seconds
        return seconds + waited

    def work(self, line: Run, reads: Iterable[int], seconds: float) -> float:
        """Run an operator, and communicate if it does; what both take with what was waited for."""
        wire = self.wire_seconds.get(line.op)
        if wire is None:
            return self.run(reads, seconds)
        self._wait(self._exchange, self._summed.pop(self._exchange, 0.0))
        op, beside = self.graph.ops[line.op], line.beside > 0
        took = self.run(reads, seconds)
        took += self.communicate(op.outputs, wire, waits=op.kind != SUM and not beside)
        self._exchange = op.outputs[0] if beside and op.outputs else -1
        return took

    def communicate(self, results: Sequence[int], seconds: float, *, waits: bool) -> float:
        """Queue a communication with these results; what the computation waits for it here."""
        self._wire = max(self.now, self._wire) + seconds
        if not waits:
            self._summed.update(dict.fromkeys(results, self._wire))
            return 0.0
        before = self.now
        self._wait(results[0] if results else -1, self._wire)
        self._spoken_for -= self.now - before
        return self.now - before

    def settle(self) -> None:
        """Wait for all sums, as forward and backward end, and for copies where those end too."""
        if self.link is not None and self.link.settles:
            for tensor, until in (*self._sent.items(), *self._coming.items()):
                self._wait(tensor, until)
            last = max(self._out, self._in)  # of what was let go of before it was read
            if last > self.now:
                self._wait(next(reversed(self._on_host)), last)
        for tensor, until in self._summed.items():
            self._wait(tensor, until)
        self._summed.clear()

    def _hand_over(self, tensor: int) -> None:
        if self.link is not None:
            taken = self.link.taken(allocated_bytes(self.graph.tensors[tensor]))
            self._spoken_for += taken
            self.now += taken

    def _wait(self, tensor: int, until: float) -> None:
        if until > self.now:
            self.waited[tensor] = self.waited.get(tensor, 0.0) + until - self.now
            self._spoken_for += until - self.now
            self.now = until

    def _seconds(self, tensor: int, *, out: bool) -> float:
        if self.link is None:
            return 0.0
        return allocated_bytes(self.graph.tensors[tensor]) / (
            self.link.to_host if out else self.link.to_device
        )

    def _label(self, tensor: int) -> str:
        return self.graph.tensors[tensor].label
