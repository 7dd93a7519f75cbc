"""Whether a Program may run: every plan passes here first, whoever made it.

Shares no code with the planners, nor with the simulation that they trust. It plays the instructions one by
one: who holds what, on which storage, with which value; which copies are on their way; how many bytes that
takes. Values have versions: an operator must read what it would read in program order. A leaf may be dropped
only where its kind may leave, once it was sent, and must be back when the step ends.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from lowtide.errors import PlanError
from lowtide.graph import RESIDENT_ROLES, Graph, Op, Phase, Role
from lowtide.plan.check_extra import CUDA_GRANULE, random_again, restorable_bytes
from lowtide.plan.check_short import wrong_short
from lowtide.plan.check_tiles import wrong_tiles
from lowtide.plan.program import Drop, Loop, Program, Run, Send
from lowtide.units import format_bytes

__all__ = ["Checked", "check"]

_GENERATOR_STATE = 5056
_MAY_LEAVE = {"parameters": Role.PARAMETER, "optimizer": Role.OPTIMIZER}


@dataclass(frozen=True, slots=True)
class Checked:
    """What a Program that may run takes."""

    peak_bytes: int
    peak_at: int
    """The instruction at which it takes most."""
    runs: int
    host_bytes: int
    """The most that lies on the host at once."""


def check(
    graph: Graph,
    program: Program,
    *,
    budget: int | None = None,
    workspace_bytes: Sequence[int] = (),
    offload: Collection[str] = (),
) -> Checked:
    """Play the Program; a PlanError names the first instruction that is wrong, and why.

    ``offload`` names the kinds of leaves that may leave the device: ``parameters``, ``optimizer``.
    """
    state = _State(graph, program, workspace_bytes, offload)
    for place, line in enumerate(program.instructions):
        state.place = place
        if place == len(program.forward):
            state.end_forward()
        if isinstance(line, Run):
            state.run(line)
        elif isinstance(line, Drop):
            for tensor in line.tensors:
                state.drop(tensor)
        elif isinstance(line, Send):
            state.send(line.tensor)
        else:
            state.fetch(line.tensor)
    state.place = len(program.instructions)
    if len(program.forward) == len(program.instructions):
        state.end_forward()
    state.end()
    if budget is not None and state.peak > budget:
        raise PlanError(
            f"instruction {state.peak_at} takes {format_bytes(state.peak)}, more than the budget of "
            f"{format_bytes(budget)}"
        )
    return Checked(state.peak, state.peak_at, state.runs, state.most_on_host)


class _Storage:
    """Memory with the tensors that are on it."""

    __slots__ = ("bytes", "tensors", "version")

    def __init__(self, size: int, version: int) -> None:
        self.bytes = size
        self.version = version
        self.tensors: set[int] = set()


class _State:
    def __init__(
        self, graph: Graph, program: Program, workspace: Sequence[int], offload: Collection[str]
    ) -> None:
        self.graph, self.program, self.workspace = graph, program, workspace
        self.place = self.runs = self.live = self.peak = self.peak_at = 0
        self.on_host: dict[int, int] = {}
        self.host_bytes = self.most_on_host = 0
        self.held: dict[int, _Storage] = {}
        self.spoilt: set[int] = set()
        """Held tensors whose value an operator in place has written over."""
        self.sending: set[int] = set()
        """Tensors sent to the host that are still on the device."""
        self.ran: set[int] = set()
        self.root = [self._root(t) for t in range(len(graph.tensors))]
        self.leaf = [graph.tensors[r].role in RESIDENT_ROLES for r in self.root]
        self.wanted_version = _versions(graph, self.root)
        self.stay = self._stay()
        self.may_leave = self._may_leave(offload)
        self.gone: set[int] = set()
        """Leaves whose memory is not on the device."""
        made = {t for op in graph.ops for t in op.outputs}
        for t, tensor in enumerate(graph.tensors):
            if self.root[t] == t and (tensor.role in RESIDENT_ROLES or t not in made):
                self._place_on(t, self._new(t))
        for t in range(len(graph.tensors)):
            if self.root[t] != t and self.leaf[t] and t not in made:
                self._place_on(t, self.held[self.root[t]])
        self.restorable = restorable_bytes(self.graph)
        self.live += self._beside() + self.restorable
        self.states = random_again(self.graph, self.program)
        self._mark(0)

    # what is there

    def _root(self, tensor: int) -> int:
        seen = 0
        while (alias := self.graph.tensors[tensor].alias) is not None:
            tensor, seen = alias, seen + 1
            if seen > len(self.graph.tensors):
                raise PlanError(f"tensor {tensor} is a view of itself")
        return tensor

    def _size(self, tensor: int) -> int:
        one = self.graph.tensors[tensor]
        if one.device.startswith("cuda"):
            return (one.bytes + CUDA_GRANULE - 1) // CUDA_GRANULE * CUDA_GRANULE
        return one.bytes

    def _new(self, tensor: int) -> _Storage:
        storage = _Storage(self._size(tensor), 0)
        self.live += storage.bytes
        return storage

    def _place_on(self, tensor: int, storage: _Storage) -> None:
        self.held[tensor] = storage
        storage.tensors.add(tensor)
        self.spoilt.discard(tensor)

    def _mark(self, passing: int) -> None:
        if self.live + passing > self.peak:
            self.peak, self.peak_at = self.live + passing, self.place

    def _stay(self) -> set[int]:
        tensors = self.graph.tensors
        stay = {t for t in range(len(tensors)) if tensors[t].role in RESIDENT_ROLES}
        stay |= set(self.graph.attributes.get("returned", ()))
        for t, tensor in enumerate(tensors):
            if tensor.gradient_of is not None and tensors[tensor.gradient_of].role in RESIDENT_ROLES:
                stay.add(t)
        return stay

    def _may_leave(self, offload: Collection[str]) -> set[int]:
        graph = self.graph
        roles = {_MAY_LEAVE[name] for name in offload if name in _MAY_LEAVE}
        changed = {self.root[t] for t in graph.attributes.get("updated", ())}
        for op in graph.ops:
            changed |= {self.root[t] for t in op.outputs if t in op.inputs}
        shown = {self.root[t] for t in graph.attributes.get("returned", ())}
        able = (t for t, tensor in enumerate(graph.tensors) if tensor.role in roles and self.root[t] == t)
        return {t for t in able if t not in changed and t not in shown}

    def _beside(self) -> int:
        """Scalars of autograd on CUDA, and old values of leaves that backward reads after an update."""
        graph = self.graph
        cuda = any(op.phase is not Phase.FORWARD and op.device.startswith("cuda") for op in graph.ops)
        updated = set(graph.attributes.get("updated", ()))
        old: set[int] = set()
        for line in self.program.backward:
            if isinstance(line, Run) and 0 <= line.op < len(graph.ops):
                op = graph.ops[line.op]
                passed = {op.inputs[k] for k in op.attributes.get("updates", ())}
                reads = set(op.reads) - passed
                old |= {t for t in reads if t in updated or graph.tensors[t].role is Role.BUFFER}
        return (4 * CUDA_GRANULE if cuda else 0) + sum(self._size(t) for t in old)

    # the instructions

    def run(self, line: Run) -> None:
        graph = self.graph
        if not 0 <= line.op < len(graph.ops):
            self._wrong(f"runs operator {line.op}; the step has {len(graph.ops)}")
        op = graph.ops[line.op]
        again = line.op in self.ran
        if op.phase is not Phase.FORWARD and self.place < len(self.program.forward):
            self._wrong(f"runs {op.label!r} of backward in the forward part")
        self._read(line.op, op, again)
        if line.short:
            there, earlier = self.held.keys() - self.spoilt, self.program.instructions[: self.place]
            self._wrong(wrong_short(graph, line, earlier, again, there))
        if again and (set(op.inputs) & set(op.outputs) or not op.outputs):
            self._wrong(f"runs {op.label!r} again, which changes its input")
        if again and op.attributes.get("once"):
            self._wrong(f"runs {op.label!r} again, which nobody knows to give the same twice")
        taken = self._taken(line, op)
        passing = 0
        for position, tensor in enumerate(op.outputs[:1] if line.short else op.outputs):
            if tensor in op.inputs:
                self.held[tensor].version += 1
                continue
            base = graph.tensors[tensor].alias
            if tensor in self.held and tensor not in self.spoilt:
                passing += self._size(tensor) if base is None else 0
            elif base is not None:
                self._place_on(tensor, self._viewed(op, base))
            elif position == 0 and taken is not None:
                self._place_on(tensor, taken)
            else:
                self._let_go(tensor)
                self._place_on(tensor, self._new(tensor))
        if line.op in self.states:
            self.states.discard(line.op)
            self.live += _GENERATOR_STATE
        self.ran.add(line.op)
        self.runs += 1
        extra = self.workspace[line.op] if self.workspace else 0
        self._mark(passing + (self._turned(line, op) if isinstance(line, Loop) else extra))

    def _viewed(self, op: Op, base: int) -> _Storage:
        if base not in self.held:
            self._wrong(
                f"{op.label!r} gives a view of {self.graph.tensors[base].label!r}, which is not there"
            )
        return self.held[base]

    def _turned(self, line: Loop, op: Op) -> int:
        """The most that a tile takes. Boxes must cover the axes once, and every body must be able to run."""
        self._wrong(wrong_tiles(line.tiles, op.attributes.get("axes", ()), len(self.program.bodies)))
        most = 0
        for k in {tile.body for tile in line.tiles}:
            body = self.program.bodies[k]
            one = _State(body.graph, body.program, body.workspace_bytes, ())
            leaves = sum(s.bytes for s in {id(s): s for t, s in one.held.items() if one.leaf[t]}.values())
            played = check(body.graph, body.program, workspace_bytes=body.workspace_bytes)
            most = max(most, played.peak_bytes - leaves)
        return most

    def _read(self, index: int, op: Op, again: bool) -> None:
        for tensor in op.reads_again if again else op.reads:
            label = self.graph.tensors[tensor].label
            if tensor not in self.held:
                self._wrong(f"{op.label!r} reads {label!r}, which is not there")
            if tensor in self.spoilt:
                self._wrong(f"{op.label!r} reads {label!r}, which was written over")
            if self.root[tensor] in self.gone:
                self._wrong(f"{op.label!r} reads {label!r}, which is on the host")
            if self.leaf[tensor]:
                continue  # an updated leaf is read as it was: its old value is kept
            wanted = self.wanted_version.get((index, self.root[tensor]), 0)
            if self.held[tensor].version != wanted:
                self._wrong(f"{op.label!r} reads {label!r} with a value of another time")

    def _taken(self, line: Run, op: Op) -> _Storage | None:
        """The storage that an operator in place writes over: what else is on it is spoilt."""
        if line.in_place is None:
            return None
        if not 0 <= line.in_place < len(op.inputs) or not op.outputs:
            self._wrong(f"writes over input {line.in_place} of {op.label!r}, which has {len(op.inputs)}")
        source = op.inputs[line.in_place]
        if self.leaf[source] or source in self.stay:
            self._wrong(f"{op.label!r} writes over {self.graph.tensors[source].label!r}, which must stay")
        storage = self.held[source]
        if op.outputs[0] in self.held:
            self._wrong(f"{op.label!r} runs in place though its result is there")
        if storage.bytes != self._size(op.outputs[0]):
            self._wrong(f"{op.label!r} writes over a storage of another size")
        if storage.tensors & self.sending:
            self._wrong(f"{op.label!r} writes over what is being sent to the host")
        self.spoilt |= storage.tensors
        storage.version = 0
        return storage

    def drop(self, tensor: int) -> None:
        if not 0 <= tensor < len(self.graph.tensors):
            self._wrong(f"drops tensor {tensor}; the step has {len(self.graph.tensors)}")
        label = self.graph.tensors[tensor].label
        if tensor not in self.held:
            self._wrong(f"drops {label!r}, which is not there")
        if tensor in self.may_leave:
            self._leave(tensor, label)
            return
        if tensor in self.stay:
            self._wrong(f"drops {label!r}, which must stay")
        self.sending.discard(tensor)
        self._let_go(tensor)

    def _leave(self, leaf: int, label: str) -> None:
        """A leaf's memory is free, whoever has a name for it."""
        if leaf not in self.on_host:
            self._wrong(f"drops {label!r}, which was not sent to the host")
        if leaf in self.gone:
            self._wrong(f"drops {label!r}, which is on the host")
        self.gone.add(leaf)
        self.sending.discard(leaf)
        self.live -= self.held[leaf].bytes

    def _let_go(self, tensor: int) -> None:
        storage = self.held.pop(tensor, None)
        self.spoilt.discard(tensor)
        if storage is None:
            return
        storage.tensors.discard(tensor)
        if not storage.tensors:
            self.live -= storage.bytes

    def send(self, tensor: int) -> None:
        if tensor not in self.held or tensor in self.spoilt or self.root[tensor] in self.gone:
            self._wrong(f"sends tensor {tensor} to the host, which is not there")
        if self.leaf[tensor] and tensor not in self.may_leave:
            self._wrong(f"sends {self.graph.tensors[tensor].label!r} to the host, which must stay")
        if tensor not in self.on_host:
            self.host_bytes += self._size(tensor)
            self.most_on_host = max(self.most_on_host, self.host_bytes)
        self.on_host[tensor] = self.held[tensor].version
        self.sending.add(tensor)

    def fetch(self, tensor: int) -> None:
        if tensor not in self.on_host:
            self._wrong(f"fetches tensor {tensor}, which was not sent")
        if tensor in self.gone:
            self.gone.discard(tensor)
            self.live += self.held[tensor].bytes
            self._mark(0)
            return
        if tensor in self.held:
            self._wrong(f"fetches {self.graph.tensors[tensor].label!r}, which is there")
        storage = self._new(tensor)
        storage.version = self.on_host[tensor]
        self._place_on(tensor, storage)
        self._mark(0)

    def end_forward(self) -> None:
        """Forward has succeeded: what it kept to restore is let go, and nothing of it may be missing."""
        self.live -= self.restorable
        for k, op in enumerate(self.graph.ops):
            if op.phase is Phase.FORWARD and k not in self.ran and not self._only_names(op):
                self._wrong(f"is past the forward part, which never ran {op.label!r}")
        for tensor in self.graph.attributes.get("returned", ()):
            if tensor not in self.held or tensor in self.spoilt:
                self._wrong(f"is past the forward part, which lacks {self.graph.tensors[tensor].label!r}")

    def _only_names(self, op: Op) -> bool:
        """Whether all an operator makes are views: who does not read them need not make them.

        One that reads and makes nothing runs for what it changes: it adds to the gradients of tiles.
        """
        if not op.outputs:
            return not op.reads
        return all(self.graph.tensors[t].alias is not None and t not in op.inputs for t in op.outputs)

    def end(self) -> None:
        """Every operator has run and every result is there."""
        ops = enumerate(self.graph.ops)
        missing = [op.label for k, op in ops if k not in self.ran and not self._only_names(op)]
        if missing:
            raise PlanError(f"the program never runs {len(missing)} operators, {missing[0]!r} first")
        if self.gone:
            label = self.graph.tensors[min(self.gone)].label
            raise PlanError(f"the program ends with {label!r} on the host")
        made = {t for op in self.graph.ops for t in op.outputs}
        for tensor in self.stay & made:
            if tensor not in self.held or tensor in self.spoilt:
                label = self.graph.tensors[tensor].label
                raise PlanError(f"the program ends without {label!r}")

    def _wrong(self, what: str | None) -> None:
        if what is not None:
            raise PlanError(f"instruction {self.place}: {what}")


def _versions(graph: Graph, root: Sequence[int]) -> dict[tuple[int, int], int]:
    """How often each storage was updated before an operator reads it in program order."""
    count: dict[int, int] = {}
    found: dict[tuple[int, int], int] = {}
    for k, op in enumerate(graph.ops):
        for tensor in op.inputs:
            found[k, root[tensor]] = count.get(root[tensor], 0)
        for tensor in set(op.inputs) & set(op.outputs):
            count[root[tensor]] = count.get(root[tensor], 0) + 1
    return found
