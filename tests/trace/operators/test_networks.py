"""Every forward operator of captured networks, cut in two along each dimension of its result."""

import functools
import random
from unittest.mock import patch

import pytest
import torch
from functorch.compile import aot_function, make_boxed_func
from torch import fx

from lowtide import zoo
from lowtide.graph import Phase, Rect, Role
from lowtide.graph.access import access
from lowtide.trace.operators import InputPart, emit, supported
from lowtide.trace.step.capture import capture
from lowtide.zoo import locallyconnected
from tests.trace.operators.tiles import Single, close, run, tile

NETWORKS = [
    "unet:base=4,batch=2,size=188",
    "alexnet:batch=2,size=67",
    "gpt2:batch=2,layers=1,width=32,heads=4,length=16,vocab=64",
    "gpt2:batch=2,layers=1,width=32,heads=4,length=16,vocab=64,dropout=10",
    "resnet50:batch=2,size=64,classes=10,width=16",
    "convpool:batch=2",
    "locallyconnected:batch=3,size=17,channels=4,classes=10",
]
RANDOM = {"aten.bernoulli": "it draws random numbers, and a part would draw others than the whole"}
REFUSED = {
    NETWORKS[0]: RANDOM,
    NETWORKS[3]: RANDOM,
    NETWORKS[6]: {"aten.copy_": "it writes into one of its inputs"},
}


@functools.cache
def captured(address):
    """The step in double precision. Repetitions are left out: blocks of a stage, positions of a kernel."""
    with patch.object(locallyconnected, "KERNELS", (3, 2)):
        built = zoo.build(address)
    built.model.double()
    if address.startswith("resnet50"):
        built.model.eval()
        for stage in range(1, 5):
            setattr(built.model, f"layer{stage}", getattr(built.model, f"layer{stage}")[:1])
    batch = [x.double() if x.is_floating_point() else x for x in built.batch]
    return capture(built.loss, built.model, *batch).joint


def leaf(tensor, value):
    if not value.is_floating_point():
        return torch.randint(2, value.shape, dtype=value.dtype)
    drawn = torch.rand(value.shape, dtype=value.dtype)
    return drawn if tensor.role is Role.BUFFER else drawn - 0.5


def leaves(joint):
    """A value for everything that goes into the step."""
    values = {t: leaf(joint.graph.tensors[t], joint.values[t]) for t in joint.inputs if t is not None}
    return values | dict(joint.constants)


def forward(joint, values):
    """Each forward operator with the values of its inputs and outputs, which are added to the others."""
    for op, call in zip(joint.graph.ops, joint.calls, strict=True):
        if op.phase is Phase.FORWARD:
            given = [values[t] for t in op.inputs]
            args, kwargs = fx.map_arg((call.args, dict(call.kwargs)), lambda n: values[joint.tensor_of[n]])
            results = call.target(*args, **kwargs)
            results = results if call.several else [results]
            made = [r for r, t in zip(results, call.results, strict=True) if t >= 0]
            values.update(zip(op.outputs, made, strict=True))
            yield Single(joint.graph, op, call, given, made)


def halves(shape, rng):
    """The whole in two parts, along one dimension after the other."""
    for dim, length in enumerate(shape):
        if length > 1:
            at = rng.randrange(1, length)
            for lo, hi in ((0, at), (at, length)):
                whole = Rect.of_shape(shape)
                yield Rect(
                    (*whole.lo[:dim], lo, *whole.lo[dim + 1 :]), (*whole.hi[:dim], hi, *whole.hi[dim + 1 :])
                )


@pytest.mark.parametrize("address", NETWORKS)
def test_operators_of_networks(address):
    torch.manual_seed(0)
    joint = captured(address)
    rng, seen, refused = random.Random(0), set(), {}
    for one in forward(joint, leaves(joint)):
        shapes = [tuple(v.shape) for v in (*one.inputs, *one.outputs)]
        key = one.op.kind, str(one.op.arguments), str(shapes)
        why = supported(one.op, one.graph)
        if why is not None:
            refused[one.op.kind] = why
        elif key not in seen:
            in_parts(one, rng)
        seen.add(key)
    assert refused == REFUSED.get(address, {})


def in_parts(one, rng):
    """The first results, cut in two along each dimension; sums as those of two parts."""
    for output, whole in enumerate(one.outputs[:3]):
        if supported(one.op, one.graph, None, output) is not None:
            continue
        if not one.op.kind.startswith("aten.empty"):
            for wanted in halves(whole.shape, rng):
                close(tile(one, wanted, output), whole[wanted.slices()])
        sums = access(one.graph, one.op).relations[output].sums
        if sums and whole.ndim == 0:
            total = one.outputs[-1] if "nll" in one.op.kind else None
            parts = [tile(one, Rect((), ()), output, over, total) for over in Rect.of_shape(sums).split(0, 2)]
            close(sum(parts[1:], parts[0]), whole)


def summing(joint):
    """The operator that adds up the loss; what follows is a factor at most."""
    steps = [op for op in joint.graph.ops if op.phase is Phase.FORWARD]
    return next(op for op in reversed(steps) if access(joint.graph, op).relations[0].sums)


def tiled(joint, values, over, run=run):
    """What the part of the loss adds, in a graph made of nothing but what it needs; and what goes into it."""
    graph, adds = joint.graph, summing(joint)
    steps = [
        (op, call)
        for op, call in zip(graph.ops, joint.calls, strict=True)
        if op.phase is Phase.FORWARD and supported(op, graph) is None
    ]
    (loss,) = joint.outputs
    needed = {loss: Rect((), ())}
    for op, _ in reversed(steps):
        for relation, t in zip(access(graph, op).relations, op.outputs, strict=True):
            if t in needed:
                needs = relation.needs(needed[t], over if op is adds else None)
                for source, need in zip(op.inputs, needs, strict=True):
                    if need is not None and not need.empty:
                        needed[source] = needed.get(source, need).hull(need)
    target = fx.Graph()
    given = sorted(needed.keys() - {t for op, _ in steps for t in op.outputs})
    parts = {t: InputPart(target.placeholder(f"t{t}"), needed[t]) for t in given}
    total = target.placeholder("total")
    for op, call in steps:
        for output, t in enumerate(op.outputs):
            if t in needed:
                held = [parts.get(source) for source in op.inputs]
                part = (over, total) if op is adds else ()
                parts[t] = InputPart(emit(target, call, op, graph, held, needed[t], output, *part), needed[t])
    target.output(parts[loss].node)
    return run(target, *(values[t][needed[t].slices()] for t in given), values[adds.outputs[-1]])


WALKS = [
    ("convpool:batch=2", 2, 3),
    ("unet:base=4,batch=2,size=188", 0, 2),
    ("unet:base=4,batch=2,size=188", 1, 3),
    ("gpt2:batch=2,layers=1,width=32,heads=4,length=16,vocab=64", 0, 2),
    ("gpt2:batch=2,layers=1,width=32,heads=4,length=16,vocab=64", 0, 5),
    ("alexnet:batch=2,size=67", 0, 2),
    ("resnet50:batch=2,size=64,classes=10,width=16", 0, 2),
]


@pytest.mark.parametrize(("address", "dim", "count"), WALKS)
def test_a_network_walked_through_tile_by_tile(address, dim, count):
    torch.manual_seed(1)
    joint = captured(address)
    values = leaves(joint)
    wanted = [values[t].requires_grad_() for t in values if joint.graph.tensors[t].role is Role.PARAMETER]
    list(forward(joint, values))
    loss = values[joint.outputs[0]]
    plain = torch.autograd.grad(loss, wanted)
    sums = access(joint.graph, summing(joint)).relations[0].sums
    parts = [tiled(joint, values, over) for over in Rect.of_shape(sums).split(dim, count)]
    assert len(parts) == count
    close(sum(parts).detach(), loss.detach())
    for a, b in zip(torch.autograd.grad(sum(parts), wanted), plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_the_graph_of_a_tile_is_differentiated_by_aot_autograd():
    torch.manual_seed(2)
    joint = captured("convpool:batch=2")
    values = leaves(joint)
    wanted = [values[t].requires_grad_() for t in values if joint.graph.tensors[t].role is Role.PARAMETER]
    list(forward(joint, values))

    def boxed(module, _):
        return make_boxed_func(module.forward)

    def traced(graph, *given):
        return aot_function(fx.GraphModule({}, graph), boxed, boxed)(*given)

    over = Rect((0, 0, 1, 0), (2, 1, 3, 4))
    plain = torch.autograd.grad(tiled(joint, values, over), wanted)
    again = torch.autograd.grad(tiled(joint, values, over, traced), wanted)
    for a, b in zip(again, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
