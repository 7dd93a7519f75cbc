"""The edges of a data-flow picture, derived from names and ports.

The arrows themselves are lost in the text; their labels are left, at the height where they were drawn.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lowtide.errors import FormatError
from lowtide.formats.dataflow.names import GRAD, OUTPUT, UPDATE, Node, is_output
from lowtide.formats.dataflow.scan import Kind, Piece
from lowtide.formats.dataflow.words import KINDS

__all__ = ["ACCUMULATE", "Edge", "Picture", "backward_edges", "forward_edges", "kind_of", "update_edges"]

ACCUMULATE = "accumulate"
"""Port of a gradient that an operator adds to; the picture has no label for it."""

_PORTS: dict[str, tuple[str, ...]] = {
    "data": (),
    "filter": ("input", "filters"),
    "filterA": ("input", "a", "b"),
    "filterNL": ("input",),
    "linear": ("input", "weights"),
    "softmax": ("input", "labels"),
    "evaluate": ("probability", "labels"),
    "accuracy": ("input",),
}
_GRADIENT_READS = {"softmax": ("labels",)}
"""Inputs that a gradient reads again, where it does not need them all."""
_GRADIENT_KEEPS = {"filterNL": (OUTPUT,), "softmax": ("probability",)}
"""Outputs that a gradient reads."""
_PARAMETERS = {"filters": "W"}
"""How a parameter is called that goes into a port of another name."""


@dataclass(slots=True, eq=False)
class Edge:
    """A tensor that an operator reads or writes through a port, and the label that says so."""

    op: str
    tensor: str
    port: str
    into: bool
    line: int
    """Of its operator."""
    first: int
    last: int
    """Lines between which the picture draws it."""
    label: Piece | None = None
    drawn: bool = True
    """Whether the picture has an arrow for it."""


@dataclass(slots=True)
class Picture:
    """The nodes of a document by name, told apart into operators and variables."""

    operators: dict[str, Node]
    variables: dict[str, Node]

    def outputs(self, op: Node) -> list[Node]:
        """The variables that a forward operator writes, in the order of the document."""
        return [v for v in self.variables.values() if v.prefix == op.name and v.part != GRAD[1:]]

    def edge(self, op: Node, tensor: str, port: str, into: bool, *, drawn: bool = True) -> Edge:
        """An edge with the lines between which it is drawn."""
        low, high = sorted((op.line, self.variables[tensor].line))
        return Edge(op.name, tensor, port, into, op.line, low, high, drawn=drawn)


def kind_of(name: str) -> str:
    """The kind of an operator: ``linear`` for ``classifier.linear1``, ``linear.grad`` for its gradient."""
    if name.startswith(UPDATE):
        return "update"
    base = name.removesuffix(GRAD)
    kind = base.rpartition(".")[2].rstrip("0123456789")
    return kind if base == name else kind + GRAD


def forward_edges(picture: Picture, pieces: list[Piece]) -> dict[str, list[Edge]]:
    """For every forward operator its edges, inputs first."""
    edges: dict[str, list[Edge]] = {}
    labels = [piece for piece in pieces if piece.kind is Kind.LABEL_OUT]
    written = _written(picture)
    for op in picture.operators.values():
        if op.name.endswith(GRAD) or op.name.startswith(UPDATE):
            continue
        kind = kind_of(op.name)
        if kind not in _PORTS:
            raise FormatError(
                f"{op.name} is an operator of unknown kind",
                expected=f"one of {', '.join(KINDS)}",
                line=op.line,
            )
        inputs = [picture.edge(op, _operand(op, port, picture, written), port, True) for port in _PORTS[kind]]
        outputs = [picture.edge(op, v.name, _out_port(op, v, labels), False) for v in picture.outputs(op)]
        edges[op.name] = inputs + outputs
    return edges


def _written(picture: Picture) -> list[Node]:
    """Variables that forward operators write, in reading order."""
    return [
        v for v in picture.variables.values() if v.prefix in picture.operators and not v.name.endswith(GRAD)
    ]


def _operand(op: Node, port: str, picture: Picture, written: list[Node]) -> str:
    """The variable that an operator reads through a port."""
    name = _parameter(op, port, picture)
    if name is None:
        above = [v for v in written if v.place < op.place and v.prefix != op.name and _goes_into(v, port)]
        own = [v for v in above if v.prefix == op.prefix]
        nearest = own if op.prefix in picture.operators else above
        name = nearest[-1].name if nearest else None
    if name is None:
        raise FormatError(
            f"no variable of the text goes into the port {port!r} of {op.name}",
            expected="the variable above its operator",
            line=op.line,
        )
    return name


def _parameter(op: Node, port: str, picture: Picture) -> str | None:
    number = op.part[len(op.part.rstrip("0123456789")) :]
    for part in (_PARAMETERS.get(port, port) + number, _PARAMETERS.get(port, port)):
        name = f"{op.prefix}.{part}"
        if name in picture.variables:
            return name
    return None


def _goes_into(variable: Node, port: str) -> bool:
    stem = variable.part.removesuffix("_output")
    if port == "input":
        return is_output(variable.part) and stem not in ("labels", "probability")
    return stem == port


def _out_port(op: Node, variable: Node, labels: list[Piece]) -> str:
    if variable.part == OUTPUT or not is_output(variable.part):
        return variable.part
    stem = variable.part.removesuffix("_output")
    if stem == variable.part:
        return OUTPUT  # spelt with its letters in the wrong order
    for label in labels:
        if op.line <= label.line <= variable.line and label.body.startswith(stem + "_"):
            return label.body
    return stem


def backward_edges(picture: Picture, forward: dict[str, list[Edge]]) -> dict[str, list[Edge]]:
    """For every gradient operator its edges, without those that accumulate."""
    edges = {}
    for op in picture.operators.values():
        if not op.name.endswith(GRAD):
            continue
        base = op.name.removesuffix(GRAD)
        if base not in forward:
            raise FormatError(
                f"{op.name} is the gradient of no operator of the text",
                expected=f"an operator {base}",
                line=op.line,
            )
        edges[op.name] = list(_gradient_edges(op, forward[base], picture))
    computed = {edge.tensor for own in edges.values() for edge in own if not edge.into}
    for own in forward.values():
        for edge in own:
            gradient = edge.tensor + GRAD
            if edge.into and gradient in picture.variables and gradient not in computed:
                raise FormatError(
                    f"no operator of the text computes {gradient}",
                    expected=f"an operator {edge.op}{GRAD}",
                    line=picture.variables[gradient].line,
                )
    return edges


def _gradient_edges(op: Node, forward: list[Edge], picture: Picture) -> Iterator[Edge]:
    kind = kind_of(op.name).removesuffix(GRAD)
    inputs = [edge for edge in forward if edge.into]
    outputs = [edge for edge in forward if not edge.into]
    deltas = [edge.tensor + GRAD for edge in outputs if edge.tensor + GRAD in picture.variables]
    if not deltas:
        raise FormatError(
            f"{op.name} has no gradient to start from", expected="the gradient of an output", line=op.line
        )
    for delta in deltas:
        yield picture.edge(op, delta, "output.delta", True)
    again = _GRADIENT_READS.get(kind, tuple(edge.port for edge in inputs))
    for edge in inputs:
        if edge.port in again:
            yield picture.edge(op, edge.tensor, edge.port, True)
    for edge in outputs:
        if edge.port in _GRADIENT_KEEPS.get(kind, ()):
            yield picture.edge(op, edge.tensor, edge.port, True)
    for edge in inputs:
        if edge.tensor + GRAD in picture.variables:
            yield picture.edge(op, edge.tensor + GRAD, edge.port + ".delta", False)


def update_edges(picture: Picture, targets: dict[str, str]) -> dict[str, list[Edge]]:
    """For every update its edges: it reads the gradient and changes the parameter in place."""
    edges = {}
    for name, parameter in targets.items():
        op = picture.operators[name]
        if parameter + GRAD not in picture.variables:
            raise FormatError(
                f"{name} has no gradient to read", expected=f"a variable {parameter}{GRAD}", line=op.line
            )
        edges[name] = [
            picture.edge(op, parameter, "params", True),
            picture.edge(op, parameter + GRAD, "gradient", True),
            picture.edge(op, parameter, "params", False, drawn=False),
        ]
    return edges
