"""Pooling, forward and backward: windows, and adaptive parts."""

from __future__ import annotations

from collections.abc import Sequence

from lowtide.graph.access.call import AccessCall, Indices, Rule, same
from lowtide.graph.access.index import Adaptive, Spread, Window
from lowtide.graph.access.relation import Relation

__all__ = ["RULES"]


def _numbers(value: object, rank: int, default: Sequence[int]) -> list[int]:
    """One number a dimension of space: a single one counts for all, none for the default."""
    if not isinstance(value, list) or not value:
        return list(default)
    return [int(n) for n in value] * (rank // len(value))


def _windows(
    call: AccessCall, index: type[Window | Spread], first: int, rank: int, axes: int, dilated: bool
) -> Indices:
    """Leading dimensions as they are, windows over the last; the figures stand from this argument on."""
    kernel = _numbers(call.value(first), rank, ())
    stride = _numbers(call.value(first + 1), rank, kernel)
    padding = _numbers(call.value(first + 2), rank, [0] * rank)
    dilation = _numbers(call.value(first + 3) if dilated else None, rank, [1] * rank)
    lead = axes - rank
    return (
        *same(lead),
        *(index(lead + d, kernel[d], stride[d], padding[d], dilation[d]) for d in range(rank)),
    )


def _forward(rank: int, *, dilated: bool) -> Rule:
    """The result, and for maxima their places."""

    def rule(call: AccessCall) -> list[Relation]:
        return [
            call.relation(s, [(call.value(0), _windows(call, Window, 1, rank, len(s), dilated))])
            for s in call.outputs
        ]

    return rule


def _backward(rank: int, *, dilated: bool) -> Rule:
    """The gradient where windows hold an element; the image is asked for its shape alone."""

    def rule(call: AccessCall) -> list[Relation]:
        shape = call.outputs[0]
        place = _windows(call, Spread, 2, rank, len(shape), dilated)
        places = [(call.value(7), place)] if dilated else []
        return [call.relation(shape, [(call.value(0), place), *places])]

    return rule


def _adaptive(rank: int) -> Rule:
    """Nearly equal parts, one an element; backward it is the same the other way round."""

    def rule(call: AccessCall) -> list[Relation]:
        read, found = call.value(0), []
        extent = call.shape(read) or ()
        for shape in call.outputs:
            lead = len(shape) - rank
            parts = tuple(Adaptive(d, shape[d], extent[d]) for d in range(lead, len(shape)))
            place = (*same(lead), *parts)
            places = [(call.value(2), place)] if call.kind.startswith("adaptive_max") else []
            found.append(call.relation(shape, [(read, place), *places]))
        return found

    return rule


RULES: dict[str, Rule] = {
    "avg_pool1d": _forward(1, dilated=False),
    **{f"avg_pool{n}d": _forward(n, dilated=False) for n in (2, 3)},
    **{f"avg_pool{n}d_backward": _backward(n, dilated=False) for n in (2, 3)},
    **{f"max_pool{n}d_with_indices": _forward(n, dilated=True) for n in (2, 3)},
    **{f"max_pool{n}d_with_indices_backward": _backward(n, dilated=True) for n in (2, 3)},
    **{f"_adaptive_avg_pool{n}d": _adaptive(n) for n in (2, 3)},
    **{f"_adaptive_avg_pool{n}d_backward": _adaptive(n) for n in (2, 3)},
    **{f"adaptive_max_pool{n}d": _adaptive(n) for n in (2, 3)},
    **{f"adaptive_max_pool{n}d_backward": _adaptive(n) for n in (2, 3)},
}
