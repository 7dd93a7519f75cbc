"""What parts of Lowtide need that not everybody has installed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from lowtide.errors import ToolError

__all__ = ["INSTALL_TORCH", "needs_torch"]

INSTALL_TORCH = 'pip install "lowtide[torch]"'


@contextlib.contextmanager
def needs_torch(what: str) -> Iterator[None]:
    """Imports inside that fail because torch is missing or broken become an error that says how to get it."""
    try:
        yield
    except ImportError as error:
        raise ToolError(
            f"{what} needs PyTorch, which cannot be imported ({error}): {INSTALL_TORCH}"
        ) from error
