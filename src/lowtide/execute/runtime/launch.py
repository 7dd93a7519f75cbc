"""A part of a Program as a flat list of calls, for when nobody watches it run.

It leaves in the table what the instructions leave there. Views that no operator reads are not made, the
others by one call each, whatever lies between them and what they are a view of. Until then the tensor that
they are made from stays in the table for them: a storage is held just as long as the Program says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from lowtide.execute.calls.bindings import quickest
from lowtide.execute.calls.views import Views
from lowtide.execute.runtime.frame import Frame
from lowtide.execute.runtime.instructions import (
    AlreadyRun,
    Dropping,
    Exchanging,
    Fetching,
    Line,
    Running,
    Sending,
    Summing,
    filled,
)
from lowtide.trace.step.group import Group
from lowtide.trace.step.joint import Joint

__all__ = ["Launch", "Step"]

Step = Callable[[Frame], None]
Call = Callable[[list[Any]], Any]
Fill = tuple[tuple[Any, int, list[Any] | None], ...]


class Launch:
    """Takes the lines of one part after the other, and gives the calls that do the same."""

    def __init__(
        self,
        joint: Joint,
        views: Views,
        held: Iterable[int],
        leaving: Iterable[int],
        later: Iterable[tuple[int, int]] = (),
    ) -> None:
        """``held`` is in the table when the part begins.

        ``leaving`` is taken from it when it has ended, and may share its memory with something else then.
        ``later`` are views that belong to the table and are not made yet, each with a tensor behind it. Such
        a tensor that is not ``held`` is in the table for their sake alone.
        """
        self.steps: list[Step] = []
        self._joint, self._views = joint, views
        self._there = set(held)
        """In the table, and by the Program too."""
        self._kept: set[int] = set()
        """In the table for views that are to be made, and dropped by the Program."""
        self._later: dict[int, int] = {}
        """Views that the Program holds and that are not made, with the tensor in the table behind each."""
        self._waiting: dict[int, set[int]] = {}
        """The same by that tensor."""
        written = (t for op in joint.graph.ops for t in op.changes)
        self._whole = {t for leaf in (*leaving, *written) for t in views.behind(leaf)}
        """Made by operators alone: others see them, and the version counters that they share."""
        for view, source in later:
            self._put_off(view, source)
            if source not in self._there:
                self._kept.add(source)
        for view in [view for view in self._later if view in self._whole]:
            self._make(view, self._views.by_operators(view, self._later[view]))

    def add(self, line: Line) -> None:
        """One more instruction."""
        if isinstance(line, Running):
            self._run(line)
        elif isinstance(line, Dropping):
            self._drop(line)
        else:
            if isinstance(line, Sending):
                self._need(line.tensor)
            elif isinstance(line, Fetching):
                self._renewed([line.tensor])
                self._there.add(line.tensor)
            self.steps.append(line)

    def give(self, tensors: Iterable[int]) -> None:
        """Have these in the table at the end of the part: nothing comes after them."""
        for tensor in tensors:
            self._need(tensor)

    def _run(self, line: Running) -> None:
        if isinstance(line, AlreadyRun):
            return
        results = [t for t in line.outputs if t >= 0]
        if self._is_view(line) and self._whole.isdisjoint(results):
            source = self._joint.graph.ops[line.op].inputs[0]
            for tensor in results:
                if tensor not in self._there and tensor not in self._later:
                    self._renewed([tensor])
                    self._put_off(tensor, self._later.get(source, source))
            return
        for tensor in line.read():
            self._need(tensor)
        self._renewed(results)
        self.steps.append(_call(line))
        self._there.update(results)

    def _is_view(self, line: Running) -> bool:
        known = line.op in self._views.operators and line.function is self._joint.calls[line.op].target
        return known and not line.awaited

    def _drop(self, line: Dropping) -> None:
        gone: list[int] = []
        held: list[int] = []
        for tensor in line.tensors:
            if tensor in self._later:
                gone += self._forgotten(tensor)
            else:
                held.append(tensor)
        self._there.difference_update(held)
        for tensor in held:
            if self._waiting.get(tensor) and line.simple:
                self._kept.add(tensor)
            else:
                for view in sorted(self._waiting.get(tensor, ())):
                    self._need(view)
                gone.append(tensor)
        if not line.simple:
            self.steps.append(line)
            gone = [t for t in gone if t not in held]
        if gone:
            self.steps.append(_clear(tuple(gone)))

    def _put_off(self, view: int, source: int) -> None:
        self._later[view] = source
        self._waiting.setdefault(source, set()).add(view)

    def _forgotten(self, view: int) -> list[int]:
        """Nobody waits for a view any more; what is not needed in the table without it."""
        source = self._later.pop(view)
        self._waiting[source].discard(view)
        if source in self._kept and not self._waiting[source]:
            self._kept.discard(source)
            return [source]
        return []

    def _need(self, tensor: int) -> None:
        """Have the tensor in the table."""
        if tensor in self._later:
            self._make(tensor, self._views.at_once(tensor, self._later[tensor]))

    def _renewed(self, tensors: Sequence[int]) -> None:
        """Before these are made: what the table has of them already stays, or is another's by now."""
        for tensor in tensors:
            self._need(tensor)
            if tensor in self._kept:
                for view in sorted(self._waiting[tensor]):
                    self._need(view)

    def _make(self, view: int, make: Callable[[Any], Any]) -> None:
        source = self._later[view]
        done = self._forgotten(view)
        self._there.add(view)
        self.steps.append(_moved(view, source, make) if done else _made(view, source, make))


def _made(view: int, source: int, make: Callable[[Any], Any]) -> Step:
    def step(frame: Frame) -> None:
        table = frame.table
        table[view] = make(table[source])

    return step


def _moved(view: int, source: int, make: Callable[[Any], Any]) -> Step:
    """The same; the tensor behind it goes."""

    def step(frame: Frame) -> None:
        table = frame.table
        table[view] = make(table[source])
        table[source] = None

    return step


def _clear(tensors: tuple[int, ...]) -> Step:
    (first, *others) = tensors

    def one(frame: Frame) -> None:
        frame.table[first] = None

    def several(frame: Frame) -> None:
        table = frame.table
        for tensor in tensors:
            table[tensor] = None

    return several if others else one


def _call(line: Running) -> Step:
    """The call of an operator; one that draws numbers, waits or goes on beside others runs as its line."""
    if line.awaited or line.state is not None or line.fill[1] or isinstance(line, Exchanging | Summing):
        return line
    fill = line.fill[0]
    reads = tuple(tensor for _, tensor, _ in fill)
    in_order = [place for place, _, items in fill if items is None] == list(range(len(fill)))
    if isinstance(line.function, Group):
        whole = in_order and len(fill) == len(line.args)
        return _group(line.function, reads, line.outputs) if whole else line
    function, args, options = quickest(line.function, line.args, line.kwargs)
    if in_order and 0 < len(fill) <= len(_BY_COUNT):
        call = _BY_COUNT[len(fill) - 1](function, reads, tuple(args[len(fill) :]), options)
    else:
        call = _general(function, args, options, fill)
    return _several(call, line.outputs) if line.several else _single(call, line.outputs[0])


def _single(call: Call, tensor: int) -> Step:
    def step(frame: Frame) -> None:
        table = frame.table
        result = call(table)
        if table[tensor] is None:
            table[tensor] = result

    def nothing(frame: Frame) -> None:
        call(frame.table)

    return step if tensor >= 0 else nothing


def _several(call: Call, tensors: tuple[int, ...]) -> Step:
    def step(frame: Frame) -> None:
        table = frame.table
        for tensor, value in zip(tensors, call(table), strict=True):
            if tensor >= 0 and table[tensor] is None:
                table[tensor] = value

    return step


def _group(group: Group, reads: tuple[int, ...], tensors: tuple[int, ...]) -> Step:
    def step(frame: Frame) -> None:
        table = frame.table
        for tensor, value in zip(tensors, group.run([table[t] for t in reads]), strict=True):
            if table[tensor] is None:
                table[tensor] = value

    return step


def _of_one(function: Any, reads: Sequence[int], rest: tuple[Any, ...], options: Mapping[str, Any]) -> Call:
    (a,) = reads
    if not rest and not options:
        return lambda table: function(table[a])
    if not options:
        return lambda table: function(table[a], *rest)
    return lambda table: function(table[a], *rest, **options)


def _of_two(function: Any, reads: Sequence[int], rest: tuple[Any, ...], options: Mapping[str, Any]) -> Call:
    a, b = reads
    if not rest and not options:
        return lambda table: function(table[a], table[b])
    return lambda table: function(table[a], table[b], *rest, **options)


def _of_three(function: Any, reads: Sequence[int], rest: tuple[Any, ...], options: Mapping[str, Any]) -> Call:
    a, b, c = reads
    if not rest and not options:
        return lambda table: function(table[a], table[b], table[c])
    return lambda table: function(table[a], table[b], table[c], *rest, **options)


_BY_COUNT = (_of_one, _of_two, _of_three)
"""Calls with so many tensors, before all other arguments."""


def _general(function: Any, args: Sequence[Any], options: Mapping[str, Any], fill: Fill) -> Call:
    known = list(args)

    def call(table: list[Any]) -> Any:
        given = known.copy()
        for place, tensor, items in fill:
            given[place] = table[tensor] if items is None else filled(items, table)
        return function(*given, **options)

    return call
