"""Communications of a captured part: between its graphs, in memory that is the same in every replay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch import Tensor

from lowtide.trace.distributed.wires import Wire, wire_of

__all__ = ["Between", "There", "WireAside", "WireBetween"]

Between = Callable[[Callable[[], None]], None]
"""Has the host do something between two graphs, in every replay."""
There = Callable[[Tensor], Callable[[], Tensor]]
"""Of a tensor that is captured: what gives one that lies where it does, in every replay."""

_Messages = Sequence[tuple[int, Tensor]]


class WireAside:
    """Communicates as always; its own operators are not counted among those of the watched part."""

    def __init__(self, wire: Wire, aside: Callable[[], AbstractContextManager[None]]) -> None:
        self._wire, self._aside = wire, aside

    @property
    def place(self) -> int:
        """Which of the devices this one is."""
        return self._wire.place

    def swap(self, sends: _Messages, receives: _Messages) -> None:
        """As always."""
        self._done(partial(self._wire.swap, sends, receives))

    def begin_swap(self, sends: _Messages, receives: _Messages) -> Callable[[], None]:
        """As always."""
        return partial(self._done, self._done(partial(self._wire.begin_swap, sends, receives)))

    def add_up(self, x: Tensor) -> None:
        """As always."""
        self._done(partial(self._wire.add_up, x))

    def begin_sum(self, x: Tensor) -> Callable[[], None]:
        """As always."""
        return partial(self._done, self._done(partial(self._wire.begin_sum, x)))

    def _done(self, call: Callable[[], Any]) -> Any:
        with self._aside():
            return call()


class WireBetween:
    """Communicates with nobody while a part is captured, and with the other processes in every replay.

    A replay looks up the wire of that ``name`` each time, as a step without graphs does, and holds nothing of
    the capture.
    """

    def __init__(self, name: str, between: Between, there: There) -> None:
        self._name, self._between, self._there = name, between, there

    @property
    def place(self) -> int:
        """Which of the devices this one is."""
        return wire_of(self._name).place

    def swap(self, sends: _Messages, receives: _Messages) -> None:
        """All messages."""
        name, out, into = self._name, self._all(sends), self._all(receives)
        self._between(lambda: wire_of(name).swap(_now(out), _now(into)))

    def begin_swap(self, sends: _Messages, receives: _Messages) -> Callable[[], None]:
        """All messages; none of their memory is used again until the end was waited for."""
        name, out, into = self._name, self._all(sends), self._all(receives)
        return self._begun(lambda: wire_of(name).begin_swap(_now(out), _now(into)), [*sends, *receives])

    def add_up(self, x: Tensor) -> None:
        """The sum."""
        name, there = self._name, self._there(x)
        self._between(lambda: wire_of(name).add_up(there()))

    def begin_sum(self, x: Tensor) -> Callable[[], None]:
        """The sum; its memory is not used again until the end was waited for."""
        name, there = self._name, self._there(x)
        return self._begun(lambda: wire_of(name).begin_sum(there()), [x])

    def _begun(self, begin: Callable[[], Callable[[], None]], held: list[Any]) -> Callable[[], None]:
        """Begin between two graphs; what ends it between two others."""
        waits: list[Callable[[], None]] = []

        def start() -> None:
            waits[:] = [begin()]  # not behind one that was begun in a replay that has failed

        def end() -> None:
            waits.pop()()

        def ended() -> None:
            self._between(end)
            held.clear()

        self._between(start)
        return ended

    def _all(self, messages: _Messages) -> list[tuple[int, Callable[[], Tensor]]]:
        return [(other, self._there(x)) for other, x in messages]


def _now(messages: Sequence[tuple[int, Callable[[], Tensor]]]) -> list[tuple[int, Tensor]]:
    return [(other, there()) for other, there in messages]
