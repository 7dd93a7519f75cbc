"""Which pages of memory are behind which addresses.

Addresses come and go in the order of the step, and pages need not lie side by side. So a page is free or it
is not: as many are needed as are live at once, and nothing is lost between them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence

__all__ = ["PAGE", "SMALL", "Lifetimes", "pages_of"]

PAGE = 2 << 20
"""Bytes of a page."""
SMALL = 1 << 20
"""Up to so many bytes PyTorch's allocator puts several tensors into one segment."""


def pages_of(first: int, size: int) -> range:
    """Numbers of the pages that bytes lie on, from address 0 on."""
    return range(first // PAGE, -(-(first + size) // PAGE))


class Lifetimes:
    """Says which pages of memory are free again, operator after operator."""

    def __init__(self, give: Callable[[list[int]], None]) -> None:
        """``give`` is told of pages that are free."""
        self._give = give
        self.behind: dict[int, int] = {}
        """By the number of a page of addresses: the page of memory."""
        self._holders: Counter[int] = Counter()

    @property
    def used(self) -> set[int]:
        """All pages of memory that are behind an address."""
        return set(self.behind.values())

    def ran(self, span: range, memory: Sequence[int], stay: Sequence[Collection[int]]) -> None:
        """An operator took this span of pages of addresses, with pages of memory behind it.

        What it has left is on those that ``stay``. Each of these dies by itself. All others were needed while
        it ran.
        """
        self.behind |= dict(zip(span, memory, strict=True))
        for pages in stay:
            self._holders.update(pages)
        self._give([self.behind[page] for page in span if not self._holders[page]])

    def died(self, pages: Collection[int]) -> None:
        """One of those that stayed is gone."""
        self._holders.subtract(pages)
        self._give([self.behind[page] for page in pages if not self._holders[page]])

    def memory(self, pages: Iterable[int]) -> frozenset[int]:
        """The pages of memory behind pages of addresses."""
        return frozenset(self.behind[page] for page in pages)
