"""Runs of operators one after the other: every tile of a loop, and the operators inside of groups.

Time is counted in events, as addresses are planned (``plan/address/allocations.py``): an event an
instruction, and the bodies of a loop stand behind it, each once. All tiles of a body share its events, so a
moment inside of a tile says at which event blocks are live.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lowtide.graph import Recording
from lowtide.plan.address.types import Allocation
from lowtide.plan.program.instructions import Loop, Program, Run
from lowtide.report.page.tables import TablePart
from lowtide.report.page.thin import MOST_MOMENTS, Ints, extremes, rounded_seconds
from lowtide.report.page.types import MeasuredCurve, Moments

__all__ = ["Walk", "events_of", "live_by_event", "spread_by_bytes", "walk_graph", "walk_program"]

_MOST_ROWS = 400_000
"""Rows that are made before they are thinned."""
_OP, _EVENT, _AGAIN, _TILE, _PART, _ENTRY = range(6)


@dataclass(frozen=True, slots=True)
class Walk:
    """Moments in order, with the parts that their operators are of, before they are thinned."""

    rows: Ints
    """Operator, event, whether it ran before, tile, part, entry of the timeline."""
    durations: npt.NDArray[np.float64]
    """Seconds; empty where no times are known."""
    parts: tuple[TablePart, ...]
    thinned: bool = False
    """Whether tiles were thinned already."""

    def moments(self, live: Ints, base: int) -> tuple[Moments, Ints]:
        """What is stored, and which rows those are; ``base`` is part of every moment."""
        bytes_ = live[self.rows[:, _EVENT]] + base
        kept = extremes(bytes_, MOST_MOMENTS)
        ends = np.cumsum(self.durations)
        starts = (ends - self.durations)[kept] if len(ends) else ()
        picked = self.rows[kept]
        operators = tuple(self.parts[part].operator(op) for op, part in picked[:, (_OP, _PART)].tolist())
        shown = bytes_[kept]
        return Moments(
            operator=operators,
            live=tuple(shown.tolist()),
            event=tuple(picked[:, _EVENT].tolist()),
            start=rounded_seconds(list(starts)),
            again=tuple(picked[:, _AGAIN].tolist()),
            tile=tuple(picked[:, _TILE].tolist()) if (picked[:, _TILE] >= 0).any() else (),
            seconds=float(ends[-1]) if len(ends) else None,
            in_all=len(self.rows),
            peak=int(shown.argmax()) if len(shown) else 0,
        ), kept

    def measured(self, recording: Recording, kept: Ints) -> MeasuredCurve | None:
        """What was measured at each entry, spread over the moments of that entry."""
        entries = self.rows[:, _ENTRY]
        timeline = recording.timeline
        if not len(entries) or int(entries[-1]) + 1 != len(timeline.live_bytes):
            return None
        first = np.searchsorted(entries, np.arange(len(timeline.live_bytes)))
        after = np.append(first[1:], len(entries))
        at: list[float] = []
        live: list[int] = []
        for k, most in enumerate(timeline.live_bytes):
            inside = timeline.inside.get(k, ()) or (most,)
            at += np.linspace(first[k], after[k], len(inside), endpoint=False).tolist()
            live += inside
        shown = extremes(np.array(live, np.int64), MOST_MOMENTS)
        places = np.interp(np.array(at)[shown], kept, np.arange(len(kept)))
        return MeasuredCurve(
            tuple(round(float(place), 2) for place in places), tuple(np.array(live)[shown].tolist())
        )


def spread_by_bytes(live: Sequence[int], moments: Moments) -> MeasuredCurve:
    """What was measured from allocation to allocation: each stands where as many bytes have come and gone.

    One operator may allocate thousands of small blocks: the number of an allocation does not say when it was.
    """
    shown = extremes(np.array(live, np.int64), MOST_MOMENTS)
    places = np.interp(_moved(live)[shown], _moved(moments.live), np.arange(len(moments.live)))
    return MeasuredCurve(
        tuple(round(float(place), 2) for place in places), tuple(live[k] for k in shown.tolist()), False
    )


def _moved(live: Sequence[int]) -> npt.NDArray[np.float64]:
    """The share of all bytes that come and go which has come and gone, from 0 to 1."""
    moved = np.cumsum(np.abs(np.diff(np.array(live, np.float64), prepend=0.0)))
    return moved / moved[-1] if moved[-1] > 0 else np.linspace(0, 1, len(moved))


def live_by_event(allocations: Sequence[Allocation], events: int) -> Ints:
    """Bytes at each event; leaves that stay are not among them."""
    change = np.zeros(events + 2, np.int64)
    for one in allocations:
        change[one.birth] += one.bytes
        change[one.death] -= one.bytes
    return np.cumsum(change)


def walk_graph(part: TablePart, seconds: Sequence[float]) -> Walk:
    """Every operator once, in program order."""
    walker = _Walker(np.zeros(0, np.int64))
    count = len(part.graph.ops)
    rows = [walker.run(part, k, k, 0) for k in range(count)]
    durations = [_shared(seconds[k], len(rows[k])) for k in range(count)] if seconds else []
    return walker.finished(rows, durations)


def walk_program(part: TablePart, program: Program, live: Ints, seconds: Sequence[float]) -> Walk:
    """Every Run of a Program; ``seconds`` are those of its Runs in order, loops and waiting included."""
    walker = _Walker(live)
    rows: list[Ints] = []
    durations: list[npt.NDArray[np.float64]] = []
    for found, weights in walker.entries(part, program, 0):
        if seconds:
            total = weights.sum()
            share = weights / total if total > 0 else np.full(len(found), 1 / len(found))
            durations.append(share * seconds[len(rows)])
        rows.append(found)
    return walker.finished(rows, durations)


def _shared(seconds: float, count: int) -> npt.NDArray[np.float64]:
    return np.full(count, seconds / count)


class _Walker:
    """Goes through a program, and through the bodies of its loops."""

    def __init__(self, live: Ints) -> None:
        self.live = live
        self.parts: list[TablePart] = []
        self._numbers: dict[int, int] = {}
        self.thinned = False

    def finished(self, rows: list[Ints], durations: list[npt.NDArray[np.float64]]) -> Walk:
        for entry, found in enumerate(rows):
            found[:, _ENTRY] = entry
        return Walk(
            np.concatenate(rows) if rows else np.zeros((0, 6), np.int64),
            np.concatenate(durations) if durations else np.zeros(0),
            tuple(self.parts),
            self.thinned,
        )

    def _number(self, part: TablePart) -> int:
        if id(part) not in self._numbers:
            self._numbers[id(part)] = len(self.parts)
            self.parts.append(part)
        return self._numbers[id(part)]

    def run(self, part: TablePart, k: int, event: int, again: int) -> Ints:
        """One run; of a group, the operators inside, whose memory is known as one figure."""
        inside = part.group(k)
        if inside is None:
            return np.array([[k, event, again, -1, self._number(part), 0]], np.int64)
        number = self._number(inside)
        rows = [[one, event, again, -1, number, 0] for one in range(len(inside.graph.ops))]
        return np.array(rows, np.int64)

    def entries(
        self, part: TablePart, program: Program, start: int
    ) -> list[tuple[Ints, npt.NDArray[np.float64]]]:
        """Rows and durations of each Run of a program whose first event is this."""
        found: list[tuple[Ints, npt.NDArray[np.float64]]] = []
        ran: set[int] = set()
        now = start
        for line in program.instructions:
            if not isinstance(line, Run):
                now += 1
                continue
            rows = self.run(part, line.op, now, int(line.op in ran))
            own = part.seconds[line.op] if part.seconds else 0.0
            weights = np.full(len(rows), own / len(rows))
            ran.add(line.op)
            now += 1
            if isinstance(line, Loop):
                begins = {}
                for number in sorted({tile.body for tile in line.tiles}):
                    begins[number] = now
                    now += events_of(program.bodies[number].program)
                rows, weights = self._tiles(part, line, program, begins, rows)
            found.append((rows, weights))
        return found

    def _tiles(
        self, part: TablePart, line: Loop, program: Program, begins: dict[int, int], rows: Ints
    ) -> tuple[Ints, npt.NDArray[np.float64]]:
        """The loop itself, whose results are there from its beginning, and then its tiles."""
        most = max(16, _MOST_ROWS // max(1, len(line.tiles)))
        bodies = {}
        for number, begin in begins.items():
            inner = self.entries(part.bodies[number], program.bodies[number].program, begin)
            body = np.concatenate([one for one, _ in inner]) if inner else rows[:0]
            weights = np.concatenate([one for _, one in inner]) if inner else np.zeros(0)
            if len(body) > most:
                self.thinned = True
                kept = extremes(self.live[body[:, _EVENT]], most)
                edges = np.append(kept[1:], len(body))
                ends = np.concatenate([[0.0], np.cumsum(weights)])
                weights = ends[edges] - ends[np.append(0, edges[:-1])]
                body = body[kept]
            bodies[number] = body, weights
        tiles = [rows]
        durations = [np.zeros(len(rows))]
        for number, tile in enumerate(line.tiles):
            body, weights = bodies[tile.body]
            body = body.copy()
            body[body[:, _TILE] < 0, _TILE] = number
            tiles.append(body)
            durations.append(weights)
        return np.concatenate(tiles), np.concatenate(durations)


def events_of(program: Program) -> int:
    """How many events a program takes, with the bodies of its loops."""
    count = len(program.instructions)
    for line in program.instructions:
        if isinstance(line, Loop):
            count += sum(events_of(program.bodies[k].program) for k in {tile.body for tile in line.tiles})
    return count
