"""Rows for operators and tensors, each made once, whichever view asks for it first."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

from lowtide.cost import Cost
from lowtide.cost.work import bytes_moved, flop
from lowtide.graph import LOOP, RESIDENT_ROLES, Graph, Op, Source, Tensor
from lowtide.plan.program.instructions import Loop, Program
from lowtide.plan.program.memory import allocated_bytes
from lowtide.report.page.thin import MOST_OPERATORS
from lowtide.report.page.types import OperatorTable, StepTables, TensorTable

__all__ = ["TablePart", "Tables", "Words"]

_LONGEST = 300
"""Characters of a name that the page shows."""


class Words:
    """Every text once; the empty one comes first."""

    def __init__(self) -> None:
        self._places: dict[str, int] = {"": 0}

    def __call__(self, text: str) -> int:
        """The place of a text, shortened where it is longer than anybody reads."""
        text = text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
        return self._places.setdefault(text, len(self._places))

    def all(self) -> tuple[str, ...]:
        """Texts by their place."""
        return tuple(self._places)


class TablePart:
    """A graph whose operators and tensors have rows: that of the step, of a tile or of a group."""

    def __init__(self, tables: Tables, graph: Graph, parent: int, seconds: Sequence[float]) -> None:
        self.tables, self.graph, self.parent, self.seconds = tables, graph, parent, seconds
        self.costs: Sequence[Cost] = ()
        self.operator_rows: dict[int, int] = {}
        self.tensor_rows: dict[int, int] = {}
        self.bodies: dict[int, TablePart] = {}
        """Of a Program: the graphs that its loops run, by their number."""
        self.groups: dict[int, TablePart] = {}
        """Graphs of operators that are groups, by operator."""
        self.prefix = ""
        """Stands before the names of its tensors: those of groups are only numbered."""
        self.makers: dict[int, int] = {}
        for k, op in enumerate(graph.ops):
            for t in op.outputs:
                self.makers.setdefault(t, k)
        self.storages = graph.storages()
        self.places: dict[str, int] = {}

    def operator(self, k: int) -> int:
        """The row of an operator."""
        if k not in self.operator_rows:
            self.operator_rows[k] = self.tables.add_operator(self, k)
        return self.operator_rows[k]

    def tensor(self, t: int) -> int:
        """The row of a tensor."""
        if t not in self.tensor_rows:
            self.tensor_rows[t] = self.tables.add_tensor(self, t)
        return self.tensor_rows[t]

    def forward_of(self, op: Op) -> int:
        """The row of the operator of forward that one of backward belongs to; -1 where that is not known."""
        if not op.differentiates:
            return -1
        if not self.places:
            self.places = {one.id: k for k, one in enumerate(self.graph.ops)}
        return self.operator_rows.get(self.places.get(op.differentiates, -1), -1)

    def all(self) -> None:
        """Rows for everything, in program order."""
        for k in range(len(self.graph.ops)):
            self.operator(k)
        for t in range(len(self.graph.tensors)):
            self.tensor(t)

    def group(self, k: int) -> TablePart | None:
        """The graph of an operator that is a group."""
        body = self.graph.ops[k].body
        if body is None or not body.ops:
            return None
        if k not in self.groups:
            self.groups[k] = self.tables.part(body, self.operator(k))
            self.groups[k].prefix = f"{self.graph.ops[k].id}/"
        return self.groups[k]

    def programmed(self, program: Program) -> TablePart:
        """The same rows, with the bodies of a program's loops."""
        found = copy(self)
        found.bodies = {}
        for line in program.instructions:
            if isinstance(line, Loop):
                for number in sorted({tile.body for tile in line.tiles} - found.bodies.keys()):
                    body = program.bodies[number]
                    part = self.tables.part(body.graph, self.operator(line.op), body.seconds)
                    found.bodies[number] = part.programmed(body.program)
        return found


class Tables:
    """The tables of one step while they grow."""

    def __init__(self, name: str, words: Words, origin: str, *, rounds: bool = True) -> None:
        self.name, self.words, self.origin, self.rounds = name, words, origin, rounds
        self.operators: list[tuple[TablePart, int]] = []
        self.tensors: list[tuple[TablePart, int]] = []
        self.in_all = 0

    def part(
        self, graph: Graph, parent: int = -1, seconds: Sequence[float] = (), costs: Sequence[Cost] = ()
    ) -> TablePart:
        """A graph of the step; all of its rows at once, unless there are too many."""
        part = TablePart(self, graph, parent, seconds)
        part.costs = costs
        self.in_all += len(graph.ops)
        if len(self.operators) + len(graph.ops) <= MOST_OPERATORS:
            part.all()
        return part

    def bytes_of(self, tensor: Tensor) -> int:
        """What a tensor takes: as the allocator rounds it, or as the document says."""
        return allocated_bytes(tensor) if self.rounds else tensor.bytes

    def add_operator(self, part: TablePart, k: int) -> int:
        """A new row."""
        self.operators.append((part, k))
        return len(self.operators) - 1

    def add_tensor(self, part: TablePart, t: int) -> int:
        """A new row."""
        self.tensors.append((part, t))
        return len(self.tensors) - 1

    def finished(self) -> StepTables:
        """The tables as they are stored."""
        for part, t in list(self.tensors):
            part.tensor(part.storages[t])
        return StepTables(
            self.name, self._operator_table(), self._tensor_table(), self.origin, max(self.in_all, 0)
        )

    def _operator_table(self) -> OperatorTable:
        words = self.words
        ops = [(part, k, part.graph.ops[k]) for part, k in self.operators]
        work = [_work(part, k) for part, k, _ in ops]
        return OperatorTable(
            name=tuple(words(op.id) for _, _, op in ops),
            kind=tuple(words(op.kind.removeprefix("aten.")) for _, _, op in ops),
            module=tuple(words(_module(op)) for _, _, op in ops),
            phase=tuple(words(op.phase.value) for _, _, op in ops),
            source=tuple(words(_place(op.source)) for _, _, op in ops),
            annotation=tuple(words(_annotation(op)) for _, _, op in ops),
            parent=tuple(part.parent for part, _, _ in ops),
            differentiates=tuple(part.forward_of(op) for part, _, op in ops),
            inputs=tuple(_known(part, op.inputs) for part, _, op in ops),
            outputs=tuple(_known(part, op.outputs) for part, _, op in ops),
            seconds=tuple(_seconds(part, k) for part, k, _ in ops),
            flop=tuple(one[0] for one in work),
            counted=tuple(int(one[1]) for one in work),
            moved=tuple(one[2] for one in work),
        )

    def _tensor_table(self) -> TensorTable:
        words = self.words
        rows = [(part, t, part.graph.tensors[t]) for part, t in self.tensors]
        return TensorTable(
            name=tuple(words(part.prefix + one.label) for part, _, one in rows),
            role=tuple(words(one.role.value) for _, _, one in rows),
            shape=tuple(words(_shape(one)) for _, _, one in rows),
            source=tuple(words(_place(one.source)) for _, _, one in rows),
            module=tuple(words(_home(part, t)) for part, t, _ in rows),
            maker=tuple(part.operator_rows.get(part.makers.get(t, -1), -1) for part, t, _ in rows),
            owner=tuple(part.tensor_rows[part.storages[t]] for part, t, _ in rows),
            bytes=tuple(self.bytes_of(one) for _, _, one in rows),
        )


def _known(part: TablePart, tensors: Sequence[int]) -> tuple[int, ...]:
    return tuple(part.tensor_rows[t] for t in tensors if t in part.tensor_rows)


def _seconds(part: TablePart, k: int) -> float | None:
    if part.seconds:
        return float(f"{part.seconds[k]:.6g}")
    figure = part.costs[k].seconds if part.costs else None
    return None if figure is None else float(f"{float(figure.value):.6g}")


def _work(part: TablePart, k: int) -> tuple[float | None, bool, float | None]:
    """FLOP, whether they are counted, and bytes moved: as the profile says, else from shapes."""
    graph, op = part.graph, part.graph.ops[k]
    cost = part.costs[k] if part.costs else None
    count, counted, moved = None, False, None
    if op.kind != LOOP and (op.arguments is not None or op.body is not None):
        count, counted = _flop(graph, op)
        moved = bytes_moved(graph, op)
    if cost is not None and cost.flop is not None:
        count, counted = int(cost.flop.value), counted or op.arguments is None
    if cost is not None and cost.bytes_moved is not None:
        moved = int(cost.bytes_moved.value)
    return count, counted, moved


def _flop(graph: Graph, op: Op) -> tuple[int, bool]:
    if op.body is None:
        return flop(graph, op)
    inside = [flop(op.body, one) for one in op.body.ops]
    return sum(count for count, _ in inside), any(counted for _, counted in inside)


def _module(op: Op) -> str:
    """The path of the module: captured operators are named by it."""
    if op.name and op.name != op.id:
        return op.name
    head, _, _ = op.id.replace("/", ".").rpartition(".")
    return head


def _home(part: TablePart, t: int) -> str:
    """The module of a tensor: that of the operator that makes it, or the one that a parameter belongs to."""
    tensor = part.graph.tensors[t]
    if tensor.role in RESIDENT_ROLES:
        return tensor.label.rpartition(".")[0]
    maker = part.makers.get(t)
    return "" if maker is None else _module(part.graph.ops[maker])


def _annotation(op: Op) -> str:
    found = op.attributes.get("annotation", "")
    if isinstance(found, dict):
        return ", ".join(f"{key}={value}" for key, value in sorted(found.items()))
    return str(found)


def _place(source: Source | None) -> str:
    return f"{source.file}:{source.line}" if source else ""


def _shape(tensor: Tensor) -> str:
    sizes = "" if tensor.shape is None else "×".join(map(str, tensor.shape)) or "scalar"
    return f"{sizes} {tensor.dtype or ''}".strip()
