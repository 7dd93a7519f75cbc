"""Small steps whose plans can be counted by hand."""

from lowtide.graph import Graph, Op, Phase, Role, Tensor, validate


def chain(count, size=1):
    """``count`` operators, each on the result of the one before; each gradient reads what went in."""
    tensors = [Tensor("x", size, Role.INPUT), Tensor("w", size, Role.PARAMETER)]
    ops = []
    for k in range(count):
        inputs = (0, 1) if k == 0 else (len(tensors) - 1, 1)
        ops.append(Op(f"f{k}", "f", inputs=inputs, outputs=(len(tensors),)))
        tensors.append(Tensor(f"a{k}", size))
    loss = len(tensors) - 1
    gradient = len(tensors)
    tensors.append(Tensor("dloss", size, Role.GRADIENT))
    for k in reversed(range(count)):
        ops.append(
            Op(f"b{k}", "b", Phase.BACKWARD, inputs=(gradient, ops[k].inputs[0]), outputs=(len(tensors),))
        )
        gradient = len(tensors)
        tensors.append(Tensor(f"g{k}", size, Role.GRADIENT, gradient_of=0 if k == 0 else None))
    return validate(Graph(tuple(tensors), tuple(ops), returned=(loss,)))


def unit_seconds(graph):
    """One for each operator of forward; backward is free."""
    return [float(op.phase is Phase.FORWARD) for op in graph.ops]
