"""Training graphs dumped from Chainer for recomputation planners.

<variables> <functions>
id bytes name                      one line a variable: `_` activation, `/path` parameter, digits input
forward | backward                 then one record a function, in any order
<inputs> <outputs>
id role                            role `_` forward; `gradient`, `input`, `output` backward
id                                 backward: the variables whose gradient is produced
Operator
{"rank": …}                        forward runs by rising rank, backward by falling rank
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from lowtide.cost import Step
from lowtide.errors import FormatError, GraphError
from lowtide.formats.jsontext import loads
from lowtide.formats.text import Lines, decode, shorten, whole
from lowtide.graph import MAX_BYTES, RESIDENT_ROLES, Graph, Op, Phase, Role, Tensor, validate

__all__ = ["ACCUMULATE", "BACKWARD_ROLES", "HEAD", "read"]

ACCUMULATE = "accumulate"
"""Port of a gradient that another function has begun and this one adds to."""

BACKWARD_ROLES = ("gradient", "input", "output")
HEAD = re.compile(rb"\d{1,9} \d{1,9}\n\d+ -?\d+ \S")
"""How such a file starts."""


@dataclass(frozen=True, slots=True)
class _Function:
    line: int
    phase: Phase
    inputs: tuple[tuple[int, str], ...]
    outputs: tuple[int, ...]
    kind: str
    attributes: dict[str, Any]


def read(data: bytes) -> Step:
    """The training graph: forward by rising rank, then backward by falling rank."""
    lines = Lines(decode(data))
    head = lines.take("`<variables> <functions>`").split(" ")
    if len(head) != 2:
        raise lines.fail(f"{len(head)} fields", "`<variables> <functions>`")
    variables, functions = (whole(field, 1, "count") for field in head)
    if variables > lines.left:
        raise lines.fail(f"{variables} variables in {lines.left} further lines", "as many lines as variables")
    leaves, position = _variables(lines, variables)
    records = []
    while lines.left:
        records.append(_function(lines, position))
    if len(records) != functions:
        raise lines.fail(f"the file has {len(records)} functions", f"{functions}, as line 1 says")
    return _step(leaves, records)


def _variables(lines: Lines, count: int) -> tuple[list[Tensor], dict[int, int]]:
    tensors: list[Tensor] = []
    position: dict[int, int] = {}
    for _ in range(count):
        fields = lines.take("`id bytes name`").split(" ")
        if len(fields) != 3 or not fields[2]:
            raise lines.fail(f"{len(fields)} fields", "`id bytes name`")
        number = whole(fields[0], lines.number, "variable id")
        size = whole(fields[1], lines.number, "size in bytes")
        if size > MAX_BYTES:
            raise lines.fail(f"a variable of {size} bytes", "at most 2^60 bytes")
        if number in position or str(number) != fields[0]:
            raise lines.fail(
                f"variable id {shorten(fields[0])}", "an id not used before, without leading zeros"
            )
        position[number] = len(tensors)
        name = "" if fields[2] == "_" else fields[2]
        tensors.append(Tensor(id=fields[0], bytes=size, role=_role(fields[2], lines), name=name))
    return tensors, position


def _role(name: str, lines: Lines) -> Role:
    if name == "_":
        return Role.ACTIVATION
    if name.startswith("/"):
        return Role.PARAMETER
    if name.isascii() and name.isdigit():
        return Role.INPUT
    raise lines.fail(
        f"the name {shorten(name)}", "`_` for an activation, `/path` for a parameter or digits for an input"
    )


def _function(lines: Lines, position: dict[int, int]) -> _Function:
    word = lines.take("`forward` or `backward`")
    if word not in ("forward", "backward"):
        raise lines.fail(shorten(word), "`forward` or `backward`, which starts a function")
    start, phase = lines.number, Phase(word)
    counts = lines.take("`<inputs> <outputs>`").split(" ")
    if len(counts) != 2:
        raise lines.fail(f"{len(counts)} fields", "`<inputs> <outputs>`")
    n_in, n_out = (whole(field, lines.number, "count") for field in counts)
    if n_in + n_out + 2 > lines.left:
        raise lines.fail(
            f"{n_in} inputs and {n_out} outputs", f"no more than the {lines.left} lines that follow"
        )
    inputs = tuple(_input(lines, position, phase) for _ in range(n_in))
    outputs = tuple(_known(lines.take("a variable id"), lines, position) for _ in range(n_out))
    kind = lines.take("the operator's name")
    if not kind or kind != kind.strip() or kind.startswith("{"):
        raise lines.fail(shorten(kind), "the operator's name")
    attributes = loads(lines.take("a JSON object of attributes"), line=lines.number)
    _check_attributes(attributes, lines)
    return _Function(start, phase, inputs, outputs, kind, attributes)


def _input(lines: Lines, position: dict[int, int], phase: Phase) -> tuple[int, str]:
    fields = lines.take("`id role`").split(" ")
    roles = ("_",) if phase is Phase.FORWARD else BACKWARD_ROLES
    if len(fields) != 2 or fields[1] not in roles:
        raise lines.fail(shorten(" ".join(fields)), f"`id role` with a role of {', '.join(roles)}")
    return _known(fields[0], lines, position), fields[1]


def _known(text: str, lines: Lines, position: dict[int, int]) -> int:
    number = whole(text, lines.number, "variable id")
    if number not in position or str(number) != text:
        raise lines.fail(f"variable {shorten(text)} is not in the list of variables", "an id listed above")
    return position[number]


def _check_attributes(attributes: Any, lines: Lines) -> None:
    if not isinstance(attributes, dict):
        raise lines.fail("attributes that are no object", "a JSON object with a `rank`")
    rank = attributes.get("rank")
    if not isinstance(rank, int) or isinstance(rank, bool):
        raise lines.fail("no whole number `rank` in the attributes", 'a JSON object with `"rank": <number>`')
    retained = attributes.get("_input_indexes_to_retain")
    if retained is not None and (
        not isinstance(retained, list) or any(type(k) is not int or k < 0 for k in retained)
    ):
        raise lines.fail(
            "`_input_indexes_to_retain` is no list of positions", "null or a list such as [0, 1]"
        )


def _step(variables: list[Tensor], records: list[_Function]) -> Step:
    ranked = sorted(range(len(records)), key=lambda k: _order(records[k]))
    tensors = list(variables)
    gradients: dict[int, int] = {}
    written: set[int] = set()
    used_ids: dict[str, int] = {}
    ops: list[Op] = []
    for k in ranked:
        record = records[k]
        name = _unique(record, used_ids)
        if record.phase is Phase.FORWARD:
            op = _forward(name, record, tensors, written)
        else:
            op = _backward(name, record, tensors, gradients, written)
        written.update(op.outputs)
        ops.append(op)
    place = {k: position for position, k in enumerate(ranked)}
    graph = Graph(
        tensors=tuple(tensors),
        ops=tuple(ops),
        attributes={"chainer": {"records": [place[k] for k in range(len(records))]}},
    )
    try:
        validate(graph)
    except GraphError as error:
        line = records[ranked[error.op]].line if error.op is not None else 1
        raise FormatError(
            str(error), expected="functions that read what an earlier rank wrote", line=line
        ) from None
    return Step(graph=graph, format="chainer")


def _order(record: _Function) -> tuple[int, int]:
    rank: int = record.attributes["rank"]
    return (0, rank) if record.phase is Phase.FORWARD else (1, -rank)


def _unique(record: _Function, used: dict[str, int]) -> str:
    """A name by operator and rank, numbered where several share it."""
    name = f"{record.kind}.{record.attributes['rank']}"
    if record.phase is Phase.BACKWARD:
        name += ".backward"
    used[name] = used.get(name, 0) + 1
    return name if used[name] == 1 else f"{name}#{used[name]}"


def _forward(name: str, record: _Function, tensors: list[Tensor], written: set[int]) -> Op:
    for t in record.outputs:
        if t in written or tensors[t].role in RESIDENT_ROLES:
            raise FormatError(
                f"function {name!r} writes variable {tensors[t].id}, which has its value already",
                expected="every activation to be written once, and leaves never",
                line=record.line,
            )
    return Op(
        id=name,
        kind=record.kind,
        phase=Phase.FORWARD,
        inputs=tuple(t for t, _ in record.inputs),
        outputs=record.outputs,
        attributes=record.attributes,
    )


def _backward(
    name: str, record: _Function, tensors: list[Tensor], gradients: dict[int, int], written: set[int]
) -> Op:
    retained = set(record.attributes.get("_input_indexes_to_retain") or ())
    inputs: list[int] = []
    ports: list[str] = []
    shape_only: list[int] = []
    listed = 0
    for variable, port in record.inputs:
        if port == "input":
            if listed not in retained:
                shape_only.append(len(inputs))
            listed += 1
        inputs.append(_gradient(variable, tensors, gradients) if port == "gradient" else variable)
        ports.append(port)
    outputs = tuple(_gradient(variable, tensors, gradients) for variable in record.outputs)
    for t in dict.fromkeys(outputs):
        if t in written:
            inputs.append(t)
            ports.append(ACCUMULATE)
    return Op(
        id=name,
        kind=record.kind,
        phase=Phase.BACKWARD,
        inputs=tuple(inputs),
        outputs=outputs,
        input_ports=tuple(ports),
        shape_only=tuple(shape_only),
        attributes=record.attributes,
    )


def _gradient(variable: int, tensors: list[Tensor], gradients: dict[int, int]) -> int:
    if variable not in gradients:
        gradients[variable] = len(tensors)
        source = tensors[variable]
        tensors.append(
            Tensor(f"{source.id}.grad", bytes=source.bytes, role=Role.GRADIENT, gradient_of=variable)
        )
    return gradients[variable]
