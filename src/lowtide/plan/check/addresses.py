"""Whether an address plan is valid: nobody writes over anybody's bytes, and no storage is left out.

Shares no code with what places allocations, nor with what finds them: rows are plain numbers here, checked
against each other by a sweep over time, and against the Program as the checker plays it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from lowtide.errors import PlanError
from lowtide.graph import Graph
from lowtide.plan.check.graph import Facts, facts_of
from lowtide.plan.check.held import Storage
from lowtide.plan.check.play import Player
from lowtide.plan.program.instructions import Loop, Program, Send

__all__ = ["PlacedRow", "check_addresses", "check_storages"]


class PlacedRow(Protocol):
    """What is checked of an allocation: bytes ``offset <= b < offset + bytes`` at ``birth <= t < death``."""

    @property
    def birth(self) -> int:
        """The event that takes the memory."""

    @property
    def death(self) -> int:
        """The event that finds it free."""

    @property
    def bytes(self) -> int:
        """How many."""

    @property
    def offset(self) -> int:
        """Where in the arena."""

    @property
    def pinned(self) -> int | None:
        """Where it was to lie, if that was not free."""

    @property
    def tensors(self) -> tuple[int, ...]:
        """Tensors that own these bytes, one after the other."""


def check_addresses(rows: Sequence[PlacedRow], *, arena_bytes: int, alignment: int = 1) -> int:
    """The most bytes that are live at once; a PlanError names rows that are wrong or overlap."""
    for k, row in enumerate(rows):
        if not 0 <= row.birth < row.death or row.bytes < 0:
            raise PlanError(f"allocation {k} is live from event {row.birth} to {row.death}")
        if row.bytes and not 0 <= row.offset <= arena_bytes - row.bytes:
            raise PlanError(
                f"allocation {k} lies at {row.offset} to {row.offset + row.bytes}, outside of the arena of "
                f"{arena_bytes} bytes"
            )
        if row.pinned is not None and row.pinned != row.offset:
            raise PlanError(f"allocation {k} lies at {row.offset}, though it is pinned at {row.pinned}")
        if row.offset % alignment:
            raise PlanError(f"allocation {k} lies at {row.offset}, no multiple of {alignment}")
    return _sweep(rows)


def _sweep(rows: Sequence[PlacedRow]) -> int:
    """Deaths before births at every event; a newborn is held against its neighbours in memory."""
    events = [(row.birth, 1, k) for k, row in enumerate(rows) if row.bytes]
    events += [(row.death, 0, k) for k, row in enumerate(rows) if row.bytes]
    here: list[tuple[int, int, int]] = []
    live = most = 0
    for event, born, k in sorted(events):
        row = rows[k]
        box = row.offset, row.offset + row.bytes, k
        at = bisect_left(here, box)
        if not born:
            del here[at]
            live -= row.bytes
            continue
        for other in here[max(0, at - 1) : at + 1]:
            if other[0] < box[1] and box[0] < other[1]:
                raise PlanError(
                    f"allocations {other[2]} and {k} overlap at event {event}: bytes {other[0]} to "
                    f"{other[1]} and {box[0]} to {box[1]}"
                )
        insort(here, box)
        live += row.bytes
        most = max(most, live)
    return most


def check_storages(
    rows: Iterable[PlacedRow],
    graph: Graph,
    program: Program,
    *,
    workspace_bytes: Sequence[int] = (),
    offload: Collection[str] = (),
    able: Collection[int] | None = None,
) -> int:
    """Hold the rows against a Program: every storage has one for all of its life, and nothing is forgotten.

    Returns the peak, leaves included. At every instruction the bytes of all rows must be those that the
    checker counts, in the bodies of loops too.
    """
    facts = facts_of(graph, offload)
    found = list(rows)
    length = _length(program)
    live = _live(found, length)
    player = _Noting(facts, program, workspace_bytes, able)
    player.play()
    _compare(player, found, live, 0)
    return player.peak


def _length(program: Program) -> int:
    """Events of a Program: one an instruction, and behind a loop those of its bodies, each once."""
    return sum(1 + _inside(program, line) for line in program.instructions)


def _inside(program: Program, line: object) -> int:
    if not isinstance(line, Loop):
        return 0
    return sum(_length(program.bodies[k].program) for k in {tile.body for tile in line.tiles})


def _live(rows: Sequence[PlacedRow], length: int) -> list[int]:
    change = [0] * (length + 1)
    for k, row in enumerate(rows):
        if row.death > length:
            raise PlanError(f"allocation {k} is live until event {row.death}; the program has {length}")
        change[row.birth] += row.bytes
        change[row.death] -= row.bytes
    return list(accumulate(change))


@dataclass(slots=True)
class _Life:
    """When a storage was taken, by which tensor first, and when it was given back."""

    tensor: int
    bytes: int
    birth: int
    death: int = -1


class _Noting(Player):
    """A Program that is played, noting the life of each storage and the bytes at each instruction."""

    def __init__(
        self,
        facts: Facts,
        program: Program,
        workspace: Sequence[int] = (),
        able: Collection[int] | None = None,
        *,
        inside: bool = False,
        depth: int = 0,
    ) -> None:
        self.lives: dict[int, _Life] = {}
        self.kept: list[Storage] = []
        """So that no two storages of a Program have one id."""
        self.took: dict[int, int] = {}
        """Bytes by instruction, of those at which memory is taken."""
        super().__init__(facts, program, workspace, able, inside=inside, depth=depth)
        self.took.clear()

    def new(self, size: int, version: int = 0) -> Storage:
        """Memory that is taken now."""
        storage = super().new(size, version)
        self.kept.append(storage)
        self.lives[id(storage)] = _Life(-1, size, self.place)
        return storage

    def place_on(self, tensor: int, storage: Storage) -> None:
        """Hold a tensor on a storage."""
        super().place_on(tensor, storage)
        life = self.lives.get(id(storage))
        if life is not None and life.tensor < 0:
            life.tensor = tensor

    def let_go(self, tensor: int) -> None:
        """Hold a tensor no more."""
        storage = self.held[tensor]
        super().let_go(tensor)
        if not storage.tensors and id(storage) in self.lives:
            self.lives[id(storage)].death = self.place

    def mark(self, passing: int) -> None:
        """Remember what is live at this instruction."""
        super().mark(passing)
        self.took[self.place] = self.live + passing


def _compare(player: _Noting, rows: Sequence[PlacedRow], live: Sequence[int], start: int) -> None:
    """Rows against the Program that was played, whose first instruction is at this event."""
    lines = player.program.instructions
    lengths = (1 + _inside(player.program, line) for line in lines)
    clock = list(accumulate(lengths, initial=start))
    wanted = Counter(
        (clock[one.birth], clock[one.death] if one.death >= 0 else clock[-1], one.bytes, one.tensor)
        for one in player.lives.values()
    )
    there = Counter((row.birth, row.death, row.bytes, row.tensors[0]) for row in rows if row.tensors)
    for birth, death, size, tensor in wanted - there:
        label = player.graph.tensors[tensor].label
        raise PlanError(f"{label!r} takes {size} bytes from event {birth} to {death}; no allocation does")
    outside = _outside(player)
    for place, line in enumerate(lines):
        if place in player.took:
            most, needed = max(live[clock[place] : clock[place + 1]]), player.took[place] - outside
            if most != needed:
                raise PlanError(
                    f"event {clock[place]} needs {needed} bytes besides leaves; its allocations have {most}"
                )
        if isinstance(line, Loop):
            _compare_bodies(player, line, rows, clock[place] + 1)


def _outside(player: _Noting) -> int:
    """Leaves that stay where they are: they are not part of an arena."""
    sent = {line.tensor for line in player.program.instructions if isinstance(line, Send)}
    moved = (player.facts.size[t] for t in sent if player.facts.leaf[t])
    return player.facts.leaf_bytes() - sum(moved)


def _compare_bodies(player: _Noting, line: Loop, rows: Sequence[PlacedRow], start: int) -> None:
    for number in sorted({tile.body for tile in line.tiles}):
        body = player.program.bodies[number]
        end = start + _length(body.program)
        inside = [row for row in rows if start <= row.birth < end]
        one = _Noting(
            facts_of(body.graph, inside=True),
            body.program,
            body.workspace_bytes,
            body.able,
            inside=True,
            depth=player.depth + 1,
        )
        one.play()
        _compare(one, inside, _live(inside, end), start)
        start = end
