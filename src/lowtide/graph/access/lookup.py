"""Operators that read or write where other tensors say: along those dimensions everything may be meant."""

from __future__ import annotations

from lowtide.graph.access.call import AccessCall, Indices, Rule, Shape, same, whole
from lowtide.graph.access.index import Same, Whole
from lowtide.graph.access.relation import Relation

__all__ = ["RULES"]


def _except(rank: int, dim: int) -> Indices:
    """Every axis where it is written, one dimension whole."""
    return tuple(Whole() if d == dim else Same(d) for d in range(rank))


def _embedding(call: AccessCall) -> list[Relation]:
    """Rows of a table, one an index."""
    shape, (table, indices) = call.outputs[0], (call.value(0), call.value(1))
    last = len(shape) - 1
    return [call.relation(shape, [(table, (Whole(), Same(last))), (indices, same(last))])]


def _embedding_backward(call: AccessCall) -> list[Relation]:
    """The table's gradient, a sum over all indices; how often each one occurs may count too."""
    shape, (gradient, indices) = call.outputs[0], (call.value(0), call.value(1))
    tokens = call.shape(indices) or ()
    place = same(len(tokens), 2)
    counted = whole(tokens) if call.value(4) else place
    return [call.relation(shape, [(gradient, (*place, Same(1))), (indices, counted)], sums=tokens)]


def _gather(call: AccessCall) -> list[Relation]:
    shape, index = call.outputs[0], call.value(2)
    if not shape or not call.shape(call.value(0)):
        return [call.everything(shape)]
    dim = call.value(1) % len(shape)
    return [call.relation(shape, [(call.value(0), _except(len(shape), dim)), (index, same(len(shape)))])]


def _index_select(call: AccessCall) -> list[Relation]:
    shape, index = call.outputs[0], call.value(2)
    if not shape:
        return [call.everything(shape)]
    dim = call.value(1) % len(shape)
    indexed = tuple(Same(dim) for _ in call.shape(index) or ())
    return [call.relation(shape, [(call.value(0), _except(len(shape), dim)), (index, indexed)])]


def _scatter(call: AccessCall) -> list[Relation]:
    """Elements of a source put where an index says; what they are put on may show through anywhere."""
    shape, index, source = call.outputs[0], call.value(2), call.value(3)
    if not shape or not call.shape(index):
        return [call.everything(shape)]
    dim = call.value(1) % len(shape)
    place = _except(len(shape), dim)
    put = place if call.shape(source) else ()
    return [call.relation(shape, [(call.value(0), same(len(shape))), (index, place), (source, put)])]


def _index(call: AccessCall) -> list[Relation] | None:
    """Several indices at once: they are stretched to one shape, which stands where the first of them did."""
    shape, source = call.outputs[0], call.shape(call.value(0)) or ()
    indices = call.value(1)
    indexed = [d for d, index in enumerate(indices) if index is not None]
    shapes = [call.shape(indices[d]) or () for d in indexed]
    rank = max(map(len, shapes), default=0)
    if any(call.is_mask(indices[d]) for d in indexed):
        return None  # how many elements it picks follows from its values
    together = indexed == list(range(indexed[0], indexed[0] + len(indexed)))
    first = indexed[0] if together else 0
    others = [axis for axis in range(len(shape)) if not first <= axis < first + rank]
    rest = iter(others)
    place = tuple(Whole() if d in indexed else Same(next(rest)) for d in range(len(source)))
    reads = [(call.value(0), place)]
    for d, extent in zip(indexed, shapes, strict=True):
        start = first + rank - len(extent)
        one = [Same(start + k) if n == shape[start + k] else Whole() for k, n in enumerate(extent)]
        reads.append((indices[d], tuple(one)))
    return [call.relation(shape, reads)]


def _index_put(call: AccessCall) -> list[Relation]:
    """Any of the values may be put anywhere; what is written over is taken for read."""
    shape = call.outputs[0]
    put = [(value, whole(call.shape(value) or ())) for value in (*call.value(1), call.value(2))]
    return [call.relation(shape, [(call.value(0), same(len(shape))), *put])]


def _grid(call: AccessCall) -> list[Relation]:
    """An image read between its elements, where a grid says."""
    shape, (image, grid) = call.outputs[0], (call.value(0), call.value(1))
    space = len(shape) - 2
    place = (Same(0), Same(1), *whole(shape[2:]))
    return [call.relation(shape, [(image, place), (grid, (Same(0), *same(space, 2), Whole()))])]


def _grid_backward(call: AccessCall) -> list[Relation]:
    """The image's gradient is a sum over the places of the grid, the grid's over channels."""
    gradient, image, grid = (call.value(k) for k in range(3))
    extent = call.shape(gradient) or ()
    rank, space = len(extent), len(extent) - 2

    def of_image(shape: Shape) -> Relation:
        places = same(space, rank)
        reads = [(gradient, (Same(0), Same(1), *places)), (grid, (Same(0), *places, Whole()))]
        return call.relation(shape, reads, sums=extent[2:])

    def of_grid(shape: Shape) -> Relation:
        channel, places = Same(rank), same(space, 1)
        reads = [
            (gradient, (Same(0), channel, *places)),
            (image, (Same(0), channel, *whole(extent[2:]))),
            (grid, (Same(0), *places, Whole())),
        ]
        return call.relation(shape, reads, sums=extent[1:2])

    parts = [p for p, asked in zip((of_image, of_grid), call.value(6), strict=True) if asked]
    return [part(shape) for part, shape in zip(parts, call.outputs, strict=True)]


RULES: dict[str, Rule] = {
    "embedding": _embedding,
    "embedding_dense_backward": _embedding_backward,
    "gather": _gather,
    **{f"grid_sampler_{n}d": _grid for n in (2, 3)},
    **{f"grid_sampler_{n}d_backward": _grid_backward for n in (2, 3)},
    "index": _index,
    "index_put": _index_put,
    "_unsafe_index": _index,
    "_unsafe_index_put": _index_put,
    "index_select": _index_select,
    "scatter": _scatter,
    "scatter_add": _scatter,
}
