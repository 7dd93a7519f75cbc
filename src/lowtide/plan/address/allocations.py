"""Which memory a step takes, from when to when: of a graph in program order, and of a Program.

Bytes are those that plans count (docs/memory-and-costs.md), so the most that are live at once, with the
leaves, is the peak that the simulation and the checker find.
"""

from __future__ import annotations

from collections.abc import Sequence

from lowtide.graph import RESIDENT_ROLES, Graph, Role, liveness
from lowtide.plan.address.types import Allocation, Purpose
from lowtide.plan.program.instructions import Loop, Program, Run, Send
from lowtide.plan.program.memory import CUDA_BLOCK_BYTES, Memory, allocated_bytes
from lowtide.plan.program.simulate import (
    RANDOM_STATE_BYTES,
    autograd_bytes,
    copied_before,
    kept_to_restore,
    run_again_on_host,
)
from lowtide.plan.program.under_way import UnderWay

__all__ = ["graph_allocations", "program_allocations"]


def graph_allocations(
    graph: Graph, workspace_bytes: Sequence[int] = (), *, times: Sequence[int] | None = None
) -> list[Allocation]:
    """What running every operator once in program order takes; leaves are not part of it.

    ``times`` are those of the operators, rising from 0 or above, where these are not simply counted.
    """
    clock = times or range(len(graph.ops))
    found = [
        Allocation(
            clock[one.first],
            clock[one.last] + 1,
            one.bytes,
            Purpose.WORKSPACE if graph.tensors[one.tensor].role is Role.WORKSPACE else Purpose.TENSOR,
            (one.first,),
            (one.tensor,),
        )
        for one in liveness(graph).lifetimes
        if graph.tensors[one.tensor].role not in RESIDENT_ROLES
    ]
    found += [
        Allocation(clock[k], clock[k] + 1, size, Purpose.WORKSPACE, (k,))
        for k, size in enumerate(workspace_bytes)
        if size
    ]
    return sorted(found, key=lambda one: one.birth)


def program_allocations(
    graph: Graph, program: Program, workspace_bytes: Sequence[int] = (), *, alignment: int = CUDA_BLOCK_BYTES
) -> list[Allocation]:
    """What a Program takes, instruction by instruction; leaves that stay are not part of it.

    The bodies of a loop stand behind it on the clock, each once: all tiles of a body use the same places,
    and tiles run one after the other. A leaf that leaves for the host has one place in the arena, to which
    it comes back; these places are stacked at its beginning, at multiples of the alignment.
    """
    recorder = _Recorder(graph)
    recorder.pin_leaves(program, alignment)
    recorder.play(program, workspace_bytes)
    return [one for _, _, one in sorted(recorder.done, key=lambda row: row[:2])]


class _Open:
    """A storage that is live."""

    __slots__ = ("at", "birth", "number", "pinned", "tensors", "use")

    def __init__(
        self, birth: int, number: int, at: tuple[int, ...], use: Purpose, pinned: int | None = None
    ) -> None:
        self.birth, self.number, self.at, self.use, self.pinned = birth, number, at, use, pinned
        self.tensors: list[int] = []


class _Recorder(Memory):
    """Memory that notes when each storage is taken and given back."""

    def __init__(self, graph: Graph, start: int = 0, inside: tuple[int, ...] = ()) -> None:
        self.now, self.inside, self.place = start, inside, 0
        self.start = start
        self.open: dict[int, _Open] = {}
        self.done: list[tuple[int, int, Allocation]] = []
        """Each with its birth and its number among those of one instruction."""
        self.opened = 0
        self.use = Purpose.GIVEN
        self.under_way = UnderWay(graph)
        self.exchange: tuple[int, tuple[int, ...], int] | None = None
        """One that goes on beside others: since when, by which instruction, and its bytes."""
        self.home: dict[int, int] = {}
        """Where leaves lie that leave for the host."""
        super().__init__(graph)
        for leaf in self.leaves:
            del self.open[self.storage_of[leaf]]

    @property
    def at(self) -> tuple[int, ...]:
        """The instruction that is played."""
        return (*self.inside, self.place)

    @property
    def leaves(self) -> list[int]:
        """Leaves that own their storage."""
        return [t for t in self.storage_of if self.is_leaf(t)]

    def pin_leaves(self, program: Program, alignment: int) -> None:
        """Places for leaves that leave, one behind the other; the others are not part of the arena."""
        sent = {line.tensor for line in program.instructions if isinstance(line, Send)}
        end = 0
        for leaf in self.leaves:
            if leaf in sent:
                self.home[leaf] = end
                self._open_leaf(leaf)
                end += -(-self.size[self.storage_of[leaf]] // alignment) * alignment

    def _open_leaf(self, leaf: int) -> None:
        self._take(self.storage_of[leaf], Purpose.LEAF, self.home[leaf]).tensors.append(leaf)

    def _take(self, storage: int, use: Purpose, pinned: int | None = None) -> _Open:
        self.opened += 1
        one = self.open[storage] = _Open(self.now, self.opened, self.at, use, pinned)
        return one

    # what Memory does, noted

    def hold(self, tensor: int, storage: int | None = None) -> None:
        """Hold a tensor on a storage of its own, or on one that exists."""
        super().hold(tensor, storage)
        own = self.storage_of[tensor]
        if storage is None:
            self._take(own, self.use)
        if own in self.open and (storage is None or self.graph.tensors[tensor].alias is None):
            self.open[own].tensors.append(tensor)

    def release(self, tensor: int) -> None:
        """Let go of a tensor, and of its storage if nobody else is on it."""
        storage = self.storage_of.get(tensor, -1)
        size = self.size.get(storage, 0)
        super().release(tensor)
        if storage not in self.size or self.is_leaf(tensor):
            self._close(self.open.pop(storage), size)

    def _bring_back(self, leaf: int) -> None:
        super()._bring_back(leaf)
        self._open_leaf(leaf)

    def _close(self, one: _Open, size: int) -> None:
        tensors = tuple(dict.fromkeys(one.tensors))
        found = Allocation(one.birth, self.now, size, one.use, one.at, tensors, one.pinned)
        self.done.append((one.birth, one.number, found))

    def _beside(self, birth: int, size: int, use: Purpose, tensors: tuple[int, ...] = ()) -> None:
        """Memory besides the storages, until now."""
        self.opened += 1
        if size and birth < self.now:
            self.done.append((birth, self.opened, Allocation(birth, self.now, size, use, self.at, tensors)))

    # the instructions

    def play(self, program: Program, workspace_bytes: Sequence[int]) -> None:
        """All instructions, each at an event of its own."""
        states = run_again_on_host(self.graph, program)
        drawn: list[tuple[int, tuple[int, ...]]] = []
        half = self.start
        for place, line in enumerate(program.instructions):
            self.place = place
            if place == len(program.forward):
                half = self.now
            if place == len(program.forward) or self.under_way.ended_before(line):
                self._end_exchange()
            if isinstance(line, Run):
                if line.op in states:
                    states.discard(line.op)
                    drawn.append((self.now, self.at))
                self._play_run(line, program, workspace_bytes)
            else:
                self.use = Purpose.FETCHED
                self.move(line)
                self.now += 1
        self._end_exchange()
        self.place = 0
        self._end(program, half if program.backward else self.now, drawn)

    def _play_run(self, line: Run, program: Program, workspace_bytes: Sequence[int]) -> None:
        birth = self.now
        op = self.graph.ops[line.op]
        outputs = op.outputs[:1] if line.short else op.outputs
        again = [
            t
            for t in outputs
            if t in self.storage_of and self.graph.tensors[t].alias is None and t not in op.inputs
        ]
        self.use = Purpose.TENSOR
        self.run(line)
        self.now += 1
        if isinstance(line, Loop):
            for number in sorted({tile.body for tile in line.tiles}):
                self._play_body(program, number)
        elif line.beside:
            self.under_way.begin(line)
            self.exchange = birth, self.at, line.beside
            more = workspace_bytes[line.op] - line.beside if workspace_bytes else 0
            self._beside(birth, max(0, more), Purpose.WORKSPACE)
        elif workspace_bytes:
            self._beside(birth, workspace_bytes[line.op], Purpose.WORKSPACE)
        for tensor in again:
            self._beside(birth, allocated_bytes(self.graph.tensors[tensor]), Purpose.AGAIN, (tensor,))

    def _end_exchange(self) -> None:
        """The workspace of an exchange that went on beside others is free."""
        if self.exchange is not None:
            birth, at, size = self.exchange
            self.under_way.end()
            self.opened += 1
            row = Allocation(birth, self.now, size, Purpose.WORKSPACE, at)
            self.done.append((birth, self.opened, row))
            self.exchange = None

    def _play_body(self, program: Program, number: int) -> None:
        body = program.bodies[number]
        one = _Recorder(body.graph, self.now, (*self.at, number))
        one.play(body.program, body.workspace_bytes)
        self.done += one.done
        self.now = one.now

    def _end(self, program: Program, half: int, drawn: list[tuple[int, tuple[int, ...]]]) -> None:
        for storage, one in self.open.items():
            if one.birth < self.now:
                self._close(one, self.size[storage])
        if half > self.start:
            kept = kept_to_restore(self.graph)
            if kept:
                row = Allocation(self.start, half, kept, Purpose.RESTORE, self.at)
                self.done.append((self.start, 0, row))
        for tensor in copied_before(self.graph, program):
            self._beside(self.start, allocated_bytes(self.graph.tensors[tensor]), Purpose.COPY, (tensor,))
        self._beside(self.start, autograd_bytes(self.graph), Purpose.OTHER)
        for birth, at in drawn:
            row = Allocation(birth, self.now, RANDOM_STATE_BYTES, Purpose.OTHER, at)
            self.done.append((birth, self.opened + 1, row))
