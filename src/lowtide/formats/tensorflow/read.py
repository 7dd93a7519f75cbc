"""Steps listed by TensorFlow: one line a node, kernel or copy, with shapes and the device.

    name, [^control…,] [(shape)…,] (output), DEVICE, time
    node:Kernel, (no input), (no output), DEVICE, time          a kernel that the node launched
    edge_N_node:MEMCPYDtoH, (no input), (output B bytes), …     a copy between devices

The list gives shapes, not edges, and is sorted by name: which node reads which, and in which order
they ran, is known only where a name says it (`x/read` reads `x`, `_retval_x_0_0` returns `x`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lowtide.cost import MAX_SECONDS, Cost, Figure, Note, NoteKind, Origin, Step
from lowtide.errors import FormatError, GraphError
from lowtide.formats.text import Lines, decimal, decode, shorten, whole
from lowtide.graph import MAX_BYTES, Category, Graph, Kernel, Op, Phase, Role, Tensor, validate

__all__ = ["HEAD", "ITEM_BYTES", "read"]

ITEM_BYTES = {
    "float32": 4, "float64": 8, "double": 8, "float16": 2, "half": 2, "bfloat16": 2,
    "int8": 1, "uint8": 1, "int16": 2, "uint16": 2, "int32": 4, "uint32": 4, "int64": 8, "uint64": 8,
    "bool": 1, "complex64": 8, "complex128": 16,
}  # fmt: skip

_SHAPE = re.compile(r"\((?:([a-z][a-z0-9]{0,15}) )?(\d{1,19}(?:x\d{1,19}){0,31})\)", re.ASCII)
_COPIED = re.compile(r"\(output (\d{1,19}) bytes\)", re.ASCII)
HEAD = re.compile(
    rb"[^\n]{1,2000}, \((?:no output|output \d+ bytes|(?:[a-z0-9]+ )?\d+(?:x\d+)*)\)"
    rb", [^,()\n]{1,200}, [0-9.eE+-]{1,40}(?:\n|$)"
)
"""How the first line of such a file looks."""
_TRANSPOSE = re.compile(r"Transpose(?:NCHWToNHWC|NHWCToNCHW)")
_RETURNED = re.compile(r"_retval_(.+)_\d+_\d+")
_EDGE = re.compile(r"edge_\d+_(.+)")
_CONVOLUTIONS = {"Conv2D": "operand 1", "Conv2DBackpropInput": "operand 1", "Conv2DBackpropFilter": "output"}
"""Where each kind of convolution shows the shape of its kernel."""


@dataclass(frozen=True, slots=True)
class _Shape:
    dtype: str | None
    dims: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.dims) * ITEM_BYTES[self.dtype or "float32"]


@dataclass(slots=True)
class _Line:
    number: int
    name: str
    control: list[str]
    operands: list[_Shape]
    output: _Shape | None
    copied: int | None
    device: str
    time: float
    kernels: list[_Line] = field(default_factory=list)


def read(data: bytes) -> Step:
    """The nodes and copies as operators, kernels inside the node that launched them; order unknown."""
    lines = Lines(decode(data))
    nodes: dict[str, _Line] = {}
    kernels: list[_Line] = []
    seen: set[str] = set()
    names: list[str] = []
    if not lines.left:
        raise FormatError("the file is empty", expected="`name, (shape), (output), DEVICE, time`", line=1)
    while lines.left:
        line = _parse(lines)
        if line.name in seen:
            raise lines.fail(f"the name {shorten(line.name)} stands twice", "one line a name")
        seen.add(line.name)
        names.append(line.name)
        if ":" in line.name and line.copied is None:
            kernels.append(line)
        else:
            nodes[line.name] = line
    for kernel in kernels:
        parent = kernel.name.rpartition(":")[0]
        if parent not in nodes:
            raise FormatError(
                f"kernel {shorten(kernel.name)} belongs to no node of the list",
                expected=f"a line for the node {shorten(parent)}",
                line=kernel.number,
            )
        nodes[parent].kernels.append(kernel)
    return _step(nodes, names)


def _parse(lines: Lines) -> _Line:
    expected = "`name, [^control…,] [(shape)…,] (output), DEVICE, time`"
    fields = lines.take(expected).split(", ")
    if len(fields) < 4 or not fields[0]:
        raise lines.fail(f"{len(fields)} fields", expected)
    name, *middle, device, time = fields
    if not device or "(" in device or device.startswith("^"):
        raise lines.fail(f"the device {shorten(device)}", "a device such as GPU before the time")
    control = []
    while middle and middle[0].startswith("^"):
        control.append(middle.pop(0)[1:])
    if not middle:
        raise lines.fail("no output", "`(shape)`, `(no output)` or `(output N bytes)`")
    *inputs, last = middle
    output, copied = _output(last, lines)
    operands = [] if inputs in ([], ["(no input)"]) else [_shape(text, lines) for text in inputs]
    absent = inputs == ["(1)"] and not control
    if not inputs and not control:
        raise lines.fail(
            "no inputs and no control inputs", "`(1)` or `(no input)` for a node that reads nothing"
        )
    is_event = ":" in name
    if is_event != (inputs == ["(no input)"]) or (copied is not None and not is_event):
        raise lines.fail(
            "inputs and name do not agree", "`(no input)` for a kernel or copy, and for nothing else"
        )
    if is_event and (control or output is not None):
        raise lines.fail(
            "a kernel with shapes or control inputs", "`node:Kernel, (no input), (no output), …`"
        )
    seconds = decimal(time, lines.number, "time")
    if not 0 <= seconds <= MAX_SECONDS:
        raise lines.fail(f"the time {shorten(time)}", "a time in microseconds that is not negative")
    return _Line(lines.number, name, control, [] if absent else operands, output, copied, device, seconds)


def _output(text: str, lines: Lines) -> tuple[_Shape | None, int | None]:
    if text == "(no output)":
        return None, None
    copied = _COPIED.fullmatch(text)
    if copied:
        return None, whole(copied.group(1), lines.number, "number of bytes")
    return _shape(text, lines), None


def _shape(text: str, lines: Lines) -> _Shape:
    found = _SHAPE.fullmatch(text)
    if not found:
        raise lines.fail(shorten(text), "a shape such as `(128x3x224x224)` or `(int32 4x1)`")
    dtype, dims = found.group(1), tuple(int(d) for d in found.group(2).split("x"))
    if dtype is not None and dtype not in ITEM_BYTES:
        raise lines.fail(f"the type {shorten(dtype)}", f"one of {', '.join(ITEM_BYTES)}")
    shape = _Shape(dtype, dims)
    if shape.bytes > MAX_BYTES:
        raise lines.fail(f"a tensor of {shape.bytes} bytes", "at most 2^60 bytes")
    return shape


def _step(nodes: Mapping[str, _Line], names: list[str]) -> Step:
    position = {name: k for k, name in enumerate(nodes)}
    outputs = {name: k for k, name in enumerate(n for n, line in nodes.items() if line.output is not None)}
    returned = {
        line.operands[0].dims for name, line in nodes.items() if name.startswith("_retval_") and line.operands
    }
    tensors = [_tensor(nodes[name], outputs, returned) for name in outputs]
    ops: list[Op] = []
    costs: list[Cost] = []
    for line in nodes.values():
        ops.append(_op(line, position, outputs, nodes))
        costs.append(_cost(line))
    attributes = {} if names == sorted(names) else {"tensorflow": {"order": _order(names, position, nodes)}}
    graph = Graph(tensors=tuple(tensors), ops=tuple(ops), ordered=False, attributes=attributes)
    try:
        validate(graph)
    except GraphError as error:
        culprit = list(nodes.values())[error.op].number if error.op is not None else 1
        raise FormatError(str(error), expected="nodes that agree with each other", line=culprit) from None
    notes = (
        Note(NoteKind.ASSUMPTION, "values without a type are float32, 4 bytes each"),
        Note(NoteKind.ASSUMPTION, "roles and phases are read off the names: the list does not state them"),
    )
    known = any(cost != Cost() for cost in costs)
    return Step(graph=graph, format="tensorflow", costs=tuple(costs) if known else (), notes=notes)


def _order(names: list[str], position: Mapping[str, int], nodes: Mapping[str, _Line]) -> list[list[int]]:
    """The order of the lines: ``[operator]`` or ``[operator, kernel]``."""
    place = {name: [k] for name, k in position.items()}
    for name, node in nodes.items():
        place |= {kernel.name: [position[name], k] for k, kernel in enumerate(node.kernels)}
    return [place[name] for name in names]


def _tensor(line: _Line, outputs: Mapping[str, int], returned: set[tuple[int, ...]]) -> Tensor:
    shape = line.output
    assert shape is not None
    base = line.name.removesuffix("/read")
    alias = outputs.get(base) if base != line.name else None
    if alias is not None and alias >= outputs[line.name]:
        alias = None
    return Tensor(
        id=line.name,
        bytes=shape.bytes,
        role=_role(line, shape, returned),
        shape=shape.dims,
        dtype=shape.dtype or "float32",
        device=line.device,
        alias=alias,
    )


def _role(line: _Line, shape: _Shape, returned: set[tuple[int, ...]]) -> Role:
    if shape.dtype is not None and not line.operands:
        return Role.CONSTANT
    if not line.operands or line.name.endswith("/read"):
        return Role.PARAMETER if shape.dims in returned else Role.INPUT
    return Role.GRADIENT if _phase(line.name) is Phase.BACKWARD else Role.ACTIVATION


def _phase(name: str) -> Phase:
    return Phase.BACKWARD if "gradients/" in name else Phase.FORWARD


def _op(
    line: _Line, position: Mapping[str, int], outputs: Mapping[str, int], nodes: Mapping[str, _Line]
) -> Op:
    try:
        after = tuple(position[name] for name in line.control)
    except KeyError as error:
        raise FormatError(
            f"control input {shorten(str(error.args[0]))} is no node of the list",
            expected="the name of another line behind `^`",
            line=line.number,
        ) from None
    inputs = _named_inputs(line, outputs, nodes)
    attributes: dict[str, Any] = {}
    if not inputs and line.operands:
        attributes["operands"] = [[s.dtype, list(s.dims)] for s in line.operands]
    if line.copied is not None:
        attributes["copied_bytes"] = line.copied
    if line.time:
        attributes["time"] = line.time
    return Op(
        id=line.name,
        kind=_kind(line),
        phase=_phase(line.name),
        inputs=inputs,
        outputs=(outputs[line.name],) if line.output is not None else (),
        category=_category(line),
        device=line.device,
        after=after,
        kernels=tuple(_kernel(k) for k in line.kernels),
        attributes=attributes,
    )


def _kernel(line: _Line) -> Kernel:
    name = line.name.rpartition(":")[2]
    return Kernel(name, line.device, {"time": line.time} if line.time else {})


def _named_inputs(line: _Line, outputs: Mapping[str, int], nodes: Mapping[str, _Line]) -> tuple[int, ...]:
    """The tensor that the name of the line says it reads, if there is one of the right shape."""
    name = line.name
    copied = _EDGE.fullmatch(name.rpartition(":")[0]) if line.copied is not None else None
    returned = _RETURNED.fullmatch(name)
    if copied:
        source = copied.group(1)
        if source not in outputs:
            raise FormatError(
                f"copy {shorten(name)} is of no node of the list",
                expected=f"a line for the node {shorten(source)}",
                line=line.number,
            )
        return (outputs[source],)
    source = returned.group(1) if returned else name.removesuffix("/read")
    if source != name and source in outputs and line.operands == [nodes[source].output]:
        return (outputs[source],)
    return ()


def _kind(line: _Line) -> str:
    if line.copied is not None:
        return line.name.rpartition(":")[2]
    if line.kernels:
        return line.kernels[0].name.rpartition(":")[2]
    if line.name.startswith("_retval_"):
        return "_Retval"
    if line.output is None:
        return line.name
    if not line.operands:
        return "Const" if line.output.dtype is not None else "Variable"
    return line.name.rpartition("/")[2]


def _category(line: _Line) -> Category:
    if line.copied is not None:
        return Category.COPY
    return Category.LAYOUT if _TRANSPOSE.search(line.name) else Category.COMPUTE


def _cost(line: _Line) -> Cost:
    flop = _convolution_flop(line)
    micros = line.time or sum(kernel.time for kernel in line.kernels)
    moved = Figure(line.copied, Origin.IMPORTED) if line.copied is not None else None
    if moved is None and line.operands and line.output is not None:
        moved = Figure(sum(s.bytes for s in line.operands) + line.output.bytes, Origin.ESTIMATED)
    return Cost(
        seconds=Figure(micros * 1e-6, Origin.IMPORTED) if micros else None,
        flop=Figure(flop, Origin.ESTIMATED) if flop else None,
        bytes_moved=moved,
    )


def _convolution_flop(line: _Line) -> int | None:
    """Two operations a multiply-add: elements of the result times window times input channels."""
    kind = _kind(line)
    if kind not in _CONVOLUTIONS or line.output is None or len(line.operands) < 2:
        return None
    kernel = line.output if _CONVOLUTIONS[kind] == "output" else line.operands[1]
    result = line.output if kind == "Conv2D" else line.operands[-1]
    if len(kernel.dims) != 4 or len(result.dims) != 4:
        return None
    return 2 * math.prod(result.dims) * math.prod(kernel.dims[:3])
