"""Whether processes that run their Programs end, or wait for each other for ever: proven before they start.

Every process runs its communications one after the other. An exchange starts all of its messages at once and
ends when each has found its counterpart; a message is not taken to be buffered anywhere. A sum ends when all
of its ranks are there. Messages from one rank to another arrive in the order in which they were sent.

Which message meets which is thus decided by the lists alone, and whoever can go on still can when others have
gone on before. So one order of events stands for all of them: where it ends, every order ends.

A sum that goes on beside the operators changes nothing: a process starts communications in the order of its
list, and waits for none that it has not started. What comes before one in any list ends first in that order
of events, so whoever has to start it is held up by nothing else.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from lowtide.errors import PlanError
from lowtide.graph import EXCHANGE, SUM, Graph, Op
from lowtide.plan.program.instructions import Loop, Program, Run

__all__ = ["Communication", "Exchange", "Sum", "check_communication", "communications"]


class Exchange(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="exchange", gc=False):
    """Messages that are started together; the next communication waits for all of them."""

    label: str
    sends: tuple[tuple[int, int], ...] = ()
    """The rank that each goes to, and its bytes."""
    receives: tuple[tuple[int, int], ...] = ()

    @property
    def sent_bytes(self) -> int:
        """What goes to others."""
        return sum(size for _, size in self.sends)


class Sum(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="sum", gc=False):
    """A sum over ranks, of which each gets all."""

    label: str
    ranks: tuple[int, ...]
    bytes: int
    of: str = ""
    """The parameter whose gradient is added up, where that is known: the same on all ranks."""

    @property
    def sent_bytes(self) -> int:
        """What goes into the sum."""
        return self.bytes


Communication = Exchange | Sum


def communications(
    graph: Graph,
    program: Program,
    rank: int,
    wires: Mapping[str, tuple[int, ...]],
    label: Callable[[Graph, Op], str] = lambda _, op: f"{op.label} ({op.phase.value})",
) -> tuple[Communication, ...]:
    """What the Program of a rank sends and receives, in its order; ``wires``: ranks of each connection."""
    found: list[Communication] = []
    for one in program.instructions:
        if isinstance(one, Loop):
            bodies = [program.bodies[k].graph for k in {tile.body for tile in one.tiles}]
            if any(op.kind in (EXCHANGE, SUM) for body in bodies for op in body.ops):
                raise PlanError(f"{graph.ops[one.op].label}: a loop over tiles talks to other processes")
        elif isinstance(one, Run) and graph.ops[one.op].kind in (EXCHANGE, SUM):
            name = label(graph, graph.ops[one.op])
            found.append(_communication(graph, graph.ops[one.op], name, rank, wires))
    return tuple(found)


def _communication(
    graph: Graph, op: Op, label: str, rank: int, wires: Mapping[str, tuple[int, ...]]
) -> Communication:
    """What one operator does."""
    tensor, arguments = graph.tensors[op.inputs[0]], op.arguments or ()
    shape, item, ranks = tensor.shape or (), _item_bytes(tensor.dtype), wires[arguments[-1]]
    if op.kind == SUM:
        leaf = graph.tensors[op.outputs[0]].gradient_of
        of = "" if leaf is None else graph.tensors[leaf].label
        return Sum(label, ranks, item * math.prod(shape), of)
    dim, sends, receives = arguments[1:4]
    row = item * math.prod(shape[:dim]) * math.prod(shape[dim + 1 :])

    def messages(flat: Sequence[int]) -> Iterator[tuple[int, int]]:
        for k in range(0, len(flat), 3):
            if ranks[flat[k]] != rank:
                yield ranks[flat[k]], row * (flat[k + 2] - flat[k + 1])

    return Exchange(label, tuple(messages(sends)), tuple(messages(receives)))


def _item_bytes(dtype: str | None) -> int:
    """Bytes of an element: of ``float32``, 4."""
    bits = re.search(r"\d+", dtype or "")
    return max(1, int(bits.group()) // 8) if bits else 1


def check_communication(lists: Sequence[Sequence[Communication]]) -> None:
    """Raise a PlanError unless ranks with these communications end, whatever the order of events.

    It names a rank that would wait for ever, what for, and what the other one does instead.
    """
    _Played(lists).run()


class _Played:
    """Where every rank is, and what it waits for."""

    def __init__(self, lists: Sequence[Sequence[Communication]]) -> None:
        self.lists = lists
        self.at = [0] * len(lists)
        self.open = [0] * len(lists)
        """How many messages of the current exchange of each rank are still without a counterpart."""
        self.sent: dict[tuple[int, int], deque[int]] = {}
        """From one rank to another: bytes of messages that nobody has asked for yet."""
        self.asked: dict[tuple[int, int], deque[int]] = {}
        self.summing: dict[tuple[int, ...], set[int]] = {}
        """Ranks that are there already."""

    def run(self) -> None:
        """Go on with whoever can until all have ended."""
        ready = deque(range(len(self.lists)))
        while ready:
            ready.extend(self._arrive(ready.popleft()))
        late = [rank for rank in range(len(self.lists)) if self._now(rank) is not None]
        if late:
            raise PlanError(self._stuck(late))

    def _now(self, rank: int) -> Communication | None:
        """What a rank is at; None where it has ended."""
        return self.lists[rank][self.at[rank]] if self.at[rank] < len(self.lists[rank]) else None

    def _arrive(self, rank: int) -> list[int]:
        """Let a rank begin its next communication; gives the ranks that can go on then."""
        one = self._now(rank)
        if one is None:
            return []
        found = self._exchange(rank, one) if isinstance(one, Exchange) else self._sum(rank, one)
        for other in found:
            self.at[other] += 1
        return found

    def _exchange(self, rank: int, one: Exchange) -> list[int]:
        self.open[rank] = len(one.sends) + len(one.receives)
        found = [] if self.open[rank] else [rank]
        messages = [(other, size, True) for other, size in one.sends]
        messages += [(other, size, False) for other, size in one.receives]
        for other, size, sends in messages:
            self._known(rank, one, [other])
            if other == rank:
                raise PlanError(f"rank {rank} sends a message to itself in {one.label}")
            channel = (rank, other) if sends else (other, rank)
            mine, theirs = (self.sent, self.asked) if sends else (self.asked, self.sent)
            if not theirs.get(channel):
                mine.setdefault(channel, deque()).append(size)
                continue
            expected = theirs[channel].popleft()
            if expected != size:
                raise PlanError(
                    f"rank {channel[0]} sends rank {channel[1]} {size if sends else expected} bytes in "
                    f"{one.label}, where it expects {expected if sends else size}"
                )
            for end in (rank, other):
                self.open[end] -= 1
                if not self.open[end]:
                    found.append(end)
        return found

    def _sum(self, rank: int, one: Sum) -> list[int]:
        self._known(rank, one, one.ranks)
        if rank not in one.ranks or len(set(one.ranks)) < len(one.ranks):
            raise PlanError(f"rank {rank} takes part in {one.label}, a sum over ranks {list(one.ranks)}")
        there = self.summing.setdefault(one.ranks, set())
        there.add(rank)
        for other in there:
            its = self._now(other)
            assert isinstance(its, Sum)
            if its.bytes != one.bytes:
                raise PlanError(
                    f"rank {rank} adds {one.bytes} bytes up in {one.label}, and rank {other} {its.bytes} in "
                    f"{its.label}"
                )
            if its.of != one.of and its.of and one.of:
                raise PlanError(
                    f"rank {rank} adds the gradient of {one.of} up where rank {other} does that of {its.of}"
                )
        if len(there) < len(one.ranks):
            return []
        return list(self.summing.pop(one.ranks))

    def _known(self, rank: int, one: Communication, others: Sequence[int]) -> None:
        for other in others:
            if not 0 <= other < len(self.lists):
                raise PlanError(f"rank {rank} waits in {one.label} for rank {other}, which does not exist")

    def _waits_for(self, rank: int) -> int:
        """A rank that another one waits for."""
        one = self._now(rank)
        if isinstance(one, Sum):
            return next(other for other in one.ranks if other not in self.summing[one.ranks])
        assert one is not None
        ahead = [other for other, _ in one.sends if self.sent.get((rank, other))]
        return (ahead or [other for other, _ in one.receives if self.asked.get((other, rank))])[0]

    def _stuck(self, late: Sequence[int]) -> str:
        """Who waits for whom, from one rank to the next, until one comes again or has ended."""
        rank, seen, told = late[0], list[int](), list[str]()
        while rank not in seen:
            seen.append(rank)
            one = self._now(rank)
            if one is None:
                told.append(f"rank {rank}, which has ended")
                break
            told.append(f"rank {rank} in {one.label}")
            rank = self._waits_for(rank)
        else:
            told.append(f"rank {rank}")
        return f"processes would wait for each other for ever: {', which waits for '.join(told)}"
