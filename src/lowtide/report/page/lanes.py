"""What copies and communications do beside the computation, and when it waits for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate

from lowtide.cost import Span
from lowtide.graph import EXCHANGE, SUM, Graph
from lowtide.plan.program.copy_lanes import Lanes, Link
from lowtide.plan.program.instructions import Program, Run
from lowtide.report.page.tables import TablePart
from lowtide.report.page.thin import MOST_SPANS, rounded_seconds
from lowtide.report.page.types import Lane

__all__ = ["CopiesSeen", "lane_of_talks", "lanes_of_copies", "lanes_of_spans"]

_Spans = list[tuple[int, float, float]]


class CopiesSeen(Lanes):
    """The clocks of a program, which note when each copy runs and when the computation waits."""

    def __init__(
        self, graph: Graph, link: Link | None, wire_seconds: Mapping[int, float] | None = None
    ) -> None:
        super().__init__(graph, link, wire_seconds)
        self.to_host: _Spans = []
        self.to_device: _Spans = []
        self.wire: _Spans = []
        self.waits: _Spans = []

    def send(self, tensor: int, is_here: Callable[[int], bool]) -> None:
        """Queue a copy to the host."""
        super().send(tensor, is_here)
        self.to_host.append((tensor, self._out - self._seconds(tensor, out=True), self._out))

    def fetch(self, tensor: int) -> None:
        """Queue a copy back to the device."""
        super().fetch(tensor)
        self.to_device.append((tensor, self._in - self._seconds(tensor, out=False), self._in))

    def communicate(self, results: Sequence[int], seconds: float, *, waits: bool) -> float:
        """Queue a communication."""
        taken = super().communicate(results, seconds, waits=waits)
        self.wire += [(tensor, self._wire - seconds, self._wire) for tensor in results[:1]]
        return taken

    def _wait(self, tensor: int, until: float) -> None:
        if until > self.now:
            self.waits.append((tensor, self.now, until))
        super()._wait(tensor, until)


def lanes_of_copies(part: TablePart, seen: CopiesSeen) -> tuple[Lane, ...]:
    """Lanes for copies each way, for communication and for waiting, as far as there is any."""
    named = (
        ("copies to the host", seen.to_host),
        ("copies to the device", seen.to_device),
        ("communication", seen.wire),
        ("computation waits", seen.waits),
    )
    return tuple(
        _lane(name, "tensor", [(part.tensor(t), start, end) for t, start, end in spans])
        for name, spans in named
        if spans and (seen.link is not None or seen.wire)
    )


def lane_of_talks(part: TablePart, program: Program | None, seconds: Sequence[float]) -> tuple[Lane, ...]:
    """A lane for operators that talk to other processes; none where none does, or times are not known.

    ``seconds`` are those of every run, one after the other.
    """
    ops = part.graph.ops
    lines = range(len(ops)) if program is None else _runs(program)
    ends = list(accumulate(seconds))
    talks = [
        (part.operator(op), end - took, end)
        for op, took, end in zip(lines, seconds, ends, strict=False)
        if ops[op].kind in (EXCHANGE, SUM)
    ]
    return (_lane("communication", "operator", talks),) if talks else ()


def _runs(program: Program) -> list[int]:
    return [line.op for line in program.instructions if isinstance(line, Run)]


def lanes_of_spans(part: TablePart, spans: Sequence[Span]) -> tuple[Lane, ...]:
    """The lanes of a profile, in seconds since its first span began."""
    if not spans:
        return ()
    began = min(span.start for span in spans)
    lanes: dict[str, list[tuple[int, float, float]]] = {}
    for span in spans:
        name = f"{span.lane or 'device'}{' (host)' if span.host else ''}"
        lanes.setdefault(name, []).append((part.operator(span.op), span.kern - began, span.end - began))
    return tuple(_lane(name, "operator", rows, measured=True) for name, rows in sorted(lanes.items()))


def _lane(name: str, what: str, rows: Iterable[tuple[int, float, float]], *, measured: bool = False) -> Lane:
    known = list(rows)
    longest = sorted(known, key=lambda row: row[1] - row[2])[:MOST_SPANS]
    ordered = sorted(longest, key=lambda row: row[1])
    times = rounded_seconds([time for _, start, end in ordered for time in (start, end)])
    table = "operator" if what == "operator" else "tensor"
    return Lane(
        name,
        table,  # type: ignore[arg-type]
        tuple(row for row, _, _ in ordered),
        times[::2],
        times[1::2],
        measured,
        len(known),
    )
