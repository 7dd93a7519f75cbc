"""Where in a step a loop over tiles may begin and end, and along which axes it is worth cutting."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence

from lowtide.errors import CaptureError
from lowtide.execute.tiling.geometry import working
from lowtide.graph import Graph, Op, Phase, Rect
from lowtide.trace.groups.fusible import fuses
from lowtide.trace.operators import MASKED, supported, values_read
from lowtide.trace.step.joint import Joint
from lowtide.trace.tiles.nested import Inner
from lowtide.trace.tiles.tiling import Tiling

__all__ = ["carrying", "endings", "grids", "inside", "middles", "result_grids", "result_of", "rows"]

_LARGE = 0.5
"""A tensor of this share of the largest is large."""
_SMALL = 0.5
"""One of this share at most is a good place for a loop to begin or to end."""
_LITTLE = 1 / 8
"""One of this share at most takes little, with its gradient, beside a loop that begins there."""
_LESS = 0.95
"""An axis is worth cutting where its halves work on less than this share of what the whole works on."""
_PART = 1 / 8
"""Share of the budget that one part of an ending's largest tensor may take."""
_ENDINGS = 2
"""So many ways to cut an ending are tried."""
_AXES = 2
"""So many axes are cut beside the first, the last ones: height and width."""


def counts(length: int) -> Iterator[int]:
    """Numbers of parts that are nearly equal: powers of two, and what lies half-way."""
    found = {length} if length <= 64 else set()
    for power in itertools.count(1):
        if 2**power > length:
            break
        found |= {2**power, min(length, 3 * 2 ** (power - 1))}
    yield from sorted(k for k in found if k > 1)


def endings(tiling: Tiling) -> list[str]:
    """Tensors through which all of the loss goes, with the largest tensors of the step behind them.

    The last of them: what follows it is the region that a loop makes small. Then the last one that is much
    smaller, if that is another one: a loop has all of it, and all of its gradient, beside a tile. Tensors
    inside of groups do not count: they are never stored.
    """
    graph = tiling.graph
    ops = [op for op, _ in tiling.forward]
    fused = tiling.joint.kernels is not None
    stored = [op for op, call in tiling.forward if not (fused and fuses(call.target))]
    most = _largest_made(graph, stored) or _largest(graph, ops)
    found: list[int] = []
    for k, t in _passages(graph, ops, tiling.leaves):
        small = graph.tensors[t].bytes <= _SMALL * most and graph.tensors[t].alias is None
        if small and _largest(graph, ops[k + 1 :]) >= _LARGE * most:
            found.append(t)
    little = [t for t in found if graph.tensors[t].bytes <= _LITTLE * most]
    return [graph.tensors[t].id for t in dict.fromkeys((*found[-1:], *little[-1:]))]


def middles(joint: Joint) -> list[str]:
    """Tensors through which all of the result goes, with the largest tensors of the step before them.

    The last one before what cannot be cut; and of images and sequences the first one behind which nothing
    large is left.
    """
    graph = joint.graph
    ops = [op for op in graph.ops if op.phase is Phase.FORWARD]
    leaves = joint.leaves
    carries = carrying(graph, ops, leaves)
    most = _largest(graph, ops)
    last = next((k for k, op in enumerate(ops) if _stands_against(graph, op, carries)), len(ops))
    found: list[int] = []
    left: dict[int, int] = {}
    for k, t in _passages(graph, ops, leaves):
        before = _largest(graph, [op for op in ops[: k + 1] if t not in op.outputs])
        one = graph.tensors[t]
        if k < last and before >= _LARGE * most and one.bytes <= _SMALL * before and len(one.shape or ()) > 1:
            found.append(t)
            if math.prod((one.shape or ())[2:]) > 1:
                left.setdefault(t, max(one.bytes, _largest(graph, ops[k + 1 :])))
    deep = sorted(left, key=lambda t: left[t])
    return [graph.tensors[t].id for t in dict.fromkeys((*found[-1:], *deep[:1]))]


def result_of(joint: Joint) -> str:
    """The one result of a step whose loss is outside; nothing where it gives a loss, or more than one."""
    result = joint.main_result
    if result is None:
        return ""
    one = joint.graph.tensors[result]
    return "" if one.shape in ((), (1,)) else one.id


def grids(tiling: Tiling) -> Iterator[tuple[int, ...]]:
    """Ways to cut what adds up to a loss: its first axis, then height and width as well."""
    rank = len(tiling.axes)
    return _grids(tiling.axes, range(max(1, rank - _AXES), rank) if rank > _AXES else ())


def rows(tiling: Tiling, budget: int) -> Iterator[tuple[int, ...]]:
    """Ways to cut an ending: its largest tensor in parts that are small in the budget, but not too small."""
    graph, axes = tiling.graph, tiling.axes
    made = {t for op, _ in tiling.steps for t in op.outputs}
    most = max(graph.tensors[t].bytes for t in tiling.needed(Rect.of_shape(axes))[0] if t in made)
    least = math.ceil(most / (_PART * budget))
    powers = [2**k for k in range(1, 20) if least <= 2**k <= axes[0]]
    for count in powers[:_ENDINGS]:
        yield (count,) + (1,) * (len(axes) - 1)


def result_grids(tiling: Tiling) -> Iterator[tuple[int, ...]]:
    """Ways to cut a result: its first axis, then others that are worth it too."""
    axes, whole = tiling.axes, Rect.of_shape(tiling.axes)
    most = working(tiling, whole)
    worth = [
        axis
        for axis in range(1, len(axes))
        if axes[axis] > 1 and max(working(tiling, half) for half in whole.split(axis, 2)) < _LESS * most
    ]
    return _grids(axes, worth[-_AXES:])


def _grids(axes: Sequence[int], chosen: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The first axis in more and more parts; then in single ones, with the chosen axes cut into squares."""
    for count in counts(axes[0]):
        yield (count,) + (1,) * (len(axes) - 1)
    longest = max((axes[axis] for axis in chosen), default=1)
    for count in counts(longest):
        side = math.ceil(longest / count)
        yield (axes[0], *(math.ceil(axes[a] / side) if a in chosen else 1 for a in range(1, len(axes))))


def inside(number: int) -> Inner:
    """Chooses loops inside tiles, to an image or a sequence in each, cut in the first, second, … way."""

    def chosen(joint: Joint) -> tuple[str, list[Rect]] | None:
        for end in middles(joint)[-1:]:
            with contextlib.suppress(CaptureError):
                tiling = Tiling(joint, end=end)
                for parts in itertools.islice(result_grids(tiling), number, number + 1):
                    return end, tiling.boxes(parts)
        return None

    return chosen


def _stands_against(graph: Graph, op: Op, carries: set[int]) -> bool:
    """Whether an operator that gradients go through cannot be run on parts."""
    read = op.kind != MASKED and carries.intersection(values_read(graph, op))
    return bool(read) and supported(op, graph) is not None


def _largest(graph: Graph, ops: Sequence[Op]) -> int:
    return max((graph.tensors[t].bytes for op in ops for t in op.outputs), default=0)


def _largest_made(graph: Graph, ops: Sequence[Op]) -> int:
    """The same without views: what they show may be inside of a group."""
    made = (graph.tensors[t] for op in ops for t in op.outputs)
    return max((tensor.bytes for tensor in made if tensor.alias is None), default=0)


def carrying(graph: Graph, ops: Sequence[Op], leaves: frozenset[int]) -> set[int]:
    """Tensors that gradients go through."""
    carries = set(leaves)
    for op in ops:
        read = op.inputs if op.kind == MASKED else values_read(graph, op)
        if carries.intersection(read):
            carries.update(t for t in op.outputs if _floating(graph.tensors[t].dtype))
    return carries


def _passages(graph: Graph, ops: Sequence[Op], leaves: frozenset[int]) -> Iterator[tuple[int, int]]:
    """Tensors that alone carry all of what comes later, with the operator behind which they do."""
    carries = carrying(graph, ops, leaves)
    last = {t: k for k, op in enumerate(ops) for t in op.inputs}
    there: set[int] = set()
    for k, op in enumerate(ops):
        there = {t for t in there if last.get(t, -1) > k}
        there.update(t for t in op.outputs if t in carries and last.get(t, -1) > k)
        if len(there) == 1:
            yield k, next(iter(there))


def _floating(dtype: str | None) -> bool:
    return dtype is not None and ("float" in dtype or "complex" in dtype)
