"""Whether a step is faster by graphs: measured while the user trains, without waiting for the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["Stopwatch", "slower"]

_STEPS = 3
"""Replays that are measured before it is decided."""
_SLOWER = 1.05
"""So many times the step's time as always is too much: less may be noise."""


class Stopwatch:
    """Times of both parts of a step on a device."""

    def __init__(self) -> None:
        self._events: list[list[tuple[Any, Any]]] = [[], []]

    @contextmanager
    def timing(self, part: int) -> Iterator[None]:
        """Measure a part, if more of it is wanted."""
        if len(self._events[part]) == _STEPS:
            yield
            return
        cuda: Any = torch.cuda
        start, end = (cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        yield
        end.record()
        self._events[part].append((start, end))

    def seconds(self) -> list[list[float]]:
        """Of forward and of backward, those that have ended."""
        return [[a.elapsed_time(b) / 1e3 for a, b in part if b.query()] for part in self._events]


def slower(always: list[list[float]], replayed: list[list[float]]) -> bool | None:
    """Whether a step takes longer by graphs; None while too little is known."""
    if not all(always) or min(map(len, replayed)) < _STEPS:
        return None
    return sum(map(min, replayed)) > _SLOWER * sum(map(min, always))
