"""Whether a Program may run: every plan passes here first, whoever made it.

Shares no code with the planners, nor with the simulation that they trust. It plays the instructions one by
one (``play.py``) and holds them to the rules of docs/valid-programs.md; each error names its rule.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from lowtide.graph import Graph
from lowtide.plan.check.graph import facts_of, sound_fields
from lowtide.plan.check.play import Player
from lowtide.plan.check.rules import Rule, broken
from lowtide.plan.program.instructions import Program
from lowtide.units import format_bytes

__all__ = ["Checked", "check"]


@dataclass(frozen=True, slots=True)
class Checked:
    """What a Program that may run takes."""

    peak_bytes: int
    peak_at: int
    """The instruction at which it takes most."""
    runs: int
    host_bytes: int
    """The most that lies on the host at once."""


def check(
    graph: Graph,
    program: Program,
    *,
    budget: int | None = None,
    workspace_bytes: Sequence[int] = (),
    offload: Collection[str] = (),
    able: Collection[int] | None = None,
    inside: bool = False,
) -> Checked:
    """Play the Program; a PlanError names the first instruction that is wrong, and why.

    ``offload`` names the kinds of leaves that may leave the device: ``parameters``, ``optimizer``. ``able``
    names operators that have a form in place; None: whoever runs the Program looks whether they do.
    ``inside`` says that the Program is the body of a loop.
    """
    sound_fields(graph)
    if workspace_bytes and len(workspace_bytes) != len(graph.ops):
        raise broken(Rule.AMOUNTS, f"{len(workspace_bytes)} workspaces for {len(graph.ops)} operators")
    facts = facts_of(graph, offload, inside=inside)
    player = Player(facts, program, workspace_bytes, able, inside=inside)
    player.play()
    if budget is not None and player.peak > budget:
        raise broken(
            Rule.BUDGET,
            f"instruction {player.peak_at} takes {format_bytes(player.peak)}, more than the budget of "
            f"{format_bytes(budget)}",
        )
    return Checked(player.peak, player.peak_at, player.runs, player.most_on_host)
