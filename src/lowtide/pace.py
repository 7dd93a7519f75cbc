"""How often long work says how far it is: to a logger, which the command line prints on standard error."""

from __future__ import annotations

import time

__all__ = ["Pace"]

_EVERY = 5.0
"""Seconds from one word to the next."""


class Pace:
    """Whether it is time for another word: not at the beginning, and then now and again."""

    def __init__(self, every: float = _EVERY) -> None:
        self._every, self._said = every, time.monotonic()

    def due(self) -> bool:
        """Whether nothing was said for a while; if so, something is now."""
        now = time.monotonic()
        if now - self._said < self._every:
            return False
        self._said = now
        return True
