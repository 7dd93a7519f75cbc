"""What long work says of itself on standard error: its stages, and every few seconds how far they are."""

from __future__ import annotations

import threading
import time
from types import TracebackType

from lowtide.commands.common import say
from lowtide.units import format_cost

__all__ = ["Stages"]

_EVERY = 5.0
"""Seconds after which a stage says that it is still there."""


class Stages:
    """The stages of one piece of work, each said when it begins; nothing is said where ``quiet``.

    A thread says how long a stage takes and what its search has found, so that no stage is silent for long.
    """

    def __init__(self, *, quiet: bool = False, origin: str = "measured") -> None:
        self._quiet, self._origin = quiet, origin
        self._name, self._found, self._began = "", "", time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._speak, daemon=True)

    def __enter__(self) -> Stages:
        if not self._quiet:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if not self._quiet:
            self._thread.join()

    def begin(self, name: str) -> None:
        """The next stage."""
        self._name, self._found, self._began = name, "", time.monotonic()
        if not self._quiet:
            say(f"{name} …", err=True)

    def search(self, _: float, best: float | None, bound: float, gap: float | None) -> None:
        """What the search of a plan has found so far."""
        found = "no plan yet" if best is None else f"best {format_cost(best, self._origin)} more"
        share = "" if gap is None else f", gap {gap:.1%}"
        self._found = f", {found}, bound {format_cost(bound, self._origin)}{share}"

    def _speak(self) -> None:
        while not self._ended.wait(_EVERY):
            seconds = time.monotonic() - self._began
            if self._name and 2 * seconds >= _EVERY:
                say(f"{self._name}: {seconds:.0f} s{self._found} …", err=True)
