"""Plans the best way to cut that a search found once more; with fused kernels, as it really runs."""

from __future__ import annotations

import contextlib

from lowtide.errors import InfeasibleError
from lowtide.execute.tiling.search import Search
from lowtide.plan import time_shares

__all__ = ["settle"]


def settle(search: Search) -> None:
    """Plan the best way in the time that is left; where tiles have groups, compile those of this way."""
    if search.interrupted:
        return
    if search.cutter.estimates:
        _compile(search)
    else:
        _polish(search)


def _polish(search: Search) -> None:
    for one in search.candidates.fastest[:1]:
        left = search.left() - one.over
        if left > one.limit:
            with search.unless_refused(), contextlib.suppress(InfeasibleError):
                search.take(one.search(one.way, left))


def _compile(search: Search) -> None:
    """What was tried had estimated groups: the next best way is compiled too where one disappoints."""
    rival = search.rival
    found = [one for one in search.candidates.found if rival is None or one.seconds < rival]
    if not found:
        return
    search.best = search.refused = None
    for one in found:
        if _good(search, one.seconds):
            break
        with search.unless_refused():
            way = search.cutter.compiled(one.way)
            try:
                search.take(one.search(way, max(one.limit, search.left() - one.over)))
            except InfeasibleError as error:
                search.missed(error, len(way.which[0]))
    if search.best is None and search.candidates.fastest:
        search.try_compiled()


def _good(search: Search, seconds: float) -> bool:
    """Whether the plan is as fast as another way promises to be, or compiling that would take too long."""
    enough = time_shares.TILE_COMPILING * search.request.limits.time_limit
    best = search.best
    return best is not None and (best.predicted.seconds <= seconds or search.cutter.compiling > enough)
