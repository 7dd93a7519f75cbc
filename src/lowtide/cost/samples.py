"""What repeated calls took, told apart from what a busy machine added to it.

A call is *disturbed* where its thread was kept off the processor for a good part of it: somebody else ran
there. A figure comes from the calls that were not. Where there are too few of them, or where they differ too
much, the machine is busy, and the figure says so.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

try:
    import resource
except ImportError:  # not a Unix system: preemption shows in the time that a thread runs alone
    resource = None  # type: ignore[assignment]

__all__ = ["HostTimer", "Sample", "Timed", "Timer", "judged", "settled", "timed_call"]

T = TypeVar("T")

_PREEMPTED = 0.1
"""A call that was preempted may lose this share of its time before it counts as disturbed."""
_WAITED = 0.5
"""The same of a call that was not: it may wait for threads of its own."""
_NOISE = 20e-6
"""Seconds that calls may lose, or differ by, whatever they take."""
_SPREAD = 2.0
"""Calls that are not disturbed take no more than this times the quickest, by their median."""
_WANTED = 3
"""A figure comes from so many calls that were not disturbed; from fewer where no more were made at once."""
_TRIES = 3
"""How often calls are made again where they were disturbed."""


class Timer(Protocol):
    """The time, and what the thread that asks got of it."""

    def now(self) -> float:
        """Seconds since some moment."""

    def worked(self) -> float:
        """Seconds that this thread has run on a processor."""

    def preempted(self) -> int:
        """How often this thread was taken off a processor though it had not finished."""


class HostTimer:
    """As the operating system counts."""

    def __init__(self) -> None:
        self._fine = time.get_clock_info("thread_time").resolution <= _NOISE

    def now(self) -> float:
        """By the clock."""
        return time.perf_counter()

    def worked(self) -> float:
        """By the thread's own clock; by the wall where that is too coarse to tell anything."""
        return time.thread_time() if self._fine else time.perf_counter()

    def preempted(self) -> int:
        """Involuntary switches; none where the system does not count them by thread."""
        with contextlib.suppress(AttributeError):
            return int(resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw)
        return 0


@dataclass(frozen=True, slots=True)
class Sample:
    """What one call took."""

    seconds: float
    disturbed: bool = False


@dataclass(frozen=True, slots=True)
class Timed:
    """What a call takes, from several samples."""

    seconds: float
    disturbed: bool = False
    """Whether the machine was too busy to tell: the quickest call is what is known."""


def timed_call(timer: Timer, call: Callable[[], T]) -> tuple[T, Sample]:
    """The result of a call, and what it took by the clock of this thread."""
    preempted, worked = timer.preempted(), timer.worked()
    started = timer.now()
    result = call()
    seconds = timer.now() - started
    lost = seconds - (timer.worked() - worked)
    allowed = _PREEMPTED if timer.preempted() > preempted else _WAITED
    return result, Sample(seconds, lost > _NOISE + allowed * seconds)


def judged(samples: Sequence[Sample], wanted: int = _WANTED) -> Timed:
    """The median of the calls that were not disturbed, if there are so many and they agree."""
    quiet = sorted(sample.seconds for sample in samples if not sample.disturbed)
    if len(quiet) >= max(1, wanted):
        middle = statistics.median(quiet)
        if middle <= _SPREAD * quiet[0] + _NOISE:
            return Timed(middle)
    return Timed(min(sample.seconds for sample in samples), disturbed=True)


def settled(samples: Sequence[Sample], again: Callable[[], Sequence[Sample]]) -> Timed:
    """The figure for some samples; ``again`` takes more as long as they are disturbed, a few times.

    It gives none where there is no time for more.
    """
    wanted = min(_WANTED, len(samples))
    found: list[Any] = list(samples)
    figure = judged(found, wanted)
    for _ in range(_TRIES):
        more = again() if figure.disturbed else ()
        if not more:
            break
        found += more
        figure = judged(found, wanted)
    return figure
