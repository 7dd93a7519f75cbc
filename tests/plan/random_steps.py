"""Random training steps as captures give them: a forward graph with skips and its mirrored backward."""

import random

from lowtide.graph import Graph, Op, Phase, Role, Tensor, validate


def random_step(seed, forward=(3, 9), *, charges=True):  # noqa: C901
    """A graph, seconds, workspaces and operators able to run in place, all drawn from one seed.

    With ``charges`` some operators are random, and some read buffers that the step updates.
    """
    draw = random.Random(seed)
    tensors = [Tensor("x", draw.randint(1, 30), Role.INPUT)]
    ops, seconds, workspace = [], [], []

    def add(kind, phase, inputs, sizes, *, alias=None, roles=None, gradient_of=None, time=None, **fields):
        outputs = []
        for k, size in enumerate(sizes):
            outputs.append(len(tensors))
            tensors.append(
                Tensor(
                    f"t{len(tensors)}",
                    size,
                    (roles or [Role.ACTIVATION] * len(sizes))[k],
                    alias=alias,
                    gradient_of=(gradient_of or [None] * len(sizes))[k],
                    device="cpu",
                )
            )
        ops.append(
            Op(
                f"op{len(ops)}",
                kind,
                phase,
                tuple(inputs),
                tuple(outputs),
                device="cpu",
                **fields,
            )
        )
        seconds.append(0.0 if alias is not None else float(draw.randint(1, 12)) if time is None else time)
        workspace.append(draw.choice([0, 0, 0, draw.randint(1, 40)]) if alias is None else 0)
        return outputs

    count = draw.randint(*forward)
    made, nodes = [0], []
    updated = []
    for k in range(count):
        inputs = [made[-1] if draw.random() < 0.8 else draw.choice(made)]
        if len(made) > 2 and draw.random() < 0.35:
            other = draw.choice(made[:-1])
            inputs += [other] if other not in inputs else []
        weight = None
        if draw.random() < 0.5:
            weight = len(tensors)
            role = Role.PARAMETER if draw.random() < 0.8 or not charges else Role.BUFFER
            tensors.append(Tensor(f"w{k}", draw.randint(1, 20), role, device="cpu"))
            if role is Role.BUFFER:
                updated.append(weight)
        size = draw.choice([draw.randint(1, 100), tensors[inputs[0]].bytes])
        sizes = [size, draw.randint(1, 10)] if draw.random() < 0.2 else [size]
        random_op = {"random": True} if charges and draw.random() < 0.05 else {}
        outputs = add(
            "f", Phase.FORWARD, inputs + ([weight] if weight is not None else []), sizes, **random_op
        )
        nodes.append((inputs, weight, outputs))
        made.append(outputs[0])
        if draw.random() < 0.25:
            view = add("view", Phase.FORWARD, [outputs[0]], [tensors[outputs[0]].bytes], alias=outputs[0])
            made[-1] = view[0]
    loss = add("loss", Phase.FORWARD, [made[-1]], [1])[0]
    tangent = len(tensors)
    tensors.append(Tensor("tangent", 1, Role.GRADIENT, device="cpu"))
    grads = {made[-1]: add("db", Phase.BACKWARD, [tangent, made[-1]], [tensors[made[-1]].bytes])[0]}
    view_of = {t.alias: k for k, t in enumerate(tensors) if t.alias is not None}
    for inputs, weight, outputs in reversed(nodes):
        top = view_of.get(outputs[0], outputs[0])
        if top not in grads:
            continue
        saved = [t for t in inputs if draw.random() < 0.7] + [t for t in outputs if draw.random() < 0.4]
        wanted = [t for t in inputs if t != 0]
        sizes = [tensors[t].bytes for t in wanted]
        roles, of = [Role.GRADIENT] * len(wanted), [None] * len(wanted)
        if weight is not None and tensors[weight].role is Role.PARAMETER:
            sizes, roles, of = [*sizes, tensors[weight].bytes], [*roles, Role.GRADIENT], [*of, weight]
        if not sizes:
            continue
        got = add("b", Phase.BACKWARD, [grads[top], *saved], sizes, roles=roles, gradient_of=of)
        for t, g in zip(wanted, got, strict=False):
            if t in grads:
                grads[t] = add("add", Phase.BACKWARD, [grads[t], g], [tensors[t].bytes], time=1.0)[0]
            else:
                grads[t] = g
    storage = Graph(tuple(tensors)).storages()
    able = [
        k for k, op in enumerate(ops)
        if tensors[op.outputs[0]].alias is None and draw.random() < 0.3
        and tensors[storage[op.inputs[0]]].bytes == tensors[op.outputs[0]].bytes
    ]  # fmt: skip
    return (
        validate(Graph(tuple(tensors), tuple(ops), returned=(loss,), updated=tuple(updated))),
        seconds,
        workspace,
        able,
    )
