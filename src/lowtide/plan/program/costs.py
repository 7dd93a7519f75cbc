"""Costs: what the operators of a step take, as a planner is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lowtide.graph import Graph, Phase

__all__ = ["Costs"]


@dataclass(frozen=True, slots=True)
class Costs:
    """What operators take, and where the figures come from."""

    seconds: tuple[float, ...]
    workspace_bytes: tuple[int, ...] = ()
    origin: str = "measured"
    forward_only: bool = False
    """Whether overhead is told against forward alone, as unit costs do: backward is free there."""
    short: Mapping[int, float] = field(default_factory=dict)
    """Seconds of second runs that start from what the first one saved, by operator."""
    wire_seconds: Mapping[int, float] = field(default_factory=dict)
    """What communications take on their lane, by operator; ``seconds`` has what they compute."""
    disturbed: int = 0
    """How many operators were measured while the machine was busy."""
    on_their_way: Mapping[int, int] = field(default_factory=dict)
    """Bytes of the parts that exchanges send and receive, by operator; one that is not here is waited for."""

    def plain_seconds(self, graph: Graph) -> float:
        """The time that overhead is told against."""
        ops = enumerate(graph.ops)
        return sum(self.seconds[k] for k, op in ops if not self.forward_only or op.phase is Phase.FORWARD)
