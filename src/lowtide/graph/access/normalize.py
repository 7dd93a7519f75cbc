"""Normalisation over the last dimensions of a row and over groups of channels, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lowtide.graph.access.call import AccessCall, Indices, Rule, Shape, same, whole
from lowtide.graph.access.index import BlockIndex, Same
from lowtide.graph.access.relation import Relation

__all__ = ["RULES"]


def _layer_norm(call: AccessCall) -> list[Relation]:
    """The result, and the statistics of each row."""
    given, rank = call.value(0), len(call.value(1))
    result = call.outputs[0]
    lead = len(result) - rank
    row = (*same(lead), *whole(result[lead:]))
    scales = [(call.value(k), same(rank, lead)) for k in (2, 3)]
    statistics = [call.relation(shape, [(given, row)]) for shape in call.outputs[1:]]
    return [call.relation(result, [(given, row), *scales]), *statistics]


def _layer_norm_backward(statistics: Sequence[int], weight: int, asked: int) -> Rule:
    """Gradients of the rows, of the weight and of the bias, as far as they are asked for.

    The figures are where statistics, weight and what is asked for stand among the arguments.
    """

    def rule(call: AccessCall) -> list[Relation]:
        gradient, given = call.value(0), call.value(1)
        rows, rank = call.shape(given) or (), len(call.value(2))
        lead = len(rows) - rank
        known = [(call.value(k), call.shape(call.value(k)) or ()) for k in statistics]

        def of_rows(shape: Shape) -> Relation:
            row = (*same(lead), *whole(rows[lead:]))
            told = [(value, (*same(lead), *whole(extent[lead:]))) for value, extent in known]
            scale = (call.value(weight), whole(rows[lead:]))
            return call.relation(shape, [(gradient, row), (given, row), *told, scale])

        def of_weight(shape: Shape) -> Relation:
            place = (*same(lead, rank), *same(rank))
            told = [(value, (*same(lead, rank), *whole(extent[lead:]))) for value, extent in known]
            return call.relation(shape, [(gradient, place), (given, place), *told], sums=rows[:lead])

        def of_bias(shape: Shape) -> Relation:
            return call.relation(shape, [(gradient, (*same(lead, rank), *same(rank)))], sums=rows[:lead])

        parts = [p for p, a in zip((of_rows, of_weight, of_bias), call.value(asked), strict=False) if a]
        return [part(shape) for part, shape in zip(parts, call.outputs, strict=True)]

    return rule


def _group_norm(call: AccessCall) -> list[Relation]:
    """The result, and the statistics of each group of channels."""
    given, channels, groups = call.value(0), call.value(4), call.value(6)
    per = channels // groups
    result, *statistics = call.outputs
    space = whole(result[2:])
    group = (Same(0), BlockIndex(1, per, per), *space)
    scales: list[tuple[Any, Indices]] = [(call.value(k), (Same(1),)) for k in (1, 2)]
    members = (Same(0), BlockIndex(1, 1, per), *space)
    return [
        call.relation(result, [(given, group), *scales]),
        *(call.relation(shape, [(given, members)]) for shape in statistics),
    ]


def _group_norm_backward(call: AccessCall) -> list[Relation]:
    """Gradients of the image, of the weight and of the bias, as far as they are asked for."""
    gradient, given, mean, scale, weight = (call.value(k) for k in range(5))
    image = call.shape(given) or ()
    per = call.value(6) // call.value(8)

    def of_image(shape: Shape) -> Relation:
        group = (Same(0), BlockIndex(1, per, per), *whole(image[2:]))
        told = [(value, (Same(0), BlockIndex(1, per, 1))) for value in (mean, scale)]
        return call.relation(
            shape, [(gradient, group), (given, group), *told, (weight, (BlockIndex(1, per, per),))]
        )

    place = (Same(1), Same(0), *same(len(image) - 2, 2))
    sums = (image[0], *image[2:])

    def of_weight(shape: Shape) -> Relation:
        told = [(value, (Same(1), BlockIndex(0, per, 1))) for value in (mean, scale)]
        return call.relation(shape, [(gradient, place), (given, place), *told], sums=sums)

    def of_bias(shape: Shape) -> Relation:
        return call.relation(shape, [(gradient, place)], sums=sums)

    parts = [p for p, asked in zip((of_image, of_weight, of_bias), call.value(9), strict=True) if asked]
    return [part(shape) for part, shape in zip(parts, call.outputs, strict=True)]


RULES: dict[str, Rule] = {
    "native_layer_norm": _layer_norm,
    "native_layer_norm_backward": _layer_norm_backward((3, 4), 5, 7),
    "_fused_rms_norm": _layer_norm,
    "_fused_rms_norm_backward": _layer_norm_backward((3,), 4, 5),
    "native_group_norm": _group_norm,
    "native_group_norm_backward": _group_norm_backward,
}
