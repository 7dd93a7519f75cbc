"""Plays a Program for the checker: who holds what, on which storage, with which value, and the bytes of it.

Values have versions: how often the storage was updated. An operator must read the version that it reads in
program order. Backward finds leaves that the step updates as they were before the step, in copies.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from lowtide.errors import PlanError
from lowtide.graph import EXCHANGE, LOOP, Op, Phase
from lowtide.plan.check.graph import Facts, facts_of, only_names, sound
from lowtide.plan.check.held import Held, Storage
from lowtide.plan.check.in_place import wrong_in_place
from lowtide.plan.check.order import Order
from lowtide.plan.check.overheads import STATE_BYTES, OnItsWay, beside_bytes, random_again, restorable_bytes
from lowtide.plan.check.rules import Rule, broken
from lowtide.plan.check.short_reruns import wrong_short
from lowtide.plan.check.tiles import wrong_loop, wrong_region
from lowtide.plan.program.instructions import Body, Drop, Loop, Program, Run, Send

__all__ = ["Player", "tile_bytes"]

_DEEPEST = 8
"""So many bodies may be inside of each other."""


class Player(Held):
    """The state of a Program while it is played."""

    def __init__(
        self,
        facts: Facts,
        program: Program,
        workspace: Sequence[int] = (),
        able: Collection[int] | None = None,
        *,
        inside: bool = False,
        depth: int = 0,
    ) -> None:
        self.facts, self.graph, self.program = facts, facts.graph, program
        self.workspace, self.able, self.inside, self.depth = workspace, able, inside, depth
        super().__init__()
        self.runs = 0
        self.on_host: dict[int, tuple[int, int]] = {}
        """Tensors on the host, with their version and bytes."""
        self.host_bytes = self.most_on_host = 0
        self.sending: set[int] = set()
        """Tensors sent to the host that are still on the device."""
        self.arriving: set[int] = set()
        """Tensors on their way back that were not waited for."""
        self.gone: set[int] = set()
        """Leaves whose memory is not on the device."""
        self.order = Order(self.graph, program.bodies)
        self.bodies: dict[int, int] = {}
        """Bytes that bodies take besides what goes into them, once they were played."""
        self.later: dict[int, Storage] = {}
        """What comes in with backward alone."""
        self.on_its_way = OnItsWay(self.graph)
        self.restorable = restorable_bytes(self.graph)
        self.live += beside_bytes(facts, program) + self.restorable
        self.states = random_again(self.graph, program)
        self._start()

    def _start(self) -> None:
        facts, tensors = self.facts, self.graph.tensors
        forward = {t for op in self.graph.ops if op.phase is Phase.FORWARD for t in op.inputs}
        for t in range(len(tensors)):
            if facts.root[t] == t and (facts.leaf[t] or t in facts.given):
                late = t in facts.given and t not in forward and not self.inside
                storage = Storage(facts.size[t], fixed=True)
                self.live += storage.bytes
                if late:
                    self.later[t] = storage
                else:
                    self.place_on(t, storage)
        for t in range(len(tensors)):
            if facts.root[t] != t and facts.leaf[t] and t not in facts.made:
                self.place_on(t, self.held[facts.root[t]])
        self.mark(0)

    def play(self) -> None:
        """All instructions; a PlanError names the first that is wrong."""
        if self.depth > _DEEPEST:
            raise broken(Rule.BODIES, f"bodies are nested more than {_DEEPEST} deep")
        self._look_at_loops()
        for place, line in enumerate(self.program.instructions):
            self.place = place
            if place == len(self.program.forward):
                self._end_forward()
            if place == len(self.program.forward) or self.on_its_way.hinders(line):
                self.live -= self.on_its_way.ended()
            if isinstance(line, Run):
                self._run(line)
            elif isinstance(line, Drop):
                for tensor in line.tensors:
                    self._drop(tensor)
            elif isinstance(line, Send):
                self._send(line.tensor)
            else:
                self._fetch(line.tensor)
        self.place = len(self.program.instructions)
        if not self.program.backward:
            self._end_forward()
        self._end()

    def _look_at_loops(self) -> None:
        """Loops by themselves, and whether they belong together."""
        for place, line in enumerate(self.program.instructions):
            if isinstance(line, Loop):
                self.place = place
                if not self._known(line.op) or self.graph.ops[line.op].kind != LOOP:
                    self._wrong(Rule.LOOPS, f"runs operator {line.op} in a loop, which stands for none")
                if line.in_place is not None or line.short:
                    self._wrong(Rule.LOOPS, f"runs the loop {line.op} in place, or in short")
                self._wrong(Rule.TILES, wrong_loop(self.graph, line, len(self.program.bodies)))
        problem = wrong_region(self.graph, self.program, inside=self.inside)
        if problem is not None:
            raise broken(Rule.REGION, f"the program {problem}")

    def _known(self, op: int) -> bool:
        return 0 <= op < len(self.graph.ops)

    def _label(self, tensor: int) -> str:
        return repr(self.graph.tensors[tensor].label)

    def _wrong(self, rule: Rule, what: str | None) -> None:
        if what is not None:
            raise broken(rule, f"instruction {self.place}: {what}")

    # running an operator

    def _run(self, line: Run) -> None:
        graph = self.graph
        if not self._known(line.op):
            self._wrong(Rule.NAMES, f"runs operator {line.op}; the step has {len(graph.ops)}")
        op = graph.ops[line.op]
        if op.phase is not Phase.FORWARD and self.place < len(self.program.forward):
            self._wrong(Rule.PHASES, f"runs {op.label!r} of backward in the forward part")
        if op.kind == LOOP and not isinstance(line, Loop):
            self._wrong(Rule.LOOPS, f"runs {op.label!r} without a loop, which stands for one")
        again = line.op in self.order.ran
        self._wrong(Rule.ORDER, self.order.wrong(line))
        self._refuse_again(op, again)
        self._read(line.op, op, again)
        if line.short:
            self._short(line, op, again)
        taken = self._taken(line, op)
        passing = 0
        for position, tensor in enumerate(op.outputs[:1] if line.short else op.outputs):
            if tensor in op.inputs:
                continue
            base = graph.tensors[tensor].alias
            if tensor in self.held:  # what was there before stays
                passing += self.facts.size[tensor] if base is None else 0
            elif base is not None:
                self.place_on(tensor, self._viewed(op, base))
            elif position == 0 and taken is not None:
                self.place_on(tensor, taken)
            else:
                self.place_on(tensor, self.new(self.facts.size[tensor]))
        if not again:
            self._update(line.op, op)
        if line.op in self.states:
            self.states.discard(line.op)
            self.live += STATE_BYTES
        self.runs += 1
        extra = max(self.workspace[line.op] if self.workspace else 0, line.beside)
        self.mark(passing + (self._turned(line) if isinstance(line, Loop) else extra))
        self._go_on(line, op)

    def _go_on(self, line: Run, op: Op) -> None:
        """What an exchange takes that goes on beside others."""
        if line.beside:
            if op.kind != EXCHANGE or not op.outputs or line.beside < 0:
                self._wrong(Rule.BESIDE, f"goes on beside {op.label!r}, which is no exchange of some bytes")
            self.on_its_way.start(line.op, line.beside)
            self.live += line.beside

    def _read(self, index: int, op: Op, again: bool) -> None:
        facts = self.facts
        for tensor in op.reads_again if again else op.reads:
            label = self._label(tensor)
            if tensor not in self.held:
                self._wrong(Rule.THERE, f"{op.label!r} reads {label}, which is not there")
            if tensor in self.spoilt:
                self._wrong(Rule.THERE, f"{op.label!r} reads {label}, which was written over")
            if facts.root[tensor] in self.gone:
                self._wrong(Rule.THERE, f"{op.label!r} reads {label}, which is on the host")
            if self.held[tensor].version != facts.wanted.get((index, facts.root[tensor]), 0):
                self._wrong(Rule.VALUES, f"{op.label!r} reads {label} with a value of another time")
        if self.arriving:
            read = {facts.root[tensor] for tensor in op.inputs}
            self.arriving = {tensor for tensor in self.arriving if facts.root[tensor] not in read}

    def _short(self, line: Run, op: Op, again: bool) -> None:
        part = self.program.forward if self.place < len(self.program.forward) else self.program.backward
        at = self.place if part is self.program.forward else self.place - len(self.program.forward)
        self._wrong(
            Rule.SHORT,
            wrong_short(self.graph, line, part[:at], again, self.held.keys() - self.spoilt),
        )
        if op.outputs[0] in self.held:
            self._wrong(Rule.SHORT, f"runs {op.label!r} in short though its result is there")

    def _refuse_again(self, op: Op, again: bool) -> None:
        if again and (set(op.inputs) & set(op.outputs) or not op.outputs):
            self._wrong(Rule.ONCE, f"runs {op.label!r} again, which changes its input")
        if again and op.once:
            self._wrong(Rule.ONCE, f"runs {op.label!r} again, which nobody knows to give the same twice")

    def _update(self, index: int, op: Op) -> None:
        """The first run of an operator writes to what was there before."""
        storages = {id(s): s for t in self.facts.updates[index] if (s := self.held.get(t)) is not None}
        for storage in storages.values():
            if storage.copy:
                self._wrong(Rule.VALUES, f"{op.label!r} updates what backward has a copy of alone")
            if storage.tensors & self.sending:
                self._wrong(Rule.SENDING, f"{op.label!r} updates what is being sent to the host")
            storage.version += 1

    def _viewed(self, op: Op, base: int) -> Storage:
        if base not in self.held or base in self.spoilt:
            self._wrong(Rule.THERE, f"{op.label!r} gives a view of {self._label(base)}, which is not there")
        return self.held[base]

    def _taken(self, line: Run, op: Op) -> Storage | None:
        """The storage that an operator in place writes over: what else is on it is spoilt."""
        if line.in_place is None:
            return None
        problem = wrong_in_place(self.facts, line, self.held, self.able)
        if problem is not None:
            self._wrong(*problem)
        storage = self.held[op.inputs[0]]
        if storage.tensors & self.sending:
            self._wrong(Rule.SENDING, f"{op.label!r} writes over what is being sent to the host")
        self.spoilt |= storage.tensors
        storage.version = 0
        return storage

    def _turned(self, line: Loop) -> int:
        """The most that a tile takes."""
        return max(self._inside(k) for k in {tile.body for tile in line.tiles})

    def _inside(self, number: int) -> int:
        """What a body takes besides what goes into it; it must be a valid program itself."""
        if number not in self.bodies:
            body = self.program.bodies[number]
            try:
                self.bodies[number] = tile_bytes(body, self.depth + 1)
            except PlanError as error:
                raise PlanError(
                    f"instruction {self.place}: body {number} of {len(body.graph.ops)} operators: {error}",
                    rule=error.rule,
                ) from error
        return self.bodies[number]

    # moving tensors

    def _drop(self, tensor: int) -> None:
        if not 0 <= tensor < len(self.graph.tensors):
            self._wrong(Rule.NAMES, f"drops tensor {tensor}; the step has {len(self.graph.tensors)}")
        label = self._label(tensor)
        if tensor not in self.held:
            self._wrong(Rule.DROPS, f"drops {label}, which is not there")
        self.arriving.discard(tensor)
        if tensor in self.facts.may_leave:
            self._leave(tensor, label)
            return
        if tensor in self.facts.stay:
            self._wrong(Rule.DROPS, f"drops {label}, which must stay")
        self.sending.discard(tensor)
        self.let_go(tensor)

    def _leave(self, leaf: int, label: str) -> None:
        """A leaf's memory is free, whoever has a name for it."""
        if leaf not in self.on_host:
            self._wrong(Rule.LEAVES_AWAY, f"drops {label}, which was not sent to the host")
        if leaf in self.gone:
            self._wrong(Rule.LEAVES_AWAY, f"drops {label}, which is on the host")
        self.gone.add(leaf)
        self.sending.discard(leaf)
        self.live -= self.held[leaf].bytes

    def _send(self, tensor: int) -> None:
        if tensor not in self.held or tensor in self.spoilt or self.facts.root[tensor] in self.gone:
            self._wrong(Rule.SENDS, f"sends tensor {tensor} to the host, which is not there")
        if self.facts.leaf[tensor] and tensor not in self.facts.may_leave:
            self._wrong(Rule.SENDS, f"sends {self._label(tensor)} to the host, which must stay")
        if self.facts.root[tensor] in self.facts.given:
            self._wrong(Rule.SENDS, f"sends {self._label(tensor)} to the host, which comes from outside")
        one = self.graph.tensors[tensor]
        if one.device.startswith("cpu") and any(t.device.startswith("cuda") for t in self.graph.tensors):
            self._wrong(Rule.SENDS, f"sends {self._label(tensor)} to the host, where it is")
        if tensor in self.arriving:
            self._wrong(Rule.SENDS, f"sends {self._label(tensor)} to the host while it comes back from there")
        storage = self.held[tensor]
        self.host_bytes += storage.bytes - self.on_host.get(tensor, (0, 0))[1]
        self.most_on_host = max(self.most_on_host, self.host_bytes)
        self.on_host[tensor] = storage.version, storage.bytes
        self.sending.add(tensor)

    def _fetch(self, tensor: int) -> None:
        if tensor not in self.on_host:
            self._wrong(Rule.FETCHES, f"fetches tensor {tensor}, which was not sent")
        if tensor in self.gone:
            self.gone.discard(tensor)
            self.live += self.held[tensor].bytes
        elif tensor in self.held:
            self._wrong(Rule.FETCHES, f"fetches {self._label(tensor)}, which is there")
        else:
            version, size = self.on_host[tensor]
            self.place_on(tensor, self.new(size, version))
        self.arriving.add(tensor)
        self.mark(0)

    # the ends

    def _end_forward(self) -> None:
        """Forward has succeeded: nothing of it may be missing. What backward finds is what it has left."""
        graph, facts = self.graph, self.facts
        self.live -= self.restorable
        for k, op in enumerate(graph.ops):
            if op.phase is Phase.FORWARD and k not in self.order.ran and not only_names(graph, op):
                self._wrong(Rule.PHASES, f"is past the forward part, which never ran {op.label!r}")
        for tensor in facts.returned:
            self._must_be_there(tensor, "is past the forward part, which lacks")
            self.held[tensor].fixed = True
        if self.inside:
            return
        self.arriving.clear()
        for tensor, storage in self.later.items():
            self.place_on(tensor, storage)
        for leaf in facts.renewed:
            for view in self.held[leaf].tensors - {leaf}:
                del self.held[view]
        for leaf in facts.old:
            self.place_on(leaf, Storage(facts.size[leaf], fixed=True, copy=True))

    def _must_be_there(self, tensor: int, told: str, final: bool = False) -> None:
        """A result is held with its last value."""
        label = self._label(tensor)
        if tensor not in self.held or tensor in self.spoilt:
            self._wrong(Rule.RESULTS, f"{told} {label}")
        root = self.facts.root[tensor]
        wanted = self.facts.final if final else self.facts.final_forward
        if self.held[tensor].version != wanted.get(root, 0):
            self._wrong(Rule.RESULTS, f"{told} the last value of {label}")

    def _end(self) -> None:
        """Every operator has run and every result is there."""
        graph, facts = self.graph, self.facts
        ops = enumerate(graph.ops)
        missing = [op.label for k, op in ops if k not in self.order.ran and not only_names(graph, op)]
        if missing:
            said = f"the program never runs {len(missing)} operators, {missing[0]!r} first"
            raise broken(Rule.COMPLETE, said)
        if self.gone:
            label = graph.tensors[min(self.gone)].label
            raise broken(Rule.LEAVES_AWAY, f"the program ends with {label!r} on the host")
        for tensor in facts.stay & facts.made - (frozenset() if self.inside else facts.returned):
            if not facts.leaf[tensor]:
                self._must_be_there(tensor, "the program ends without", final=True)
        used = {t.body for line in self.program.instructions if isinstance(line, Loop) for t in line.tiles}
        if used != set(range(len(self.program.bodies))):
            raise broken(
                Rule.BODIES, f"the program has {len(self.program.bodies)} bodies and runs {len(used)}"
            )


def tile_bytes(body: Body, depth: int = 1) -> int:
    """What a tile takes besides what goes into it; a PlanError says that its body is no valid program.

    It is inside of so many others.
    """
    sound(body.graph)
    for what, figures in (("workspaces", body.workspace_bytes), ("times", body.seconds)):
        if figures and len(figures) != len(body.graph.ops):
            raise broken(Rule.BODIES, f"{len(figures)} {what} for {len(body.graph.ops)} operators")
    facts = facts_of(body.graph, inside=True)
    one = Player(facts, body.program, body.workspace_bytes, body.able, inside=True, depth=depth)
    one.play()
    return one.peak - facts.leaf_bytes()
