"""Operators that move elements: parts, joins, paddings, other orders of dimensions."""

from __future__ import annotations

from lowtide.graph.access.call import AccessCall, Indices, Rule, Shape, broadcast, same
from lowtide.graph.access.index import At, Digit, Index, Only, Reshaped, Same, Shift, Spread, Whole
from lowtide.graph.access.relation import Relation

__all__ = ["RULES"]


def _put(indices: Indices, dim: int, index: Index) -> Indices:
    """The same indices with another one in a dimension."""
    return (*indices[:dim], index, *indices[dim + 1 :])


def _only(indices: Indices, axis: int, position: int) -> Indices:
    """The same where the axis holds a position, else nothing."""
    return tuple(Only(axis, position, index) for index in indices)


def _start(value: int | None, length: int) -> int:
    """Where a slice begins, as Python has it."""
    start = value or 0
    return max(0, min(length, start + length if start < 0 else start))


def _slice(call: AccessCall) -> list[Relation]:
    shape = call.outputs[0]
    source = call.shape(call.value(0)) or ()
    dim = call.value(1, 0) % len(source)
    start, step = _start(call.value(2), source[dim]), call.value(4, 1)
    place = _put(same(len(shape)), dim, Shift(dim, start, step))
    return [call.relation(shape, [(call.value(0), place)])]


def _within(dim: int, start: int, step: int) -> Index:
    """Where in a slice the elements of the whole are."""
    return Shift(dim, -start) if step == 1 else Spread(dim, 1, step, -start)


def _slice_backward(call: AccessCall) -> list[Relation]:
    shape = call.outputs[0]
    dim = call.value(2) % len(shape)
    start, step = _start(call.value(3), shape[dim]), call.value(5, 1)
    place = _put(same(len(shape)), dim, _within(dim, start, step))
    return [call.relation(shape, [(call.value(0), place)])]


def _slice_scatter(call: AccessCall) -> list[Relation]:
    """What is written over is taken for read: it has no box of its own."""
    shape = call.outputs[0]
    dim = call.value(2, 0) % len(shape)
    start, step = _start(call.value(3), shape[dim]), call.value(5, 1)
    everywhere = same(len(shape))
    put = _put(everywhere, dim, _within(dim, start, step))
    return [call.relation(shape, [(call.value(0), everywhere), (call.value(1), put)])]


def _without(rank: int, dim: int) -> Indices:
    """All axes but one."""
    return (*same(dim), *same(rank - dim - 1, dim + 1))


def _inserted(rank: int, dim: int, index: Index) -> Indices:
    """All axes in order, and one dimension more."""
    return (*same(dim), index, *same(rank - dim, dim))


def _select(call: AccessCall) -> list[Relation]:
    source = call.shape(call.value(0)) or ()
    dim = call.value(1) % len(source)
    place = _inserted(len(source) - 1, dim, At(call.value(2) % source[dim]))
    return [call.relation(call.outputs[0], [(call.value(0), place)])]


def _select_backward(call: AccessCall) -> list[Relation]:
    shape = call.outputs[0]
    dim = call.value(2) % len(shape)
    place = _only(_without(len(shape), dim), dim, call.value(3) % shape[dim])
    return [call.relation(shape, [(call.value(0), place)])]


def _select_scatter(call: AccessCall) -> list[Relation]:
    shape = call.outputs[0]
    dim = call.value(2) % len(shape)
    place = _only(_without(len(shape), dim), dim, call.value(3) % shape[dim])
    return [call.relation(shape, [(call.value(0), same(len(shape))), (call.value(1), place)])]


def _unbind(call: AccessCall) -> list[Relation]:
    source = call.shape(call.value(0)) or ()
    dim = call.value(1, 0) % len(source)
    return [
        call.relation(shape, [(call.value(0), _inserted(len(shape), dim, At(k)))])
        for k, shape in enumerate(call.outputs)
    ]


def _split(call: AccessCall) -> list[Relation]:
    """Parts one behind the other, whatever says how long they are."""
    found, start = [], 0
    for shape in call.outputs:
        dim = call.value(2, 0) % len(shape)
        found.append(call.relation(shape, [(call.value(0), _put(same(len(shape)), dim, Shift(dim, start)))]))
        start += shape[dim]
    return found


def _cat(call: AccessCall) -> list[Relation]:
    shape = call.outputs[0]
    dim, start = call.value(1, 0) % len(shape), 0
    reads = []
    for part in call.value(0):
        extent = call.shape(part) or ()
        if len(extent) != len(shape):
            continue  # torch lets an empty tensor of any shape pass
        reads.append((part, _put(same(len(shape)), dim, Shift(dim, -start))))
        start += extent[dim]
    return [call.relation(shape, reads)]


def _stack(call: AccessCall) -> list[Relation]:
    shape = call.outputs[0]
    dim = call.value(1, 0) % len(shape)
    parts = enumerate(call.value(0))
    return [call.relation(shape, [(part, _only(_without(len(shape), dim), dim, k)) for k, part in parts])]


def _pad(call: AccessCall) -> list[Relation]:
    """Margins are given from the last dimension on; a negative one cuts off."""
    shape, margins = call.outputs[0], call.value(1)
    place = same(len(shape))
    for k in range(len(margins) // 2):
        dim = len(shape) - 1 - k
        place = _put(place, dim, Shift(dim, -margins[2 * k])) if margins[2 * k] else place
    return [call.relation(shape, [(call.value(0), place)])]


def _permute(call: AccessCall) -> list[Relation]:
    shape = call.outputs[0]
    order = [d % len(shape) for d in call.value(1)]
    return [_reordered(call, shape, order)]


def _transpose(call: AccessCall) -> list[Relation]:
    shape = call.outputs[0]
    order = list(range(len(shape)))
    if order:
        one, other = call.value(1) % len(shape), call.value(2) % len(shape)
        order[one], order[other] = order[other], order[one]
    return [_reordered(call, shape, order)]


def _t(call: AccessCall) -> list[Relation]:
    return [_reordered(call, call.outputs[0], list(range(len(call.outputs[0])))[::-1])]


def _reordered(call: AccessCall, shape: Shape, order: list[int]) -> Relation:
    """The output's axis k is the input's dimension ``order[k]``."""
    return call.relation(shape, [(call.value(0), tuple(Same(order.index(d)) for d in range(len(order))))])


def _expand(call: AccessCall) -> list[Relation]:
    shape = call.outputs[0]
    return [call.relation(shape, [(call.value(0), broadcast(call.shape(call.value(0)) or (), shape))])]


def _repeat(call: AccessCall) -> list[Relation]:
    """The whole again and again along each dimension."""
    shape = call.outputs[0]
    source = call.shape(call.value(0)) or ()
    skip = len(shape) - len(source)
    place: list[Index] = []
    for axis, length in enumerate(source, start=skip):
        place.append(Same(axis) if shape[axis] == length else Reshaped((Digit(axis, 1, length),)))
    return [call.relation(shape, [(call.value(0), tuple(place))])]


def _as_real(call: AccessCall) -> list[Relation]:
    """Both parts of complex numbers as a last dimension."""
    shape = call.outputs[0]
    return [call.relation(shape, [(call.value(0), same(len(shape) - 1))])]


def _as_complex(call: AccessCall) -> list[Relation]:
    """A last dimension of two elements as the parts of complex numbers."""
    shape = call.outputs[0]
    return [call.relation(shape, [(call.value(0), (*same(len(shape)), Whole()))])]


RULES: dict[str, Rule] = {
    "cat": _cat,
    "constant_pad_nd": _pad,
    "expand": _expand,
    "expand_copy": _expand,
    "narrow": _slice,
    "permute": _permute,
    "repeat": _repeat,
    "select": _select,
    "select_backward": _select_backward,
    "select_scatter": _select_scatter,
    "slice": _slice,
    "slice_backward": _slice_backward,
    "slice_scatter": _slice_scatter,
    "split": _split,
    "split_with_sizes": _split,
    "stack": _stack,
    "t": _t,
    "transpose": _transpose,
    "unbind": _unbind,
    "unsafe_split": _split,
    "view_as_complex": _as_complex,
    "view_as_real": _as_real,
}
