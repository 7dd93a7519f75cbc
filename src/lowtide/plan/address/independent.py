"""Which instructions of a Program must keep their order: any other order of the rest is a valid Program too.

Every instruction reads and writes things: names of tensors, values of storages, the generators of random
numbers, the queue of copies. Two of them keep their order if one writes what the other reads or writes. That
is stricter than the rules of docs/valid-programs.md, which the checker still holds every result to.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from lowtide.graph import RESIDENT_ROLES, Graph
from lowtide.plan.program.instructions import Drop, Fetch, Instruction, Loop, Program, Run, Send
from lowtide.plan.program.memory import saved_for

__all__ = ["PartInUnits", "parts_of"]

_DRAWN, _COPIES = "drawn", "copies"
"""What everything whose order may show writes, and what all copies to the host and back write."""


@dataclass(slots=True)
class _Touched:
    """What an instruction reads and writes."""

    reads: set[Hashable] = field(default_factory=set)
    writes: set[Hashable] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class PartInUnits:
    """Forward or backward, in units that stay together: mostly single instructions.

    A unit that drops a tensor is not moved by anybody: it follows as soon as it can.
    """

    units: tuple[tuple[Instruction, ...], ...]
    before: tuple[frozenset[int], ...]
    """For each unit those that come before it in every order."""
    drops: frozenset[int]
    """Units that let go of a tensor which was not sent to the host."""

    @property
    def movable(self) -> list[int]:
        """All units besides these drops, in their order."""
        return [k for k in range(len(self.units)) if k not in self.drops]

    def between(self) -> dict[int, set[int]]:
        """For each movable unit the movable ones that come before it, through drops as well."""
        found: list[set[int]] = []
        for before in self.before:
            mine: set[int] = set()
            for k in before:
                mine |= found[k] if k in self.drops else {k}
            found.append(mine)
        return {k: found[k] for k in self.movable}

    def lines(self, order: Sequence[int]) -> list[Instruction]:
        """The instructions with the movable units in some order, and drops as early as they can be."""
        missing = [len(before) for before in self.before]
        after: list[list[int]] = [[] for _ in self.units]
        for k, before in enumerate(self.before):
            for one in before:
                after[one].append(k)
        found: list[Instruction] = []

        def add(first: Sequence[int]) -> None:
            ready = list(first)
            while ready:
                k = ready.pop(0)
                found.extend(self.units[k])
                for one in after[k]:
                    missing[one] -= 1
                    if not missing[one] and one in self.drops:
                        ready.append(one)

        add([k for k in sorted(self.drops) if not missing[k]])
        for k in order:
            add([k])
        return _joined(found)


def _joined(lines: Sequence[Instruction]) -> list[Instruction]:
    """Drops that follow each other as one."""
    found: list[Instruction] = []
    for line in lines:
        last = found[-1] if found else None
        if isinstance(line, Drop) and isinstance(last, Drop):
            found[-1] = Drop(last.tensors + line.tensors)
        else:
            found.append(line)
    return found


def parts_of(graph: Graph, program: Program) -> tuple[PartInUnits, PartInUnits]:
    """Both parts of a Program; nothing passes from one to the other."""
    sent = {line.tensor for line in program.instructions if isinstance(line, Send)}
    reader = _Reader(graph, sent)
    return reader.part(program.forward), reader.part(program.backward)


class _Reader:
    """What the instructions of one Program read and write."""

    def __init__(self, graph: Graph, sent: set[int]) -> None:
        self.graph, self.sent = graph, sent
        self.root = graph.storages()

    def part(self, lines: Sequence[Instruction]) -> PartInUnits:
        units = self._units(lines)
        written: dict[Hashable, int] = {}
        read: dict[Hashable, set[int]] = {}
        before: list[frozenset[int]] = []
        for k, unit in enumerate(units):
            touched = _Touched()
            for line in unit:
                self._touch(line, touched)
            mine = {written[one] for one in touched.reads | touched.writes if one in written}
            for one in touched.writes:
                mine |= read.pop(one, set())
                written[one] = k
            for one in touched.reads - touched.writes:
                read.setdefault(one, set()).add(k)
            before.append(frozenset(mine - {k}))
        free = [k for k, unit in enumerate(units) if len(unit) == 1 and self._free(unit[0])]
        return PartInUnits(tuple(units), tuple(before), frozenset(free))

    def _units(self, lines: Sequence[Instruction]) -> list[tuple[Instruction, ...]]:
        """Single instructions and drops; a short run stays with those that are part of it."""
        found: list[tuple[Instruction, ...]] = []
        for line in lines:
            if isinstance(line, Drop):
                found += [(Drop((t,)),) for t in line.tensors]
            elif isinstance(line, Run) and line.short and line.in_place is not None:
                behind = next(k for k in reversed(range(len(found))) if not isinstance(found[k][-1], Drop))
                found[behind:] = [(*(one for unit in found[behind:] for one in unit), line)]
            else:
                found.append((line,))
        return found

    def _free(self, line: Instruction) -> bool:
        return isinstance(line, Drop) and not self._leaves(line.tensors[0])

    def _leaves(self, tensor: int) -> bool:
        """Whether dropping a tensor waits for a copy to the host, or takes a leaf away."""
        return tensor in self.sent or self.graph.tensors[tensor].role in RESIDENT_ROLES

    def _touch(self, line: Instruction, touched: _Touched) -> None:
        if isinstance(line, Run):
            self._run(line, touched)
        elif isinstance(line, Drop):
            for t in line.tensors:
                touched.writes.add(t)
                if self._leaves(t):
                    touched.writes |= {self._value(t), _COPIES}
        elif isinstance(line, Send):
            touched.reads.add(line.tensor)
            touched.writes |= {self._value(line.tensor), _COPIES}
        elif isinstance(line, Fetch):
            touched.writes |= {line.tensor, self._value(line.tensor), _COPIES}

    def _value(self, tensor: int) -> Hashable:
        return "value", self.root[tensor]

    def _run(self, line: Run, touched: _Touched) -> None:
        op = self.graph.ops[line.op]
        for t in (*op.inputs, *(saved_for(op) if line.short else ())):
            touched.reads |= {t, self._value(t)}
        for t in op.outputs[:1] if line.short else op.outputs:
            base = self.graph.tensors[t].alias
            if t in op.inputs:
                continue
            touched.writes.add(t)
            if base is None:
                touched.writes.add(self._value(t))
            else:
                touched.reads |= {base, self._value(t)}
        touched.writes |= {self._value(t) for t in op.changes}
        if line.in_place is not None:
            touched.writes.add(self._value(op.inputs[line.in_place]))
        if not op.repeatable or not op.outputs or isinstance(line, Loop):
            touched.writes.add(_DRAWN)
        touched.reads |= {("ran", other) for other in op.after}
        touched.writes.add(("ran", line.op))
