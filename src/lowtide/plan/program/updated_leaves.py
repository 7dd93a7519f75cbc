"""Leaves that the step itself updates: a second run of an operator that reads one may find a new value.

Backward has a copy of what forward updates, from before the step. A second run in forward is right only as
long as the leaf is not updated yet, which depends on the order that a search may still change.
"""

from __future__ import annotations

from collections.abc import Collection

from lowtide.graph import Graph

__all__ = ["updated_leaves"]


def updated_leaves(graph: Graph, storage: list[int], leaves: Collection[int]) -> set[int]:
    """Storages of leaves that operators update."""
    found: set[int] = set()
    for op in graph.ops:
        changed = {t for t in op.outputs if t in op.inputs}
        changed.update(op.inputs[j] for j in op.updates)
        found |= {storage[t] for t in changed if storage[t] in leaves}
    return found
