"""Reductions: sums and means, which parts add up to, and others, which need all of what they reduce."""

from __future__ import annotations

from collections.abc import Sequence

from lowtide.graph.access.call import AccessCall, Indices, Rule, Shape, same
from lowtide.graph.access.index import Index, Same, Until, Whole
from lowtide.graph.access.relation import Relation

__all__ = ["RULES"]


def _kept(source: Shape, shape: Shape, dims: Sequence[int], reduced: Sequence[Index]) -> Indices:
    """Dimensions that stay are read where they are written, the others as said."""
    keeps = len(source) == len(shape)
    found: list[Index] = []
    axis = 0
    for d in range(len(source)):
        if d in dims:
            found.append(reduced[list(dims).index(d)])
            axis += keeps
        else:
            found.append(Same(axis))
            axis += 1
    return tuple(found)


def _sum(*, scaled: bool) -> Rule:
    """Of everything, or of some dimensions."""

    def rule(call: AccessCall) -> list[Relation]:
        shape, given = call.outputs[0], call.value(0)
        source = call.shape(given) or ()
        dims = call.dims(call.value(1), len(source))
        place = _kept(source, shape, dims, same(len(dims), len(shape)))
        return [call.relation(shape, [(given, place)], sums=[source[d] for d in dims], scaled=scaled)]

    return rule


def _all(position: int) -> Rule:
    """Operators whose result needs all of the dimensions that this argument names."""

    def rule(call: AccessCall) -> list[Relation] | None:
        if any(call.shape(v) is not None for v in call.values()[1:]):
            return None
        given = call.value(0)
        source = call.shape(given) or ()
        dims = call.dims(_dims(call, position), len(source))
        places = [(s, _kept(source, s, dims, [Whole()] * len(dims))) for s in call.outputs]
        return [call.relation(shape, [(given, place)]) for shape, place in places]

    return rule


def _dims(call: AccessCall, position: int) -> object:
    """The dimensions; a switch in their place belongs to a form that takes everything."""
    value = call.value(position)
    return None if isinstance(value, bool) else value


def _softmax(call: AccessCall) -> list[Relation]:
    """Along the whole of a dimension."""
    shape = call.outputs[0]
    return [call.relation(shape, [(call.value(0), _along(call, shape, 1))])]


def _softmax_backward(call: AccessCall) -> list[Relation]:
    """The gradient is summed; the result counts elsewhere only where it is no logarithm."""
    shape = call.outputs[0]
    row = _along(call, shape, 2)
    result = same(len(shape)) if call.kind.startswith("_log") else row
    return [call.relation(shape, [(call.value(0), row), (call.value(1), result)])]


def _along(call: AccessCall, shape: Shape, position: int) -> Indices:
    """Everything where it is written, but for one dimension, which is read whole."""
    dims = call.dims(call.value(position), len(shape))
    return _kept(shape, shape, dims, [Whole()] * len(dims))


def _ordered(position: int) -> Rule:
    """Elements in their order along a dimension, the last one unless this argument names it."""

    def rule(call: AccessCall) -> list[Relation]:
        rank = len(call.outputs[0])
        dims = call.dims(call.value(position, call.option("dim", -1)), rank)
        return [
            call.relation(shape, [(call.value(0), _kept(shape, shape, dims, [Whole()]))])
            for shape in call.outputs
        ]

    return rule


def _running(call: AccessCall) -> list[Relation]:
    """Everything up to an element, along a dimension."""
    dim = call.dims(call.value(1), len(call.outputs[0]))
    return [
        call.relation(shape, [(call.value(0), _kept(shape, shape, dim, [Until(d) for d in dim]))])
        for shape in call.outputs
    ]


_WHOLE = "all amax amin any argmax argmin logsumexp max median min prod std std_mean var var_mean"
_RUNNING = "cummax cummin cumprod cumsum logcumsumexp"

RULES: dict[str, Rule] = (
    {"sum": _sum(scaled=False), "mean": _sum(scaled=True)}
    | {kind: _all(1) for kind in _WHOLE.split()}
    | {"linalg_vector_norm": _all(2), "norm": _all(2)}
    | {"sort": _ordered(1), "topk": _ordered(2)}
    | {"_softmax": _softmax, "_log_softmax": _softmax, "_safe_softmax": _softmax}
    | {"_softmax_backward_data": _softmax_backward, "_log_softmax_backward_data": _softmax_backward}
    | dict.fromkeys(_RUNNING.split(), _running)
)
