"""Which dimensions follow the grid, tensor by tensor, and the operator at which none does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from lowtide.graph.access import Access, Relation
from lowtide.graph.rect import Rect
from lowtide.graph.tiles.types import Carried
from lowtide.graph.tiles.walk import ancestors, roots
from lowtide.graph.types import Graph

__all__ = ["Lost", "blocker", "follow"]


@dataclass(frozen=True, slots=True)
class Lost:
    """A place at which a part is not enough: an operator reads all of a tensor whatever is wanted."""

    op: int
    tensor: int
    axis: int
    """Of the grid."""


def follow(
    graph: Graph, ops: Sequence[int], accesses: Mapping[int, Access], tensor: int, dims: Sequence[int]
) -> tuple[dict[int, Carried], list[Lost]]:
    """The dimensions of every tensor that move with a grid over ``dims`` of one, and where none does."""
    nowhere: Carried = ((),) * len(dims)
    carried: dict[int, Carried] = {tensor: tuple((d,) for d in dims)}
    lost: list[Lost] = []
    for k in reversed(ops):
        op = graph.ops[k]
        for output, relation in zip(op.outputs, accesses[k].relations, strict=True):
            for axis, along in enumerate(carried.get(output, nowhere)):
                if not along:
                    continue
                for read, moved in zip(op.inputs, _moved(relation, along), strict=True):
                    if moved is None:
                        continue
                    before = carried.get(read, nowhere)
                    both = tuple(sorted({*before[axis], *moved}))
                    carried[read] = (*before[:axis], both, *before[axis + 1 :])
                    if not moved:
                        lost.append(Lost(k, read, axis))
    return carried, lost


def _moved(relation: Relation, along: Sequence[int]) -> Iterator[tuple[int, ...] | None]:
    """For each input the dimensions that are read elsewhere when another place of the output is wanted."""
    whole = Rect.of_shape(relation.shape)
    # of a single element the place behind it is asked for, though it is not there
    far = [max(1, relation.shape[d] - 1) for d in along]
    one = relation.reach(_at(whole, along, [0] * len(far)))
    other = relation.reach(_at(whole, along, far))
    for near, away in zip(one, other, strict=True):
        if near is None or away is None:
            yield None
        else:
            yield tuple(d for d, (a, b) in enumerate(zip(near, away, strict=True)) if a != b)


def _at(rect: Rect, along: Sequence[int], places: Sequence[int]) -> Rect:
    lo, hi = list(rect.lo), list(rect.hi)
    for d, place in zip(along, places, strict=True):
        lo[d], hi[d] = place, place + 1
    return msgspec.structs.replace(rect, lo=tuple(lo), hi=tuple(hi))


def blocker(
    graph: Graph,
    ops: Sequence[int],
    accesses: Mapping[int, Access],
    carried: Mapping[int, Carried],
    lost: Sequence[Lost],
) -> Lost | None:
    """The last operator that makes every tile need everything; None where tiles can be computed.

    A whole tensor is no harm where it does not come from what is cut: a weight, a mask, the embedding of a
    number. Where an operator further back gathered it from a tensor that is cut, that one is to blame.
    """
    origin = roots(graph, ops, accesses) if lost else {}
    inputs = frozenset[int]().union(*origin.values())
    for one in sorted(lost, key=lambda found: -found.op):
        own = origin.get(one.tensor, frozenset())
        cut = {t for t in inputs if t in carried and carried[t][one.axis]}
        if own and (own & cut or not cut):
            tensors, used = ancestors(graph, [k for k in ops if k < one.op], accesses, [one.tensor])
            for k in reversed(used):
                wanted = [t for t in graph.ops[k].outputs if t in tensors]
                gathered = _gathered(graph, k, accesses[k], wanted, carried, one.axis)
                if gathered is not None and origin.get(gathered):
                    return Lost(k, gathered, one.axis)
            return one
    return None


def _gathered(
    graph: Graph, k: int, access: Access, outputs: Sequence[int], carried: Mapping[int, Carried], axis: int
) -> int | None:
    """A tensor that is cut and of which the operator reads all for any part of these outputs."""
    op = graph.ops[k]
    for output, relation in zip(op.outputs, access.relations, strict=True):
        if output not in outputs:
            continue
        moved: list[set[int]] = [set() for _ in op.inputs]
        for d in range(len(relation.shape)):
            for found, dims in zip(moved, _moved(relation, (d,)), strict=True):
                found |= set(dims or ())
        for read, found, indices in zip(op.inputs, moved, relation.inputs, strict=True):
            along = carried[read][axis] if read in carried else ()
            if indices is not None and along and not found.issuperset(along):
                return read
    return None
