"""Writing a step as TensorFlow lists it; the reader is beside this file."""

from __future__ import annotations

import math
import re
from typing import Any

from lowtide.cost import Step
from lowtide.formats.base import Written
from lowtide.formats.losses import Part, losses_of
from lowtide.formats.tensorflow.read import ITEM_BYTES
from lowtide.graph import Graph, Op, Tensor

__all__ = ["write"]

_OWN = {
    Part.SHAPES, Part.DTYPES, Part.DEVICES, Part.CONTROL, Part.KERNELS, Part.COPIES, Part.SECONDS,
    Part.UPDATES,
}  # fmt: skip
_KNOWN_FROM_SHAPES = {
    Part.FLOP, Part.TRAFFIC, Part.VIEWS, Part.EXTRAS, Part.NOTES, Part.ROLES, Part.PHASES, Part.NAMES,
}  # fmt: skip
"""What the reader works out of the lines again, so that nothing is lost when the step came from them."""


def write(step: Step) -> Written:
    """The text; a step that was read from this format comes back byte for byte."""
    graph = step.graph
    own = step.format == "tensorflow"
    names = [op.id for op in graph.ops] if own else _names(graph)
    lines = [_lines(step, k, names, own) for k in range(len(graph.ops))]
    order = _order(step, lines) if own else None
    if order is not None:
        text = [lines[op][line] for op, line in order]
    else:
        text = sorted((line for group in lines for line in group), key=lambda line: line.split(", ", 1)[0])
    losses = losses_of(step, _OWN | _KNOWN_FROM_SHAPES if own else _OWN)
    return Written("".join(text).encode(), losses if own else losses + _flattened(graph))


def _order(step: Step, lines: list[list[str]]) -> list[tuple[int, int]] | None:
    """The lines in the order of the document read, if it is known and names each line once."""
    kept = step.graph.attributes.get("tensorflow")
    entries = kept.get("order") if isinstance(kept, dict) else None
    if not isinstance(entries, list) or not all(isinstance(entry, list) for entry in entries):
        return None
    order = [(entry[0], entry[1] + 1 if len(entry) > 1 else 0) for entry in entries if _positions(entry)]
    every = {(op, line) for op, group in enumerate(lines) for line in range(len(group))}
    return order if len(order) == len(entries) == len(every) and set(order) == every else None


def _positions(entry: list[Any]) -> bool:
    return 1 <= len(entry) <= 2 and all(type(value) is int for value in entry)


def _flattened(graph: Graph) -> tuple[str, ...]:
    shapeless = sum(t.shape is None or (t.dtype or "float32") not in ITEM_BYTES for t in graph.tensors)
    several = sum(len(op.outputs) > 1 for op in graph.ops)
    said = []
    if graph.ordered and graph.ops:
        said.append("the order of the operators, and which tensor each one reads: only shapes are written")
    if shapeless:
        said.append(f"{shapeless} tensors of unknown shape or type, written as flat vectors of their bytes")
    if several:
        said.append(f"all outputs but the first of {several} operators")
    return tuple(said)


def _names(graph: Graph) -> list[str]:
    """A name for every operator that no other has and that cannot be taken for two fields or a kernel."""
    used: dict[str, int] = {}
    names = []
    for op in graph.ops:
        name = _name(op.id if ":" in op.label else op.label)
        used[name] = used.get(name, 0) + 1
        names.append(name if used[name] == 1 else f"{name}#{used[name]}")
    return names


def _lines(step: Step, position: int, names: list[str], own: bool) -> list[str]:
    """The line of one operator and behind it those of its kernels."""
    op = step.graph.ops[position]
    name = names[position]
    device = _name(op.device) if op.device else "CPU"
    cost = step.costs[position] if step.costs else None
    seconds = float(cost.seconds.value) if cost and cost.seconds else 0.0
    time = op.attributes.get("time", 0) if own else seconds * 1e6
    lines = [", ".join([name, *_ends(step.graph, op, names, own), device, _number(time)]) + "\n"]
    for kernel in op.kernels:
        fields = (
            f"{name}:{kernel.name if own else _name(kernel.name)}",
            "(no input)",
            "(no output)",
            kernel.device or device,
        )
        lines.append(", ".join([*fields, _number(kernel.attributes.get("time", 0))]) + "\n")
    return lines


def _ends(graph: Graph, op: Op, names: list[str], own: bool) -> list[str]:
    """Control inputs, shapes of the inputs, shape of the output."""
    if own and type(op.attributes.get("copied_bytes")) is int:
        return ["(no input)", f"(output {op.attributes['copied_bytes']} bytes)"]
    control = [f"^{names[k]}" for k in op.after]
    operands = _operands(op) if own else None
    if operands is not None:
        inputs = [_shape(dtype, dims) for dtype, dims in operands]
    else:
        inputs = [_tensor(graph.tensors[t]) for t in op.inputs]
    if not inputs and not control:
        inputs = ["(1)"]
    return [*control, *inputs, _tensor(graph.tensors[op.outputs[0]]) if op.outputs else "(no output)"]


def _operands(op: Op) -> list[tuple[str | None, list[int]]] | None:
    """Type and dimensions of what the operator reads, where the list gave no tensor for it."""
    kept = op.attributes.get("operands")
    if not isinstance(kept, list):
        return None
    sound = [
        (pair[0], pair[1])
        for pair in kept
        if isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str | None) and _dims(pair[1])
    ]
    return sound if len(sound) == len(kept) else None


def _dims(value: Any) -> bool:
    return isinstance(value, list) and all(type(d) is int and d >= 0 for d in value)


def _tensor(tensor: Tensor) -> str:
    if tensor.shape is None or (tensor.dtype or "float32") not in ITEM_BYTES:
        return _shape("uint8", [tensor.bytes])
    return _shape(tensor.dtype, list(tensor.shape))


def _shape(dtype: str | None, dims: list[int]) -> str:
    padded = dims + [1] * (2 - len(dims))
    prefix = "" if dtype in (None, "float32") else f"{dtype} "
    return f"({prefix}{'x'.join(map(str, padded))})"


def _number(value: Any) -> str:
    number = float(value) if isinstance(value, int | float) else 0.0
    return str(int(number)) if number == math.floor(number) else repr(number)


def _name(text: str) -> str:
    """A name that cannot be taken for two fields or for a kernel."""
    return re.sub(r"[\s,:^]+", "_", text) or "_"
