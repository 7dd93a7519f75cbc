"""Memory for the operators of a step that is captured: first their requests are listed, then answered."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from lowtide.device_internals import allocations_of, blocks_of_memory, usual_segments
from lowtide.execute.graphs.arena import segments
from lowtide.execute.graphs.arena.driver import Addresses
from lowtide.execute.graphs.arena.errors import CannotCaptureError, NoRoomError
from lowtide.execute.graphs.arena.layout import ArenaLayout, Requests
from lowtide.execute.graphs.arena.pages import PAGE
from lowtide.execute.graphs.arena.segments import Pages
from lowtide.units import format_bytes

__all__ = ["Answering", "CaptureMemory", "Listing"]


class CaptureMemory(Protocol):
    """Where operators allocate while they are captured."""

    addresses: Addresses
    pages: Sequence[int]
    """Their numbers, in the order of the addresses."""

    @property
    def operator(self) -> int:
        """How many have run."""

    def open(self) -> None:
        """A part is captured from here on."""

    def close(self) -> None:
        """Its end."""

    def begin(self) -> None:
        """An operator is going to run."""

    def ran(self, stay: Mapping[int, int]) -> Collection[int]:
        """It has left storages of so many bytes, by address: those among them that lie here."""

    def died(self, address: int) -> None:
        """A storage is gone."""


class Listing:
    """Addresses that follow one another: nothing runs, so one page is behind all of them."""

    def __init__(self, pages: Pages) -> None:
        self._pages, self.addresses, self._requests = pages, Addresses(), Requests(usual=usual_segments())
        self.pages: Sequence[int] = ()
        self._taken = 0
        self._before = (0, 0, 0)
        if not pages.grow(1):
            raise NoRoomError("the device has no memory left for them")

    @property
    def operator(self) -> int:
        """How many have run."""
        return len(self._requests)

    def open(self) -> None:
        """A part is captured from here on."""
        self._pages.list_requests(self.addresses, self._taken)

    def close(self) -> None:
        """Its end."""
        self._taken = segments.taken()
        self.addresses.mapped.update(range(self._taken // PAGE))

    def begin(self) -> None:
        """An operator is going to run."""
        segments.listed(self.addresses)
        self._before = allocations_of(self._pages.index)

    def ran(self, stay: Mapping[int, int]) -> Collection[int]:
        """It has left storages of so many bytes, by address: those among them that lie here."""
        count, size, current = allocations_of(self._pages.index)
        listed = segments.listed(self.addresses)
        mine = self._requests.ran(
            listed,
            {address: size for address, size in stay.items() if address in self.addresses},
            allocations=count - self._before[0],
            taken=size - self._before[1],
        )
        if current - self._before[2] > len(mine):  # other threads allocate too: look closer
            for one in listed:
                for address, kept in blocks_of_memory(range(one.address, one.address + one.size)):
                    if address not in mine:
                        raise CannotCaptureError(f"an operator keeps {kept:,} bytes that are no result of it")
        return mine

    def died(self, address: int) -> None:
        """A storage is gone."""
        self._requests.died(address)

    def layout(self, room: int) -> ArenaLayout:
        """Places for all that was asked for, for which so many bytes are there."""
        return self._requests.layout(room // PAGE * PAGE)


class Answering:
    """An arena, in which every request has its place."""

    def __init__(self, pages: Pages, layout: ArenaLayout, held: Collection[int], most: int) -> None:
        """Its pages are those that nobody has ``held``; so many bytes of them are there at ``most``."""
        self._pages, self._layout, self._operator = pages, layout, 0
        self._deaths: dict[int, int] = {}
        """By address of a storage that is alive: the operator whose results may lie there."""
        self._expected = 0
        """Requests of this part so far."""
        count = math.ceil(layout.bytes / PAGE)
        missing = max((count + len(held)) * PAGE, pages.size) - most // PAGE * PAGE
        if missing > 0:
            raise NoRoomError(f"they need {format_bytes(missing)} more than the budget leaves for them")
        there = pages.grow(count + len(held))
        free = [page for page in range(there) if page not in held][:count]
        if len(free) < count:
            raise NoRoomError("the device has no memory left for them")
        self.addresses = Addresses(count)
        self.pages: Sequence[int] = free
        pages.put_behind(self.addresses, free)

    @property
    def operator(self) -> int:
        """How many have run."""
        return self._operator

    def open(self) -> None:
        """A part is captured from here on."""
        self._expected = 0
        places = [place for operator in self._layout.operators[self._operator :] for place in operator]
        self._pages.answer(self.addresses, self._layout.bytes, [(one.size, one.offset) for one in places])

    def close(self) -> None:
        """Its end."""

    def begin(self) -> None:
        """An operator is going to run: what dies before it is gone."""
        if any(death <= self._operator for death in self._deaths.values()):
            raise CannotCaptureError("a tensor lives longer than it did at first")

    def ran(self, stay: Mapping[int, int]) -> Collection[int]:
        """It has left storages of so many bytes, by address: those among them that lie here."""
        operators, now = self._layout.operators, self._operator
        places = operators[now] if now < len(operators) else ()
        self._operator += 1
        self._expected += len(places)
        answered, unplanned = segments.answered()
        if unplanned or answered != self._expected:
            raise CannotCaptureError("operators ask for other memory than they did at first")
        mine = set()
        for address, size in stay.items():
            offset = address - self.addresses.base
            place = next((one for one in places if one.offset <= offset < one.offset + one.used), None)
            if place is None:
                continue
            if offset + size > place.offset + place.used:
                raise CannotCaptureError("a tensor is larger than it was at first")
            self._deaths[address] = place.death
            mine.add(address)
        return mine

    def died(self, address: int) -> None:
        """A storage is gone."""
        del self._deaths[address]
