"""Normalisation over the last dimensions, over groups of channels, and over the batch."""

from __future__ import annotations

from lowtide.graph.access.call import Call, Rule, same, whole
from lowtide.graph.access.relation import Relation

__all__ = ["RULES"]


def _layer_norm(call: Call) -> list[Relation]:
    """The result, and the statistics of each row."""
    given, rank = call.value(0), len(call.value(1))
    result = call.outputs[0]
    lead = len(result) - rank
    row = (*same(lead), *whole(result[lead:]))
    last = same(rank, lead)
    scales = [(call.value(k), last) for k in (2, 3)]
    statistics = [call.relation(shape, [(given, row)]) for shape in call.outputs[1:]]
    return [call.relation(result, [(given, row), *scales]), *statistics]


RULES: dict[str, Rule] = {"native_layer_norm": _layer_norm, "_fused_rms_norm": _layer_norm}
