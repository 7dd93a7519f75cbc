"""Random steps with everything in them that a Program must heed, and valid Programs of them, without torch."""

import random

import msgspec

from lowtide.errors import InfeasibleError
from lowtide.graph import LOOP, Graph, Op, Phase, Rect, Role, Tensor, validate
from lowtide.plan.budget import Budget
from lowtide.plan.program.copy_lanes import Link
from lowtide.plan.program.costs import Costs
from lowtide.plan.program.in_place import with_in_place
from lowtide.plan.program.instructions import Body, Loop, Program, Run, Tile
from lowtide.plan.program.simple import offload_all, recompute_all, store_all
from lowtide.plan.program.simulate import inside_bytes
from tests.plan.random_steps import random_step
from tests.planning import plan_for

replace = msgspec.structs.replace


class _Wild:
    """A random step to which features are added one after the other."""

    def __init__(self, seed, forward):
        self.draw = random.Random(f"wild {seed}")
        graph, self.seconds, self.workspace, self.able = random_step(seed, forward)
        self.tensors, self.ops = list(graph.tensors), list(graph.ops)
        self.returned = graph.returned
        self.updated = list(graph.updated)
        self.early = []

    def of(self, phase):
        return [k for k, op in enumerate(self.ops) if op.phase is phase]

    def leaf(self, role, size=None):
        self.tensors.append(
            Tensor(f"leaf{len(self.tensors)}", size or self.draw.randint(1, 20), role, device="cpu")
        )
        return len(self.tensors) - 1

    def change(self, k, **changes):
        self.ops[k] = replace(self.ops[k], **changes)

    def mark(self, k, **fields):
        self.change(k, **fields)

    def insert(self, at, op, seconds=1.0):
        """Put an operator before another; ``after`` and ``able`` count along."""
        self.ops.insert(at, op)
        self.seconds.insert(at, seconds)
        self.workspace.insert(at, 0)
        self.able = [k + (k >= at) for k in self.able]
        self.ops = [replace(o, after=tuple(k + (k >= at) for k in o.after)) for o in self.ops]

    def add_tensor(self, size, **more):
        self.tensors.append(Tensor(f"n{len(self.tensors)}", size, device="cpu", **more))
        return len(self.tensors) - 1

    # features

    def statistics(self):
        """A forward operator that updates a buffer in passing."""
        k = self.draw.choice(self.of(Phase.FORWARD)[:-1])
        if self.ops[k].updates or self.tensors[self.ops[k].outputs[0]].alias is not None:
            return
        buffer = self.leaf(Role.BUFFER)
        inputs = self.ops[k].inputs
        self.change(k, inputs=(*inputs, buffer))
        self.mark(k, updates=(len(inputs),))
        self.updated.append(buffer)
        self.early.append(buffer)

    def copied(self):
        """A buffer that forward and backward read, under views too, and that gets a new value."""
        draw, forward = self.draw, self.of(Phase.FORWARD)
        role = draw.choice([Role.BUFFER, Role.BUFFER, Role.PARAMETER])
        buffer = self.leaf(role, 7)
        name = buffer
        at = draw.choice(forward)
        if draw.random() < 0.5:
            name = self.add_tensor(7, alias=buffer)
            self.insert(at, Op(f"view{name}", "view", Phase.FORWARD, (buffer,), (name,), device="cpu"), 0.0)
        readers = [k for k in self.of(Phase.FORWARD) if k > at and self.ops[k].kind != "view"]
        readers = draw.sample(readers, min(len(readers), draw.randint(1, 2)))
        if draw.random() < 0.4:
            readers.append(draw.choice(self.of(Phase.BACKWARD)))
        for k in readers:
            if name not in self.ops[k].inputs:
                self.change(k, inputs=(*self.ops[k].inputs, name))
        end = len(self.of(Phase.FORWARD))
        source = draw.choice([t for op in self.ops[:end] for t in op.outputs])
        place = (
            end
            if draw.random() < 0.7
            else draw.randint(max([k for k in readers if k < end], default=at) + 1, end)
        )
        source = source if any(source in op.outputs for op in self.ops[:place]) else self.ops[0].outputs[0]
        copy = Op(
            f"copy{buffer}", "aten.copy_", Phase.FORWARD, (buffer, source), (buffer,), device="cpu",
            updates=(0,),
        )  # fmt: skip
        self.insert(place, copy)
        self.updated.append(buffer)

    def updated_late(self):
        """A buffer that backward updates."""
        buffer = self.leaf(Role.BUFFER)
        k = self.draw.choice([k for k in self.of(Phase.BACKWARD) if self.ops[k].outputs])
        add = Op(
            f"late{buffer}", "aten.copy_", Phase.BACKWARD, (buffer, self.ops[k].outputs[0]), (buffer,),
            device="cpu", updates=(0,),
        )  # fmt: skip
        self.insert(k + 1, add)
        self.updated.append(buffer)

    def accumulated(self):
        """Gradients that are added to what comes in, as in tiles."""
        k = self.draw.choice([k for k in self.of(Phase.BACKWARD) if self.ops[k].outputs])
        into = self.leaf(Role.INPUT)
        add = Op(f"into{into}", "lowtide.accumulate", Phase.BACKWARD, (into, self.ops[k].outputs[0]), ())
        self.insert(k + 1, add)

    def summed(self):
        """A gradient that is written and then added to, as documents have it."""
        made = [
            k for k in self.of(Phase.BACKWARD)
            if self.ops[k].outputs and self.ops[k].outputs[0] not in self.ops[k].inputs
        ]  # fmt: skip
        k = self.draw.choice(made)
        t = self.ops[k].outputs[0]
        add = Op(f"sum{len(self.ops)}", "sum", Phase.BACKWARD, (t, 0), (t,), device="cpu")
        self.insert(k + 1, add)

    def random(self):
        for k in self.draw.sample(range(len(self.ops)), min(len(self.ops), self.draw.randint(1, 4))):
            if not set(self.ops[k].inputs) & set(self.ops[k].outputs) and self.ops[k].outputs:
                where = self.draw.choice(["cpu", "cpu", "cuda:0"])
                if self.tensors[self.ops[k].outputs[0]].alias is None:
                    self.change(k, device=where)
                    self.mark(k, random=True)

    def masks(self):
        """Operators that draw from the same generator, and nothing else connects them."""
        for _ in range(self.draw.randint(2, 3)):
            reader = self.draw.choice([k for k in self.of(Phase.FORWARD) if self.ops[k].kind != "view"])
            mask = self.add_tensor(self.draw.randint(1, 9))
            kind = self.draw.choice([{"random": True}, {"random": True}, {"once": True}])
            self.change(reader, inputs=(*self.ops[reader].inputs, mask))
            drawn = Op(f"rand{mask}", "rand", Phase.FORWARD, (), (mask,), device="cpu", **kind)
            self.insert(self.draw.randint(0, reader), drawn)

    def shown(self):
        """More results, some of them views."""
        made = [t for k in self.of(Phase.FORWARD) for t in self.ops[k].outputs if t not in self.ops[k].inputs]
        chosen = self.draw.sample(made, min(len(made), 2))
        self.returned = tuple(sorted({*self.returned, *chosen}))

    def fitting(self):
        """Operators as large as what they read, which may be a leaf, a result or what comes in."""
        for _ in range(3):
            k = self.draw.randrange(len(self.ops))
            op = self.ops[k]
            if op.outputs and op.inputs and op.outputs[0] not in op.inputs:
                made = self.tensors[op.outputs[0]]
                source = self.tensors[op.inputs[0]]
                if made.alias is None and source.alias is None and not self.viewed(op.outputs[0]):
                    self.tensors[op.outputs[0]] = replace(made, bytes=source.bytes)
                    self.able.append(k)

    def viewed(self, tensor):
        return any(one.alias == tensor for one in self.tensors)

    def once(self):
        k = self.draw.randrange(len(self.ops))
        if not self.ops[k].random and not self.ops[k].id.startswith("view"):
            self.mark(k, once=True)

    def waiting(self):
        k = self.draw.randrange(1, len(self.ops))
        self.change(k, after=(self.draw.randrange(k),))

    def normalized(self):
        """A BatchNorm, a sum and a ReLU, whose second runs may be one short run."""
        draw = self.draw
        k = draw.choice(self.of(Phase.FORWARD)[:-1])
        source = self.ops[k].outputs[0]
        names = [self.add_tensor(5) for _ in range(5)]
        y, mean, deviation, s, r = names
        buffer = self.leaf(Role.BUFFER)
        self.updated.append(buffer)
        lines = [
            Op(f"norm{y}", "norm", Phase.FORWARD, (source, buffer), (y, mean, deviation), device="cpu",
               short=(1, 2), updates=(1,)),
            Op(f"add{s}", "aten.add", Phase.FORWARD, (y, mean), (s,), device="cpu"),
            Op(f"relu{r}", "aten.relu", Phase.FORWARD, (s,), (r,), device="cpu"),
        ]  # fmt: skip
        if draw.random() < 0.5:
            lines[1:] = [replace(lines[2], inputs=(y,))]
        for j, op in enumerate(lines):
            self.insert(k + 1 + j, op)
        self.able += [k + 2 + j for j in range(len(lines) - 1)]
        later = self.draw.choice(self.of(Phase.BACKWARD))
        self.change(later, inputs=(*self.ops[later].inputs, r, mean, deviation))

    def step(self):
        graph = validate(
            Graph(
                tuple(self.tensors),
                tuple(self.ops),
                returned=tuple(self.returned),
                updated=tuple(sorted(set(self.updated))),
                updated_early=tuple(self.early),
            )
        )
        owner = graph.storages()
        size = [graph.tensors[t].bytes for t in owner]
        able = {k for k in self.able if size[self.ops[k].inputs[0]] == size[self.ops[k].outputs[0]]}
        return graph, self.seconds, self.workspace, sorted(able)


INSIDE = ("accumulated", "summed", "random", "once", "waiting", "masks", "fitting", "fitting")
"""What a body may have: nothing there is copied between forward and backward."""
FEATURES = (
    "statistics", "copied", "copied", "updated_late", "accumulated", "summed", "random", "once", "waiting",
    "normalized", "masks", "masks", "shown", "fitting", "fitting",
)  # fmt: skip


def wild_step(seed, forward=(3, 7), features=FEATURES):
    """A graph, seconds, workspaces and operators able to run in place, drawn from a seed."""
    wild = _Wild(seed, forward)
    for name in wild.draw.sample(features, wild.draw.randint(0, min(5, len(features)))):
        getattr(wild, name)()
    return wild.step()


def looped_step(seed):
    """A step whose forward has a loop over tiles, with a Program of it: bodies are wild steps."""
    draw = random.Random(f"loop {seed}")
    wild = _Wild(seed, (2, 4))
    axes = draw.choice([(2,), (3, 2), (4,)])
    makers = [k for k in wild.of(Phase.FORWARD) if wild.tensors[wild.ops[k].outputs[0]].alias is None]
    k = draw.choice(makers[:-1] or makers)
    wild.able = [one for one in wild.able if one != k]
    whole = Rect.of_shape(axes)
    boxes = whole.split(0, draw.randint(1, axes[0]))
    bodies, tiles = [], []
    for box in boxes:
        if not bodies or draw.random() < 0.3:
            body, times, extra, may = wild_step(draw.randrange(10**6), (2, 4), INSIDE)
            inner = with_in_place(body, draw.choice([store_all, recompute_all])(body), may)
            bodies.append(Body(body, inner, tuple(extra), tuple(times), tuple(may)))
        tiles.append(Tile(len(bodies) - 1, box))
    loop = Loop(k, tiles=tuple(tiles))
    drawn = any(op.random or op.once for one in bodies for op in one.graph.ops)
    wild.change(k, kind=LOOP, axes=tuple(axes), once=drawn)
    graph, seconds, workspace, able = wild.step()

    def turned(program):
        lines = [loop if isinstance(x, Run) and x.op == k else x for x in program.instructions]
        cut = len(program.forward)
        return Program(tuple(lines[:cut]), tuple(lines[cut:]), tuple(bodies))

    workspace[k] = max(inside_bytes(body) for body in bodies)
    return (graph, seconds, workspace, able), turned


def programs_of(seed, step, turned=lambda program: program):
    """A valid Program of a step, of one kind or another."""
    graph, _, _, able = step
    draw = random.Random(f"program {seed}")
    kind = draw.choice(["store", "recompute", "each", "offload", "plan", "plan", "plan"])
    if kind == "plan":
        made = planned(seed, step, draw, turned)
        if made is not None:
            return made.program
        kind = "store"
    plain = {
        "store": store_all,
        "recompute": recompute_all,
        "each": lambda graph: recompute_all(graph, each_use=True),
        "offload": offload_all,
    }[kind](graph)
    return turned(with_in_place(graph, plain, able) if draw.random() < 0.7 else plain)


def planned(seed, step, draw, turned=lambda program: program, *, leaving=True):
    """A plan of the step inside some budget, or None where there is none."""
    graph, seconds, workspace, able = step
    short = {
        k: 0.5 for k, op in enumerate(graph.ops) if op.short or op.kind in ("aten.add", "aten.relu")
    }  # fmt: skip
    means = draw.choice([["recompute"], ["recompute", "offload"]])
    link = Link(40.0, 30.0, 0.1) if "offload" in means else None
    costs = Costs(tuple(seconds), tuple(workspace), "imported", short=short if draw.random() < 0.7 else {})
    kinds = ("parameters",) if leaving and link and draw.random() < 0.3 else ()
    try:
        return plan_for(
            graph, costs, Budget(share=draw.choice([1.0, 0.9, 0.8, 0.7])), able=able, only=means, link=link,
            time_limit=0.02, seed=seed, offload=kinds, turned=turned,
        )  # fmt: skip
    except InfeasibleError:
        return None
