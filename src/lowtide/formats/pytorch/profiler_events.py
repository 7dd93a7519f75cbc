"""Trace events as ``torch.profiler`` exports them, and calls on threads, one inside of the other."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from lowtide.errors import FormatError

__all__ = ["Thread", "ThreadCall", "TraceEvent", "nested_calls", "read_events", "recognise_events"]

_HEAD = re.compile(rb"\s*\{")
_KEY = re.compile(rb'"traceEvents"\s*:')
_GZIP = b"\x1f\x8b\x08"
_HEAD_BYTES = 1 << 16
_MOST_TIMES = 300
"""A compressed file that grows more is no trace."""
_MOST_MICROSECONDS = 1e17
_BYTE = re.compile(r"\(byte (\d+)\)")
_EXPECTED = "a trace, as export_chrome_trace of torch.profiler writes it"

Thread = tuple[int | float | str, int | float | str]


class TraceEvent(msgspec.Struct, gc=False):
    """One event; times are microseconds of the profiler's clock."""

    ph: str = ""
    name: str = ""
    cat: str = ""
    pid: int | float | str = 0
    tid: int | float | str = 0
    ts: float = 0.0
    dur: float = 0.0
    args: dict[str, Any] = {}

    @property
    def thread(self) -> Thread:
        """Where it happened."""
        return self.pid, self.tid

    @property
    def end(self) -> float:
        """When it was over."""
        return self.ts + self.dur

    def whole(self, key: str) -> int | None:
        """One of its arguments, where it is a whole number that fits 64 bits."""
        value = self.args.get(key)
        return value if type(value) is int and abs(value) < 1 << 63 else None


class _Trace(msgspec.Struct):
    """The outermost object."""

    traceEvents: list[TraceEvent]  # noqa: N815


@dataclass(slots=True, eq=False)
class ThreadCall:
    """A call on a thread, and the call that it is part of."""

    event: TraceEvent
    parent: ThreadCall | None
    called: int = 0
    """How many operators it calls itself."""
    facts: Any = field(default=None)
    """What a reader makes of it."""


_DECODER = msgspec.json.Decoder(_Trace)


def recognise_events(data: bytes) -> bool:
    """Whether a file begins as a trace does, compressed or not."""
    if data[:3] == _GZIP:
        try:
            data = zlib.decompressobj(wbits=31).decompress(data, _HEAD_BYTES)
        except zlib.error:
            return False
    return _HEAD.match(data) is not None and _KEY.search(data) is not None


def read_events(data: bytes) -> list[TraceEvent]:
    """All events of a trace in the order of the file, or a FormatError."""
    data = _unpacked(data)
    try:
        events = _DECODER.decode(data).traceEvents
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        found = _BYTE.search(str(error))
        byte = int(found[1]) if found else len(data) if "truncated" in str(error) else 0
        raise FormatError(
            f"the trace breaks off or is damaged: {error}", expected=_EXPECTED, byte=byte
        ) from None
    except RecursionError:
        raise FormatError("nested too deeply", expected=_EXPECTED, byte=0) from None
    for k, event in enumerate(events):
        if abs(event.ts) > _MOST_MICROSECONDS or not 0 <= event.dur <= _MOST_MICROSECONDS:
            raise FormatError(
                f"event {k} begins at {event.ts:g} and takes {event.dur:g} microseconds",
                expected="times that a step can take",
                byte=0,
            )
    return events


def _unpacked(data: bytes) -> bytes:
    if data[:3] != _GZIP:
        return data
    most = (1 << 20) + _MOST_TIMES * len(data)
    packed = zlib.decompressobj(wbits=31)
    try:
        text = packed.decompress(data, most)
    except zlib.error as error:
        raise FormatError(f"the compressed data are damaged: {error}", expected=_EXPECTED, byte=0) from None
    if not packed.eof:
        grows = len(text) >= most
        problem = (
            f"compressed data that grow more than {_MOST_TIMES} times"
            if grows
            else "compressed data break off"
        )
        raise FormatError(problem, expected=_EXPECTED, byte=len(data))
    return text


def nested_calls(events: Iterable[TraceEvent]) -> list[ThreadCall]:
    """Calls by thread, each behind the call that it is part of."""
    threads: dict[Thread, list[TraceEvent]] = {}
    for event in events:
        threads.setdefault(event.thread, []).append(event)
    return [call for calls in threads.values() for call in _nested(calls)]


def _nested(events: Sequence[TraceEvent]) -> list[ThreadCall]:
    found: list[ThreadCall] = []
    around: list[ThreadCall] = []
    for event in sorted(events, key=lambda one: (one.ts, -one.dur)):
        while around and event.ts >= around[-1].event.end:
            around.pop()
        call = ThreadCall(event, around[-1] if around else None)
        if call.parent is not None and event.cat == "cpu_op":
            call.parent.called += 1
        found.append(call)
        around.append(call)
    return found
