"""What devices read of the inputs of operators, each way to split an operator looked at once."""

from __future__ import annotations

from lowtide.graph import Graph, Op, Rect
from lowtide.graph.access import Relation, access
from lowtide.graph.shards import Mesh, OperatorShare, box_of
from lowtide.trace.shards.batch_norm import BATCH_NORMS

__all__ = ["Needs", "Reads"]

Needs = list[tuple[int, Rect]]
"""What some devices along an axis read of a tensor."""


class Reads:
    """The operators of a step."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._relations: dict[str, tuple[Relation, ...]] = {}
        self._known: dict[tuple[str, int, OperatorShare, tuple[int, ...], int], list[Needs]] = {}

    def relations(self, op: Op) -> tuple[Relation, ...]:
        """How each result follows from the inputs."""
        if op.id not in self._relations:
            self._relations[op.id] = access(self._graph, op).relations
        return self._relations[op.id]

    def of(self, op: Op, result: int, share: OperatorShare, mesh: Mesh, ranks: list[int]) -> list[Needs]:
        """For each input what devices read for one of the results, where these share the operator out."""
        key = op.id, result, share, tuple(ranks), mesh.devices
        if key not in self._known:
            found: list[Needs] = [[] for _ in op.inputs]
            for rank in ranks:
                for place, need in enumerate(self._read(op, result, share, mesh, rank)):
                    if need is not None and not need.empty:
                        found[place].append((rank, need))
            self._known[key] = found
        return self._known[key]

    def _read(self, op: Op, result: int, share: OperatorShare, mesh: Mesh, rank: int) -> list[Rect | None]:
        if op.kind in BATCH_NORMS:
            own = box_of(self._graph.tensors[op.outputs[0]].shape or (), share.cut, mesh, rank)
            channels = Rect(own.lo[1:2], own.hi[1:2])
            return [channels if place else own for place in range(len(op.inputs))]
        relation, over = self.relations(op)[result], None
        if share.over[0] is not None:
            over = box_of(relation.sums, share.over, mesh, rank)
        needs = relation.needs(box_of(relation.shape, share.computed, mesh, rank), over)
        later = over is not None and any(over.lo)
        return [None if later and place in relation.once else need for place, need in enumerate(needs)]
