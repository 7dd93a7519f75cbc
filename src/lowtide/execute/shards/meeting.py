"""What processes tell each other through the store of torch.distributed, before the first tensor moves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from typing import Any, TypeVar

from lowtide.errors import LowtideError, RunError

__all__ = ["BEATS", "Meeting", "UnreachableError", "within"]

T = TypeVar("T")
_PAUSES = 0.005, 0.2
"""Seconds between two looks, at first and at last."""
_LONGEST = 3600.0
"""Seconds in which whoever says that it is there has to be done."""
BEATS = "lowtide/beat"
"""Where processes say in the store that they are there."""
_ANSWER = 20.0
"""Seconds in which a store answers, or cannot be reached."""


class UnreachableError(RunError):
    """The store by which processes meet does not answer."""


def within(seconds: float, call: Callable[[], T]) -> T:
    """What a call gives; an UnreachableError where it takes longer: torch itself waits for ever."""
    found: list[T] = []
    failed: list[Exception] = []

    def run() -> None:
        try:
            found.append(call())
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True, name="lowtide store")
    thread.start()
    thread.join(seconds)
    if found:
        return found[0]
    reason = str(failed[0]).partition("\n")[0] if failed else f"no answer for {seconds:.0f} s"
    raise UnreachableError(
        f"the store of torch.distributed, by which processes meet, cannot be reached: {reason}. It runs "
        "where MASTER_ADDR says; look whether that host and the link to it are up"
    )


class Meeting:
    """The processes of a mesh, numbered from 0 on. All of them meet for the same topics in the same order."""

    def __init__(self, store: Any, rank: int, count: int, seconds: float) -> None:
        """``seconds``: so long others may say nothing until they are there."""
        self.store, self.rank, self.count, self.seconds = store, rank, count, seconds
        number = within(_ANSWER, lambda: store.add(f"lowtide/meetings/{rank}", 1))
        self._prefix, self._topics = f"lowtide/{number}", 0

    def everybody(self, topic: str, said: bytes) -> list[bytes]:
        """What each says about a topic, in the order of ranks, once all have said it."""
        self._topics += 1
        keys = [f"{self._prefix}/{self._topics}/{rank}" for rank in range(self.count)]
        within(_ANSWER, lambda: self.store.set(keys[self.rank], said))
        missing, pause = set(range(self.count)), _PAUSES[0]
        began = heard = time.monotonic()
        beats: dict[int, bytes] = {}
        while missing:
            missing = {k for k in missing if not within(_ANSWER, lambda k=k: self.store.check([keys[k]]))}  # type: ignore[misc]
            now = time.monotonic()
            if missing and now - heard > self.seconds:
                seen = {k: self._beat(k) for k in missing}
                alive = all(seen[k] and seen[k] != beats.get(k) for k in missing) and now - began < _LONGEST
                if not alive:
                    raise RunError(_absent(missing, self.count, topic, now - began))
                beats, heard = seen, now  # they are at it still
            if missing:
                time.sleep(pause)
                pause = min(2 * pause, _PAUSES[1])
        found = [within(_ANSWER, lambda key=key: bytes(self.store.get(key))) for key in keys]  # type: ignore[misc]
        self._wait_for_readers(f"{self._prefix}/{self._topics}/read")
        return found

    def _wait_for_readers(self, key: str) -> None:
        """Have the first process, which may have the store, go on when all others have read what was said.

        It may end next, and the store with it. A process that has died meanwhile is not waited for long.
        """
        read, until = within(_ANSWER, lambda: self.store.add(key, 1)), time.monotonic() + _ANSWER
        while self.rank == 0 and read < self.count and time.monotonic() < until:
            time.sleep(_PAUSES[0])
            read = within(_ANSWER, lambda: self.store.add(key, 0))

    def _beat(self, rank: int) -> bytes:
        """What a process has last said of itself; nothing where it never has."""
        key = f"{BEATS}/{rank}"
        return within(_ANSWER, lambda: bytes(self.store.get(key)) if self.store.check([key]) else b"")

    def agree(self, topic: str, said: dict[str, str], advice: str) -> None:
        """Refuse, on all ranks with one message, what is not the same everywhere."""
        lines = "\n".join(f"{name}\t{value}" for name, value in said.items())
        heard = [one.decode() for one in self.everybody(topic, lines.encode())]
        for rank, one in enumerate(heard):
            if one != heard[0]:
                pairs = zip(heard[0].split("\n"), one.split("\n"), strict=False)
                first, other = next(((a, b) for a, b in pairs if a != b), (heard[0], one))
                name, _, here = first.partition("\t")
                there = other.partition("\t")[2]
                raise RunError(f"rank 0 and rank {rank} differ in {name}: {here} and {there}. {advice}")

    def settled(self, topic: str, work: Callable[[], T]) -> T:
        """What ``work`` gives, once it has on all ranks; where it fails on one, all raise its error."""
        failed: Exception | None = None
        found: list[T] = []
        try:
            found.append(work())
        except Exception as error:
            failed = error
        name = "" if isinstance(failed, RunError) else f"{type(failed).__name__}: "
        heard = self.everybody(topic, b"" if failed is None else f"{name}{failed}".encode())
        failing = next((rank for rank, one in enumerate(heard) if one), None)
        if failing is None:
            return found[0]
        if failed is not None and not isinstance(failed, LowtideError):
            raise failed
        it_said = heard[failing].decode()
        raise RunError(f"rank {failing}: {it_said}") from failed


def _absent(missing: Collection[int], count: int, topic: str, seconds: float) -> str:
    names = ", ".join(map(str, sorted(missing)))
    return (
        f"rank {names} of {count} has not come to {topic} in {seconds:.0f} s: it has ended, hangs, or cannot "
        "be reached. All processes have to call lowtide.fit with a mesh"
    )
