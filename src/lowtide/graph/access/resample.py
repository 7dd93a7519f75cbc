"""Resizing, and borders that are mirrored or repeated: each element reads a range written down."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from lowtide.graph.access.call import AccessCall, Rule, Shape, same
from lowtide.graph.access.index import LONGEST_TABLE, Range, Spans
from lowtide.graph.access.relation import Relation

__all__ = ["RULES"]

_Ranges = tuple[Range, ...]


def _inverse(ranges: _Ranges, length: int) -> _Ranges:
    """For each of so many elements, the smallest range that holds those who read it."""
    first, last = [len(ranges)] * length, [0] * length
    for k, (lo, hi) in enumerate(ranges):
        for i in range(lo, hi):
            first[i], last[i] = min(first[i], k), max(last[i], k + 1)
    return tuple((lo, hi) if lo < hi else (0, 0) for lo, hi in zip(first, last, strict=True))


def _nearest(source: int, size: int, scale: float | None, exact: bool) -> _Ranges:
    """The element whose place is nearest; single and double precision may differ by one."""
    found = []
    for number in (np.float32, np.float64):
        step = number(1 / scale) if scale else number(source) / number(size)
        shift = number(0.5 if exact else 0)
        found.append([min(int((number(k) + shift) * step), source - 1) for k in range(size)])
    return tuple((min(pair), max(pair) + 1) for pair in zip(*found, strict=True))


def _linear(source: int, size: int, scale: float | None, corners: bool, before: int, behind: int) -> _Ranges:
    """The elements on both sides of a place; where it falls on an element, those beside it too."""
    found = []
    for k in range(size):
        if corners:
            place = k * (source - 1) / (size - 1) if size > 1 else 0.0
        else:
            place = (k + 0.5) * (1 / scale if scale else source / size) - 0.5
        slack = 1e-6 * (1 + abs(place))
        lo, hi = math.floor(place - slack) - before, math.floor(place + slack) + behind + 1
        found.append((max(0, min(lo, source - 1)), min(source, max(hi, 1))))
    return tuple(found)


def _scales(call: AccessCall, position: int, rank: int) -> list[float | None]:
    """Factors as they were given: one argument for all (and the size is None), or one a dimension."""
    value = call.value(position)
    if isinstance(value, list):
        return [float(v) for v in value]
    found = [call.value(position + d) for d in range(rank)]
    return [float(v) if isinstance(v, int | float) else None for v in found]


def _resize(rank: int, how: str, *, backward: bool) -> Rule:
    """Forward reads a range for each element; backward the elements that read it."""
    nearest = how in ("nearest", "exact")
    reach = 1 if how == "cubic" else 0

    def ranges(call: AccessCall, small: Shape, large: Shape, d: int) -> _Ranges:
        at = (3 if backward else 2) + (0 if nearest else 1)
        scale = _scales(call, at, rank)[d]
        axis = len(small) - rank + d
        if nearest:
            return _nearest(small[axis], large[axis], scale, how == "exact")
        corners = bool(call.value(at - 1))
        return _linear(small[axis], large[axis], scale, corners, reach, reach + 1)

    def rule(call: AccessCall) -> list[Relation] | None:
        given, shape = call.value(0), call.outputs[0]
        source = call.shape(given) or ()
        if max((*shape, *source), default=0) > LONGEST_TABLE:
            return None
        lead = len(shape) - rank
        small, large = (shape, source) if backward else (source, shape)
        tables = [ranges(call, small, large, d) for d in range(rank)]
        if backward:
            tables = [_inverse(table, shape[lead + d]) for d, table in enumerate(tables)]
        place = (*same(lead), *(Spans(lead + d, table) for d, table in enumerate(tables)))
        return [call.relation(shape, [(given, place)])]

    return rule


def _border(rank: int, *, mirrored: bool, backward: bool) -> Rule:
    """Margins filled from the inside; they are given from the last dimension on."""

    def table(length: int, before: int, behind: int) -> _Ranges:
        found = []
        for k in range(-before, length + behind):
            at = max(0, min(length - 1, k))
            if mirrored:
                at = -k if k < 0 else min(k, 2 * (length - 1) - k)
            found.append((at, at + 1))
        return tuple(found)

    def rule(call: AccessCall) -> list[Relation] | None:
        given, shape = call.value(0), call.outputs[0]
        inner = shape if backward else call.shape(given) or ()
        margins: Sequence[int] = call.value(2 if backward else 1)
        if max((*inner, *margins), default=0) > LONGEST_TABLE:
            return None
        lead = len(shape) - rank
        place = list(same(lead))
        spans = []
        for d in range(rank):
            k = 2 * (rank - 1 - d)
            ranges = table(inner[lead + d], margins[k], margins[k + 1])
            spans.append(Spans(lead + d, _inverse(ranges, inner[lead + d]) if backward else ranges))
        return [call.relation(shape, [(given, (*place, *spans))])]

    return rule


_RESIZED = {
    **{f"upsample_nearest{n}d": (n, "nearest") for n in (1, 2, 3)},
    **{f"_upsample_nearest_exact{n}d": (n, "exact") for n in (1, 2, 3)},
    "upsample_linear1d": (1, "linear"),
    "upsample_bilinear2d": (2, "linear"),
    "upsample_trilinear3d": (3, "linear"),
    "upsample_bicubic2d": (2, "cubic"),
}

RULES: dict[str, Rule] = {
    **{kind: _resize(*what, backward=False) for kind, what in _RESIZED.items()},
    **{f"{kind}_backward": _resize(*what, backward=True) for kind, what in _RESIZED.items()},
    **{
        f"{name}_pad{n}d{suffix}": _border(n, mirrored=name == "reflection", backward=bool(suffix))
        for name in ("reflection", "replication")
        for n in (1, 2, 3)
        for suffix in ("", "_backward")
    },
}
