"""Graphviz files of a step: a picture for people, with the whole graph in attributes of its own.

One statement a line. Labels are those of data-flow pictures where the step has boxes. What a drawing has no
place for stands in attributes that begin with ``lowtide_``, which Graphviz passes over:

    digraph "step" {
      graph [lowtide_version="1", …];
      t0 [label="L0.W\\ndim=[64 1 1 1 9 9 33 33]\\n…", lowtide_node="tensor", lowtide_role="parameter", …];
      o1 [label="L0.filter\\n…", lowtide_node="op", lowtide_kind="filter", …];
      t0 -> o1 [label="->filters", lowtide_port="filters"];
    }
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from lowtide.cost import Step
from lowtide.formats.base import Written
from lowtide.formats.dot.read import (
    GRAPH_LISTS,
    OP_REST,
    TENSOR_REST,
    VERSION,
    quote,
)
from lowtide.formats.losses import Part, losses_of
from lowtide.graph import Op, Phase, Rect, Role, Tensor
from lowtide.units import format_bytes

__all__ = ["PHASE_COLOUR", "attributes", "label", "write_dot"]

_HOLDS = frozenset(
    {
        Part.NAMES,
        Part.ROLES,
        Part.PHASES,
        Part.SHAPES,
        Part.DTYPES,
        Part.DEVICES,
        Part.ADDRESSES,
        Part.VIEWS,
        Part.BOXES,
        Part.PORTS,
        Part.SHAPE_ONLY,
        Part.CONTROL,
        Part.KERNELS,
        Part.COPIES,
        Part.UPDATES,
        Part.SOURCES,
        Part.EXTRAS,
    }
)
_FONT = "Helvetica,Arial,sans-serif"
_BACK = {"constraint": "false", "color": "#b8b8b8", "fontcolor": "#8a8a8a"}
"""Edges that lead back to what an operator reads: pale, and they do not pull on the drawing."""
_FINE_NODES = 150
"""Graphs up to this size are laid out at leisure; the time for fine curves explodes beyond it."""
_FAST = {"splines": "line", "nslimit": "1", "nslimit1": "1", "mclimit": "0.3"}
PHASE_COLOUR = {Phase.FORWARD: "#d6e6f5", Phase.BACKWARD: "#f9e0cf", Phase.UPDATE: "#dcefd8"}
_ROLE_COLOUR = {
    Role.PARAMETER: "#ece3f6",
    Role.BUFFER: "#ece3f6",
    Role.CONSTANT: "#ece3f6",
    Role.OPTIMIZER: "#ece3f6",
    Role.INPUT: "#e2f3f1",
    Role.GRADIENT: "#fdf3ec",
}
_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def write_dot(step: Step) -> Written:
    """The graph as a Graphviz file that gives the same graph back, and what of the step it leaves out."""
    graph = step.graph
    lines = [
        f"digraph {quote(graph.name or 'step')} {{",
        "  graph"
        + attributes(
            {
                "lowtide_version": str(VERSION),
                "lowtide_format": step.format,
                "lowtide_name": graph.name,
                "lowtide_ordered": "true" if graph.ordered else "false",
                "lowtide_attributes": _json(graph.attributes) if graph.attributes else None,
                **{f"lowtide_{key}": _listed(getattr(graph, key)) for key in GRAPH_LISTS},
                "rankdir": "TB",
                "ranksep": "0.35",
                "nodesep": "0.25",
                **(_FAST if len(graph.tensors) + len(graph.ops) > _FINE_NODES else {}),
            }
        ),
        "  node" + attributes({"fontname": _FONT, "fontsize": "10", "margin": "0.3,0.08"}),
        "  edge" + attributes({"fontname": _FONT, "fontsize": "9", "color": "#555555"}),
    ]
    lines += [f"  t{k}{attributes(_tensor(tensor))}" for k, tensor in enumerate(graph.tensors)]
    lines += [f"  o{k}{attributes(_op(op))}" for k, op in enumerate(graph.ops)]
    for k, op in enumerate(graph.ops):
        lines += [f"  {edge}" for edge in _edges(k, op)]
    lines.append("}\n")
    return Written("\n".join(lines).encode(), losses_of(step, _HOLDS))


def attributes(values: Mapping[str, str | None]) -> str:
    """The attributes of a statement in brackets; those that are None are left out."""
    return " [" + ", ".join(f"{k}={quote(v)}" for k, v in values.items() if v is not None) + "];"


def _listed(numbers: Sequence[int]) -> str | None:
    return " ".join(map(str, numbers)) or None


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _rest(item: Tensor | Op, keys: frozenset[str]) -> str | None:
    """The fields that have no attribute of their own, where they are set."""
    values = msgspec.to_builtins(item)
    rest = {key: value for key, value in values.items() if key in keys}
    return _json(rest) if rest else None


def _tensor(tensor: Tensor) -> dict[str, str | None]:
    return {
        "label": label(_tensor_lines(tensor)),
        "shape": "note",
        "style": "filled",
        "fillcolor": _ROLE_COLOUR.get(tensor.role, "#ffffff"),
        "lowtide_node": "tensor",
        "lowtide_id": tensor.id,
        "lowtide_name": tensor.name or None,
        "lowtide_bytes": str(tensor.bytes),
        "lowtide_role": tensor.role.value,
        "lowtide_shape": None if tensor.shape is None else " ".join(map(str, tensor.shape)),
        "lowtide_dtype": tensor.dtype,
        "lowtide_rest": _rest(tensor, TENSOR_REST),
    }


def _op(op: Op) -> dict[str, str | None]:
    clears = op.kind == "set_zero"
    return {
        "label": label(_op_lines(op)),
        "shape": "hexagon" if clears else "box",
        "style": "filled" if clears else "rounded,filled",
        "fillcolor": PHASE_COLOUR[op.phase],
        "lowtide_node": "op",
        "lowtide_id": op.id,
        "lowtide_name": op.name or None,
        "lowtide_kind": op.kind,
        "lowtide_phase": op.phase.value,
        "lowtide_category": op.category.value,
        "lowtide_rest": _rest(op, OP_REST),
    }


def _tensor_lines(tensor: Tensor) -> list[str]:
    lines = [tensor.label]
    if tensor.boxes:
        if tensor.shape is not None:
            lines.append(f"dim=[{' '.join(map(str, tensor.shape))}]")
        return lines + _box_lines(tensor.boxes)
    if tensor.shape is not None:
        lines.append("x".join(map(str, tensor.shape)) + (f" {tensor.dtype}" if tensor.dtype else ""))
    lines.append(f"{tensor.role.value}, {format_bytes(tensor.bytes)}")
    return lines


def _op_lines(op: Op) -> list[str]:
    lines = [op.label]
    result = op.attributes.get("result_dim")
    if isinstance(result, (list, tuple)):
        lines.append(f"result_dim=[{' '.join(map(str, result))}]")
    lines += _box_lines(op.boxes)
    if len(lines) == 1 and op.kind not in op.label:
        lines.append(op.kind)
    return lines


def _box_lines(boxes: Mapping[str, Rect | None]) -> list[str]:
    return [f"{key}={_box(box)}" for key, box in boxes.items()]


def _box(box: Rect | None) -> str:
    if box is None:
        return "None"
    arrays = (f"array([{', '.join(map(str, bounds))}], dtype=int32)" for bounds in (box.lo, box.hi))
    return f"Rect({', '.join(arrays)})"


def label(lines: list[str]) -> str:
    """The lines as they are shown: Graphviz takes entities in labels, and has no control characters."""
    return "\n".join(_CONTROL.sub("\ufffd", line.replace("\n", " ")).replace("&", "&amp;") for line in lines)


def _edges(position: int, op: Op) -> Iterator[str]:
    """The edges of an operator: its inputs, its outputs, then what it waits for."""
    outputs = set(op.outputs)
    shape_only = set(op.shape_only)
    for k, tensor in enumerate(op.inputs):
        port = op.input_ports[k] if op.input_ports else None
        accumulates = tensor in outputs and port == "accumulate"
        yield f"t{tensor} -> o{position}" + attributes(
            {
                "label": None if port is None else label([f"->{port}"]),
                "lowtide_port": port,
                "lowtide_shape_only": "true" if k in shape_only else None,
                "style": "dashed" if k in shape_only else None,
                **(_BACK if accumulates else {}),
            }
        )
    inputs = {t for k, t in enumerate(op.inputs) if not op.input_ports or op.input_ports[k] != "accumulate"}
    for k, tensor in enumerate(op.outputs):
        port = op.output_ports[k] if op.output_ports else None
        yield f"o{position} -> t{tensor}" + attributes(
            {
                "label": None if port is None else label([f"{port}->"]),
                "lowtide_port": port,
                **(_BACK if tensor in inputs else {}),
            }
        )
    for other in op.after:
        yield f"o{other} -> o{position}" + attributes({"style": "dotted", "lowtide_after": "true"})
