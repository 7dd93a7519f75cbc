"""Says whether a graph contradicts itself."""

from __future__ import annotations

from collections.abc import Sequence

from lowtide.errors import GraphError
from lowtide.graph.types import RESIDENT_ROLES, Graph, Op, Role, Tensor

__all__ = ["MAX_BYTES", "validate"]

MAX_BYTES = 1 << 60
"""No tensor is larger than an exbibyte: a larger figure is a damaged one."""


def validate(graph: Graph) -> Graph:
    """Return the graph itself, or raise a GraphError that names the first contradiction."""
    _tensors(graph.tensors)
    written = {k for k, t in enumerate(graph.tensors) if t.role in RESIDENT_ROLES}
    seen: set[str] = set()
    count = len(graph.tensors)
    produced = {t for op in graph.ops for t in op.outputs}
    for k, op in enumerate(graph.ops):
        if op.id in seen:
            raise GraphError(f"operator id {op.id!r} is used twice")
        seen.add(op.id)
        _references(op, k, count, len(graph.ops))
        if graph.ordered:
            _reads_what_was_written(graph, op, written, produced)
            written.update(op.outputs)
    return graph


def _tensors(tensors: Sequence[Tensor]) -> None:
    seen: set[str] = set()
    for k, tensor in enumerate(tensors):
        if tensor.id in seen:
            raise GraphError(f"tensor id {tensor.id!r} is used twice")
        seen.add(tensor.id)
        if not 0 <= tensor.bytes <= MAX_BYTES:
            raise GraphError(f"tensor {tensor.id!r} has {tensor.bytes} bytes; sizes lie between 0 and 2^60")
        if tensor.shape is not None and any(d < 0 for d in tensor.shape):
            raise GraphError(f"tensor {tensor.id!r} has a negative dimension in {tensor.shape}")
        for what, other in (("alias", tensor.alias), ("gradient_of", tensor.gradient_of)):
            if other is not None and (not 0 <= other < len(tensors) or other == k):
                raise GraphError(f"tensor {tensor.id!r} has {what} {other}, which is not another tensor")
        if tensor.alias is not None and tensor.alias > k:
            raise GraphError(f"tensor {tensor.id!r} is a view of a tensor that comes after it")


def _references(op: Op, position: int, tensors: int, ops: int) -> None:
    for t in (*op.inputs, *op.outputs):
        if not 0 <= t < tensors:
            raise GraphError(f"operator {op.id!r} refers to tensor {t}; the graph has {tensors}")
    for k in op.shape_only:
        if not 0 <= k < len(op.inputs):
            raise GraphError(f"operator {op.id!r} marks input {k} shape-only; it has {len(op.inputs)} inputs")
    for other in op.after:
        if not 0 <= other < ops or other == position:
            raise GraphError(f"operator {op.id!r} waits for operator {other}; the graph has {ops}")
    for ports, ends, what in ((op.input_ports, op.inputs, "input"), (op.output_ports, op.outputs, "output")):
        if ports and len(ports) != len(ends):
            raise GraphError(f"operator {op.id!r} names {len(ports)} {what} ports for {len(ends)} {what}s")


def _reads_what_was_written(graph: Graph, op: Op, written: set[int], produced: set[int]) -> None:
    for t in op.reads:
        if t in written:
            continue
        tensor = graph.tensors[t]
        if tensor.alias is not None and graph.storage(t) in written:
            continue
        if tensor.role is Role.GRADIENT and t not in produced:
            continue  # the gradient that starts the backward pass comes from outside
        raise GraphError(
            f"operator {op.id!r} reads tensor {tensor.id!r} before any operator has written it: "
            "a cycle, or operators out of order"
        )
