"""Tiny training steps with everything that makes orders and recomputation difficult, drawn from a seed."""

import random

from lowtide.graph import Graph, Op, Phase, Role, Tensor, validate


class _Draft:
    """A step under construction."""

    def __init__(self, draw):
        self.draw = draw
        self.tensors, self.ops, self.seconds, self.workspace = [], [], [], []
        self.updated = []

    def tensor(self, size, role=Role.ACTIVATION, **fields):
        self.tensors.append(Tensor(f"t{len(self.tensors)}", size, role, **fields))
        return len(self.tensors) - 1

    def op(self, phase, inputs, outputs, *, time=None, **fields):
        view = bool(outputs) and all(self.tensors[t].alias is not None for t in outputs)
        view = view and not set(inputs) & set(outputs)
        self.ops.append(Op(f"op{len(self.ops)}", "k", phase, tuple(inputs), tuple(outputs), **fields))
        self.seconds.append(0.0 if view else self.time() if time is None else time)
        self.workspace.append(0 if view else self.draw.choice([0, 0, 0, self.draw.randint(1, 6)]))

    def time(self):
        draw = self.draw
        return draw.choice([float(draw.randint(0, 5)), float(draw.randint(1, 9)), draw.uniform(0.1, 6)])

    def view(self, phase, base, **fields):
        made = self.tensor(self.tensors[base].bytes, alias=base, **fields)
        self.op(phase, [base], [made])
        return made


def tiny_step(seed, forward=(2, 4)):
    """A graph, seconds, workspaces, and operators able to run in place.

    Forward has skips, views, operators with two results, random ones, some that run once and some that
    update a buffer. Backward has gradients of weights as results of their own or beside others, directly or
    through a view, and adds up gradients into new tensors or in place.
    """
    draw = random.Random(seed)
    step = _Draft(draw)
    nodes, made = [], [step.tensor(draw.randint(1, 6), Role.INPUT)]
    nodes += [_forward(step, made) for _ in range(draw.randint(*forward))]
    loss = step.tensor(1)
    step.op(Phase.FORWARD, [made[-1]], [loss])
    returned = [loss]
    if draw.random() < 0.15:
        returned.append(draw.choice(made[1:]))
    tangent = step.tensor(draw.randint(1, 3), Role.GRADIENT)
    gradient = {}
    _first_gradient(step, gradient, tangent, made[-1])
    for inputs, weight, outputs in reversed(nodes):
        if outputs[-1] in gradient:
            _backward(step, gradient, inputs, weight, outputs)
    if draw.random() < 0.2:  # something of backward that nothing else waits for
        step.op(Phase.BACKWARD, [tangent], [step.tensor(draw.randint(1, 4))])
    graph = Graph(
        tuple(step.tensors),
        tuple(step.ops),
        returned=tuple(sorted(set(returned))),
        updated=tuple(step.updated),
    )
    return validate(graph), step.seconds, step.workspace, _able(graph, draw)


def _forward(step, made):
    draw = step.draw
    inputs = [made[-1] if draw.random() < 0.7 else draw.choice(made)]
    if len(made) > 1 and draw.random() < 0.4:
        other = draw.choice(made)
        inputs += [other] if other not in inputs else []
    weight = step.tensor(draw.randint(1, 5), Role.PARAMETER) if draw.random() < 0.5 else None
    reads = inputs + ([weight] if weight is not None else [])
    fields = {}
    chance = draw.random()
    if chance < 0.08:
        fields = {"random": True}
    elif chance < 0.13:
        fields = {"once": True}
    elif chance < 0.2:
        buffer = step.tensor(draw.randint(1, 3), Role.BUFFER)
        step.updated.append(buffer)
        reads = [*reads, buffer]
        fields = {"updates": (len(reads) - 1,)}
    sizes = [draw.choice([draw.randint(1, 12), step.tensors[inputs[0]].bytes])]
    sizes += [draw.randint(1, 5)] if draw.random() < 0.2 else []
    outputs = [step.tensor(size) for size in sizes]
    step.op(Phase.FORWARD, reads, outputs, **fields)
    top = step.view(Phase.FORWARD, outputs[0]) if draw.random() < 0.25 else outputs[0]
    made.append(top)
    return inputs, weight, [*outputs, top]


def _first_gradient(step, gradient, tangent, top):
    gradient[top] = step.tensor(step.tensors[top].bytes, Role.GRADIENT)
    reads = [tangent] + ([top] if step.draw.random() < 0.5 else [])
    step.op(Phase.BACKWARD, reads, [gradient[top]])


def _backward(step, gradient, inputs, weight, outputs):
    """The gradients of what an operator read, of its weight in an operator of its own or in the same."""
    draw = step.draw
    above = gradient[outputs[-1]]
    saved = [t for t in inputs if draw.random() < 0.6] + [t for t in outputs[:1] if draw.random() < 0.3]
    wanted = [t for t in inputs if t != 0]
    alone = weight is not None and draw.random() < 0.7
    if alone and draw.random() < 0.5:
        _weight_gradient(step, above, inputs, weight)
        alone = weight = None
    got = [step.tensor(step.tensors[t].bytes, Role.GRADIENT) for t in wanted]
    made = list(got)
    if weight is not None and not alone:
        made.append(step.tensor(step.tensors[weight].bytes, Role.GRADIENT, gradient_of=weight))
    if made:
        step.op(Phase.BACKWARD, [above, *saved], made)
    if alone:
        _weight_gradient(step, above, inputs, weight)
    for t, g in zip(wanted, got, strict=True):
        if t not in gradient:
            gradient[t] = g
        elif draw.random() < 0.5:
            step.op(Phase.BACKWARD, [gradient[t], g], [gradient[t]])
        else:
            total = step.tensor(step.tensors[t].bytes, Role.GRADIENT)
            step.op(Phase.BACKWARD, [gradient[t], g], [total])
            gradient[t] = total


def _weight_gradient(step, above, inputs, weight):
    size = step.tensors[weight].bytes
    if step.draw.random() < 0.4:
        made = step.tensor(size, Role.GRADIENT)
        step.op(Phase.BACKWARD, [above, inputs[0]], [made])
        step.view(Phase.BACKWARD, made, role=Role.GRADIENT, gradient_of=weight)
    else:
        made = step.tensor(size, Role.GRADIENT, gradient_of=weight)
        step.op(Phase.BACKWARD, [above, inputs[0]], [made])


def _able(graph, draw):
    root = graph.storages()
    found = []
    for k, op in enumerate(graph.ops):
        fits = op.inputs and op.outputs and graph.tensors[op.outputs[0]].alias is None
        fits = fits and not set(op.inputs) & set(op.outputs)
        if fits and graph.tensors[root[op.inputs[0]]].bytes == graph.tensors[op.outputs[0]].bytes:
            found += [k] if draw.random() < 0.5 else []
    return found
