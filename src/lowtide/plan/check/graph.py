"""What the checker asks of a graph, and what it knows of one before the first instruction."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from lowtide.errors import GraphError
from lowtide.graph import (
    RESIDENT_ROLES,
    Graph,
    Op,
    Phase,
    Role,
    Tensor,
    check_fields,
    validate,
)
from lowtide.plan.check.rules import Rule, broken

__all__ = ["CUDA_GRANULE", "Facts", "allocated", "facts_of", "only_names", "sound", "sound_fields"]

CUDA_GRANULE = 512
"""The allocator gives memory on CUDA in multiples of so many bytes."""

_MAY_LEAVE = {"parameters": Role.PARAMETER, "optimizer": Role.OPTIMIZER}


def sound(graph: Graph) -> None:
    """Raise a PlanError if the graph contradicts itself."""
    try:
        validate(graph)
    except GraphError as error:
        raise broken(Rule.GRAPH, str(error)) from error
    if not graph.ordered:
        raise broken(Rule.GRAPH, "its graph does not say in which order operators run")
    sound_fields(graph)


def sound_fields(graph: Graph) -> None:
    """Raise a PlanError if a field of the graph that a Program relies on is wrong."""
    try:
        check_fields(graph)
    except GraphError as error:
        raise broken(Rule.GRAPH, str(error)) from error
    problem = _made_twice(graph)
    if problem is not None:
        raise broken(Rule.GRAPH, problem)


def _made_twice(graph: Graph) -> str | None:
    made: set[int] = set()
    for op in graph.ops:
        for t in op.outputs:
            if t in op.inputs:
                continue
            if t in made:
                return f"{op.label!r} makes {graph.tensors[t].label!r}, which another operator makes"
            made.add(t)
    return None


@dataclass(frozen=True, slots=True)
class Facts:
    """What follows from a graph alone. Tensors and operators are positions; a root owns its storage."""

    graph: Graph
    root: list[int]
    leaf: list[bool]
    """Whether the storage of a tensor is that of a leaf."""
    size: list[int]
    """What the allocator takes for a tensor of its own."""
    updates: list[tuple[int, ...]]
    """By operator: tensors whose memory its first run writes to, and that exist before."""
    wanted: dict[tuple[int, int], int]
    """How often a root is updated before an operator reads it."""
    final: dict[int, int]
    """How often a root is updated in all."""
    final_forward: dict[int, int]
    """How often forward updates a root."""
    made: frozenset[int]
    """Tensors that some operator makes or updates."""
    returned: frozenset[int]
    stay: frozenset[int]
    """Leaves, results and gradients of leaves: they are never dropped."""
    given: frozenset[int]
    """Tensors besides leaves that no operator makes: gradients that come in."""
    old: frozenset[int]
    """Leaves that backward finds as they were before the step: it gets a copy."""
    renewed: frozenset[int]
    """Those of them that the step updates: a view made in forward shows the new value."""
    may_leave: frozenset[int]
    """Leaves that may be on the host alone for a while."""

    def least_bytes(self) -> int:
        """What is there when the step ends: leaves, results and gradients."""
        return sum(self.size[t] for t in {self.root[t] for t in self.stay})

    def leaf_bytes(self) -> int:
        """What the leaves take."""
        return sum(self.size[t] for t, root in enumerate(self.root) if t == root and self.leaf[t])


def facts_of(graph: Graph, offload: Collection[str] = (), *, inside: bool = False) -> Facts:
    """What follows from a sound graph; ``inside`` of a loop nothing is copied between forward and backward.

    ``offload`` names the kinds of leaves that may leave the device.
    """
    tensors = graph.tensors
    root = graph.storages()
    updates = [op.changes for op in graph.ops]
    late = {
        root[t]
        for op, ts in zip(graph.ops, updates, strict=True)
        if op.phase is not Phase.FORWARD
        for t in ts
    }
    updated = {root[t] for t in graph.updated}
    changed = updated.union(*({root[t] for t in ts} for ts in updates))
    roots = [t for t in range(len(tensors)) if root[t] == t and tensors[t].role in RESIDENT_ROLES]
    old = {t for t in roots if (t in updated or tensors[t].role is Role.BUFFER) and t not in late}
    old = set() if inside else old
    made = frozenset(t for op in graph.ops for t in op.outputs)
    returned = frozenset(graph.returned)
    leaf = [tensors[r].role in RESIDENT_ROLES for r in root]
    roles = {_MAY_LEAVE[name] for name in offload if name in _MAY_LEAVE}
    shown = {root[t] for t in returned}
    wanted, final, final_forward = _versions(graph, root, updates, old & changed)
    return Facts(
        graph=graph,
        root=root,
        leaf=leaf,
        size=[allocated(one) for one in tensors],
        updates=updates,
        wanted=wanted,
        final=final,
        final_forward=final_forward,
        made=made,
        returned=returned,
        stay=_stay(graph, returned),
        given=frozenset(t for t in range(len(tensors)) if root[t] == t and t not in made and not leaf[t]),
        old=frozenset(old),
        renewed=frozenset(old & changed),
        may_leave=frozenset(
            t for t in roots if tensors[t].role in roles and t not in changed and t not in shown
        ),
    )


def allocated(tensor: Tensor) -> int:
    """What the allocator takes for a tensor of its own."""
    whole = tensor.device.startswith("cuda")
    return -(-tensor.bytes // CUDA_GRANULE) * CUDA_GRANULE if whole else tensor.bytes


def only_names(graph: Graph, op: Op) -> bool:
    """Whether all an operator makes are views: who does not read them need not make them.

    One that reads and makes nothing runs for what it changes: it adds to the gradients of tiles.
    """
    if not op.repeatable:
        return False
    if not op.outputs:
        return not op.reads
    return all(graph.tensors[t].alias is not None and t not in op.inputs for t in op.outputs)


def _versions(
    graph: Graph, root: list[int], updates: list[tuple[int, ...]], renewed: set[int]
) -> tuple[dict[tuple[int, int], int], dict[int, int], dict[int, int]]:
    """How often roots are updated before each operator reads them in program order, in all, by forward."""
    count: dict[int, int] = {}
    forward: dict[int, int] = {}
    wanted: dict[tuple[int, int], int] = {}
    for k, op in enumerate(graph.ops):
        for r in {root[t] for t in op.inputs}:
            before = r in renewed and op.phase is Phase.BACKWARD
            wanted[k, r] = 0 if before else count.get(r, 0)
        for r in {root[t] for t in updates[k]}:
            count[r] = count.get(r, 0) + 1
            forward[r] = forward.get(r, 0) + (op.phase is Phase.FORWARD)
    return wanted, count, forward


def _stay(graph: Graph, returned: frozenset[int]) -> frozenset[int]:
    tensors = graph.tensors
    found = {t for t, one in enumerate(tensors) if one.role in RESIDENT_ROLES}
    for t, one in enumerate(tensors):
        if one.gradient_of is not None and tensors[one.gradient_of].role in RESIDENT_ROLES:
            found.add(t)
    return returned | found
