"""Pages of memory, by their numbers."""

from __future__ import annotations

__all__ = ["LARGE_SEGMENT", "PAGE", "SMALL", "pages_of"]

PAGE = 2 << 20
"""Bytes of a page."""
SMALL = 1 << 20
"""Up to so many bytes PyTorch's allocator puts several tensors into one segment, of a page."""
LARGE_SEGMENT = 20 << 20
"""It asks for so much for a larger tensor of less than 10 MiB; for others for whole pages."""


def pages_of(first: int, size: int) -> range:
    """Numbers of the pages that bytes lie on, from address 0 on."""
    return range(first // PAGE, -(-(first + size) // PAGE))
