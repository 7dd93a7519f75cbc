"""Where in one arena everything lies that a captured step allocates.

A step is captured twice. The first time its requests for memory are listed, with how long each is needed.
Then each gets a place (``plan/address/``), and the second time the same requests are answered with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from lowtide.execute.graphs.arena.pages import LARGE_SEGMENT, PAGE, SMALL
from lowtide.plan.address.place import place
from lowtide.plan.address.types import Allocation

__all__ = ["ALIGNMENT", "ArenaLayout", "Listed", "Place", "Requests"]

ALIGNMENT = 512
"""Of all tensors in PyTorch's allocator."""
_TIME_LIMITS = (3.0, 20.0)
"""Seconds to look for places, and to look again where there is no room for the first ones."""


class Listed(NamedTuple):
    """A request of PyTorch's allocator: the address that it was given, and the size it has asked for."""

    address: int
    size: int


class Place(NamedTuple):
    """The answer to a request: ``offset <= byte < offset + used`` of the arena, until an operator runs."""

    size: int
    """What is asked for, of which the rest is not used: PyTorch rounds up."""
    offset: int
    used: int
    death: int
    """The number of that operator."""


class ArenaLayout(NamedTuple):
    """The places of a step, by operators that allocate in the arena, in their order."""

    operators: tuple[tuple[Place, ...], ...]
    bytes: int
    """Of the arena."""
    live_bytes: int
    """The most that is used at once."""


@dataclasses.dataclass(slots=True)
class _Request:
    listed: Listed
    used: int
    birth: int
    death: int | None
    """The operator before which nothing lies there any more."""
    alive: int = 0
    """Storages that lie there."""


class Requests:
    """What operators have asked for, one after the other, and how long it is needed."""

    def __init__(self, *, usual: bool = True) -> None:
        """``usual`` says that PyTorch asks for segments as it does where nobody sets their sizes."""
        self._usual = usual
        self._operators: list[list[_Request]] = []
        self._behind: dict[int, _Request] = {}
        """By address of a storage that is alive: where it lies."""

    def __len__(self) -> int:
        return len(self._operators)

    def ran(
        self, listed: Sequence[Listed], stay: Mapping[int, int], *, allocations: int, taken: int
    ) -> frozenset[int]:
        """An operator has asked for this; the addresses of what it has left there.

        ``stay`` are the storages of its results with their bytes, by address. It has made so many
        ``allocations``, blocks of so many bytes ``taken`` together. Where each has a request of its own, a
        result needs its own bytes alone. Others need what PyTorch has asked for, or less: no more than was
        taken beside the rest.
        """
        now = len(self._operators)
        within = [
            [address for address in stay if one.address <= address < one.address + one.size] for one in listed
        ]
        mine = frozenset(address for inside in within for address in inside)
        alone = allocations == len(listed)
        exact = {
            k: stay[one.address]
            for k, (one, inside) in enumerate(zip(listed, within, strict=True))
            if alone and inside == [one.address]
        }
        sizes = [one.size for one in listed]
        least = {k: _least(size) if self._usual else 0 for k, size in enumerate(sizes) if k not in exact}
        needed = _needed(sizes, exact, least, taken, alone=alone)
        found = []
        for one, inside, most in zip(listed, within, needed, strict=True):
            used = max([most, *(address - one.address + stay[address] for address in inside)])
            request = _Request(one, used, now, None if inside else now + 1, len(inside))
            self._behind |= dict.fromkeys(inside, request)
            found.append(request)
        self._operators.append(found)
        return mine

    def died(self, address: int) -> None:
        """What lay there is gone."""
        request = self._behind.pop(address)
        request.alive -= 1
        if not request.alive:
            request.death = len(self._operators)

    def layout(self, room: int | None = None) -> ArenaLayout:
        """A place for each; so many bytes are there for them."""
        end = len(self._operators)
        flat = [one for operator in self._operators for one in operator]
        for one in flat:
            one.death = end if one.death is None else one.death
        lumps = _lumps(flat, end)
        allocations = [
            Allocation(lump[0].birth, lump[0].death or end, max(1, sum(map(_rounded, lump))))
            for lump in lumps
        ]
        for limit in _TIME_LIMITS:
            found = place(allocations, alignment=ALIGNMENT, time_limit=limit)
            if room is None or found.arena_bytes <= room or found.live_bytes > room:
                break
        offsets: dict[int, int] = {}
        for lump, there in zip(lumps, found.allocations, strict=True):
            for one, before in zip(lump, accumulate(map(_rounded, lump), initial=0), strict=False):
                offsets[id(one)] = there.offset + before
        operators = tuple(
            tuple(Place(one.listed.size, offsets[id(one)], one.used, one.death or end) for one in operator)
            for operator in self._operators
        )
        return ArenaLayout(operators, found.arena_bytes, found.live_bytes)


def _needed(
    sizes: Sequence[int], exact: Mapping[int, int], least: Mapping[int, int], taken: int, *, alone: bool
) -> list[int]:
    """What is used of each request at most; of some it is known exactly, of others how much at least."""
    left = taken - sum(exact.values())
    beside = sum(least.values())
    if beside > left:  # PyTorch asks for more at once than it usually does
        least, beside = dict.fromkeys(least, 0), 0
    return [
        exact[k] if k in exact else min(SMALL if alone and size == PAGE else size, left - beside + least[k])
        for k, size in enumerate(sizes)
    ]


def _least(size: int) -> int:
    """What a tensor takes at least for which PyTorch's allocator asks for so many bytes."""
    if size <= PAGE:
        return 0
    return SMALL if size == LARGE_SEGMENT else size - PAGE


def _rounded(one: _Request) -> int:
    return -(-one.used // ALIGNMENT) * ALIGNMENT


def _lumps(requests: Sequence[_Request], end: int) -> list[list[_Request]]:
    """What gets places one by one; of what is small and stays to the end, so much together as a page has.

    Users may hold that, gradients above all, and with it whole pages.
    """
    lumps, open_bytes = [], PAGE
    staying: list[_Request] = []
    for one in requests:
        if one.death != end or one.used > SMALL:
            lumps.append([one])
            continue
        open_bytes += _rounded(one)
        if open_bytes > PAGE:
            staying, open_bytes = [], _rounded(one)
            lumps.append(staying)
        staying.append(one)
    return lumps
