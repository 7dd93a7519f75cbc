"""Has PyTorch's allocator take segments from addresses and pages of our own, while a graph is captured."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from lowtide.execute.graphs.arena.driver import Addresses
from lowtide.execute.graphs.arena.layout import Listed
from lowtide.execute.graphs.arena.pages import PAGE
from lowtide.execute.memory import reserved

try:
    from lowtide.execute.graphs.arena import _segments
except ImportError:  # no compiler where it was installed
    _segments = None  # type: ignore[assignment]

__all__ = ["Pages", "answered", "available", "listed", "pool", "taken"]

_PAGE_NUMBERS, _SIZES = "I", "Q"
_ALLOCATORS: list[Any] = []
"""PyTorch keeps a pointer to each for good."""


def available() -> bool:
    """Whether the compiled allocator is there."""
    return _segments is not None


def pool(number: int) -> Any:
    """A pool of PyTorch's allocator that takes its segments there; each allocation has one of its own.

    PyTorch remembers what each allocator has given, by address: pools that are alive together, and that may
    get the same address, have allocators of their own, by their ``number``.
    """
    cuda: Any = torch.cuda
    while len(_ALLOCATORS) <= number:
        made = cuda.memory.CUDAPluggableAllocator(_segments.__file__, "lowtide_take", "lowtide_give")
        _ALLOCATORS.append(made)
    allocator = _ALLOCATORS[number].allocator()
    try:
        return cuda.MemPool(allocator, no_split=True)
    except TypeError:  # PyTorch of before: allocations may share a segment, which is placed as a whole
        return cuda.MemPool(allocator)


def taken() -> int:
    """Bytes of the addresses that were handed out."""
    return _segments.state()[0]


def answered() -> tuple[int, int]:
    """How many requests got the places that they were given, and how many were not known."""
    _, known, unknown = _segments.state()
    return known, unknown


def listed(addresses: Addresses) -> list[Listed]:
    """What was asked for since the last call, at these addresses."""
    numbers = array(_SIZES, _segments.requests()).tolist()
    pairs = zip(numbers[::2], numbers[1::2], strict=True)
    return [Listed(addresses.base + offset, size) for size, offset in pairs]


class Pages:
    """Pages of memory on a device, by their numbers. They are freed with it, once no address has them."""

    def __init__(self, device: torch.device) -> None:
        self.index: int = torch.cuda.current_device() if device.index is None else device.index
        self._memory = _segments.new_memory(self.index)
        reserved.count(self)

    @property
    def size(self) -> int:
        """Bytes of all pages."""
        return PAGE * _segments.pages(self._memory)

    def grow(self, count: int) -> int:
        """Have so many pages at least; how many there are then: fewer where the device has no more."""
        return _segments.new_pages(self._memory, count)

    def put_behind(self, addresses: Addresses, pages: Sequence[int]) -> None:
        """Have these pages behind the addresses, one after the other."""
        _segments.lay(self._memory, addresses.base, array(_PAGE_NUMBERS, pages).tobytes())
        addresses.mapped.update(range(len(pages)))

    def list_requests(self, addresses: Addresses, taken: int) -> None:
        """List what is asked for; it gets addresses behind those ``taken``."""
        _segments.list_requests(self._memory, addresses.base, addresses.size, taken)

    def answer(self, addresses: Addresses, size: int, places: Iterable[tuple[int, int]]) -> None:
        """Answer requests of these sizes with these offsets, one after the other, in so many bytes."""
        numbers = array(_SIZES, [number for place in places for number in place])
        _segments.answer(self._memory, addresses.base, size, numbers.tobytes())
