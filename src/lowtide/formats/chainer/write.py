"""Writing a step as a Chainer training graph; the reader is beside this file."""

from __future__ import annotations

import json
import re

from lowtide.cost import Step
from lowtide.errors import ConvertError
from lowtide.formats.base import Written
from lowtide.formats.chainer.read import ACCUMULATE, BACKWARD_ROLES
from lowtide.formats.losses import Part, losses_of
from lowtide.graph import RESIDENT_ROLES, Graph, Op, Phase, Role, Tensor

__all__ = ["write"]


def write(step: Step) -> Written:
    """The text; a step that was read from this format comes back byte for byte.

    Where backward has values that are no gradients of variables, forward alone is written.
    """
    graph = step.graph
    if not graph.ordered:
        raise ConvertError(
            "a Chainer graph needs to know who reads what; this document does not say it. Capture the "
            "step with `lowtide profile`, or take a file that lists inputs"
        )
    own = _is_own(step)
    ops = [op for op in graph.ops if op.phase is not Phase.UPDATE and not _makes_leaves(graph, op)]
    dropped = sum(op.phase is not Phase.UPDATE for op in graph.ops) - len(ops)
    left_out = _backward_left_out(graph, ops)
    if left_out:
        ops = [op for op in ops if op.phase is Phase.FORWARD]
        if not ops:
            raise ConvertError(f"a Chainer graph cannot hold this step: {left_out}; write it as native")
    numbers = _numbers(step, ops if left_out else None)
    ranks = {} if own else _ranks(ops)
    records = [_record(graph, op, numbers, ranks) for op in ops]
    records = [records[k] for k in _record_order(step, len(records))]
    head = f"{len(numbers)} {len(records)}\n"
    variables = "".join(
        f"{number} {graph.tensors[t].bytes} {_written_name(graph.tensors[t], number)}\n"
        for t, number in numbers.items()
    )
    holds = {Part.PORTS, Part.SHAPE_ONLY, Part.ROLES, Part.PHASES}
    losses = losses_of(step, holds | {Part.EXTRAS, Part.NAMES} if own else holds)
    losses += () if own else _changed(graph, ops, bool(left_out))
    if dropped:
        losses += (f"{dropped} operators that only provide leaves",)
    if left_out:
        losses += (left_out,)
    return Written((head + variables + "".join(records)).encode(), losses)


def _backward_left_out(graph: Graph, ops: list[Op]) -> str:
    """Why backward cannot be written, if it cannot: a Chainer graph has nothing but gradients there."""
    backward = [op for op in ops if op.phase is Phase.BACKWARD]
    made = {t for op in backward for t in op.outputs}
    odd = [t for t in sorted(made) if not _is_gradient(graph, t)]
    given = {t for op in backward for t in op.reads} - made
    odd += [t for t in sorted(given) if graph.tensors[t].role is Role.GRADIENT and not _is_gradient(graph, t)]
    if not odd:
        return ""
    first = graph.tensors[odd[0]].label
    return (
        f"all {len(backward)} operators of backward and what they write: {len(odd)} values there, {first!r} "
        "the first, are the gradient of no variable"
    )


def _is_gradient(graph: Graph, tensor: int) -> bool:
    """Whether it is the gradient of a variable, and not of another gradient."""
    owner = graph.tensors[tensor].gradient_of
    return owner is not None and graph.tensors[owner].gradient_of is None


def _changed(graph: Graph, ops: list[Op], forward_only: bool) -> tuple[str, ...]:
    """What is written, but read back as something else."""
    forward = sum(len(op.shape_only) for op in graph.ops if op.phase is Phase.FORWARD)
    owners = [] if forward_only else [t.gradient_of for t in graph.tensors if t.gradient_of is not None]
    merged = len(owners) - len(set(owners))
    roles = {Role.PARAMETER, Role.INPUT, Role.ACTIVATION, Role.GRADIENT}
    other = sorted({t.role.value for t in graph.tensors if t.role not in roles})
    said = []
    if forward:
        said.append(
            f"{forward} inputs of forward operators asked for their shape only: they are read back as read"
        )
    if merged:
        said.append(f"{merged} gradients of a tensor that has another gradient: they are written as one")
    over = sum(graph.tensors[t].role in RESIDENT_ROLES for op in ops for t in op.outputs)
    if over:
        said.append(f"{over} leaves that operators write over: they are read back as read alone")
    if other:
        said.append(f"roles: {', '.join(other)} is read back as parameter or activation")
    return tuple(said)


def _is_own(step: Step) -> bool:
    """Whether ids and attributes are still those of a Chainer graph."""
    variables = [t.id for t in step.graph.tensors if t.gradient_of is None]
    numbered = all(name.isascii() and name.isdigit() and str(int(name)) == name for name in variables)
    ranked = all(type(op.attributes.get("rank")) is int for op in step.graph.ops)
    return step.format == "chainer" and numbered and ranked


def _record_order(step: Step, count: int) -> list[int]:
    """The order in which the document had its functions, if it is known, else program order."""
    kept = step.graph.attributes.get("chainer")
    order = kept.get("records") if isinstance(kept, dict) else None
    plain = list(range(count))
    sound = isinstance(order, list) and all(type(k) is int for k in order) and sorted(order) == plain
    return order if sound and isinstance(order, list) else plain


def _makes_leaves(graph: Graph, op: Op) -> bool:
    """Whether the operator only provides what a Chainer graph lists as a variable without a producer."""
    return not op.inputs and all(graph.tensors[t].role in RESIDENT_ROLES for t in op.outputs)


def _numbers(step: Step, ops: list[Op] | None) -> dict[int, int]:
    """An id for every variable: gradients have none, they are named after what they are the gradient of.

    Where only some operators are written, what none of them touches is left out, but for leaves.
    """
    tensors = step.graph.tensors
    chosen = [k for k, t in enumerate(tensors) if t.gradient_of is None]
    if ops is not None:
        touched = {t for op in ops for t in (*op.inputs, *op.outputs)}
        chosen = [k for k in chosen if k in touched or tensors[k].role in RESIDENT_ROLES]
    if _is_own(step):
        return {k: int(tensors[k].id) for k in chosen}
    return {k: number for number, k in enumerate(chosen)}


def _ranks(ops: list[Op]) -> dict[str, int]:
    forward = [op.id for op in ops if op.phase is Phase.FORWARD]
    backward = [op.id for op in ops if op.phase is Phase.BACKWARD]
    ranks = {name: rank for rank, name in enumerate(forward)}
    return ranks | {name: rank for rank, name in enumerate(reversed(backward))}


def _written_name(tensor: Tensor, number: int) -> str:
    if tensor.role is Role.INPUT:
        return tensor.name if tensor.name.isascii() and tensor.name.isdigit() else str(number)
    if tensor.role in RESIDENT_ROLES:
        return "/" + _word(tensor.label.removeprefix("/"))
    return "_"


def _word(text: str) -> str:
    return re.sub(r"\s+", "_", text) or "unnamed"


def _record(graph: Graph, op: Op, numbers: dict[int, int], ranks: dict[str, int]) -> str:
    inputs: list[str] = []
    retained: list[int] = []
    listed = 0
    shape_only = set(op.shape_only)
    for k, t in enumerate(op.inputs):
        port = op.input_ports[k] if op.input_ports else ""
        if port == ACCUMULATE:
            continue
        gradient_of = graph.tensors[t].gradient_of
        if op.phase is Phase.FORWARD:
            role = "_"
        elif gradient_of is not None:
            role = "gradient"
        else:
            role = port if port in BACKWARD_ROLES else "input"
        if role == "input":
            if k not in shape_only:
                retained.append(listed)
            listed += 1
        inputs.append(f"{_number(graph, t, numbers)} {role}\n")
    outputs = [
        _produced(graph, op, t, numbers) for t in op.outputs if graph.tensors[t].role not in RESIDENT_ROLES
    ]
    attributes = op.attributes
    if op.id in ranks:
        attributes = {
            "_input_indexes_to_retain": retained or None,
            "_output_indexes_to_retain": None,
            "_output_count": len(op.outputs),
            "rank": ranks[op.id],
            "lazy_grad_sum": False,
        }
    body = f"{op.phase.value}\n{len(inputs)} {len(outputs)}\n" + "".join(inputs + outputs)
    return f"{body}{_word(op.kind)}\n{json.dumps(attributes)}\n"


def _number(graph: Graph, tensor: int, numbers: dict[int, int]) -> int:
    """The id of a variable, or for a gradient that of what it is the gradient of."""
    owner = graph.tensors[tensor].gradient_of
    return numbers[tensor if owner is None else owner]


def _produced(graph: Graph, op: Op, tensor: int, numbers: dict[int, int]) -> str:
    found = graph.tensors[tensor]
    if op.phase is Phase.FORWARD and found.gradient_of is not None:
        raise ConvertError(
            f"forward operator {op.label!r} writes {found.label!r}, a gradient: "
            "a Chainer graph has gradients in backward "
            "only; write the step as native or csv"
        )
    return f"{_number(graph, tensor, numbers)}\n"
