"""Execution profiles of MegEngine: one JSON object with the graph, the addresses and the times.

    profiler.device[op][comp_node], profiler.host[op][thread]     start, kern, end in seconds
    profiler.opr_footprint[op]                                    FLOP, bytes, shapes, parameters
    graph_exec.comp_seq                                           the operators that ran, in order
    graph_exec.operator, .var, .mem_chunk                         who reads what, and where it lived

What the graph has a field for is kept there; every other key of a record stays with its tensor or
operator as an attribute, so that nothing is lost on the way back.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import msgspec

from lowtide.cost import MAX_SECONDS, Cost, Figure, Origin, Span, Step
from lowtide.errors import FormatError, GraphError
from lowtide.formats.jsontext import Key, loads, locate
from lowtide.formats.text import decode, shorten
from lowtide.graph import MAX_BYTES, Graph, Op, Phase, Role, Tensor, validate

__all__ = ["HEAD", "read"]

HEAD = re.compile(rb'\s*\{\s*"(?:profiler|graph_exec)"\s*:\s*\{')
_WEIGHT, _WORKSPACE = "PERSISTENT_DEVICE_VALUE", "VOLATILE_CONTENT"


class _Reader:
    """The document, with access that says where in the file something is wrong."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.root = loads(text)

    def fail(self, problem: str, expected: str, path: Sequence[Key]) -> NoReturn:
        where = ".".join(map(str, path)) or "the document"
        raise FormatError(f"{where}: {problem}", expected=expected, byte=locate(self.text, path))

    def mapping(self, value: Any, path: Sequence[Key]) -> dict[str, Any]:
        if not isinstance(value, dict):
            self.fail(f"{shorten(str(value))} is no object", "a JSON object", path)
        return value

    def section(self, *path: str) -> dict[str, Any]:
        value: Any = self.root
        for depth, key in enumerate(path):
            parent = self.mapping(value, path[:depth])
            if key not in parent:
                self.fail(f"there is no `{key}`", f"a profile with `{'.'.join(path)}`", path[:depth])
            value = parent[key]
        return self.mapping(value, path)

    def number(self, value: Any, path: Sequence[Key]) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.fail(f"{shorten(str(value))} is no number", "a number", path)
        return value

    def whole(self, value: Any, path: Sequence[Key]) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            self.fail(
                f"{shorten(str(value))} is no whole number", "a whole number that is not negative", path
            )
        return value

    def text_of(self, value: Any, path: Sequence[Key]) -> str:
        if not isinstance(value, str):
            self.fail(f"{shorten(str(value))} is no text", "a string", path)
        return value

    def names(self, value: Any, path: Sequence[Key]) -> list[str]:
        if not isinstance(value, list):
            self.fail(f"{shorten(str(value))} is no list", "a list of ids", path)
        return [self.text_of(name, (*path, k)) for k, name in enumerate(value)]


def read(data: bytes) -> Step:
    """The executed operators in order, with addresses, footprints and times."""
    reader = _Reader(decode(data))
    tensors, position = _tensors(reader)
    records = reader.section("graph_exec", "operator")
    sequence = reader.names(reader.section("graph_exec").get("comp_seq"), ("graph_exec", "comp_seq"))
    _check_sequence(reader, sequence, records)
    footprints = reader.section("profiler", "opr_footprint")
    ops = tuple(_op(reader, name, records, position, footprints) for name in sequence)
    place = {name: k for k, name in enumerate(sequence)}
    _refuse_strangers(reader, footprints, place, ("profiler", "opr_footprint"))
    spans = (*_spans(reader, "device", place), *_spans(reader, "host", place))
    graph = Graph(
        tensors=_with_inputs(_with_views(tensors, ops), ops),
        ops=ops,
        attributes={"megengine": _attributes(reader, records, place, position)},
    )
    try:
        validate(graph)
    except GraphError as error:
        path: tuple[Key, ...] = ("graph_exec",)
        if error.op is not None:
            path = ("graph_exec", "operator", ops[error.op].id)
        reader.fail(str(error), "operators that read what an earlier one wrote", path)
    costs = tuple(_cost(reader, name, footprints, spans_of) for name, spans_of in _by_op(sequence, spans))
    return Step(graph=graph, format="megengine", costs=costs, spans=spans)


def _tensors(reader: _Reader) -> tuple[list[Tensor], dict[str, int]]:
    tensors: list[Tensor] = []
    position: dict[str, int] = {}
    path = ("graph_exec", "var")
    for name, value in reader.section(*path).items():
        record = reader.mapping(value, (*path, name))
        position[name] = len(tensors)
        tensors.append(_tensor(reader, name, record, (*path, name)))
    return tensors, position


def _tensor(reader: _Reader, name: str, record: dict[str, Any], path: tuple[Key, ...]) -> Tensor:
    flags = reader.names(record.get("flag", []), (*path, "flag"))
    start = record.get("prev_dev_ptr")
    end = record.get("prev_dev_ptr_end")
    size = 0
    if end is not None:
        size = reader.whole(end, (*path, "prev_dev_ptr_end")) - reader.whole(start, (*path, "prev_dev_ptr"))
        if not 0 <= size <= MAX_BYTES:
            reader.fail(f"{size} bytes", "an end behind the start", (*path, "prev_dev_ptr_end"))
    elif start is not None:
        reader.whole(start, (*path, "prev_dev_ptr"))
    typed = _TYPED_VAR | _ADDRESS if start and size else _TYPED_VAR
    layout = _layout(reader, record, path)
    return Tensor(
        id=name,
        bytes=size,
        role=_role(flags, end),
        name=reader.text_of(record.get("name"), (*path, "name")),
        shape=_shape(record, layout),
        dtype=layout.get("dtype") if isinstance(layout.get("dtype"), str) else None,
        device=reader.text_of(record.get("comp_node"), (*path, "comp_node")),
        address=start if start and size else None,
        attributes={key: value for key, value in record.items() if key not in typed},
    )


def _role(flags: list[str], end: int | None) -> Role:
    if _WEIGHT in flags:
        return Role.PARAMETER
    if _WORKSPACE in flags:
        return Role.WORKSPACE
    # without memory of its own the value is inferred on the host before the graph runs
    return Role.ACTIVATION if end is not None else Role.CONSTANT


def _layout(reader: _Reader, record: dict[str, Any], path: tuple[Key, ...]) -> dict[str, Any]:
    plan = record.get("mem_plan")
    if plan is None:
        return {}
    layout = reader.mapping(plan, (*path, "mem_plan")).get("layout", {})
    return reader.mapping(layout, (*path, "mem_plan", "layout"))


def _shape(record: dict[str, Any], layout: dict[str, Any]) -> tuple[int, ...] | None:
    tags = record.get("static_infer_tags")
    inferred = tags.get("SHAPE") if isinstance(tags, dict) else None
    found = inferred.get("inferred_result") if isinstance(inferred, dict) else None
    for shape in (layout.get("shape"), found):
        if isinstance(shape, list) and all(type(d) is int and d >= 0 for d in shape):
            return tuple(shape)
    return None


def _check_sequence(reader: _Reader, sequence: list[str], records: Mapping[str, Any]) -> None:
    seen: set[str] = set()
    for k, name in enumerate(sequence):
        if name not in records or name in seen:
            problem = "runs twice" if name in seen else "is not in `graph_exec.operator`"
            reader.fail(
                f"operator {shorten(name)} {problem}", "each operator once", ("graph_exec", "comp_seq", k)
            )
        seen.add(name)


def _op(
    reader: _Reader,
    name: str,
    records: Mapping[str, Any],
    position: Mapping[str, int],
    footprints: Mapping[str, Any],
) -> Op:
    path: tuple[Key, ...] = ("graph_exec", "operator", name)
    record = reader.mapping(records[name], path)
    inputs, outputs = (_ends(reader, record, end, path, position) for end in ("input", "output"))
    attributes = {key: value for key, value in record.items() if key not in _TYPED_OP}
    footprint = reader.mapping(footprints.get(name, {}), ("profiler", "opr_footprint", name))
    if name in footprints:
        attributes["footprint"] = {
            key: value for key, value in footprint.items() if key not in ("memory", "computation")
        }
    return Op(
        id=name,
        kind=reader.text_of(record.get("type"), (*path, "type")),
        phase=Phase.FORWARD,
        inputs=inputs,
        outputs=outputs,
        name=reader.text_of(record.get("name"), (*path, "name")),
        attributes=attributes,
    )


_TYPED_VAR = frozenset({"name", "comp_node", "id", "node_type"})
_ADDRESS = frozenset({"prev_dev_ptr", "prev_dev_ptr_end"})
_TYPED_OP = frozenset({"id", "type", "input", "output", "name", "node_type"})


def _ends(
    reader: _Reader, record: dict[str, Any], end: str, path: tuple[Key, ...], position: Mapping[str, int]
) -> tuple[int, ...]:
    names = reader.names(record.get(end), (*path, end))
    for k, name in enumerate(names):
        if name not in position:
            reader.fail(
                f"variable {shorten(name)} does not exist", "an id of `graph_exec.var`", (*path, end, k)
            )
    return tuple(position[name] for name in names)


def _refuse_strangers(
    reader: _Reader, found: Mapping[str, Any], place: Mapping[str, int], path: tuple[Key, ...]
) -> None:
    for name in found:
        if name not in place:
            reader.fail("this operator did not run", "an id of `graph_exec.comp_seq`", (*path, name))


def _spans(reader: _Reader, side: str, place: Mapping[str, int]) -> list[Span]:
    found = reader.section("profiler", side)
    _refuse_strangers(reader, found, place, ("profiler", side))
    spans = []
    for name, lanes in found.items():
        for lane, value in reader.mapping(lanes, ("profiler", side, name)).items():
            path: tuple[Key, ...] = ("profiler", side, name, lane)
            record = reader.mapping(value, path)
            start, kern, end = (reader.number(record.get(key), (*path, key)) for key in _CLOCK)
            if not -MAX_SECONDS <= start <= kern <= end <= MAX_SECONDS or len(record) != len(_CLOCK):
                reader.fail("the times are out of order", "start <= kern <= end and nothing else", path)
            spans.append(Span(place[name], lane, start, kern, end, host=side == "host"))
    return spans


_CLOCK = ("start", "kern", "end")


def _by_op(sequence: list[str], spans: Sequence[Span]) -> list[tuple[str, list[Span]]]:
    grouped: list[tuple[str, list[Span]]] = [(name, []) for name in sequence]
    for span in spans:
        if not span.host:
            grouped[span.op][1].append(span)
    return grouped


def _cost(reader: _Reader, name: str, footprints: Mapping[str, Any], spans: Sequence[Span]) -> Cost:
    footprint = footprints.get(name, {})
    figures: dict[str, Figure | None] = {}
    for key in ("memory", "computation"):
        value = footprint.get(key)
        path = ("profiler", "opr_footprint", name, key)
        figures[key] = None if value is None else Figure(reader.whole(value, path), Origin.IMPORTED)
    return Cost(
        seconds=Figure(sum(span.running for span in spans), Origin.IMPORTED) if spans else None,
        flop=figures["computation"],
        bytes_moved=figures["memory"],
    )


def _with_views(tensors: list[Tensor], ops: Sequence[Op]) -> tuple[Tensor, ...]:
    """An output at the very address of an equally large input is a view of it, or overwrote it."""
    for op in ops:
        places = {(tensors[t].address, tensors[t].bytes): t for t in op.inputs}
        for out in op.outputs:
            tensor = tensors[out]
            source = places.get((tensor.address, tensor.bytes))
            if tensor.address is not None and source not in (None, out) and tensors[source or 0].alias != out:
                tensors[out] = msgspec.structs.replace(tensor, alias=source)
    return tuple(tensors)


def _with_inputs(tensors: tuple[Tensor, ...], ops: Sequence[Op]) -> tuple[Tensor, ...]:
    """A value that has memory and that no operator writes comes from outside the step."""
    written = {t for op in ops for t in op.outputs}
    return tuple(
        msgspec.structs.replace(t, role=Role.INPUT) if k not in written and t.role is Role.ACTIVATION else t
        for k, t in enumerate(tensors)
    )


def _attributes(
    reader: _Reader, records: Mapping[str, Any], place: Mapping[str, int], position: Mapping[str, int]
) -> dict[str, Any]:
    """What belongs to the whole profile: memory chunks, operators that did not run, further sections."""
    chunks = reader.section("graph_exec", "mem_chunk")
    for name, value in chunks.items():
        path: tuple[Key, ...] = ("graph_exec", "mem_chunk", name)
        chunk = reader.mapping(value, path)
        reader.whole(chunk.get("size"), (*path, "size"))
        if reader.text_of(chunk.get("owner_var"), (*path, "owner_var")) not in position:
            reader.fail("the owner does not exist", "an id of `graph_exec.var`", (*path, "owner_var"))
    idle = {name: record for name, record in records.items() if name not in place}
    for name, value in idle.items():
        path = ("graph_exec", "operator", name)
        record = reader.mapping(value, path)
        for end in ("input", "output"):
            _ends(reader, record, end, path, position)
    known = {
        "profiler": ("device", "host", "opr_footprint"),
        "graph_exec": ("comp_seq", "mem_chunk", "var", "operator"),
    }
    more = {
        section: {k: v for k, v in reader.section(section).items() if k not in keys}
        for section, keys in known.items()
    }
    top = {key: value for key, value in reader.root.items() if key not in known}
    return {"chunks": chunks, "idle": idle, "more": more, "top": top}
