"""What a search says of itself now and again, on standard error."""

from __future__ import annotations

from collections.abc import Callable

from lowtide.commands.common import say
from lowtide.pace import Pace
from lowtide.units import format_cost

__all__ = ["Progress", "search_progress"]

Progress = Callable[[float, float | None, float, float | None], None]


def search_progress(origin: str = "measured", *, quiet: bool = False) -> Progress | None:
    """The best so far, the bound and the gap, by costs of this origin; None where ``quiet``."""
    if quiet:
        return None
    pace = Pace()

    def tell(seconds: float, best: float | None, bound: float, gap: float | None) -> None:
        if pace.due():
            found = "no plan yet" if best is None else f"best {format_cost(best, origin)} more"
            share = "" if gap is None else f", gap {gap:.1%}"
            say(
                f"searching for {seconds:.0f} s: {found}, bound {format_cost(bound, origin)}{share} …",
                err=True,
            )

    return tell
