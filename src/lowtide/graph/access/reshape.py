"""Views that keep the order of elements: dimensions merged, split, added and taken away."""

from __future__ import annotations

from lowtide.graph.access.call import AccessCall, Indices, Rule, Shape
from lowtide.graph.access.index import Digit, Index, Reshaped, Same, Whole
from lowtide.graph.access.relation import Relation

__all__ = ["RULES", "reshaped"]


def reshaped(source: Shape, shape: Shape) -> Indices:
    """How a tensor of one shape is read where it is seen in another with as many elements.

    Both shapes are cut into common factors, from the left: (6, 4) and (2, 12) into 2, 3 and 4. Where there
    are none, as of (2, 3) and (3, 2), dimensions are read whole.
    """
    if 0 in shape:
        return (Whole(),) * len(source)
    factors = _factors(source, shape)
    found: list[Index] = []
    for dim, length in enumerate(source):
        mine = [f for f in factors if f[0] == dim]
        if any(axis is None for _, axis, _ in mine) or not mine:
            found.append(Whole())
        else:
            found.append(_index(mine, factors, shape, length))
    return tuple(found)


_Factor = tuple[int, int | None, int]
"""Dimension of the source, axis of the shape (None where they have no factor in common), length."""


def _factors(source: Shape, shape: Shape) -> list[_Factor]:
    """Common factors from left to right; dimensions of one element have none."""
    left = [(k, n) for k, n in enumerate(source) if n != 1][::-1]
    right = [(k, n) for k, n in enumerate(shape) if n != 1][::-1]
    found: list[_Factor] = []
    while left and right:
        (dim, a), (axis, b) = left.pop(), right.pop()
        if a % b and b % a:
            found += _mixed(dim, a, b, left, right)
            continue
        found.append((dim, axis, min(a, b)))
        if a > b:
            left.append((dim, a // b))
        elif b > a:
            right.append((axis, b // a))
    return found


def _mixed(
    dim: int, a: int, b: int, left: list[tuple[int, int]], right: list[tuple[int, int]]
) -> list[_Factor]:
    """Dimensions up to the next place where both shapes have an end."""
    found: list[_Factor] = [(dim, None, a)]
    while a != b:
        if a < b:
            dim, n = left.pop()
            found.append((dim, None, n))
            a *= n
        else:
            b *= right.pop()[1]
    return found


def _index(mine: list[_Factor], factors: list[_Factor], shape: Shape, length: int) -> Index:
    """The digits that make up one dimension of the source."""
    if len(mine) == 1 and mine[0][1] is not None and shape[mine[0][1]] == length:
        return Same(mine[0][1])
    digits, weight = [], length
    for factor in mine:
        _, axis, size = factor
        assert axis is not None
        weight //= size
        before = [f[2] for f in factors[: factors.index(factor)] if f[1] == axis]
        stride = shape[axis] // size
        for n in before:
            stride //= n
        digits.append(Digit(axis, stride, size, weight))
    return Reshaped(tuple(digits))


def _view(call: AccessCall) -> list[Relation] | None:
    """Another shape for the same elements; another type of element only where the shape stays."""
    source, shape = call.shape(call.value(0)) or (), call.outputs[0]
    if call.op.overload == "dtype" and source != shape:
        return None
    return [call.relation(shape, [(call.value(0), reshaped(source, shape))])]


_KINDS = "_reshape_alias _unsafe_view flatten reshape squeeze unflatten unsqueeze view view_copy"

RULES: dict[str, Rule] = dict.fromkeys(_KINDS.split(), _view)
