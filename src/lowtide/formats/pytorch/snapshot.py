"""Snapshots of the CUDA allocator, as ``torch.cuda.memory._dump_snapshot`` writes them.

    segments        what was taken from the device, cut into blocks: the state when the snapshot was written
    device_traces   for each device what the allocator did before: alloc, free_requested, free_completed, ...

Each allocation becomes an operator that writes one tensor; what is freed before the next one is read by a
``free`` operator. The first operator stands for what was there before the recording, the last for its end:

    operators       before   alloc   alloc   free   alloc   end
    live bytes      ▂▂▂▂▂▂   ▄▄▄▄▄   ▆▆▆▆▆   ▆▆▆▆   ▅▅▅▅▅   ▅▅▅
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import msgspec

from lowtide.cost import Cost, Figure, Note, NoteKind, Origin, Step
from lowtide.errors import FormatError, GraphError
from lowtide.formats.base import Format
from lowtide.formats.pytorch.frames import NOBODY, Requester
from lowtide.formats.pytorch.plain_pickle import read_plain_pickle
from lowtide.formats.pytorch.snapshot_fields import Document, Event, Segment
from lowtide.graph import MAX_BYTES, Graph, Op, Tensor, validate

__all__ = ["SNAPSHOT_FORMAT", "read_snapshot"]

_ROUNDING = 512
"""The allocator hands out multiples of so many bytes."""
_FREE, _OUT_OF_MEMORY, _BEFORE, _END = "free", "out of memory", "before the recording", "end of the recording"
_NOTHING_MOVED = Cost(bytes_moved=Figure(0, Origin.ESTIMATED))
_SIZES = "blocks of the sizes that devices have"
_TOTALS = ("reserved_bytes", "most_reserved_bytes", "allocated_bytes", "free_bytes")
_RESERVING = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}


def read_snapshot(data: bytes) -> Step:
    """The allocations of the device that took the most memory, with the lines that asked for them."""
    document = Document(read_plain_pickle(data), len(data))
    steps = [_step(document, device) for device in document.devices()]
    if not steps:
        return Step(Graph(), format="snapshot")
    chosen = max(steps, key=lambda step: step.lifetimes().peak_bytes)
    others = [step for step in steps if step is not chosen and step.graph.tensors]
    return msgspec.structs.replace(chosen, notes=(*chosen.notes, *map(_left_out, others)))


def _left_out(step: Step) -> Note:
    device, peak = step.graph.attributes["allocator"]["device"], step.lifetimes().peak_bytes
    return Note(NoteKind.ASSUMPTION, f"{device} is left out: its peak of {peak:,} bytes is smaller")


@dataclass(frozen=True, slots=True)
class _Action:
    """An operator to be: what it allocates or frees, who asked for it, and when."""

    kind: str
    tensors: list[int]
    requester: Requester
    time: int | None


@dataclass(slots=True)
class _History:
    """What happened on one device, followed from event to event."""

    device: int
    tensors: list[Tensor] = field(default_factory=list)
    actions: list[_Action] = field(default_factory=list)
    before: list[int] = field(default_factory=list)
    """Tensors that were there when the recording began."""
    live: dict[int, int] = field(default_factory=dict)
    """The tensor at each address."""
    seen: set[int] = field(default_factory=set)
    """Addresses that events were about."""
    odd: int = 0
    """Frees of what was free already."""
    ran_out: list[dict[str, int]] = field(default_factory=list)
    reserved: int = 0
    """Bytes taken from the device since the recording began, less those given back."""
    most_reserved: int = 0

    def follow(self, event: Event) -> None:
        """One more event; those of no known action change nothing."""
        if event.action == "alloc":
            self._free(event.address, event.time)  # where nobody said that it was freed
            tensor = self.tensor(event.address, event.size, event.requester)
            self.live[event.address] = tensor
            self.seen.add(event.address)
            self.actions.append(_Action(event.requester.kind, [tensor], event.requester, event.time))
        elif event.action == "free_completed":
            if event.address not in self.live and event.address not in self.seen:
                self.was_there(event.address, event.size, NOBODY)
            self.odd += event.address not in self.live
            self._free(event.address, event.time)
        elif event.action == "oom":
            self.ran_out.append({"bytes": event.size, "free_on_device": event.device_free})
            self.actions.append(_Action(_OUT_OF_MEMORY, [], event.requester, event.time))
        elif event.action in _RESERVING:
            self.reserved += _RESERVING[event.action] * event.size
            self.most_reserved = max(self.most_reserved, self.reserved)

    def _free(self, address: int, time: int | None) -> None:
        self.seen.add(address)
        tensor = self.live.pop(address, None)
        if tensor is None:
            return
        if self.actions and self.actions[-1].kind == _FREE:
            self.actions[-1].tensors.append(tensor)
        else:
            self.actions.append(_Action(_FREE, [tensor], NOBODY, time))

    def was_there(self, address: int, size: int, requester: Requester) -> None:
        """A block that was allocated before the recording."""
        self.live[address] = self.tensor(address, size, requester)
        self.before.append(self.live[address])

    def tensor(self, address: int, size: int, requester: Requester) -> int:
        """A new tensor for a block of at least this size."""
        self.tensors.append(
            Tensor(
                id=f"block {len(self.tensors)}",
                bytes=-(-size // _ROUNDING) * _ROUNDING,
                name=requester.name,
                device=f"cuda:{self.device}",
                address=address,
                source=requester.source,
            )
        )
        return len(self.tensors) - 1


def _step(document: Document, device: int) -> Step:
    """The step of one device."""
    history = _History(device)
    for event in document.events(device):
        history.follow(event)
    segments = document.segments(device)
    for block in (block for segment in segments for block in segment.blocks if block.active):
        if block.address not in history.live and block.address not in history.seen:
            history.was_there(block.address, block.size, block.requester)
    ops, times = _operators(history)
    figures = _figures(history, segments)
    graph = Graph(tuple(history.tensors), tuple(ops), attributes={"allocator": figures})
    try:
        validate(graph)
    except GraphError as error:
        raise FormatError(str(error), expected=_SIZES, byte=0) from None
    if max(sum(t.bytes for t in history.tensors), *(figures[key] for key in _TOTALS)) > MAX_BYTES:
        raise FormatError("blocks of more than 2^60 bytes together", expected=_SIZES, byte=0)
    costs = tuple(_NOTHING_MOVED if op.inputs or op.kind == _BEFORE else Cost() for op in ops)
    step = Step(graph, format="snapshot", costs=costs, notes=tuple(_notes(history)))
    timeline = msgspec.structs.replace(step.lifetimes(), seconds=_seconds(times))
    return msgspec.structs.replace(step, timeline=timeline)


def _operators(history: _History) -> tuple[list[Op], list[int | None]]:
    """The operators and the time of each."""
    ops: list[Op] = []
    times: list[int | None] = []
    if history.before:
        ops.append(Op(id=_BEFORE, kind=_BEFORE, outputs=tuple(history.before)))
        times.append(None)
    for k, action in enumerate(history.actions):
        ends = tuple(action.tensors)
        free = action.kind == _FREE
        ops.append(
            Op(
                id=f"event {k}",
                kind=action.kind,
                phase=action.requester.phase,
                inputs=ends if free else (),
                outputs=() if free else ends,
                name=_named(action),
                device=f"cuda:{history.device}",
                source=action.requester.source,
            )
        )
        times.append(action.time)
    if history.actions and history.live:
        ops.append(Op(id=_END, kind=_END, phase=ops[-1].phase, inputs=tuple(history.live.values())))
        times.append(None)
    return ops, times


def _named(action: _Action) -> str:
    """Allocations of one line have one name: two snapshots are compared line by line."""
    if action.kind == _FREE:
        return _FREE
    where = action.requester.name or "no stack recorded"
    return f"{_OUT_OF_MEMORY}: {where}" if action.kind == _OUT_OF_MEMORY else where


def _seconds(times: list[int | None]) -> tuple[float, ...]:
    """From each operator to the next one; none where the snapshot has no times."""
    if all(time is None for time in times):
        return ()
    gaps = [
        max(0, after - before) * 1e-6 if before is not None and after is not None else 0.0
        for before, after in pairwise(times)
    ]
    return (*gaps, 0.0)


def _figures(history: _History, segments: list[Segment]) -> dict[str, Any]:
    """What the allocator holds when the snapshot is written, and the most that it held before."""
    blocks = [block for segment in segments for block in segment.blocks]
    active = [block for block in blocks if block.active]
    free = [block.size for block in blocks if not block.active]
    reserved = sum(segment.size for segment in segments)
    return {
        "device": f"cuda:{history.device}",
        "segments": len(segments),
        "reserved_bytes": reserved,
        "most_reserved_bytes": reserved + max(0, history.most_reserved - history.reserved),
        "allocated_bytes": sum(block.size for block in active),
        "requested_bytes": sum(min(block.requested, block.size) for block in active),
        "free_bytes": sum(free),
        "largest_free_bytes": max(free, default=0),
        "out_of_memory": history.ran_out,
    }


def _notes(history: _History) -> Iterator[Note]:
    if history.actions:
        text = (
            "each allocation stands for an operator; sizes are rounded up to 512 bytes, as the allocator does"
        )
        yield Note(NoteKind.ASSUMPTION, text)
    else:
        yield Note(
            NoteKind.ASSUMPTION,
            "no history was recorded: this is the state when the snapshot was written. Call "
            "torch.cuda.memory._record_memory_history() before the step to record one",
        )
    if history.odd:
        yield Note(
            NoteKind.ASSUMPTION, f"{history.odd} frees of blocks that were free already count for nothing"
        )


def _facts(step: Step) -> dict[str, Any]:
    found = step.graph.attributes.get("allocator")
    return {"allocator": found} if _whole(found, (*_TOTALS, "segments")) and _failures(found) else {}


def _whole(found: Any, keys: tuple[str, ...]) -> bool:
    return isinstance(found, dict) and all(type(found.get(key)) is int for key in keys)


def _failures(found: Any) -> bool:
    """Whether the list of failed allocations is one, in a file that somebody may have changed."""
    listed = found.get("out_of_memory")
    return isinstance(listed, list) and all(_whole(one, ("bytes", "free_on_device")) for one in listed)


def _recognise(data: bytes) -> bool:
    return data[:1] == b"\x80" and data[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05")


SNAPSHOT_FORMAT = Format(
    name="snapshot",
    title="CUDA memory snapshot of PyTorch",
    recognise=_recognise,
    read=read_snapshot,
    facts=_facts,
)
