"""One operator on real tensors as a Graph, its result cut into tiles, each made from just what it needs."""

import itertools
import operator
from typing import NamedTuple

import torch
from torch import fx

from lowtide.graph import Graph, Op, Phase, Rect, Role
from lowtide.graph.access import access
from lowtide.trace.operators import InputPart, emit, supported
from lowtide.trace.step.builder import Builder, Call


def randn(*shape):
    return torch.randn(shape, dtype=torch.float64)


class Single(NamedTuple):
    graph: Graph
    op: Op
    call: Call
    inputs: list
    outputs: list


def single(target, *args, **kwargs):
    """The operator as it would be captured, with the values of its inputs and outputs."""
    graph = fx.Graph()
    builder, nodes = Builder(), {}

    def node_of(value):
        if isinstance(value, torch.Tensor):
            if id(value) not in nodes:
                node = graph.placeholder(f"x{len(nodes)}")
                node.meta["val"] = value
                nodes[id(value)] = node, value
                builder.add_leaf(node, node.name, Role.INPUT)
            return nodes[id(value)][0]
        return [node_of(one) for one in value] if isinstance(value, list | tuple) else value

    node = graph.call_function(
        target, tuple(node_of(a) for a in args), {k: node_of(v) for k, v in kwargs.items()}
    )
    with torch.no_grad():
        result = target(*args, **kwargs)
    node.meta["val"] = result
    builder.add_call(node, Phase.FORWARD)
    values = [value for _, value in nodes.values()]
    op = builder.ops[0]
    results = [r for r in (result if isinstance(result, tuple | list) else (result,)) if torch.is_tensor(r)]
    graph_ = Graph(tuple(builder.tensors), tuple(builder.ops))
    return Single(graph_, op, builder.calls[0], [values[t] for t in op.inputs], results)


def cuts(length, rng, most=3):
    """A dimension in a few uneven parts."""
    inside = rng.sample(range(1, length), min(length - 1, rng.randrange(most))) if length > 1 else []
    return list(itertools.pairwise([0, *sorted(inside), length]))


def grid(shape, rng, most=3):
    """A tensor in tiles."""
    for ranges in itertools.product(*(cuts(length, rng, most) for length in shape)):
        yield Rect(tuple(a for a, _ in ranges), tuple(b for _, b in ranges))


def grown(box, shape, rng):
    """A box with something around it that nobody asked for."""
    return box.grow([rng.randrange(2) for _ in shape], [rng.randrange(2) for _ in shape]).clip(shape)


def tile(one, wanted, output=0, over=None, total=None, rng=None):
    """The box of the result, computed from no more than the access relation asks for, or a little more."""
    relation = access(one.graph, one.op).relations[output]
    needs = list(relation.needs(wanted, over))
    for k in relation.once if over is not None and any(over.lo) else ():
        needs[k] = None
    target, parts, given = fx.Graph(), [], []
    for k, (need, value) in enumerate(zip(needs, one.inputs, strict=True)):
        if need is None or need.empty:
            parts.append(None)
            continue
        box = grown(need, value.shape, rng) if rng is not None else need
        parts.append(InputPart(target.placeholder(f"p{k}"), box))
        given.append(value[box.slices()])
    weight = target.placeholder("total") if total is not None else None
    given += [total] if total is not None else []
    target.output(emit(target, one.call, one.op, one.graph, parts, wanted, output, over, weight))
    target.lint()
    return run(target, *given)


def run(graph, *given):
    """What the graph gives; compiling it would take longer."""
    values, given = {}, iter(given)
    for node in graph.nodes:
        if node.op == "placeholder":
            values[node] = next(given)
        elif node.op == "output":
            return values[node.args[0]]
        else:
            assert node.target is operator.getitem or node.target.namespace == "aten"
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.get)
            values[node] = node.target(*args, **kwargs)
    raise AssertionError("a graph without an output")


def close(got, expected):
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def check(rng, target, *args, most=3, output=0, grad=9, **kwargs):
    """Every tile is that box of the whole, and gradients of the first inputs are those through the whole."""
    one = single(target, *args, **kwargs)
    assert supported(one.op, one.graph) is None
    whole = one.outputs[output]
    leaves = [v.requires_grad_() for v in one.inputs[:grad] if v.is_floating_point()]
    result = target(*args, **kwargs)
    result = result[output] if isinstance(result, tuple | list) else result
    leaves = leaves if result.requires_grad else []
    seed = torch.Generator().manual_seed(rng.randrange(1 << 30))
    weights = torch.randn(whole.shape, generator=seed, dtype=torch.float64)
    loss = torch.zeros((), dtype=torch.float64)
    for wanted in grid(whole.shape, rng, most):
        got = tile(one, wanted, output, rng=rng if rng.random() < 0.3 else None)
        close(got.detach(), whole[wanted.slices()])
        loss = loss + (got * weights[wanted.slices()]).sum() if leaves else loss
    if leaves:
        plain = torch.autograd.grad(
            (result * weights).sum(), leaves, allow_unused=True, materialize_grads=True
        )
        tiled = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
        for a, b in zip(tiled, plain, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    return one


def adds_up(rng, target, *args, output=0, total=None, **kwargs):
    """Parts of the summed axes add to the whole."""
    one = single(target, *args, **kwargs)
    assert supported(one.op, one.graph) is None
    relation = access(one.graph, one.op).relations[output]
    whole = one.outputs[output]
    assert relation.sums
    for wanted in grid(whole.shape, rng):
        parts = [tile(one, wanted, output, over, total) for over in grid(relation.sums, rng)]
        close(sum(parts[1:], parts[0]), whole[wanted.slices()])
    return one
