"""The addresses of a step for the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lowtide.printable import printable
from lowtide.units import format_bytes, format_seconds

__all__ = ["told_addresses"]


def told_addresses(view: dict[str, Any]) -> Iterator[str]:
    """Lines for people."""
    best = ", which no arena of this alignment beats" if view["optimal"] else ""
    yield f"{printable(view['target'])}: {view['allocations']:,} allocations in {view['events']:,} events"
    yield f"  arena       {format_bytes(view['arena_bytes'])}{best}"
    yield f"  live        {format_bytes(view['live_bytes'])} at most at once"
    yield f"  efficiency  {view['efficiency']:.2%}, at multiples of {view['alignment']} bytes"
    yield f"  greedy      {_greedy(view)}"
    if view["given_bytes"] is not None:
        yield f"  as given    {format_bytes(view['given_bytes'])} by the offsets of the file"
    if view["total_bytes"] is not None:
        kept = "inside" if view["total_bytes"] <= view["budget_bytes"] else "more than"
        budget = format_bytes(view["budget_bytes"])
        yield f"  with leaves {format_bytes(view['total_bytes'])}, {kept} the budget of {budget}"
    if view["moved"] is not None:
        yield f"  order       {_order(view)}"
    yield f"  found by {view['method']} in {format_seconds(view['solve_seconds'])}; checked"


def _order(view: dict[str, Any]) -> str:
    if not view["moved"]:
        return "as given: no other order was found that takes less"
    before, moved = view["in_given_order_bytes"], view["moved"]
    less = format_bytes(before - view["arena_bytes"])
    what = "instruction runs" if moved == 1 else "instructions run"
    return f"{moved:,} {what} elsewhere, which takes {less} less than the {format_bytes(before)} as given"


def _greedy(view: dict[str, Any]) -> str:
    less = view["greedy_bytes"] <= view["arena_bytes"]
    return f"{'no less' if less else format_bytes(view['greedy_bytes'])} by size alone"
