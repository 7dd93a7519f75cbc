"""Reads the Graphviz files that Lowtide writes: a statement a line, the graph in ``lowtide_`` attributes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

import msgspec

from lowtide.cost import Step
from lowtide.errors import FormatError, GraphError
from lowtide.formats.jsontext import loads
from lowtide.formats.text import Lines, decode, shorten, whole
from lowtide.graph import Graph, Op, Tensor, upgraded, validate

__all__ = ["GRAPH_LISTS", "OP_REST", "TENSOR_REST", "VERSION", "quote", "read_dot", "recognise_dot"]

VERSION = 2
_BEFORE = "1"
"""In files of this version, what operators mean stands among their attributes."""
TENSOR_REST = frozenset({"device", "alias", "gradient_of", "address", "boxes", "source", "attributes"})
_MEANING = frozenset(
    {"random", "once", "updates", "short", "differentiates", "axes"}
    | {"overload", "arguments", "options", "strides", "in_place"}
)
OP_REST = frozenset({"device", "kernels", "boxes", "source", "attributes"}) | _MEANING
"""Fields that stand together in ``lowtide_rest`` as JSON."""

_HEAD = re.compile(rb"(?:\s|//[^\n]*\n|/\*(?:[^*]|\*(?!/))*\*/)*(?:strict\s+)?(?:di)?graph\b[^\n]{0,500}\{")
_TOKEN = re.compile(
    r'\s*(?:"(?P<string>(?:[^"\\]|\\.)*)"|(?P<word>[A-Za-z0-9_.\-]+(?<!-))|(?P<sign>->|[\[\]{}=,;]))'
)
_ESCAPED = re.compile(r'[\\"\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]')
_ESCAPE = re.compile(r"\\(u[0-9a-f]{4}|.)")
_PLAIN = {"\\": "\\\\", '"': '\\"', "\n": "\\n"}
_TENSOR_KEYS = {"id", "name", "bytes", "role", "shape", "dtype", "rest", "node"}
_OP_KEYS = {"id", "name", "kind", "phase", "category", "rest", "node"}
_EDGE_KEYS = {"port", "shape_only", "after"}
GRAPH_LISTS = ("returned", "updated", "updated_early")
"""Lists of tensors, each in an attribute of its own."""
_GRAPH_KEYS = {"version", "format", "name", "ordered", "attributes", *GRAPH_LISTS}
_OURS = f"a Graphviz file written by lowtide, version {VERSION}"

_Item = TypeVar("_Item", Tensor, Op)
_Attributes = dict[str, str]


def quote(text: str) -> str:
    """The text as a Graphviz string on one line; :func:`read_dot` gives back every character."""
    return '"' + _ESCAPED.sub(lambda m: _PLAIN.get(m[0]) or f"\\u{ord(m[0]):04x}", text) + '"'


def recognise_dot(data: bytes) -> bool:
    """Whether a file is a Graphviz graph, of whatever origin: reading says if it is one of ours."""
    return _HEAD.match(data[:4096]) is not None


@dataclass(slots=True)
class _Node:
    """A tensor or an operator as far as its own statement tells."""

    line: int
    position: int
    values: dict[str, Any]
    is_op: bool
    inputs: list[tuple[int, str | None, bool]] = field(default_factory=list)
    """Position, port, and whether only the shape is asked for."""
    outputs: list[tuple[int, str | None]] = field(default_factory=list)
    after: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _File:
    """What the statements so far have said."""

    graph: dict[str, Any] | None = None
    format: str = ""
    before: bool = False
    """Whether it is of the version before."""
    nodes: dict[str, _Node] = field(default_factory=dict)

    def of_kind(self, is_op: bool) -> list[_Node]:
        return [node for node in self.nodes.values() if node.is_op is is_op]


def read_dot(data: bytes) -> Step:
    """The step of a Graphviz file that Lowtide wrote; a FormatError with the line for any other file."""
    lines = Lines(decode(data))
    head = _statement(lines)
    if head is None or head[:1] != ["digraph"] or head[2:] != ["{"]:
        raise FormatError(
            "not the beginning of a directed graph",
            expected='`digraph "…" {`, ' + _OURS,
            line=max(1, lines.number),
        )
    found = _File()
    counts = [0, 0]
    while (tokens := _statement(lines)) != ["}"]:
        if tokens is None:
            raise FormatError("the file ends here", expected="`}`", line=lines.number + 1)
        _take(tokens, found, counts, lines.number)
    if (more := _statement(lines)) is not None:
        raise lines.fail(f"{shorten(more[0])} after the end", "nothing after `}`")
    if found.graph is None:
        raise lines.fail("no `graph` statement", _OURS)
    return _step(found)


def _statement(lines: Lines) -> list[str] | None:
    """The tokens of the next line that is not blank or a comment; None at the end."""
    while (line := lines.peek()) is not None:
        lines.take("a statement")
        if line.strip() and not line.lstrip().startswith("//"):
            return list(_tokens(line.rstrip(), lines))
    return None


def _tokens(line: str, lines: Lines) -> Iterator[str]:
    """The tokens of a line; strings keep a quotation mark in front, to tell them from words."""
    position = 0
    while position < len(line):
        match = _TOKEN.match(line, position)
        if match is None:
            raise lines.fail(
                f"{shorten(line[position : position + 20])}", "a string, a word or one of -> [ ] { } = , ;"
            )
        string = match["string"]
        yield match[match.lastgroup or 0] if string is None else '"' + _ESCAPE.sub(_unescape, string)
        position = match.end()


def _unescape(match: re.Match[str]) -> str:
    code = match[1]
    if len(code) == 5:
        return chr(int(code[1:], 16))
    return "\n" if code == "n" else code


def _take(tokens: list[str], found: _File, counts: list[int], line: int) -> None:
    if tokens[-1] == ";":
        tokens = tokens[:-1]
    if "[" not in tokens:
        _fail(line, f"the statement {shorten(' '.join(tokens))}", '`name [attribute="value", …];`')
    at = tokens.index("[")
    subject = tokens[:at]
    ours = _ours(_pairs(tokens[at:], line), subject, line)
    if subject in (["node"], ["edge"]):
        return
    if subject == ["graph"]:
        _take_graph(ours, found, line)
    elif found.graph is None:
        _fail(line, f'no `graph [lowtide_version="{VERSION}", …]` before this statement', _OURS)
    elif len(subject) == 1:
        _take_node(subject[0], ours, found, counts, line)
    elif len(subject) == 3 and subject[1] == "->":
        _take_edge(subject[0], subject[2], ours, found, line)
    else:
        _fail(line, f"{shorten(' '.join(subject))}", "a node, or `node -> node`")


def _fail(line: int, problem: str, expected: str) -> NoReturn:
    raise FormatError(problem, expected=expected, line=line)


def _pairs(tokens: list[str], line: int) -> _Attributes:
    """The attributes between brackets."""
    if tokens[-1] != "]" or len(tokens) % 4 not in (1, 2):
        _fail(line, "an attribute list that breaks off", '`[name="value", …]`')
    inner = tokens[1:-1]
    pairs: _Attributes = {}
    for k in range(0, len(inner), 4):
        key, sign, value, comma = [*inner[k : k + 4], ","][:4]
        if sign != "=" or comma != "," or not value.startswith('"') or key.startswith('"'):
            _fail(line, f"{shorten(' '.join(inner[k : k + 4]))} in an attribute list", '`name="value"`')
        if key in pairs:
            _fail(line, f"the attribute {shorten(key)} stands twice", "every attribute once")
        pairs[key] = value[1:]
    return pairs


def _ours(pairs: _Attributes, subject: list[str], line: int) -> _Attributes:
    """The attributes that are not for Graphviz, without their prefix."""
    ours = {key.removeprefix("lowtide_"): value for key, value in pairs.items() if key.startswith("lowtide_")}
    of_node = {"tensor": _TENSOR_KEYS, "op": _OP_KEYS}.get(ours.get("node", ""), ours.keys())
    known = _GRAPH_KEYS if subject == ["graph"] else _EDGE_KEYS if len(subject) == 3 else of_node
    for key in ours:
        if key not in known:
            _fail(
                line,
                f"the attribute {shorten('lowtide_' + key)}",
                f"one that lowtide writes here: {sorted(known)}",
            )
    return ours


def _take_graph(ours: _Attributes, found: _File, line: int) -> None:
    version = ours.get("version")
    if version not in (_BEFORE, str(VERSION)):
        problem = "no version" if version is None else f"version {shorten(version)}"
        _fail(line, f"a Graphviz file with {problem}", _OURS)
    if found.graph is not None:
        _fail(line, "a second `graph` statement", "one")
    ordered = {"true": True, "false": False}.get(ours.get("ordered", ""))
    if ordered is None:
        _fail(line, f"lowtide_ordered={shorten(ours.get('ordered', ''))}", "`true` or `false`")
    attributes = loads(ours.get("attributes", "{}"), line=line)
    if not isinstance(attributes, dict):
        _fail(line, "lowtide_attributes", "a JSON object")
    found.graph = {"name": ours.get("name", ""), "ordered": ordered, "attributes": attributes}
    for key in GRAPH_LISTS:
        found.graph[key] = tuple(whole(n, line, "position") for n in ours.get(key, "").split())
    found.before = version == _BEFORE
    found.format = ours.get("format", "")


def _take_node(name: str, ours: _Attributes, found: _File, counts: list[int], line: int) -> None:
    kind = ours.pop("node", "")
    if kind not in ("tensor", "op"):
        _fail(line, f"the node {shorten(name)} without lowtide_node", '`lowtide_node="tensor"` or `"op"`')
    if name in found.nodes:
        _fail(line, f"the node {shorten(name)} stands twice", "every node once")
    is_op = kind == "op"
    needed = ("id", "kind", "phase", "category") if is_op else ("id", "bytes", "role")
    for key in needed:
        if key not in ours:
            _fail(line, f"the node {shorten(name)} without lowtide_{key}", f'lowtide_{key}="…"')
    rest = loads(ours.pop("rest", "{}"), line=line)
    allowed = OP_REST if is_op else TENSOR_REST
    if not isinstance(rest, dict) or not rest.keys() <= allowed:
        _fail(line, f"lowtide_rest of {shorten(name)}", f"a JSON object with keys of {sorted(allowed)}")
    values: dict[str, Any] = rest | ours
    if not is_op:
        values["bytes"] = whole(ours["bytes"], line, "size in bytes")
        if "shape" in ours:
            values["shape"] = [whole(n, line, "dimension") for n in ours["shape"].split()]
    found.nodes[name] = _Node(line, counts[is_op], values, is_op)
    counts[is_op] += 1


def _take_edge(source: str, target: str, ours: _Attributes, found: _File, line: int) -> None:
    for name in (source, target):
        if name not in found.nodes:
            _fail(
                line, f"an edge of {shorten(name)}, which no line above declares", "nodes first, then edges"
            )
    a, b = found.nodes[source], found.nodes[target]
    for key in ("shape_only", "after"):
        if ours.get(key, "true") != "true":
            _fail(line, f"lowtide_{key}={shorten(ours[key])}", "`true`, or nothing")
    if a.is_op and b.is_op and ours.keys() == {"after"}:
        b.after.append(a.position)
    elif not a.is_op and b.is_op and "after" not in ours:
        b.inputs.append((a.position, ours.get("port"), "shape_only" in ours))
    elif a.is_op and not b.is_op and ours.keys() <= {"port"}:
        a.outputs.append((b.position, ours.get("port")))
    else:
        expected = "an edge between a tensor and an operator, or between operators with lowtide_after"
        _fail(line, f"an edge from {shorten(source)} to {shorten(target)}", expected)


def _step(found: _File) -> Step:
    assert found.graph is not None
    tensors, ops = found.of_kind(False), found.of_kind(True)
    graph = Graph(
        tensors=tuple(_convert(node, node.values, Tensor) for node in tensors),
        ops=tuple(_convert(node, node.values | _ends(node), Op) for node in ops),
        **found.graph,
    )
    try:
        graph = upgraded(graph) if found.before else graph
        validate(graph)
    except GraphError as error:
        node = ops[error.op] if error.op is not None else tensors[error.tensor or 0]
        _fail(node.line, str(error), "a graph that does not contradict itself")
    return Step(graph, format=found.format)


def _ends(node: _Node) -> dict[str, Any]:
    """The edges of an operator as its fields."""
    ends: dict[str, Any] = {
        "inputs": [tensor for tensor, _, _ in node.inputs],
        "outputs": [tensor for tensor, _ in node.outputs],
        "shape_only": [k for k, (_, _, shape_only) in enumerate(node.inputs) if shape_only],
        "after": node.after,
    }
    for key, ports in (
        ("input_ports", [e[1] for e in node.inputs]),
        ("output_ports", [e[1] for e in node.outputs]),
    ):
        named = [port for port in ports if port is not None]
        if named and len(named) != len(ports):
            _fail(
                node.line,
                f"some edges of an operator have a lowtide_port and some have not ({key})",
                "all or none",
            )
        ends[key] = named
    return ends


def _convert(node: _Node, values: dict[str, Any], kind: type[_Item]) -> _Item:
    try:
        return msgspec.convert(values, kind)
    except (msgspec.ValidationError, GraphError) as error:
        _fail(node.line, str(error), _OURS)
    except RecursionError:
        _fail(node.line, "attributes nested too deeply", _OURS)
