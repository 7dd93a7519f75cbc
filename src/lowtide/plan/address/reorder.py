"""Independent instructions in another order, where that takes a smaller arena and costs nothing.

A walk over orders: one instruction at a time goes elsewhere between those that it must follow and those that
must follow it. An order that takes more live bytes at its peak, or more time, than the given one is never the
result. Placing all memory well takes seconds, so each order is judged by a quick placement; the best of the
walk is placed well at its end.
"""

from __future__ import annotations

import random
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from lowtide.graph import Graph
from lowtide.plan.address.allocations import program_allocations
from lowtide.plan.address.boxes import boxes_of, peak_bytes
from lowtide.plan.address.first_fit import first_fit
from lowtide.plan.address.independent import parts_of
from lowtide.plan.address.place import place
from lowtide.plan.address.skyline import skyline, weights
from lowtide.plan.address.types import AddressPlan, Allocation, EventClock
from lowtide.plan.program.copy_lanes import Lanes, Link
from lowtide.plan.program.instructions import Program, Run
from lowtide.plan.program.simulate import simulate

__all__ = ["InOrder", "OrderedStep", "place_in_any_order"]

_ROUNDING = 1e-9
"""Of a time: sums in another order differ by less."""
_EXACT = 40
"""So few allocations are placed well while orders are compared."""
_EXACT_SECONDS = 0.05
_WORSE = 0.1
"""How often the walk goes to an order that is worse, so that it does not end in the first valley."""
_HOT = 0.5
"""How often an instruction is moved that uses what is live at the peak."""
_PATIENCE = 20
"""The walk goes back to the best order after so many others, and one for each instruction that can move."""
_FIRST_SHARE, _WALK_SHARE = 0.4, 0.6
"""Of the time limit for the given order, and of what is left for the walk."""


@dataclass(frozen=True, slots=True)
class OrderedStep:
    """A Program with what its operators take."""

    graph: Graph
    program: Program
    workspace_bytes: Sequence[int] = ()
    seconds: Sequence[float] = ()
    short: Mapping[int, float] | None = None
    link: Link | None = None
    wire_seconds: Mapping[int, float] | None = None

    def allocations(self, program: Program, alignment: int) -> list[Allocation]:
        """The memory that it takes when it runs in the order of another Program."""
        return program_allocations(self.graph, program, self.workspace_bytes, alignment=alignment)

    def time(self, program: Program) -> float:
        """Seconds; without copies to the host and communications no order changes them."""
        if (self.link is None and not self.wire_seconds) or not self.seconds:
            return 0.0
        lanes = Lanes(self.graph, self.link, self.wire_seconds)
        took = simulate(self.graph, program, seconds=self.seconds, short=self.short, lanes=lanes)
        return sum(took.seconds)


@dataclass(frozen=True, slots=True)
class InOrder:
    """Addresses, and the Program that they are for."""

    addresses: AddressPlan
    program: Program
    moved: int
    """How many instructions run elsewhere than in the given Program; 0: it is that one."""
    given_bytes: int
    """The arena of the given order."""


def place_in_any_order(
    step: OrderedStep,
    *,
    alignment: int = 1,
    time_limit: float,
    most_orders: int | None = None,
    progress: Callable[[str], None] | None = None,
) -> InOrder:
    """The smallest arena found for the given order or another one; the given one where none is smaller.

    ``most_orders`` limits how many others are looked at.
    """
    deadline = time.perf_counter() + time_limit

    def placed(program: Program, seconds: float) -> AddressPlan:
        return place(
            step.allocations(program, alignment),
            alignment=alignment,
            clock=EventClock.INSTRUCTION,
            time_limit=seconds,
            progress=progress,
        )

    given = placed(step.program, _FIRST_SHARE * time_limit)
    left = deadline - time.perf_counter()
    walk = _Walk(step, alignment, time.perf_counter() + _WALK_SHARE * left)
    if progress is not None:
        progress("other orders of independent instructions")
    other = walk.best_program(most_orders)
    if other is not None:
        found = placed(other, max(0.0, deadline - time.perf_counter()))
        if found.arena_bytes < given.arena_bytes:
            return InOrder(found, other, walk.moved, given.arena_bytes)
    return InOrder(given, step.program, 0, given.arena_bytes)


class _Walk:
    """An order of the movable units of both parts, and the best so far."""

    def __init__(self, step: OrderedStep, alignment: int, deadline: float) -> None:
        self.step, self.alignment, self.deadline = step, alignment, deadline
        self.draw = random.Random(0)  # noqa: S311
        self.parts = parts_of(step.graph, step.program)
        self.before = [part.between() for part in self.parts]
        self.after = [_turned(before) for before in self.before]
        self.order = [part.movable for part in self.parts]
        self.best_order = [list(one) for one in self.order]
        rows = step.allocations(step.program, alignment)
        self.peak = peak_bytes(rows)
        self.time = step.time(step.program)
        self.key = self.best = self._height(rows)
        self.users = self._users()
        self.hot = self._at_peak(rows)
        self.since = 0
        """Orders since the best was found, or begun at again."""

    @property
    def moved(self) -> int:
        """How many units of the best order are elsewhere than in the given one."""
        return sum(len(order) - _longest_rise(order) for order in self.best_order)

    def program(self, order: Sequence[Sequence[int]]) -> Program:
        """The given Program with its units in this order."""
        forward, backward = (tuple(part.lines(one)) for part, one in zip(self.parts, order, strict=True))
        return msgspec.structs.replace(self.step.program, forward=forward, backward=backward)

    def best_program(self, most: int | None) -> Program | None:
        """The Program of the best order; None where the given one is no worse."""
        start = self.best
        movable = [(n, k) for n, order in enumerate(self.order) for k in order if self._room(n, k)[1] > 1]
        looked = 0
        self._look(self.order)  # the given order, with drops as early as they can be
        while movable and time.perf_counter() < self.deadline and (most is None or looked < most):
            hot = self.hot if self.draw.random() < _HOT else []
            n, k = self.draw.choice(hot or movable)
            low, count = self._room(n, k)
            if count > 1:
                self._look(self._elsewhere(n, k, low + self.draw.randrange(count)))
                looked += 1
                self._return(len(movable))
        return self.program(self.best_order) if self.best < start else None

    def _return(self, movable: int) -> None:
        """Begin again at the best order where nothing better was found for long."""
        self.since += 1
        if self.since > _PATIENCE + movable:
            self.order, self.key, self.since = self.best_order, self.best, 0
            self.hot = self._at_peak(self.step.allocations(self.program(self.order), self.alignment))

    def _users(self) -> dict[int, list[tuple[int, int]]]:
        """By tensor the movable units whose operators read or write it, each with its part."""
        found: dict[int, list[tuple[int, int]]] = {}
        for n, part in enumerate(self.parts):
            for k in part.movable:
                ops = [self.step.graph.ops[line.op] for line in part.units[k] if isinstance(line, Run)]
                for t in {t for op in ops for t in (*op.inputs, *op.outputs)}:
                    found.setdefault(t, []).append((n, k))
        return found

    def _at_peak(self, rows: Sequence[Allocation]) -> list[tuple[int, int]]:
        """Units that use what is live when the most is: moving them may lower the peak."""
        change = np.zeros(max((row.death for row in rows), default=0) + 1, np.int64)
        for row in rows:
            change[row.birth] += row.bytes
            change[row.death] -= row.bytes
        peak = int(np.cumsum(change).argmax())
        live = {t for row in rows if row.birth <= peak < row.death and len(row.at) == 1 for t in row.tensors}
        return sorted({unit for t in live for unit in self.users.get(t, ())})

    def _room(self, n: int, k: int) -> tuple[int, int]:
        """The first place that a unit may go to, and how many there are, without it in the order."""
        order = self.order[n]
        at = order.index(k)
        low = high = at
        while low and order[low - 1] not in self.before[n][k]:
            low -= 1
        while high + 1 < len(order) and order[high + 1] not in self.after[n][k]:
            high += 1
        return low, high - low + 1

    def _elsewhere(self, n: int, k: int, place: int) -> list[list[int]]:
        found = [list(one) for one in self.order]
        found[n].remove(k)
        found[n].insert(place, k)
        return found

    def _look(self, order: list[list[int]]) -> None:
        """Go to an order if it is no worse, or now and then; keep it if it is the best."""
        program = self.program(order)
        rows = self.step.allocations(program, self.alignment)
        anyway = self.draw.random() < _WORSE
        free = peak_bytes(rows) <= self.peak and self.step.time(program) <= self.time * (1 + _ROUNDING)
        if not free and not anyway:
            return
        key = self._height(rows, None if anyway else self.key[0])
        if anyway or key <= self.key:
            self.order, self.key = order, key
            self.hot = self._at_peak(rows)
        if free and key < self.best:
            self.best, self.best_order = key, order
            self.since = 0

    def _height(self, rows: Sequence[Allocation], most: int | None = None) -> tuple[int, int]:
        """The arena of a quick placement and its lower bound, in units; or an arena above ``most``."""
        boxes = boxes_of(rows, self.alignment)
        if len(boxes) <= _EXACT:
            found = place(rows, alignment=self.alignment, time_limit=_EXACT_SECONDS)
            return found.arena_bytes // self.alignment, boxes.bound
        best = None if most is None else max(most, boxes.bound) + 1
        for key in () if boxes.has_pins else ("area", "lifetime"):
            offsets = skyline(boxes, weights(boxes, key), best)
            best = best if offsets is None else boxes.height(offsets)
        offsets = first_fit(boxes, "size", stop=best)
        return boxes.height(offsets) if offsets is not None else best or 0, boxes.bound


def _turned(before: Mapping[int, set[int]]) -> dict[int, set[int]]:
    found: dict[int, set[int]] = {k: set() for k in before}
    for k, ones in before.items():
        for one in ones:
            found[one].add(k)
    return found


def _longest_rise(order: Sequence[int]) -> int:
    """The most units that are still in the order of their numbers."""
    ends: list[int] = []
    for k in order:
        at = bisect_left(ends, k)
        ends[at : at + 1] = [k]
    return len(ends)
