"""The fields of a snapshot of the CUDA allocator, their types checked; what is optional may be missing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lowtide.errors import FormatError
from lowtide.formats.pytorch.frames import NOBODY, Requester, requester_of
from lowtide.formats.pytorch.plain_pickle import PlainData

__all__ = ["Block", "Document", "Event", "Segment"]

_SNAPSHOT = "a memory snapshot, as torch.cuda.memory._dump_snapshot writes it"
_MOST = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that the allocator did."""

    action: str
    address: int
    size: int
    """As it was asked for, in bytes."""
    time: int | None
    """Microseconds of some clock."""
    device_free: int
    """Where it ran out of memory: what the device had left."""
    requester: Requester


@dataclass(frozen=True, slots=True)
class Block:
    """A part of a segment when the snapshot was written."""

    address: int
    size: int
    requested: int
    state: str
    requester: Requester

    @property
    def active(self) -> bool:
        """Whether it is not free: a tensor has it, or another stream may still use it."""
        return self.state.startswith("active")


@dataclass(frozen=True, slots=True)
class Segment:
    """Memory that the allocator has taken from the device."""

    size: int
    blocks: tuple[Block, ...]


class Document:
    """A snapshot as it stands in the file. No entry is looked at more often than the file has bytes."""

    def __init__(self, plain: PlainData, file_bytes: int) -> None:
        self._plain = plain
        self._left = file_bytes
        self._requesters: dict[int, Requester] = {}
        root = plain.value
        if not isinstance(root, dict) or "segments" not in root:
            raise FormatError("a pickle without `segments`", expected=_SNAPSHOT, byte=plain.byte(root))
        self._segments = self._list(root, "segments")
        self._traces = self._list(root, "device_traces")

    def devices(self) -> list[int]:
        """Those that have a segment or a history, in rising order."""
        traced = {k for k, trace in enumerate(self._traces) if trace}
        return sorted(traced | {self._whole(one, "device", 0) for one in self._dicts(self._segments)})

    def segments(self, device: int) -> list[Segment]:
        """The segments of a device in the order of the file."""
        return [
            self._segment(one)
            for one in self._dicts(self._segments)
            if self._whole(one, "device", 0) == device
        ]

    def events(self, device: int) -> Iterator[Event]:
        """What the allocator did on a device, the oldest first."""
        trace = self._traces[device] if device < len(self._traces) else []
        if not isinstance(trace, list):
            raise self._wrong(self._traces, f"the history of cuda:{device} is no list")
        for entry in self._dicts(trace):
            time = entry.get("time_us")
            if time is not None and (type(time) is not int or abs(time) > _MOST):
                raise self._wrong(entry, f"time_us is {_said(time)}")
            yield Event(
                action=self._text(entry, "action"),
                address=self._whole(entry, "addr", 0),
                size=self._whole(entry, "size", 0),
                time=time,
                device_free=self._whole(entry, "device_free", 0),
                requester=self._requester(entry),
            )

    def _segment(self, one: dict[str, Any]) -> Segment:
        blocks = []
        address = self._whole(one, "address", 0)
        for block in self._dicts(self._list(one, "blocks")):
            address = self._whole(block, "address", address)  # versions before 2.1 leave it out
            size = self._whole(block, "size", 0)
            past = self._list(block, "history")[:1]
            last = past[0] if past and isinstance(past[0], dict) else {}
            requested = self._whole(block, "requested_size", self._whole(last, "real_size", size))
            requester = self._requester(block if "frames" in block else last)
            blocks.append(Block(address, size, requested, self._text(block, "state"), requester))
            address += size
        return Segment(self._whole(one, "total_size", sum(block.size for block in blocks)), tuple(blocks))

    def _requester(self, entry: dict[str, Any]) -> Requester:
        """Who is behind the frames of an entry; entries share frames, which are looked at once."""
        frames = entry.get("frames")
        if not isinstance(frames, list):
            return NOBODY
        known = self._requesters.get(id(frames))
        if known is None:
            self._spend(len(frames), frames)
            known = self._requesters[id(frames)] = requester_of(frames)
        return known

    def _dicts(self, entries: list[Any]) -> Iterator[dict[str, Any]]:
        self._spend(len(entries), entries)
        for entry in entries:
            if not isinstance(entry, dict):
                raise self._wrong(entries, f"a {type(entry).__name__} where a dict stands")
            yield entry

    def _spend(self, count: int, entries: list[Any]) -> None:
        """Lists that are used again and again would take for ever, however small the file is."""
        self._left -= count
        if self._left < 0:
            raise self._wrong(entries, "one list is part of more entries than the file has bytes")

    def _list(self, entry: dict[str, Any], key: str) -> list[Any]:
        value = entry.get(key, [])
        if not isinstance(value, list):
            raise self._wrong(entry, f"{key} is {_said(value)}, no list")
        return value

    def _whole(self, entry: dict[str, Any], key: str, default: int) -> int:
        value = entry.get(key, default)
        if type(value) is not int or not 0 <= value <= _MOST:
            raise self._wrong(entry, f"{key} is {_said(value)}, no whole number from 0 to 2^63")
        return value

    def _text(self, entry: dict[str, Any], key: str) -> str:
        value = entry.get(key)
        if not isinstance(value, str):
            raise self._wrong(entry, f"{key} is {_said(value)}, no string")
        return value

    def _wrong(self, entry: Any, problem: str) -> FormatError:
        return FormatError(problem, expected=_SNAPSHOT, byte=self._plain.byte(entry))


def _said(value: Any) -> str:
    """A value as it can stand in a message, whatever is inside of it."""
    return repr(value) if value is None or type(value) in (bool, int, float) else f"a {type(value).__name__}"
