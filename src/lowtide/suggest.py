"""A misspelt name gets "did you mean"."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["did_you_mean"]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`` Did you mean 'x'?`` for the known names nearest to this one, or nothing."""
    names = {candidate.lower(): candidate for candidate in known}
    close = difflib.get_close_matches(name.lower(), names, n=3, cutoff=0.5)
    if not close:
        return ""
    return " Did you mean " + " or ".join(repr(names[one]) for one in close) + "?"
