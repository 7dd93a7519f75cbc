"""Addresses of a CUDA device, by the functions of its driver.

They are reserved without memory. Mapping puts pages of memory behind them (``segments.py``). They belong to
the process that reserved them: one that is forked from it gives nothing back.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
from collections.abc import Collection, Sequence
from functools import cache
from typing import Any

from lowtide.execute.graphs.arena.pages import PAGE
from lowtide.execute.memory.reserved import count

__all__ = ["Addresses", "DriverError", "call"]

_ADDRESSES = 4 << 40
"""Bytes of addresses that both parts of a step may take while they are listed; they cost nothing."""


class DriverError(Exception):
    """CUDA's driver has refused something."""


@cache
def _library() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def call(name: str, *arguments: Any) -> None:
    """Call a function of the driver; a DriverError where it is not there or does not succeed."""
    try:
        function = getattr(_library(), name)
    except (OSError, AttributeError) as error:
        raise DriverError(f"CUDA's driver has no {name}: {error}") from error
    code = function(*arguments)
    if code:
        raise DriverError(f"{name} has failed with CUDA error {code}")


class _Left:
    """Pages of a device on which nothing but tensors of the user lies."""

    def __init__(self, index: int, size: int) -> None:
        self.index, self.size = index, size


class Addresses:
    """A range of addresses, with pages behind some of them."""

    def __init__(self, pages: int = _ADDRESSES // PAGE) -> None:
        base = ctypes.c_uint64()
        self.size = max(1, pages) * PAGE
        alignment, none = ctypes.c_size_t(PAGE), ctypes.c_uint64(0)
        call("cuMemAddressReserve", ctypes.byref(base), ctypes.c_size_t(self.size), alignment, none, none)
        self.base = base.value
        self._process = os.getpid()
        self.mapped: set[int] = set()
        """Pages of addresses that have memory."""
        self._left: _Left | None = None

    def __contains__(self, address: int) -> bool:
        return self.base <= address < self.base + self.size

    def unmap(self, keep: Collection[int] = ()) -> None:
        """Have nothing behind the addresses, but for some pages of them."""
        if self._process != os.getpid():
            return
        if self.mapped:
            call("cuCtxSynchronize")  # whoever runs on them has ended
        for run in _runs(sorted(self.mapped.difference(keep))):
            at = ctypes.c_uint64(self.base + PAGE * run.start)
            call("cuMemUnmap", at, ctypes.c_size_t(PAGE * len(run)))
            self.mapped.difference_update(run)

    def leave(self, keep: Collection[int], index: int) -> None:
        """The same; what is kept of a device is counted as long as this is there."""
        self.unmap(keep)
        if keep:
            self._left = _Left(index, PAGE * len(keep))
            count(self._left)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # as where the process ends
            self.unmap()
            if self._process == os.getpid():
                call("cuMemAddressFree", ctypes.c_uint64(self.base), ctypes.c_size_t(self.size))


def _runs(numbers: Sequence[int]) -> list[range]:
    """Numbers that follow each other, together."""
    found = []
    for _, run in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        listed = [number for _, number in run]
        found.append(range(listed[0], listed[-1] + 1))
    return found
