"""What becomes of each storage of a step, why, and what that costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from lowtide.graph import LOOP, RESIDENT_ROLES, Graph, Phase
from lowtide.plan.program.instructions import Program, Run, Send
from lowtide.plan.program.memory import allocated_bytes
from lowtide.plan.program.simple import kept_throughout
from lowtide.report.page.tables import TablePart
from lowtide.report.page.thin import MOST_BLOCKS
from lowtide.report.page.types import DecisionTable
from lowtide.units import format_bytes, format_cost

__all__ = ["Known", "decision_table"]


@dataclass(frozen=True, slots=True)
class Known:
    """What a plan counts with."""

    cost: str = ""
    short: Mapping[int, float] = field(default_factory=dict)
    waited: Mapping[int, float] = field(default_factory=dict)
    """Seconds that the computation waits for the copies of a tensor."""
    budget_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class _Decision:
    tensor: int
    decision: str
    reason: str
    price: float | None = None
    instead: float | None = None


def decision_table(part: TablePart, program: Program, known: Known) -> DecisionTable:
    """Every storage of the step, and those inside of tiles and groups; the largest where there are many."""
    rows = [(part, one) for one in _Decider(part, program, known).all()]
    for number, body in sorted(part.bodies.items()):
        inner = program.bodies[number].program
        rows += [(body, one) for one in _Decider(body, inner, known, inside=True).all()]
    for home in (part, *part.bodies.values()):
        for group in home.groups.values():
            rows += [(group, one) for one in _fused(group)]
    in_all = len(rows)
    if in_all > MOST_BLOCKS:
        rows = sorted(rows, key=lambda row: -row[0].graph.tensors[row[1].tensor].bytes)[:MOST_BLOCKS]
    words = part.tables.words
    return DecisionTable(
        tensor=tuple(home.tensor(one.tensor) for home, one in rows),
        decision=tuple(words(one.decision) for _, one in rows),
        reason=tuple(words(one.reason) for _, one in rows),
        price=tuple(one.price for _, one in rows),
        instead=tuple(one.instead for _, one in rows),
        in_all=in_all,
    )


def _fused(group: TablePart) -> Iterator[_Decision]:
    """Values inside of a group: compiled kernels pass them on without writing them down."""
    graph = group.graph
    given = set(graph.returned)
    for t, tensor in enumerate(graph.tensors):
        if t in group.makers and t not in given and tensor.alias is None:
            yield _Decision(t, "fused", "passed on inside of a compiled group: not in memory as a whole")


class _Decider:
    """Storages of one graph, as its program treats them."""

    def __init__(self, part: TablePart, program: Program, known: Known, *, inside: bool = False) -> None:
        self.part, self.program, self.known, self.inside = part, program, known, inside
        self.graph: Graph = part.graph
        self.storage = part.storages
        self.reruns = self._second_runs()
        self.reads = self._reads()
        self.sent = {self.storage[line.tensor] for line in program.instructions if isinstance(line, Send)}
        self.over = self._in_place()
        self.saved = self._saved()
        self.kept_anyway = {self.storage[t] for t in kept_throughout(self.graph)}

    def all(self) -> Iterator[_Decision]:
        """One for each storage that takes memory."""
        for t, tensor in enumerate(self.graph.tensors):
            if self.storage[t] == t and allocated_bytes(tensor):
                leaf = tensor.role in RESIDENT_ROLES
                if not (leaf and self.inside):
                    yield self._leaf(t) if leaf else self._made(t)

    def _leaf(self, t: int) -> _Decision:
        if t in self.sent:
            return _Decision(t, "offloaded", self._away(t), self.known.waited.get(t, 0.0))
        return _Decision(t, "resident", "a leaf of the step: on the device throughout", 0.0)

    def _made(self, t: int) -> _Decision:
        maker = self.part.makers.get(t)
        own = self._seconds(maker)
        if maker is not None and self.graph.ops[maker].kind == LOOP:
            return _Decision(t, "tiled", "tiles make it part by part, and add up where they overlap")
        if t in self.sent:
            return _Decision(t, "offloaded", self._away(t), self.known.waited.get(t, 0.0), own)
        if maker in self.reruns:
            return self._again(t, maker, own)
        if t in self.over and (self.inside or t not in self.saved):
            return _Decision(t, "in place", f"{self._place(t)}, which nobody reads afterwards", 0.0)
        if self.inside:
            return _Decision(t, "tiled", "exists for one tile at a time", 0.0)
        if t in self.kept_anyway:
            return _Decision(t, "result", "the step returns it, or it is the gradient of a parameter", 0.0)
        if t in self.saved:
            kept = self._kept(t, maker, own)
            return replace(kept, reason=f"{kept.reason}; {self._place(t)}") if t in self.over else kept
        last = self.reads.get(t)
        until = f"freed after {self.graph.ops[last[-1]].id}" if last else "nobody reads it"
        return _Decision(t, "temporary", until, 0.0)

    def _again(self, t: int, maker: int | None, own: float | None) -> _Decision:
        assert maker is not None
        times, spent = self.reruns[maker]
        first = next(k for k in self.graph.ops[maker].outputs if self.storage[k] in (k, t))
        price = spent if self.storage[first] == t else 0.0
        often = "again" if times == 1 else f"{times} more times"
        op = self.graph.ops[maker]
        size = format_bytes(allocated_bytes(self.graph.tensors[t]))
        forward = [k for k in self.reads.get(t, ()) if self.graph.ops[k].phase is Phase.FORWARD]
        later = [k for k in self.reads.get(t, ()) if self.graph.ops[k].phase is not Phase.FORWARD]
        if not later:
            reason = f"{_kind(op.kind)} runs {often} for others that backward needs"
        else:
            since = self.graph.ops[forward[-1]].id if forward else op.id
            until = self.graph.ops[later[0]].id
            reason = f"frees {size} from {since} to {until}; {_kind(op.kind)} runs {often}"
        return _Decision(t, "recomputed", reason, price, own)

    def _kept(self, t: int, maker: int | None, own: float | None) -> _Decision:
        if maker is None:
            return _Decision(t, "kept", "comes in from outside", 0.0)
        op = self.graph.ops[maker]
        size = allocated_bytes(self.graph.tensors[t])
        if op.once or op.updates:
            return _Decision(t, "kept", f"{_kind(op.kind)} may run once only", 0.0)
        budget = self.known.budget_bytes
        if budget and size < 1e-3 * budget:
            share = f"{size / budget:.2%}"
            return _Decision(t, "kept", f"backward reads it; {share} of the budget", 0.0, own)
        if own:
            told = format_cost(own, self.known.cost)
            return _Decision(
                t, "kept", f"backward reads it; running {_kind(op.kind)} again takes {told}", 0.0, own
            )
        return _Decision(t, "kept", "backward reads it", 0.0, own)

    def _away(self, t: int) -> str:
        size = format_bytes(allocated_bytes(self.graph.tensors[t]))
        waits = self.known.waited.get(t, 0.0)
        told = (
            f"the computation waits {format_cost(waits, self.known.cost)}" if waits else "nobody waits for it"
        )
        return f"{size} wait on the host between their uses; {told}"

    def _place(self, t: int) -> str:
        return f"written over {self.graph.tensors[self.over[t]].label}"

    def _seconds(self, maker: int | None) -> float | None:
        return self.part.seconds[maker] if maker is not None and self.part.seconds else None

    def _second_runs(self) -> dict[int, tuple[int, float]]:
        """How often operators run after their first time, and how long that takes in all."""
        ran: set[int] = set()
        found: dict[int, tuple[int, float]] = {}
        for line in self.program.instructions:
            if isinstance(line, Run):
                if line.op in ran:
                    own = self.part.seconds[line.op] if self.part.seconds else 0.0
                    times, spent = found.get(line.op, (0, 0.0))
                    found[line.op] = (
                        times + 1,
                        spent + (self.known.short.get(line.op, own) if line.short else own),
                    )
                ran.add(line.op)
        return found

    def _reads(self) -> dict[int, list[int]]:
        """Operators that read each storage, in program order."""
        found: dict[int, list[int]] = {}
        for k, op in enumerate(self.graph.ops):
            for s in dict.fromkeys(self.storage[t] for t in op.reads):
                found.setdefault(s, []).append(k)
        return found

    def _in_place(self) -> dict[int, int]:
        """Storages that lie where another one was, with that one."""
        return {
            self.graph.ops[line.op].outputs[0]: self.graph.ops[line.op].inputs[line.in_place]
            for line in self.program.instructions
            if isinstance(line, Run) and line.in_place is not None and self.graph.ops[line.op].outputs
        }

    def _saved(self) -> set[int]:
        """Storages that forward makes and backward reads."""
        return {self.storage[t] for t in self.graph.saved_for_backward()}


def _kind(kind: str) -> str:
    return kind.removeprefix("aten.")
