"""``access(graph, op)``: the rule of an operator's kind, asked."""

from __future__ import annotations

from lowtide.graph.access import (
    attention,
    batchnorm,
    convolution,
    layout,
    lookup,
    loss,
    normalize,
    pointwise,
    pool,
    product,
    rearrange,
    reduction,
    resample,
    reshape,
)
from lowtide.graph.access.call import AccessCall, Rule
from lowtide.graph.access.relation import Access
from lowtide.graph.types import DENSE, Graph, Op

__all__ = ["access"]

_FAMILIES = (
    pointwise,
    convolution,
    pool,
    layout,
    reshape,
    product,
    reduction,
    normalize,
    batchnorm,
    loss,
    lookup,
    attention,
    resample,
    rearrange,
)
_RULES: dict[str, Rule] = {kind: rule for family in _FAMILIES for kind, rule in family.RULES.items()}


def access(graph: Graph, op: Op) -> Access:
    """Which part of each input the operator reads for a part of each of its outputs.

    An operator that no rule knows, or whose arguments or shapes the graph does not tell, needs everything.
    """
    rule = _rule(op)
    call = AccessCall(graph, op)
    told = all(graph.tensors[t].shape is not None for t in (*op.inputs, *op.outputs))
    relations = rule(call) if rule is not None and told and op.arguments is not None else None
    if relations is None:
        return Access(False, tuple(map(call.everything, call.outputs)))
    return Access(True, tuple(relations))


def _rule(op: Op) -> Rule | None:
    """By kind; an operator in place reads what the other one reads, and its first argument is the output."""
    if op.kind == DENSE:
        return _RULES["clone"]
    if not op.kind.startswith("aten."):
        return None
    kind = op.kind.removeprefix("aten.")
    return _RULES.get(kind) or _RULES.get(kind.removesuffix("_"))
