"""Writing a step as a MegEngine profile; the reader is beside this file."""

from __future__ import annotations

import json
from typing import Any

from lowtide.cost import Span, Step
from lowtide.errors import ConvertError
from lowtide.formats.base import Written
from lowtide.formats.losses import Part, losses_of
from lowtide.formats.megengine.arena import Arena
from lowtide.formats.megengine.params import param_of
from lowtide.graph import RESIDENT_ROLES, Op, Phase, Role, Tensor

__all__ = ["own_sections", "write"]

_HELD = {
    Part.SHAPES, Part.DTYPES, Part.ADDRESSES, Part.SECONDS, Part.FLOP, Part.TRAFFIC, Part.SPANS, Part.VIEWS,
    Part.NAMES, Part.ROLES, Part.PHASES, Part.UPDATES,
}  # fmt: skip
_PERSISTENT = RESIDENT_ROLES - {Role.INPUT}
_PLAIN = {Role.PARAMETER, Role.INPUT, Role.ACTIVATION, Role.WORKSPACE}
"""Roles that the reader tells apart again."""


def write(step: Step, arena: Arena | None = None) -> Written:
    """The profile; a step that was read from this format comes back as equal JSON.

    With an arena, the values in it get a place in its chunk, with offset and pointers.
    """
    graph = step.graph
    if not graph.ordered:
        raise ConvertError(
            "a MegEngine profile needs to know who reads what; this document does not say it. Capture "
            "the step with `lowtide profile`, or take a file that lists inputs"
        )
    own = own_sections(step)
    more = own.get("more", {})
    shaped_by = {} if own else {t: op for op in reversed(graph.ops) for t in op.outputs}
    variables = {t.id: _variable(step, k, shaped_by.get(k), bool(own)) for k, t in enumerate(graph.tensors)}
    chunks = dict(own["chunks"]) if own else _chunks(graph.tensors)
    if arena is not None and arena.offsets:
        chunks[arena.chunk] = _put_into(arena, step, variables)
    operators = {op.id: _operator(step, k, bool(own)) for k, op in enumerate(graph.ops)} | own.get("idle", {})
    document = {
        **own.get("top", {}),
        "profiler": {
            **more.get("profiler", {"opr_internal_pf": {}}),
            "device": _times(step, host=False),
            "host": _times(step, host=True),
            "opr_footprint": _footprints(step, bool(own)),
        },
        "graph_exec": {
            **more.get("graph_exec", {}),
            "comp_seq": [op.id for op in graph.ops],
            "mem_chunk": chunks,
            "var": variables,
            "operator": operators,
        },
    }
    held = _HELD | ({Part.EXTRAS, Part.DEVICES} if own else set())
    losses = losses_of(step, held)
    there = arena.offsets if arena else {}
    unplaced = (t for k, t in enumerate(graph.tensors) if t.address is None and k not in there)
    views = 0 if own else sum(t.alias is not None for t in unplaced)
    if views:
        losses += (f"{views} views: without an address they are read back with memory of their own",)
    if not own and any(op.phase is not Phase.FORWARD for op in graph.ops):
        losses += ("phases: all operators are read back as forward",)
    other = sorted({t.role.value for t in graph.tensors} - {role.value for role in _PLAIN})
    if other and not own:
        losses += (f"roles: {', '.join(other)} is read back as parameter or activation",)
    return Written(json.dumps(document, allow_nan=False).encode(), losses)


def own_sections(step: Step) -> dict[str, dict[str, Any]]:
    """What the reader kept of the whole profile; nothing for a step from elsewhere, or a damaged one."""
    own = step.graph.attributes.get("megengine")
    if step.format != "megengine" or not isinstance(own, dict):
        return {}
    sections = [own.get(name) for name in ("chunks", "idle", "more", "top")]
    sections += list(own["idle"].values()) if isinstance(own.get("idle"), dict) else [None]
    parts = [*sections, *own["more"].values()] if isinstance(own.get("more"), dict) else [None]
    parts += [op.attributes.get("footprint", {}) for op in step.graph.ops]
    chunks = own["chunks"].values() if isinstance(own.get("chunks"), dict) else [None]
    sound = all(isinstance(chunk, dict) and type(chunk.get("size")) is int for chunk in chunks)
    return own if sound and all(isinstance(part, dict) for part in parts) else {}


def _variable(step: Step, position: int, producer: Op | None, own: bool) -> dict[str, Any]:
    tensor = step.graph.tensors[position]
    inputs = [step.graph.tensors[t].id for t in producer.inputs if t != position] if producer else []
    record: dict[str, Any] = {} if own else _blank_variable(tensor, inputs)
    record |= tensor.attributes if own else {}
    record |= {"name": tensor.name if own else tensor.label, "id": tensor.id, "node_type": "var"}
    record["comp_node"] = tensor.device
    if tensor.address is not None:
        record |= {"prev_dev_ptr": tensor.address, "prev_dev_ptr_end": tensor.address + tensor.bytes}
    return record


def _blank_variable(tensor: Tensor, inputs: list[str]) -> dict[str, Any]:
    shape = None if tensor.shape is None else list(tensor.shape)
    shaped = [{"dep_type": "SHAPE", "var": one} for one in inputs]
    tags = {
        name: {"deps": deps, "inferred_result": result, "infer_type": kind, "node_type": "static_infer_tag"}
        for name, deps, result, kind in (
            ("VALUE", [], None, "NO_DESC"),
            ("SHAPE", shaped, shape, "MISSING_INP" if shaped else "CONST"),
        )
    }
    plan = None
    if tensor.role in _PERSISTENT and shape is not None:
        layout = {"dtype": tensor.dtype, "stride": _strides(shape), "shape": shape}
        plan = {"offset_byte": 0, "layout": layout, "mem_chunk_id": f"chk{tensor.id}"}
    # a null pointer: the end alone says how many bytes the value took
    return {
        "prev_dev_ptr": 0,
        "prev_dev_ptr_end": tensor.bytes,
        "dev_ptr": None,
        "flag": _flags(tensor.role),
        "force_update_src": None,
        "mem_plan": plan,
        "mem_readonly_fwd_src": None,
        "static_infer_tags": tags,
    }


def _put_into(arena: Arena, step: Step, variables: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Give variables their place in an arena; its chunk."""
    for k, offset in arena.offsets.items():
        tensor = step.graph.tensors[k]
        shape = list(tensor.shape or (tensor.bytes,))
        layout = {"dtype": tensor.dtype, "stride": _strides(shape), "shape": shape}
        plan = {"offset_byte": offset, "layout": layout, "mem_chunk_id": arena.chunk}
        start = arena.base + offset
        variables[tensor.id] |= {
            "mem_plan": plan,
            "prev_dev_ptr": start,
            "prev_dev_ptr_end": start + tensor.bytes,
        }
    owner = step.graph.tensors[min(arena.offsets, key=lambda k: (arena.offsets[k], k))]
    return {
        "dev_ptr": arena.base,
        "owner_var": owner.id,
        "size": arena.bytes,
        "id": arena.chunk,
        "node_type": "mem_chunk",
    }


def _flags(role: Role) -> list[str]:
    if role in _PERSISTENT:
        return ["PERSISTENT_DEVICE_VALUE"]
    return ["VOLATILE_CONTENT"] if role is Role.WORKSPACE else []


def _strides(shape: list[int]) -> list[int]:
    strides, step = [], 1
    for d in reversed(shape):
        strides.append(step)
        step *= d
    return strides[::-1]


def _operator(step: Step, position: int, own: bool) -> dict[str, Any]:
    op, tensors = step.graph.ops[position], step.graph.tensors
    extra = {"dfs_step_num": position, "input_update_time": position if op.inputs else 0, "priority": 0}
    record: dict[str, Any] = {"waiting_spec": {}, "extra": extra}
    if own:
        record = {key: value for key, value in op.attributes.items() if key != "footprint"}
    return record | {
        "id": op.id,
        "type": op.kind,
        "name": op.name if own else op.label,
        "input": [tensors[t].id for t in op.inputs],
        "output": [tensors[t].id for t in op.outputs],
        "node_type": "operator",
    }


def _footprints(step: Step, own: bool) -> dict[str, Any]:
    found = {}
    for k, op in enumerate(step.graph.ops):
        cost = step.costs[k] if step.costs else None
        if own and "footprint" not in op.attributes:
            continue
        record = dict(op.attributes["footprint"]) if own else _shapes(step, op)
        memory = cost.bytes_moved.value if cost and cost.bytes_moved else None
        record["memory"] = memory if memory is not None or own else _traffic(step, op)
        record["computation"] = cost.flop.value if cost and cost.flop else None
        found[op.id] = record
    return found


def _shapes(step: Step, op: Op) -> dict[str, Any]:
    tensors = step.graph.tensors
    ends = {"in_shapes": op.inputs, "out_shapes": op.outputs}
    shapes = {name: [list(tensors[t].shape or ()) for t in end] for name, end in ends.items()}
    return {"param": param_of(op), **shapes}


def _traffic(step: Step, op: Op) -> int:
    return sum(step.graph.tensors[t].bytes for t in (*op.reads, *op.outputs))


def _times(step: Step, *, host: bool) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for span in step.spans or _from_costs(step):
        if span.host is host:
            clock = {"start": span.start, "kern": span.kern, "end": span.end}
            found.setdefault(step.graph.ops[span.op].id, {})[span.lane] = clock
    return found


def _from_costs(step: Step) -> list[Span]:
    """Operators one after another, for a step whose times are known but not when each one ran."""
    spans: list[Span] = []
    clock = 0.0
    for k, cost in enumerate(step.costs):
        if cost.seconds is not None:
            end = clock + float(cost.seconds.value)
            spans.append(Span(k, step.graph.ops[k].device or "device", clock, clock, end))
            clock = end
    return spans


def _chunks(tensors: tuple[Tensor, ...]) -> dict[str, Any]:
    return {
        f"chk{t.id}": {
            "dev_ptr": t.address,
            "owner_var": t.id,
            "size": t.bytes,
            "id": f"chk{t.id}",
            "node_type": "mem_chunk",
        }
        for t in tensors
        if t.role in _PERSISTENT
    }
