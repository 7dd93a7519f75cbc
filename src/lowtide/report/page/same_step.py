"""Which ways to run a step are of the same step, and what they are called where several have one name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from lowtide.graph import Graph, Role
from lowtide.report.page.run_view import WayToRun

__all__ = ["grouped", "leaves_of", "told_apart"]


def leaves_of(graph: Graph) -> set[tuple[str, int]]:
    """By which two plans are known to be of one step: its parameters, however it is cut or fused."""
    return {(one.id, one.bytes) for one in graph.tensors if one.role is Role.PARAMETER}


def grouped(ways: Sequence[WayToRun], whole: Mapping[int, int]) -> list[WayToRun]:
    """With the number of the step that each runs: by its parameters, or those of the way it is part of."""
    seen: list[set[tuple[str, int]]] = []
    found = []
    for k, way in enumerate(ways):
        leaves = leaves_of(ways[whole.get(k, k)].part.graph)
        if leaves and leaves not in seen:
            seen.append(leaves)
        found.append(replace(way, group=seen.index(leaves) + 1 if leaves else 0))
    return found


def told_apart(ways: Sequence[WayToRun]) -> list[WayToRun]:
    """Ways of several files that have one name, such as eager PyTorch, each with its file."""
    count = Counter(way.name for way in ways)
    return [replace(way, name=f"{way.name} ({way.file})") if count[way.name] > 1 else way for way in ways]
