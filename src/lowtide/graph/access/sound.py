"""Says whether the operators of a graph from a file can have been called as it says.

The rules take arguments for what the operator's schema asks for. A captured step has no others; a file may.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from lowtide.errors import GraphError
from lowtide.graph.access.index import Either, Index, Only, Slide, Spread, Window
from lowtide.graph.access.relation import Relation
from lowtide.graph.access.rules import access
from lowtide.graph.fields import check_fields
from lowtide.graph.rect import Rect
from lowtide.graph.types import Graph, Op

__all__ = ["check_calls"]

_WIDEST = 1 << 16
"""No window reaches further, and none is moved further: such a figure is a damaged one."""
_MISFITS = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError, GraphError)
"""How a rule, or a relation that it gives, trips over arguments of another sort."""


def check_calls(graph: Graph) -> Graph:
    """Return the graph itself, or raise a GraphError that names the first operator that cannot be called so.

    Relations of a graph that passes can be asked for any part of an output.
    """
    check_fields(graph)
    for k in range(len(graph.ops)):
        with _named(graph, k):
            _ask(graph, graph.ops[k])
    return graph


@contextlib.contextmanager
def _named(graph: Graph, k: int) -> Iterator[None]:
    """What goes wrong inside is told with the operator."""
    try:
        yield
    except _MISFITS as error:
        op = graph.ops[k]
        raise GraphError(
            f"operator {op.id!r} cannot be {op.kind!r}: its arguments, inputs and outputs do not fit it "
            f"({type(error).__name__}: {error}); the file is damaged, capture the step again",
            op=k,
        ) from error


def _ask(graph: Graph, op: Op) -> None:
    """Ask for all of every output, and for its first and last element; any misfit raises something."""
    relations = access(graph, op).relations
    for tensor, relation in zip(op.outputs, relations, strict=True):
        if relation.shape != (graph.tensors[tensor].shape or ()):
            raise GraphError(f"a relation for another shape, {relation.shape}")
        for index in _indices(relation):
            _check_window(index)
        whole = Rect.of_shape(relation.shape)
        ends = Rect((0,) * whole.ndim, (1,) * whole.ndim), Rect(tuple(n - 1 for n in whole.hi), whole.hi)
        for part in (whole, *ends):
            for reach in relation.reach(part):
                if reach is not None and not all(type(n) is int for n in (*reach.lo, *reach.hi)):
                    raise GraphError(f"a part {reach} between elements")


def _indices(relation: Relation) -> Iterator[Index]:
    """Every Index of a relation, those inside of others too."""
    waiting = [index for indices in relation.inputs if indices is not None for index in indices]
    while waiting:
        index = waiting.pop()
        yield index
        if isinstance(index, Only):
            waiting.append(index.index)
        elif isinstance(index, Either):
            waiting += [index.first, index.second]


def _check_window(index: Index) -> None:
    if isinstance(index, Window | Spread | Slide):
        kernel = 1 if isinstance(index, Slide) else index.kernel
        sizes = (kernel, index.stride, index.dilation)
        if min(sizes) < 1 or max(*sizes, abs(index.padding)) > _WIDEST:
            raise GraphError(f"a window of {index}")
