"""Runs Programs on symbols, to tell right ones from wrong ones without torch and without the checker.

The value of a tensor is a hash of the operator that made it and of what that read. Storages are real: an
operator in place and an update overwrite what they are on, and whoever reads it later sees that. Copies to
the host take the bytes at any time until they are waited for. The reference is the graph itself, each operator
once in program order. Follows docs/valid-programs.md and execute/, not plan/check/.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from lowtide.graph import LOOP, RESIDENT_ROLES, Phase, Role
from lowtide.plan.program.instructions import Drop, Fetch, Loop, Run, Send

__all__ = ["WrongError", "runs_right"]

GARBAGE = ("garbage",)
JOINED = ("aten.relu", "aten.add")


class WrongError(Exception):
    """The Program cannot go on, or has done what nobody can make good."""


@dataclass(eq=False)
class Storage:
    content: object
    bytes: int
    gone: bool = False


@dataclass(frozen=True)
class Ref:
    storage: Storage
    path: tuple = ()

    @property
    def value(self):
        if self.storage.gone:
            raise WrongError("it is on the host")
        return hash((self.storage.content, self.path)) if self.path else self.storage.content


@dataclass
class Copy:
    """A tensor on the host; its bytes are read from the storage until somebody waits for that."""

    ref: Ref
    content: object
    done: bool = False

    def taken(self):
        if not self.done and self.ref.storage.content != self.content:
            self.content = GARBAGE
        self.done = True
        return self.content


def updated_by(op):
    found = [t for t in op.outputs if t in op.inputs]
    found += [op.inputs[k] for k in op.updates]
    return list(dict.fromkeys(found + (list(op.inputs[:1]) if op.kind == "lowtide.accumulate" else [])))


def in_passing(op):
    """Inputs that the first run updates, and whose values its results do not depend on: running statistics."""
    return {op.inputs[k] for k in op.updates} - set(op.outputs)


@dataclass
class Device:
    """Generators and what of them a result may depend on."""

    drawn: dict = field(default_factory=dict)

    def draw(self, op):
        """Numbers that an operator draws; one that nobody knows draws from everywhere."""
        if op.once:
            before = tuple(sorted(self.drawn.items()))
            for name in ("any", "cpu", "cuda:0", "cuda:1"):
                self.drawn[name] = self.drawn.get(name, 0) + 1
            return before
        if op.random:
            where = op.device or "cpu"
            self.drawn[where] = self.drawn.get(where, 0) + 1
            return where, self.drawn[where], self.drawn.get("any", 0)
        return ()


def computed(k, op, values, drawn):
    """What each output is."""
    reads = tuple(v for j, v in enumerate(values) if op.inputs[j] not in in_passing(op))
    return [hash((k, op.id, position, reads, drawn)) for position in range(len(op.outputs))]


class Step:
    """A step on symbols, part of a tile or whole."""

    def __init__(self, graph, device, inside=None):
        self.graph, self.device, self.inside = graph, device, inside
        self.root = graph.storages()
        made = {t for op in graph.ops for t in op.outputs}
        updated = {self.root[t] for t in graph.updated}
        late = {self.root[t] for op in graph.ops if op.phase is not Phase.FORWARD for t in updated_by(op)}
        self.changed = updated | {self.root[t] for op in graph.ops for t in updated_by(op)}
        self.leaves, self.given = [], []
        self.table = [None] * len(graph.tensors)
        for t, tensor in enumerate(graph.tensors):
            if self.root[t] == t and (tensor.role in RESIDENT_ROLES or t not in made):
                (self.leaves if tensor.role in RESIDENT_ROLES else self.given).append(t)
                self.table[t] = Ref(Storage(("leaf", t, inside), tensor.bytes))
        for t in range(len(graph.tensors)):
            if self.root[t] != t and t not in made and self.root[t] in self.leaves:
                self.table[t] = Ref(self.table[self.root[t]].storage, (t,))
        self.before = {t: self.table[t].storage.content for t in self.leaves}
        self.user = {t: self.table[t] for t in self.leaves}
        self.coming = {t: self.table[t] for t in self.given}
        """Gradients that come in, which others may have too."""
        self.copies = {
            t for t in self.leaves
            if inside is None and t not in late and (t in updated or graph.tensors[t].role is Role.BUFFER)
        }  # fmt: skip
        self.returned = tuple(graph.returned)
        self.gradients = [
            t for t, one in enumerate(graph.tensors)
            if one.gradient_of is not None and graph.tensors[one.gradient_of].role in RESIDENT_ROLES
            and t in made
        ]  # fmt: skip

    def call(self, k, op, drawn, loops, again=False):
        """Values of inputs and outputs; ``loops`` gives what comes of an operator that is a loop."""
        skip = in_passing(op) if again else ()
        asked = [j not in op.shape_only and t not in skip for j, t in enumerate(op.inputs)]
        values = [self.value(t) if read else None for t, read in zip(op.inputs, asked, strict=True)]
        if op.kind == LOOP:
            drawn = loops(tuple(values))
        return values, computed(k, op, values, drawn)

    def value(self, t):
        if self.table[t] is None:
            raise WrongError(f"{t} is not there")
        return self.table[t].value

    def update(self, k, op, values, drawn):
        """The storages that the first run of an operator changes."""
        for t in updated_by(op):
            storage = self.table[t].storage
            storage.content = hash(("update", k, t, storage.content, tuple(values), drawn))

    def put(self, k, op, position, t, value, storage=None):
        """Put an output where it belongs, unless something is there."""
        if t in op.inputs or self.table[t] is not None:
            return
        base = self.graph.tensors[t].alias
        if base is not None:
            self.table[t] = Ref(self.table[base].storage, (*self.table[base].path, (k, position)))
        elif storage is not None:
            storage.content = value
            self.table[t] = Ref(storage)
        else:
            self.table[t] = Ref(Storage(value, self.graph.tensors[t].bytes))

    def hand_over(self):
        """Backward finds leaves that the step updates as they were, and none of their views."""
        if self.inside is not None:
            return
        for t, ref in enumerate(self.table):
            root = self.root[t]
            if ref is not None and root in self.copies and root != t and root in self.changed:
                self.table[t] = None
        for t in self.copies:
            self.table[t] = Ref(Storage(self.before[t], self.graph.tensors[t].bytes))

    def outcome(self):
        found = {t: self.value(t) for t in self.gradients}
        found |= {("leaf", t): ref.value for t, ref in (self.user | self.coming).items()}
        return found


class Reference(Step):
    """Each operator once, in program order."""

    def run(self, bodies):
        results = None
        for k, op in enumerate(self.graph.ops):
            if op.phase is not Phase.FORWARD and results is None:
                results = self.results()
                self.switch()
            if self.inside is None and op.phase is not Phase.FORWARD:
                self.fresh_views(op)
            drawn = self.device.draw(op)
            values, made = self.call(k, op, drawn, lambda values, k=k: bodies.right(k, values, self.device))
            for position, t in enumerate(op.outputs):
                self.put(k, op, position, t, made[position])
            self.update(k, op, values, drawn)
        if results is None:
            results = self.results()
            self.switch()
        return results, {t: ref.value for t, ref in self.held.items()}, self.outcome()

    def results(self):
        self.held = {t: self.table[t] for t in self.returned}
        return {t: ref.value for t, ref in self.held.items()}

    def switch(self):
        self.hand_over()

    def fresh_views(self, op):
        """Views of what backward reads as it was are made again where it reads them."""
        for t in op.inputs:
            base = self.graph.tensors[t].alias
            if self.table[t] is None and base is not None:
                k, maker = next((k, o) for k, o in enumerate(self.graph.ops) if t in o.outputs)
                self.fresh_views(maker)
                for position, made in enumerate(maker.outputs):
                    self.put(k, maker, position, made, None)


class Playing(Step):
    """A Program, instruction by instruction, as execute/ runs it."""

    def __init__(self, graph, program, device, able, bodies, inside=None):
        super().__init__(graph, device, inside)
        self.program, self.able, self.bodies = program, able, bodies
        self.ran, self.states = set(), {}
        self.hosts, self.arriving = {}, set()
        self.most = 0
        forward_reads = {t for op in graph.ops if op.phase is Phase.FORWARD for t in op.inputs}
        self.later = {}
        for t in self.given if inside is None else ():
            if t not in forward_reads:
                self.later[t], self.table[t] = self.table[t], None

    def run(self):
        lines = self.program.instructions
        for place, line in enumerate(lines):
            if place == len(self.program.forward):
                self.border()
            self.step(place, line)
        if not self.program.backward:
            self.border()
        if any(ref.storage.gone for ref in self.user.values()):
            raise WrongError("a leaf is away at the end")
        missing = [
            op.id for k, op in enumerate(self.graph.ops)
            if k not in self.ran and (updated_by(op) or op.random or op.once)
        ]  # fmt: skip
        if missing:
            raise WrongError(f"never runs {missing}")
        at_end = {t: ref.value for t, ref in self.shown.items()}
        if self.inside is not None:
            at_end = {t: self.value(t) for t in self.returned}
        return self.results, at_end, self.outcome()

    def step(self, place, line):
        if isinstance(line, Run):
            self.execute(place, line)
        elif isinstance(line, Drop):
            for t in line.tensors:
                self.drop(t)
        elif isinstance(line, Send):
            self.send(line.tensor)
        elif isinstance(line, Fetch):
            self.fetch(line.tensor)
        self.measure(0)

    def measure(self, passing):
        storages = {
            id(r.storage): r.storage for r in (*self.table, *self.user.values(), *self.later.values()) if r
        }
        storages |= {id(r.storage): r.storage for r in getattr(self, "shown", {}).values()}
        copied = {id(self.table[t].storage) for t in self.copies} if hasattr(self, "shown") else set()
        self.most = max(
            self.most,
            passing + sum(s.bytes for key, s in storages.items() if not s.gone and key not in copied),
        )

    def execute(self, place, line):
        if not 0 <= line.op < len(self.graph.ops):
            raise WrongError("no such operator")
        op, k = self.graph.ops[line.op], line.op
        if op.phase is not Phase.FORWARD and place < len(self.program.forward) and self.inside is None:
            raise WrongError("backward in forward")
        if isinstance(line, Loop) != (op.kind == LOOP):
            raise WrongError("loop or not")
        read = {self.root[t] for t in op.inputs}
        self.arriving = {t for t in self.arriving if self.root[t] not in read}
        again = k in self.ran
        if line.short:
            self.short(place, line, op, again)
            return
        if again and (op.once or set(op.inputs) & set(op.outputs) or not op.outputs):
            raise WrongError("changes again")
        for other in op.after:
            if other < k and other not in self.ran and self.graph.ops[other].outputs:
                raise WrongError("waits for another")
        drawn = self.states[k] if again else self.device.draw(op)
        self.states[k] = drawn
        values, made = self.call(
            k, op, drawn, lambda values: self.bodies.played(self, line, values, self.device), again
        )
        storage = self.over(line, op)
        passing = sum(
            self.graph.tensors[t].bytes for t in op.outputs
            if t not in op.inputs and self.table[t] is not None and self.graph.tensors[t].alias is None
        )  # fmt: skip
        for position, t in enumerate(op.outputs):
            self.put(k, op, position, t, made[position], storage if position == 0 else None)
        if not again:
            self.update(k, op, values, drawn)
        self.ran.add(k)
        self.measure(passing)

    def over(self, line, op):
        if line.in_place is None:
            return None
        if line.in_place != 0 or line.op not in self.able or not op.outputs:
            raise WrongError("no such form")
        made, source = op.outputs[0], self.table[op.inputs[0]]
        if self.graph.tensors[made].alias is not None or made in op.inputs:
            raise WrongError("no such form")
        others = [t for t in op.inputs[1:] if self.table[t] is not None]
        if any(self.table[t].storage is source.storage for t in others):
            source.storage.content = GARBAGE
            return None
        if source.storage.bytes != self.graph.tensors[made].bytes:
            raise WrongError("another size")
        if self.table[made] is not None:
            source.storage.content = GARBAGE
        return source.storage

    def short(self, place, line, op, again):
        k, saved = line.op, op.short
        if op.kind in JOINED and k in self.joined:
            self.joined.discard(k)
            return
        if not again or not saved or line.in_place is not None:
            raise WrongError("no short run")
        _, made = self.call(k, op, (), None, again)
        if any(self.value(op.outputs[j]) != made[j] for j in saved):
            raise WrongError("other statistics")
        target, value, self.joined = op.outputs[0], made[0], set()
        for one in self.program.instructions[place + 1 :]:
            if isinstance(one, Drop):
                continue
            if not isinstance(one, Run) or not one.short or not 0 <= one.op < len(self.graph.ops):
                break
            part = self.graph.ops[one.op]
            if part.kind not in JOINED:
                break
            if part.inputs[0] != target or one.op not in self.ran:
                raise WrongError("not part of it")
            reads = [value, *(self.value(t) for t in part.inputs[1:])]
            target, value = part.outputs[0], computed(one.op, part, reads, ())[0]
            self.joined.add(one.op)
        if self.table[target] is None:
            self.table[target] = Ref(Storage(value, self.graph.tensors[target].bytes))

    joined: set = frozenset()

    def drop(self, t):
        if not 0 <= t < len(self.graph.tensors):
            raise WrongError("no such tensor")
        if t in self.hosts:
            self.hosts[t].taken()
        self.arriving.discard(t)
        if t in self.leaves:
            if t not in self.hosts or self.table[t] is None:
                raise WrongError("a leaf is lost")
            self.user[t].storage.gone = True
            return
        self.table[t] = None

    def send(self, t):
        if not 0 <= t < len(self.graph.tensors):
            raise WrongError("no such tensor")
        self.value(t)
        if self.root[t] in self.leaves and t not in self.leaves:
            raise WrongError("a part of a leaf")
        if self.root[t] in self.given:
            raise WrongError("it comes from outside")
        content = GARBAGE if t in self.arriving else self.table[t].storage.content
        self.hosts[t] = Copy(self.table[t], content)

    def fetch(self, t):
        if t not in self.hosts:
            raise WrongError("it was not sent")
        if t in self.leaves:
            self.user[t].storage.gone = False
        else:
            copy = self.hosts[t]
            self.table[t] = Ref(Storage(copy.taken(), copy.ref.storage.bytes), copy.ref.path)
        self.arriving.add(t)

    def border(self):
        self.results = {t: self.value(t) for t in self.returned} if self.inside is None else {}
        self.shown = {t: self.table[t] for t in self.returned} if self.inside is None else {}
        for k, op in enumerate(self.graph.ops):
            drawn = op.random or op.once or updated_by(op)
            if op.phase is Phase.FORWARD and k not in self.ran and drawn:
                raise WrongError("forward leaves something undone")
        self.hand_over()
        self.table = [self.later.get(t, ref) for t, ref in enumerate(self.table)]
        self.later = {}
        if self.inside is None:
            self.arriving.clear()


class Bodies:
    """What loops give, by the bodies of a Program; ``right`` are those of a Program that is known to be."""

    def __init__(self, program, right):
        self.bodies, self.program, self.known = program.bodies, program, right

    def right(self, k, values, device):
        loop = next(x for x in self.known.instructions if isinstance(x, Loop) and x.op == k)
        found = set()
        for tile in loop.tiles:
            body = self.known.bodies[tile.body]
            part = (values, tile.over, tile.body)
            done = Reference(body.graph, device, part).run(Bodies(body.program, body.program))
            found.add((tile.over, str(sorted(done[2].items(), key=str)), str(sorted(done[1].items()))))
        return hash(frozenset(found))

    def played(self, step, line, values, device):
        axes = step.graph.ops[line.op].axes
        refuse_boxes(line.tiles, axes, len(self.bodies))
        found = set()
        for tile in line.tiles:
            body = self.bodies[tile.body]
            part = (values, tile.over, tile.body)
            one = Playing(
                body.graph, body.program, device, body.able, Bodies(body.program, body.program), part
            )
            done = one.run()
            found.add((tile.over, str(sorted(done[2].items(), key=str)), str(sorted(done[1].items()))))
        return hash(frozenset(found))


def refuse_boxes(tiles, axes, bodies):
    """Every cell of the axes is in one box."""
    cells = list(itertools.product(*map(range, axes)))
    for cell in cells:
        boxes = [t for t in tiles if all(lo <= i < hi for i, (lo, hi) in zip(cell, t.over, strict=False))]
        if len(boxes) != 1:
            raise WrongError("a cell is not in one box")
    for tile in tiles:
        inside = len(tile.over.lo) == len(axes) and all(
            0 <= lo < hi <= n for (lo, hi), n in zip(tile.over, axes, strict=True)
        )
        if not inside or not 0 <= tile.body < bodies:
            raise WrongError("a box or a body that is none")


def runs_right(graph, program, able, right):
    """The most bytes that a Program takes where it gives what the graph gives; a WrongError where it does not.

    ``right`` is a Program whose loops are known to be those of the graph.
    """
    there, here = Device(), Device()
    wanted = Reference(graph, there).run(Bodies(right, right))
    one = Playing(graph, program, here, able, Bodies(program, right))
    try:
        found = one.run()
    except (IndexError, KeyError, AttributeError, StopIteration) as error:
        raise WrongError(f"crashes: {error!r}") from error
    for what, a, b in zip(("results", "results at the end", "gradients"), wanted, found, strict=True):
        if a != b:
            raise WrongError(f"other {what}")
    if there.drawn != here.drawn:
        raise WrongError("other random states")
    return one.most
