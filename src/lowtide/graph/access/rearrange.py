"""Elements in another order, and windows, halves and blocks of a dimension set beside each other."""

from __future__ import annotations

from lowtide.graph.access.call import AccessCall, Rule, same
from lowtide.graph.access.index import (
    LONGEST_TABLE,
    Digit,
    Either,
    Reshaped,
    Same,
    Shift,
    Slide,
    Spans,
    Spread,
    Whole,
)
from lowtide.graph.access.relation import Relation

__all__ = ["RULES"]


def _turned(call: AccessCall) -> list[Relation] | None:
    """Dimensions read backwards, or from another element on."""
    shape, given = call.outputs[0], call.value(0)
    if call.kind == "flip":
        moved = {d % len(shape): None for d in call.value(1)}
    elif call.value(2):
        moved = {d % len(shape): by for d, by in zip(call.value(2), call.value(1), strict=True)}
    else:
        return None  # rolled as if it had one dimension
    if any(shape[d] > LONGEST_TABLE for d in moved):
        return None
    place = [
        Spans(d, _moved_by(moved[d], length)) if d in moved else Same(d) for d, length in enumerate(shape)
    ]
    return [call.relation(shape, [(given, tuple(place))])]


def _moved_by(by: int | None, length: int) -> tuple[tuple[int, int], ...]:
    """For each element the one that is read: so many places before it, or None, from the other end."""
    order = [length - 1 - k if by is None else (k - by) % length for k in range(length)]
    return tuple((k, k + 1) for k in order)


def _shuffle(call: AccessCall) -> list[Relation]:
    """Channels laid out as rows and columns."""
    shape, factor = call.outputs[0], call.value(1)
    c, h, w = (len(shape) - 3 + k for k in range(3))
    channel = Reshaped((Digit(c, 1, shape[c], factor**2), Digit(h, 1, factor, factor), Digit(w, 1, factor)))
    space = [Reshaped((Digit(axis, factor, shape[axis] // factor),)) for axis in (h, w)]
    return [call.relation(shape, [(call.value(0), (*same(c), channel, *space))])]


def _unshuffle(call: AccessCall) -> list[Relation]:
    """Rows and columns gathered as channels."""
    shape, factor = call.outputs[0], call.value(1)
    c, h, w = (len(shape) - 3 + k for k in range(3))
    channel = Reshaped((Digit(c, factor**2, shape[c] // factor**2),))
    rows = Reshaped((Digit(h, 1, shape[h], factor), Digit(c, factor, factor)))
    columns = Reshaped((Digit(w, 1, shape[w], factor), Digit(c, 1, factor)))
    return [call.relation(shape, [(call.value(0), (*same(c), channel, rows, columns))])]


def _gated(call: AccessCall) -> list[Relation]:
    """One half of a dimension times what is made of the other."""
    shape = call.outputs[0]
    dim = call.value(1, -1) % len(shape)
    both = Either(Same(dim), Shift(dim, shape[dim]))
    place = tuple(both if d == dim else Same(d) for d in range(len(shape)))
    return [call.relation(shape, [(call.value(0), place)])]


def _gated_backward(call: AccessCall) -> list[Relation]:
    """The gradient has the length of a half; of the dimension itself both halves count everywhere."""
    shape = call.outputs[0]
    dim = call.value(2) % len(shape)
    half = Reshaped((Digit(dim, 1, shape[dim] // 2),))
    gradient = tuple(half if d == dim else Same(d) for d in range(len(shape)))
    place = tuple(Whole() if d == dim else Same(d) for d in range(len(shape)))
    return [call.relation(shape, [(call.value(0), gradient), (call.value(1), place)])]


def _unfold(call: AccessCall) -> list[Relation]:
    """Windows over a dimension, their elements as the last."""
    shape, dim = call.outputs[0], call.value(1) % max(1, len(call.outputs[0]) - 1)
    place = [Slide(d, len(shape) - 1, call.value(3)) if d == dim else Same(d) for d in range(len(shape) - 1)]
    return [call.relation(shape, [(call.value(0), tuple(place))])]


def _unfold_backward(call: AccessCall) -> list[Relation]:
    shape, size, step = call.outputs[0], call.value(3), call.value(4)
    dim = call.value(2) % max(1, len(shape))
    place = [Spread(d, size, step) if d == dim else Same(d) for d in range(len(shape))]
    return [call.relation(shape, [(call.value(0), (*place, Whole()))])]


RULES: dict[str, Rule] = {
    "flip": _turned,
    "glu": _gated,
    "glu_backward": _gated_backward,
    "pixel_shuffle": _shuffle,
    "pixel_unshuffle": _unshuffle,
    "roll": _turned,
    "unfold": _unfold,
    "unfold_backward": _unfold_backward,
}
