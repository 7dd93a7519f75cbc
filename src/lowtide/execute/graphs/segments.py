"""Has PyTorch's allocator take segments from addresses and pages of our own, while a graph is captured."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable
from functools import cache
from typing import Any

import torch

from lowtide.execute.graphs.driver import Addresses
from lowtide.execute.graphs.pages import PAGE
from lowtide.execute.memory import reserved

try:
    from lowtide.execute.graphs import _segments
except ImportError:  # no compiler where it was installed
    _segments = None  # type: ignore[assignment]

__all__ = ["Pages", "available", "lacking", "pool", "taken"]

_NUMBERS = "I"


def available() -> bool:
    """Whether the compiled allocator is there."""
    return _segments is not None


@cache
def _allocator() -> Any:
    memory: Any = torch.cuda.memory
    return memory.CUDAPluggableAllocator(_segments.__file__, "lowtide_take", "lowtide_give")


def pool() -> Any:
    """A pool of PyTorch's allocator that takes its segments there."""
    cuda: Any = torch.cuda
    return cuda.MemPool(_allocator().allocator())


def taken() -> int:
    """Bytes of the addresses that were handed out."""
    return _segments.taken()


def lacking() -> int:
    """Bytes that were asked for without a page being left; what was captured then cannot be used."""
    return PAGE * _segments.lacking()


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

    def hand_out(self, addresses: Addresses, already: int, most: int) -> None:
        """Take segments from these addresses, behind those used ``already``; so many bytes at ``most``."""
        _segments.hand_out(self._memory, addresses.base, addresses.size, already, most // PAGE)

    def taken(self) -> list[int]:
        """The pages behind what was handed out since the last call."""
        return array(_NUMBERS, _segments.logged(self._memory)).tolist()

    def give(self, pages: Iterable[int]) -> None:
        """These are free again."""
        _segments.give(self._memory, array(_NUMBERS, pages).tobytes(), False)

    def give_all_but(self, held: Collection[int]) -> None:
        """Every page is free but for these."""
        free = (page for page in range(_segments.pages(self._memory)) if page not in held)
        _segments.give(self._memory, array(_NUMBERS, free).tobytes(), True)
