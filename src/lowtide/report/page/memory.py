"""Who takes memory from when to when, and at which address."""

from __future__ import annotations

from collections.abc import Sequence

from lowtide.graph import RESIDENT_ROLES, Graph
from lowtide.plan.address.place import place
from lowtide.plan.address.types import AddressPlan, Allocation, EventClock
from lowtide.plan.program.instructions import Instruction, Program, Run, Send
from lowtide.plan.program.memory import CUDA_BLOCK_BYTES
from lowtide.report.page.tables import TablePart
from lowtide.report.page.thin import MOST_BLOCKS
from lowtide.report.page.types import BlockTable, Settled

__all__ = ["block_table", "leaves_that_stay", "placed", "placed_by_file", "settled_by"]

_PLACING_SECONDS = 0.5
_HOST_ALIGNMENT = 64


def leaves_that_stay(graph: Graph, program: Program | None) -> list[int]:
    """Leaves that are on the device throughout."""
    sent = {line.tensor for line in program.instructions if isinstance(line, Send)} if program else set()
    return [
        t
        for t, tensor in enumerate(graph.tensors)
        if tensor.role in RESIDENT_ROLES and tensor.alias is None and t not in sent
    ]


def placed(graph: Graph, allocations: Sequence[Allocation], clock: EventClock) -> AddressPlan | None:
    """One arena for all of them; none where there are too many to be drawn."""
    if not allocations or len(allocations) > MOST_BLOCKS:
        return None
    on_cuda = any(tensor.device.startswith("cuda") for tensor in graph.tensors)
    alignment = CUDA_BLOCK_BYTES if on_cuda else _HOST_ALIGNMENT
    return place(allocations, alignment=alignment, clock=clock, time_limit=_PLACING_SECONDS)


def placed_by_file(graph: Graph, allocations: Sequence[Allocation]) -> tuple[list[int], Settled] | None:
    """The addresses that a document gives its tensors, without those that nobody touches in between.

    -1 stands for a block of which it gives none.
    """
    addresses = [graph.tensors[one.tensors[0]].address if one.tensors else None for one in allocations]
    own = [(address, one) for address, one in zip(addresses, allocations, strict=True) if address is not None]
    if not own or 2 * len(own) < len(allocations):
        return None
    touched, end = 0, 0
    places: dict[int, int] = {}
    for low, size in sorted((address, one.bytes) for address, one in own):
        if low >= end:  # nobody touches what is between
            end = low
        places.setdefault(low, touched - (end - low))
        touched += max(0, low + size - end)
        end = max(end, low + size)
    offsets = [-1 if address is None else places[address] for address in addresses]
    live = _most([one for _, one in own])
    return offsets, Settled(touched, live, 0, "as the document says", False, 1)


def _most(allocations: Sequence[Allocation]) -> int:
    change: dict[int, int] = {}
    for one in allocations:
        change[one.birth] = change.get(one.birth, 0) + one.bytes
        change[one.death] = change.get(one.death, 0) - one.bytes
    most = live = 0
    for at in sorted(change):
        live += change[at]
        most = max(most, live)
    return most


def settled_by(plan: AddressPlan) -> Settled:
    """What the places of an address plan cost."""
    return Settled(
        plan.arena_bytes, plan.live_bytes, plan.greedy_bytes, plan.method, plan.optimal, plan.alignment
    )


def block_table(
    part: TablePart,
    program: Program | None,
    allocations: Sequence[Allocation],
    offsets: Sequence[int],
    events: int,
) -> BlockTable:
    """Rows for the largest, in the order in which they are taken."""
    kept = range(len(allocations))
    left_out = 0
    if len(allocations) > MOST_BLOCKS:
        order = sorted(kept, key=lambda k: -allocations[k].bytes)
        left_out = allocations[order[MOST_BLOCKS]].bytes
        kept = sorted(order[:MOST_BLOCKS])  # type: ignore[assignment]
    rows = [(allocations[k], *_owner(part, program, allocations[k])) for k in kept]
    words = part.tables.words
    return BlockTable(
        tensor=tuple(tensor for _, tensor, _ in rows),
        operator=tuple(operator for _, _, operator in rows),
        use=tuple(words(one.use.value) for one, _, _ in rows),
        bytes=tuple(one.bytes for one, _, _ in rows),
        birth=tuple(one.birth for one, _, _ in rows),
        death=tuple(one.death for one, _, _ in rows),
        offset=tuple(offsets[k] for k in kept) if offsets else (),
        in_all=len(allocations),
        bytes_left_out=left_out,
        events=events,
    )


def _owner(part: TablePart, program: Program | None, one: Allocation) -> tuple[int, int]:
    """The rows of its tensor and of the operator that takes it."""
    if program is None:
        operator = part.operator(one.at[0]) if one.at else -1
        return (part.tensor(one.tensors[0]) if one.tensors else -1), operator
    at = one.at
    while len(at) > 2:
        _, number, *rest = at
        part, program, at = part.bodies[number], program.bodies[number].program, tuple(rest)
    tensor = part.tensor(one.tensors[0]) if one.tensors else -1
    line = _line(program, at[0]) if at else None
    return tensor, part.operator(line.op) if isinstance(line, Run) else -1


def _line(program: Program, k: int) -> Instruction | None:
    """One instruction; a list of all is not made for it."""
    behind = k - len(program.forward)
    if behind < 0:
        return program.forward[k]
    return program.backward[behind] if behind < len(program.backward) else None
