"""Products of matrices and vectors: sums over the inner dimension."""

from __future__ import annotations

from lowtide.graph.access.call import AccessCall, Rule, broadcast
from lowtide.graph.access.index import Same
from lowtide.graph.access.relation import Relation

__all__ = ["RULES"]


def _product(first: int) -> Rule:
    """(b, m, k) times (b, k, n), the factors standing from this argument on; what stands before is added.

    The batch b may be missing, and m or n where a factor is a vector.
    """

    def rule(call: AccessCall) -> list[Relation]:
        shape, inner = call.outputs[0], Same(len(call.outputs[0]))
        left, right = call.value(first), call.value(first + 1)
        one, other = call.shape(left) or (), call.shape(right) or ()
        batch = tuple(Same(axis) for axis in range(max(0, len(one) - 2)))
        rows = (Same(len(batch)),) if len(one) > 1 else ()
        columns = (Same(len(shape) - 1),) if len(other) > 1 else ()
        reads = [(left, (*batch, *rows, inner)), (right, (*batch, inner, *columns))]
        added = [call.value(k) for k in range(first)]
        reads += [(value, broadcast(call.shape(value) or (), shape)) for value in added]
        return [call.relation(shape, reads, sums=one[-1:], once=added)]

    return rule


def _linear(call: AccessCall) -> list[Relation]:
    """The last dimension times a matrix that stands with its result first."""
    shape = call.outputs[0]
    given, weight, bias = (call.value(k) for k in range(3))
    last, inner = Same(len(shape) - 1), Same(len(shape))
    lead = tuple(Same(axis) for axis in range(len(shape) - 1))
    reads = [(given, (*lead, inner)), (weight, (last, inner)), (bias, (last,))]
    return [call.relation(shape, reads, sums=(call.shape(given) or ())[-1:], once=[bias])]


RULES: dict[str, Rule] = {
    "mm": _product(0),
    "bmm": _product(0),
    "mv": _product(0),
    "dot": _product(0),
    "vdot": _product(0),
    "addmm": _product(1),
    "baddbmm": _product(1),
    "addmv": _product(1),
    "linear": _linear,
}
