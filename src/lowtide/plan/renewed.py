"""Second runs that would find a leaf with another value than the first: the step has updated it since.

Backward has a copy of what forward updates, from before the step. So a second run of an operator that reads
such a leaf is right in backward, and in forward as long as the leaf is not updated yet.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from lowtide.graph import Graph

__all__ = ["leaf_updates", "reads_new"]


def leaf_updates(
    graph: Graph, ops: Sequence[int], storage: Sequence[int], leaves: Collection[int]
) -> dict[int, list[int]]:
    """By storage of a leaf, the positions in ``ops`` of the operators that update it."""
    found: dict[int, list[int]] = {}
    for v, k in enumerate(ops):
        op = graph.ops[k]
        changed = {t for t in op.outputs if t in op.inputs}
        for t in changed.union(op.inputs[j] for j in op.attributes.get("updates", ())):
            if storage[t] in leaves:
                found.setdefault(storage[t], []).append(v)
    return found


def reads_new(
    v: int, read: Collection[int], updates: Mapping[int, Sequence[int]], split: int, count: int
) -> bool:
    """Whether a second run of operator ``v``, which reads these leaves, may find one with another value.

    There are ``count`` operators, ``split`` of them of forward.
    """
    at = [u for leaf in read for u in updates.get(leaf, ())]
    return any(u < v or u + 1 < (split if u < split else count) for u in at)
