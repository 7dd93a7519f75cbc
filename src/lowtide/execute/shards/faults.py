"""Who has died or hangs, and where: every process says in the store where it is, several times a second."""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from lowtide.errors import RunError
from lowtide.execute.shards.meeting import BEATS, UnreachableError, within

__all__ = ["RankWatch", "found_out", "read_verdict", "where_is"]

_PERIOD = 0.25
_SILENT = 2.5
"""Seconds after which a process that says nothing is taken for dead: ten times what it should take."""
_ANSWER = 10.0
"""Seconds in which a verdict is there."""
_VERDICT = "lowtide/verdict"


class _Beat(msgspec.Struct, frozen=True):
    """What a process says of itself."""

    number: int
    done: int
    """Communications that it has ended since it began, and sums that it has started."""
    inside: bool
    """Whether it is in one now, and waits for others itself."""
    where: str


class RankWatch:
    """Knows where this process is, and finds out about others when a communication fails."""

    def __init__(self, store: Any, rank: int, count: int) -> None:
        self._store, self.rank, self.count = store, rank, count
        self._labels: Sequence[str] = ()
        self._at = self._done = 0
        self._waits_in = ""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True, name="lowtide beats")
        self._thread.start()
        atexit.register(self.close)  # a thread that is in the store when Python ends would abort the process

    def begin(self, labels: Sequence[str]) -> None:
        """A step begins, whose communications have these labels."""
        self._labels, self._at = labels, 0

    def close(self) -> None:
        """Say nothing any more."""
        self._ended.set()
        self._thread.join(_ANSWER)

    @property
    def where(self) -> str:
        """Where this process is, in words."""
        if self._waits_in:
            return f"in {self._waits_in}"
        name = self._next
        before = self._labels[self._at - 1] if 0 < self._at <= len(self._labels) else ""
        return f"behind {before}, on the way to {name}" if before else f"on the way to {name}"

    @property
    def _next(self) -> str:
        """The communication that comes next."""
        return self._labels[self._at] if self._at < len(self._labels) else f"communication {self._done + 1}"

    @contextlib.contextmanager
    def communicating(self) -> Iterator[str]:
        """Around each communication, or the start of one that is waited for later; gives its name."""
        with self.waiting(self._next) as name:
            yield name
        self._at, self._done = self._at + 1, self._done + 1

    @contextlib.contextmanager
    def waiting(self, name: str) -> Iterator[str]:
        """While others are waited for; what torch raises becomes a RunError that names the rank to blame."""
        self._waits_in = name
        try:
            yield name
        except RuntimeError as error:
            raise RunError(self._told(error)) from error
        self._waits_in = ""

    def _beat(self) -> None:
        number = 0
        with contextlib.suppress(Exception):  # the store is gone: who asks for it says so
            store = self._store.clone() if hasattr(self._store, "clone") else self._store
            while not self._ended.is_set():
                number += 1
                beat = _Beat(number, self._done, bool(self._waits_in), self.where)
                store.set(f"{BEATS}/{self.rank}", msgspec.json.encode(beat))
                self._ended.wait(_PERIOD)

    def _told(self, error: RuntimeError) -> str:
        """What has happened: all processes that find out say the same."""
        reason = str(error).partition("\n")[0]
        try:
            return within(_ANSWER, lambda: self._verdict(reason))
        except UnreachableError as gone:
            return f"rank {self.rank} was {self.where} when its connections failed ({reason}); {gone}"

    def _verdict(self, reason: str) -> str:
        store = self._store.clone() if hasattr(self._store, "clone") else self._store
        told = read_verdict(store) or found_out(store, self.count, self.rank)
        told += f". Rank {self.rank} waited {self.where} ({reason})"
        return read_verdict(store) or bytes(store.compare_set(_VERDICT, "", told)).decode()


def read_verdict(store: Any) -> str:
    """What was found out already; nothing where no communication has failed."""
    return bytes(store.get(_VERDICT)).decode() if store.check([_VERDICT]) else ""


def where_is(store: Any, rank: int) -> str:
    """Where a process was when it last said so; nothing where it never has."""
    found = _beats(store, [rank])
    return found[rank].where if rank in found else ""


def found_out(store: Any, count: int, me: int | None = None) -> str:
    """Which of so many processes has died or hangs, and where, in words; ``me`` asks, and is not to blame."""
    others = [rank for rank in range(count) if rank != me]
    first = _beats(store, others)
    time.sleep(_SILENT)
    second = _beats(store, others)
    silent = [rank for rank in others if first.get(rank) == second.get(rank)]
    if silent:
        one = second.get(silent[0])
        where = "before its first communication" if one is None else one.where
        return f"rank {silent[0]} has died, or cannot be reached: it was {where}"
    late = min(others, key=lambda rank: (second[rank].done, second[rank].inside))
    return f"rank {late} does not go on: it is {second[late].where}"


def _beats(store: Any, ranks: Sequence[int]) -> dict[int, _Beat]:
    """The last words of processes."""
    known = [rank for rank in ranks if store.check([f"{BEATS}/{rank}"])]
    return {rank: msgspec.json.decode(store.get(f"{BEATS}/{rank}"), type=_Beat) for rank in known}
