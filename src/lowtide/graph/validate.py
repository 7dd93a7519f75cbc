"""Says whether a graph contradicts itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lowtide.errors import GraphError
from lowtide.graph.rect import Rect
from lowtide.graph.types import GROUP, RESIDENT_ROLES, Graph, Op, Role, Tensor

__all__ = ["MAX_BYTES", "validate"]

MAX_BYTES = 1 << 60
"""No tensor is larger than an exbibyte: a larger figure is a damaged one."""
MAX_ADDRESS = 1 << 63


def validate(graph: Graph) -> Graph:
    """Return the graph itself, or raise a GraphError that names the first contradiction."""
    tensors, ops = len(graph.tensors), len(graph.ops)
    for k, tensor in enumerate(graph.tensors):
        problem = _tensor(tensor, tensors)
        if problem:
            raise GraphError(f"tensor {tensor.id!r} {problem}", tensor=k)
    for k, op in enumerate(graph.ops):
        problem = _op(op, k, tensors, ops)
        if problem:
            raise GraphError(f"operator {op.id!r} {problem}", op=k)
    again = _repeated([tensor.id for tensor in graph.tensors])
    if again is not None:
        raise GraphError(f"tensor id {graph.tensors[again].id!r} is used twice", tensor=again)
    again = _repeated([op.id for op in graph.ops])
    if again is not None:
        raise GraphError(f"operator id {graph.ops[again].id!r} is used twice", op=again)
    storage = graph.storages()
    if graph.ordered:
        _reads_what_was_written(graph, storage)
    for k, op in enumerate(graph.ops):
        if op.body is not None or op.kind == GROUP:
            _check_body(graph, op, k)
    return graph


def _check_body(graph: Graph, op: Op, position: int) -> None:
    """A group has a body that takes what it takes and gives what it gives, and holds no other group."""
    body = op.body
    if body is None or op.kind != GROUP:
        raise GraphError(f"operator {op.id!r}: a group has a body, and nothing else has one", op=position)
    if any(one.body is not None or one.kind == GROUP for one in body.ops):
        raise GraphError(f"operator {op.id!r}: a group inside a group", op=position)
    try:
        validate(body)
    except GraphError as error:
        raise GraphError(f"the body of operator {op.id!r}: {error}", op=position) from error
    taken = [_sort(graph.tensors[t]) for t in op.inputs]
    given = sorted(_sort(graph.tensors[t]) for t in op.outputs)
    leaves = [_sort(t) for t in body.tensors if t.role in RESIDENT_ROLES]
    if taken != leaves or given != sorted(_sort(body.tensors[t]) for t in body.returned):
        raise GraphError(
            f"operator {op.id!r}: its body takes and gives other tensors than it does", op=position
        )


def _sort(tensor: Tensor) -> tuple[tuple[int, ...], str]:
    return tensor.shape or (), tensor.dtype or ""


def _repeated(names: Sequence[str]) -> int | None:
    """The position of the first name that stood before."""
    if len(set(names)) == len(names):
        return None
    seen: set[str] = set()
    for k, name in enumerate(names):
        if name in seen:
            return k
        seen.add(name)
    return None


def _tensor(tensor: Tensor, tensors: int) -> str:
    if not 0 <= tensor.bytes <= MAX_BYTES:
        return f"has {tensor.bytes} bytes; sizes lie between 0 and 2^60"
    if tensor.shape and min(tensor.shape) < 0:
        return f"has a negative dimension in {tensor.shape}"
    if tensor.address is not None and not 0 <= tensor.address < MAX_ADDRESS:
        return f"has the address {tensor.address}; addresses lie between 0 and 2^63"
    if tensor.boxes and not _bounded(tensor.boxes):
        return "has a box beyond 2^60 elements"
    if tensor.alias is not None and not 0 <= tensor.alias < tensors:
        return f"is a view of tensor {tensor.alias}; the graph has {tensors}"
    if tensor.gradient_of is not None and not 0 <= tensor.gradient_of < tensors:
        return f"is the gradient of tensor {tensor.gradient_of}; the graph has {tensors}"
    return ""


def _bounded(boxes: Mapping[str, Rect | None]) -> bool:
    return all(-MAX_BYTES <= i <= MAX_BYTES for box in boxes.values() if box for i in (*box.lo, *box.hi))


def _op(op: Op, position: int, tensors: int, ops: int) -> str:
    for ends in (op.inputs, op.outputs):
        if ends and not (min(ends) >= 0 and max(ends) < tensors):
            return f"refers to tensor {min(ends) if min(ends) < 0 else max(ends)}; the graph has {tensors}"
    for k in op.shape_only:
        if not 0 <= k < len(op.inputs):
            return f"marks input {k} as shape-only; it has {len(op.inputs)} inputs"
    for other in op.after:
        if not 0 <= other < ops or other == position:
            return f"waits for operator {other}, which is no other operator of the {ops}"
    if op.boxes and not _bounded(op.boxes):
        return "has a box beyond 2^60 elements"
    if op.input_ports and len(op.input_ports) != len(op.inputs):
        return f"names {len(op.input_ports)} input ports for {len(op.inputs)} inputs"
    if op.output_ports and len(op.output_ports) != len(op.outputs):
        return f"names {len(op.output_ports)} output ports for {len(op.outputs)} outputs"
    return ""


def _reads_what_was_written(graph: Graph, storage: Sequence[int]) -> None:
    """A storage counts as written when any view of it is; leaves are there from the start."""
    tensors = graph.tensors
    written = bytearray(len(tensors))
    for k, tensor in enumerate(tensors):
        if tensor.role in RESIDENT_ROLES:
            written[storage[k]] = 1
    made = bytearray(len(tensors))
    for op in graph.ops:
        for t in op.outputs:
            made[t] = 1
    for k, op in enumerate(graph.ops):
        for t in op.reads:
            owner = storage[t]
            # the gradient that starts the backward pass comes from outside: nobody ever writes it
            if not written[owner] and (made[owner] or tensors[t].role is not Role.GRADIENT):
                raise GraphError(
                    f"operator {op.id!r} reads tensor {tensors[t].id!r} before any operator has written "
                    "it: a cycle, or operators out of order",
                    op=k,
                )
        for t in op.outputs:
            written[storage[t]] = 1
