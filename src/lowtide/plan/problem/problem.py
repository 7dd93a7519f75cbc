"""Problem: what a planner needs of a step, in plain numbers.

Real operators count from 0 in program order; views are not among them: reading a view is reading its
storage. Storages that may come and go count from 0 too; leaves are part of ``fixed``. Times are whole
numbers, ``scale`` of them to a second, rounded down.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil

from lowtide.errors import PlanError
from lowtide.graph import RESIDENT_ROLES, Graph, Op, Phase, Role
from lowtide.plan.problem.scale import scale_of, whole_units
from lowtide.plan.program.memory import allocated_bytes, saved_for
from lowtide.plan.program.simple import kept_throughout
from lowtide.plan.program.simulate import RANDOM_STATE_BYTES, autograd_bytes, kept_to_restore
from lowtide.plan.program.updated_leaves import updated_leaves

__all__ = ["Charge", "Problem", "build_problem", "is_view", "median_time"]


@dataclass(frozen=True, slots=True)
class Charge:
    """Bytes taken from a slot to the end once one of some operators runs again at ``when`` or later."""

    bytes: int
    instant: int
    """From the block of this instant on."""
    op: int
    """From this operator of the block on; 0 is the start of the block."""
    when: int


@dataclass(frozen=True)
class Problem:
    """Operators and storages of a step whose mandatory operators keep their order."""

    graph: Graph
    ops: tuple[int, ...]
    """The graph's operator behind each operator of the problem."""
    split: int
    """How many operators belong to forward; they come first."""
    time: tuple[int, ...]
    repeat: tuple[int, ...]
    """What a second run takes: less than the first where it can start from what that one saved."""
    scale: float
    views: int
    """What making every view once takes; no operator of the problem is one."""
    workspace: tuple[int, ...]
    asked: tuple[bool, ...]
    """Which operators the caller lets run a second time."""
    again: tuple[bool, ...]
    """Which of them may: a second run changes nothing."""
    reads: tuple[tuple[int, ...], ...]
    writes: tuple[tuple[int, ...], ...]
    """The storages that a run of the operator allocates, all of them each time."""
    over: tuple[int, ...]
    """The storage that the first output may take over if it dies with the operator, or -1."""
    bytes: tuple[int, ...]
    producer: tuple[int, ...]
    """The operator that makes the storage; -1 where it is given from outside."""
    kept: tuple[bool, ...]
    """Whether the storage stays once it is made."""
    owner: tuple[int, ...]
    """The graph's tensor that owns each storage."""
    resident: int
    """Bytes of leaves, and what nobody drops."""
    fixed: tuple[int, ...]
    """Bytes that are there at each instant whatever is planned: leaves, and copies of some."""
    charges: tuple[Charge, ...]
    charged: tuple[tuple[int, ...], ...]
    """The charges that running an operator again may bring."""
    sent: tuple[int, ...] = ()
    """Storages that are copied to the host once they are made."""
    fetched: tuple[tuple[int, int], ...] = ()
    """Operators that stand for a copy back, each with the graph's tensor that it brings."""
    able: frozenset[int] = frozenset()
    """The graph's operators that may run in place."""
    short: frozenset[int] = frozenset()
    """The graph's operators whose second runs are short."""

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """Operators that read each storage, in order."""
        found: list[list[int]] = [[] for _ in self.bytes]
        for op, storages in enumerate(self.reads):
            for storage in storages:
                found[storage].append(op)
        return tuple(tuple(one) for one in found)

    @cached_property
    def back(self) -> tuple[int, ...]:
        """For each storage the operator that stands for its copy back, or -1."""
        found = [-1] * len(self.bytes)
        for op, _ in self.fetched:
            found[self.writes[op][0]] = op
        return tuple(found)

    @cached_property
    def workspace_of_graph(self) -> tuple[int, ...]:
        """Workspace bytes by operator of the graph."""
        found = [0] * len(self.graph.ops)
        for op, size in zip(self.ops, self.workspace, strict=True):
            found[op] = size
        return tuple(found)

    @cached_property
    def total_time(self) -> int:
        """What running every operator once takes."""
        return sum(self.time)

    def seconds(self, time: int) -> float:
        """A time in seconds."""
        return time / self.scale


def build_problem(
    graph: Graph,
    seconds: Sequence[float] = (),
    *,
    workspace_bytes: Sequence[int] = (),
    able: Collection[int] = (),
    again: Collection[int] | None = None,
    short: Mapping[int, float] | None = None,
    fine: bool = False,
) -> Problem:
    """The Problem of a graph whose operators take so many seconds and so much workspace.

    ``able`` names operators that may run in place, ``again`` those that may be run a second time: all by
    default, unless everything after forward is free: running that again would be free as well. An operator
    that updates a tensor in place, or reads one that is updated later, never runs a second time; nor does one
    that may find a leaf with a new value . ``short`` are seconds of second runs that start
    from what the first one saved, which stays for them. With ``fine`` a second has many units even where all
    operators take a few whole ones: waiting does not.
    """
    if not graph.ordered:
        raise PlanError(
            "this document does not say in which order its operators ran: nothing can be planned. "
            "Capture the "
            "step with `lowtide profile`"
        )
    return _Builder(graph, seconds, workspace_bytes, frozenset(able), again, short or {}, fine).problem()


def is_view(graph: Graph, op: Op, storage: Sequence[int]) -> bool:
    """Whether an operator only gives other names to the storages it reads, any number of times."""
    if not op.repeatable:
        return False
    held = {storage[t] for t in op.reads}
    return held == {storage[t] for t in op.outputs} and all(
        graph.tensors[t].alias is not None and t not in op.inputs for t in op.outputs
    )


def median_time(problem: Problem) -> int:
    """The time of a usual operator that may run again: the scale of temperatures and penalties."""
    times = sorted(t for t, again in zip(problem.repeat, problem.again, strict=True) if t and again)
    return times[len(times) // 2] if times else 1


class _Builder:
    def __init__(
        self,
        graph: Graph,
        seconds: Sequence[float],
        workspace: Sequence[int],
        able: frozenset[int],
        again: Collection[int] | None,
        short: Mapping[int, float],
        fine: bool,
    ) -> None:
        self.graph = graph
        self.given_workspace = workspace
        self.able = able
        self.storage = graph.storages()
        self.leaves = {self.storage[k] for k, t in enumerate(graph.tensors) if t.role in RESIDENT_ROLES}
        self.view = [is_view(graph, op, self.storage) for op in graph.ops]
        self.ops = [k for k, view in enumerate(self.view) if not view]
        self.position = {k: v for v, k in enumerate(self.ops)}
        self.split = sum(graph.ops[k].phase is Phase.FORWARD for k in self.ops)
        times = [float(seconds[k]) if seconds else 1.0 for k in self.ops]
        self.short = dict(short)
        self.scale = scale_of([*times, *self.short.values()], fine)
        self.time = [whole_units(t * self.scale) for t in times]
        pairs = zip(self.ops, times, strict=True)
        self.repeat = [whole_units(self.short.get(k, t) * self.scale) for k, t in pairs]
        self.view_seconds = sum(seconds[k] for k, view in enumerate(self.view) if view) if seconds else 0.0
        if again is not None:
            wanted = set(again)
        elif any(self.time[self.split :]) or not any(self.time):
            wanted = set(self.ops)
        else:
            wanted = set(self.ops[: self.split])
        self.wanted = wanted
        self.maker = {t: k for k, view in enumerate(self.view) if view for t in graph.ops[k].outputs}
        self._sources: dict[int, tuple[frozenset[int], frozenset[int]]] = {}
        self.pinned: set[int] = set()
        """Storages with a view that only a real operator makes: they are not made again."""
        self.kept = {self.storage[t] for t in kept_throughout(graph)} - self.leaves
        made = {t for op in graph.ops for t in op.outputs if self.storage[t] == t}
        self.staying = self.kept - made
        """Storages that are given and stay: a gradient that comes in and is one of a leaf as it is."""
        self.leaves |= self.staying
        self.kept -= self.staying
        self.kept |= {self.storage[t] for k in self.short for t in saved_for(graph.ops[k])}

    def problem(self) -> Problem:
        graph, storage = self.graph, self.storage
        number, producer, owner, rewritten = self._storages()
        reads, writes, again, workspace = [], [], [], []
        last_write = {s: max(w) for s, w in rewritten.items()}
        renewed = updated_leaves(graph, storage, self.leaves)
        for v, k in enumerate(self.ops):
            op = graph.ops[k]
            touched = {s for t in op.reads for s in self.sources(t)[0]}
            touched |= {storage[t] for t in op.outputs if producer.get(storage[t], -1) not in (v,)}
            reads.append(tuple(sorted(number[s] for s in touched if s in number)))
            made = dict.fromkeys(storage[t] for t in op.outputs if producer.get(storage[t]) == v)
            writes.append(tuple(number[s] for s in made))
            late = any(last_write.get(s, -1) >= v for s in touched if s not in self.leaves)
            late = (
                late
                or bool(op.once)
                or any(s in rewritten or s in self.pinned for s in made)
                or bool(renewed & self._leaves_read(op))
            )
            again.append(k in self.wanted and bool(made) and not late)
            extra = int(self.given_workspace[k]) if self.given_workspace else 0
            workspace.append(extra + self._written_anew(op, v, producer))
        resident = self._resident()
        fixed, charges, charged = self._charges(resident)
        return Problem(
            graph=graph,
            ops=tuple(self.ops),
            split=self.split,
            time=tuple(self.time),
            repeat=tuple(self.repeat),
            scale=self.scale,
            views=ceil(self.view_seconds * self.scale),
            workspace=tuple(workspace),
            asked=tuple(k in self.wanted for k in self.ops),
            again=tuple(again),
            reads=tuple(reads),
            writes=tuple(writes),
            over=tuple(self._over(k, number, producer) for k in self.ops),
            bytes=tuple(allocated_bytes(graph.tensors[t]) for t in owner),
            producer=tuple(producer[t] for t in owner),
            kept=tuple(t in self.kept and producer[t] >= 0 for t in owner),
            owner=tuple(owner),
            resident=resident,
            fixed=tuple(fixed),
            charges=tuple(charges),
            charged=tuple(charged),
            able=self.able,
            short=frozenset(self.short),
        )

    def _leaves_read(self, op: Op) -> set[int]:
        """Storages of leaves that a second run of an operator reads."""
        return {self.storage[t] for r in op.reads_again for t in self.sources(r)[1]}

    def _storages(self) -> tuple[dict[int, int], dict[int, int], list[int], dict[int, set[int]]]:
        """Numbers and first writers of the storages that come and go; writers of those written twice."""
        graph, storage = self.graph, self.storage
        writers: dict[int, list[int]] = {}
        for v, k in enumerate(self.ops):
            op = graph.ops[k]
            for t in op.outputs:
                if graph.tensors[t].alias is not None and t not in op.inputs:
                    self.pinned.add(storage[t])
                elif v not in writers.setdefault(storage[t], []):
                    writers[storage[t]].append(v)
        producer = {s: found[0] for s, found in writers.items() if s not in self.leaves}
        # an operator that writes into what was there before makes nothing
        for s, found in writers.items():
            inputs = {storage[t] for t in graph.ops[self.ops[found[0]]].inputs}
            if s in inputs and s not in self.leaves:
                producer[s] = -1
        for op in graph.ops:
            for t in op.reads:
                if storage[t] not in self.leaves:
                    producer.setdefault(storage[t], -1)
        rewritten = {
            s: set(found) for s, found in writers.items() if len(found) > 1 or producer.get(s, -1) < 0
        }
        owner = sorted(producer)
        return {s: n for n, s in enumerate(owner)}, producer, owner, rewritten

    def sources(self, tensor: int) -> tuple[frozenset[int], frozenset[int]]:
        """Storages that reading a tensor takes, and leaves that making its views again reads."""
        found = self._sources.get(tensor)
        if found is None:
            storages, leaves = frozenset({self.storage[tensor]}), frozenset[int]()
            if tensor in self.maker:
                below = [self.sources(t) for t in self.graph.ops[self.maker[tensor]].reads]
                storages = storages.union(*(one[0] for one in below))
                leaves = leaves.union(*(one[1] for one in below))
            if self.graph.tensors[tensor].role in RESIDENT_ROLES:
                leaves |= {tensor}
            found = self._sources[tensor] = storages, leaves
        return found

    def _written_anew(self, op: Op, v: int, producer: dict[int, int]) -> int:
        """Bytes of what an operator allocates although something else holds the tensor."""
        tensors = self.graph.tensors
        return sum(
            allocated_bytes(tensors[t])
            for t in op.outputs
            if t not in op.inputs and tensors[t].alias is None and producer.get(self.storage[t], -1) != v
        )

    def _over(self, k: int, number: dict[int, int], producer: dict[int, int]) -> int:
        op = self.graph.ops[k]
        if k not in self.able or not op.inputs or 0 in op.shape_only or not op.outputs:
            return -1
        source, made = op.inputs[0], op.outputs[0]
        s = self.storage[source]
        alone = sum(self.storage[t] == s for t in op.inputs) == 1 and self.storage[made] == made
        if not alone or s in self.kept or producer.get(s, -1) < 0 or producer.get(made) != self.position[k]:
            return -1
        same = allocated_bytes(self.graph.tensors[s]) == allocated_bytes(self.graph.tensors[made])
        return number[s] if same else -1

    def _resident(self) -> int:
        tensors = self.graph.tensors
        leaves = (t for t in tensors if t.role in RESIDENT_ROLES and t.alias is None)
        beside = autograd_bytes(self.graph) + sum(allocated_bytes(tensors[t]) for t in self.staying)
        return sum(allocated_bytes(t) for t in leaves) + self._never_touched() + beside

    def _charges(self, resident: int) -> tuple[list[int], list[Charge], list[tuple[int, ...]]]:
        graph = self.graph
        tensors = graph.tensors
        updated = set(graph.updated)
        copied_if_read = [
            {t for r in graph.ops[k].reads_again for t in self.sources(r)[1]
             if t in updated or tensors[t].role is Role.BUFFER}
            for k in self.ops
        ]  # fmt: skip
        always = {t for found in copied_if_read[self.split :] for t in found}
        always |= self._read_by_late_views(updated)
        resident += sum(allocated_bytes(tensors[t]) for t in always)
        fixed = [resident + kept_to_restore(graph)] * self.split
        fixed += [resident] * (len(self.ops) - self.split)
        charges: list[Charge] = []
        charged: list[tuple[int, ...]] = []
        number: dict[int, int] = {}
        for v, k in enumerate(self.ops):
            mine = []
            for t in sorted(copied_if_read[v] - always):
                if t not in number:
                    number[t] = len(charges)
                    charges.append(Charge(allocated_bytes(tensors[t]), 0, 0, self.split))
                mine.append(number[t])
            op = graph.ops[k]
            if op.random and op.device.startswith("cpu"):
                mine.append(len(charges))
                charges.append(Charge(RANDOM_STATE_BYTES, v, v, 0))
            charged.append(tuple(mine))
        return fixed, charges, charged

    def _never_touched(self) -> int:
        """Bytes of given tensors that nobody reads: nobody drops them either."""
        written = {t for op in self.graph.ops for t in op.outputs}
        known = written.union(self.staying, *(op.reads for op in self.graph.ops))
        tensors = enumerate(self.graph.tensors)
        return sum(allocated_bytes(t) for k, t in tensors if k not in known and t.role not in RESIDENT_ROLES)

    def _read_by_late_views(self, updated: set[int]) -> set[int]:
        """Updated leaves that views made in backward for their own sake read."""
        kept = set(kept_throughout(self.graph))
        return {
            t
            for k, op in enumerate(self.graph.ops)
            if self.view[k] and op.phase is not Phase.FORWARD and kept.intersection(op.outputs)
            for r in op.reads_again
            for t in self.sources(r)[1]
            if t in updated or self.graph.tensors[t].role is Role.BUFFER
        }
