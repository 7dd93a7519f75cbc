"""Tells the user of a function compiled for Lowtide of which no Program runs.

Torch skips code that it does not trace, such as its own ``DistributedDataParallel``, and runs it as it is
without a word. Results are right then, but nothing is inside a budget.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

__all__ = ["calls_begun", "program_ran", "warned_once"]

_COUNT = [0]
"""How many times a Program ran in this process."""
_CALLS, _DEPTH = [0], [0]
"""How many times functions that are compiled for Lowtide were called, and how many such calls run now."""

_TOLD = (
    "torch captured no graph of a function that is compiled for Lowtide: it runs as it is, and no budget "
    "holds. Torch skips its own code, such as DistributedDataParallel around modules of torch.nn. Compile a "
    "function of your own that calls it, or pass it to lowtide.fit, which plans what torch captures and says "
    "what it does not"
)


def program_ran() -> None:
    """Note that a Program runs."""
    _COUNT[0] += 1


def calls_begun() -> int:
    """How many times functions that are compiled for Lowtide were called, but for calls inside of others."""
    return _CALLS[0]


def warned_once(init: Callable[..., None], ours: Callable[[Any], bool]) -> Callable[..., None]:
    """The ``__init__`` of what torch wraps a function in, which looks after the first call of one of ours."""

    def made(self: Any, callback: Any, *args: Any, **kwargs: Any) -> None:
        init(self, callback, *args, **kwargs)
        if ours(callback):
            self.enter_exit_hooks.append(_watching())

    return made


def _watching() -> Callable[[], Callable[[], None]]:
    """Called before a call, gives what to call after it."""
    calls = [0]

    def enter() -> Callable[[], None]:
        calls[0] += 1
        _CALLS[0] += not _DEPTH[0]
        _DEPTH[0] += 1
        first, before = calls[0] == 1, _COUNT[0]

        def leave() -> None:
            _DEPTH[0] -= 1
            failed = sys.exc_info()[1] is not None
            if first and _COUNT[0] == before and not failed:
                warnings.warn(_TOLD, stacklevel=3)

        return leave

    return enter
