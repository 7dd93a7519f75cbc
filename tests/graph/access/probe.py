"""Proves relations by running operators: what a relation does not name may be anything, what it names matters."""

from __future__ import annotations

import random

import torch
from torch import fx

from lowtide.graph import Phase, Rect, Role
from lowtide.graph.access import Only, Whole, access, check_calls
from lowtide.trace.step.builder import Builder

aten = torch.ops.aten


class Probe:
    """One operator as capture reads it, with the values it is given."""

    def __init__(self, target, args, options=None, run=None):
        self.run_with = run or target
        graph = fx.Graph()
        nodes, self.values = {}, []

        def placeholder(value):
            if isinstance(value, torch.Tensor):
                if id(value) not in nodes:
                    nodes[id(value)] = graph.placeholder(f"input_{len(nodes)}")
                    nodes[id(value)].meta["val"] = value
                    self.values.append(value)
                return nodes[id(value)]
            return [placeholder(v) for v in value] if isinstance(value, list) else value

        given = [placeholder(value) for value in args]
        options = {key: placeholder(value) for key, value in (options or {}).items()}
        self.call = graph.call_function(target, tuple(given), options)
        self.nodes = list(nodes.values())
        self.call.meta["val"] = self._apply(self.values)
        builder = Builder()
        for node in self.nodes:
            builder.add_leaf(node, node.name, Role.INPUT)
        builder.add_call(self.call, Phase.FORWARD)
        self.graph = builder.graph([], [], [], [])
        self.op = self.graph.ops[0]
        order = {t: k for k, t in enumerate(self.op.inputs)}
        assert [builder.tensor_of[node] for node in self.nodes] == list(order)
        self.access = access(check_calls(self.graph), self.op)

    def _apply(self, values):
        table = dict(zip(self.nodes, (v.clone() for v in values), strict=True))
        args, options = fx.map_arg((self.call.args, dict(self.call.kwargs)), lambda node: table[node])
        return self.run_with(*args, **options)

    def run(self, values):
        """The outputs that are tensors."""
        made = self._apply(values)
        made = made if isinstance(made, tuple | list) else (made,)
        return [value for value in made if isinstance(value, torch.Tensor)]


def garbage(value, generator):
    """Other values of the same sort, from the same range: valid indices stay valid, positive stays positive."""
    if value.numel() == 0:
        return value.clone()
    if value.dtype == torch.bool:
        return torch.rand(value.shape, generator=generator) < 0.5
    mixed = value.flatten()[torch.randint(value.numel(), (value.numel(),), generator=generator)]
    mixed = mixed.reshape(value.shape).clone()
    return mixed * 1.7 + 0.1 if value.is_floating_point() else mixed


def rects(shape, count=5, keep=(), seed=0):
    """The whole, both corners, and boxes at random; with some axes whole in all of them."""
    draw = random.Random(seed)
    found = [Rect.of_shape(shape)]
    if not shape or 0 in shape:
        return found
    found.append(Rect((0,) * len(shape), (1,) * len(shape)))
    found.append(Rect(tuple(n - 1 for n in shape), tuple(shape)))
    for _ in range(count):
        cuts = [sorted(draw.sample(range(n + 1), 2)) for n in shape]
        found.append(Rect(tuple(a for a, _ in cuts), tuple(b for _, b in cuts)))
    whole = [[0 if d in keep else lo for d, lo in enumerate(rect.lo)] for rect in found]
    ends = [[shape[d] if d in keep else hi for d, hi in enumerate(rect.hi)] for rect in found]
    return [Rect(tuple(lo), tuple(hi)) for lo, hi in zip(whole, ends, strict=True)]


def outside(value, rect, filling):
    """The value with everything outside the Rect replaced."""
    if rect is None:
        return filling
    made = filling.clone()
    made[rect.slices()] = value[rect.slices()]
    return made


def near(one, other):
    """Equal but for the last bits."""
    sort = torch.complex128 if one.is_complex() else torch.float64
    return torch.allclose(one.to(sort), other.to(sort), rtol=1e-9, atol=1e-9, equal_nan=True)


def check(
    target, *args, options=None, run=None, tight=True, whole=True, loose=(), count=5, summed=True, keep=(),
    valid=None,
):  # fmt: skip
    """Proves every relation of a call; returns the relations.

    ``tight`` says that the ends of what is named matter, ``whole`` that this goes for dimensions that are
    always read whole too; ``loose`` names inputs whose ends need not matter, ``keep`` axes that are never
    cut, ``valid`` by input a function that gives other values which the operator may be given.
    """
    probe = Probe(target, args, options, run)
    assert probe.access.known, probe.op.kind
    expected = probe.run(probe.values)
    relations = probe.access.relations
    assert [tuple(e.shape) for e in expected] == [r.shape for r in relations]
    for k, relation in enumerate(relations):
        for rect in rects(relation.shape, count, keep):
            _check_rest(probe, relation, k, rect, expected[k], valid or {})
            if tight and expected[k].is_floating_point():
                _check_ends(probe, relation, k, rect, expected[k], loose, whole)
        if relation.sums and summed:
            _check_sum(probe, relation, k, expected[k])
    return relations


def _check_rest(probe, relation, k, rect, whole, valid):
    """What is outside of the Rects named may be anything."""
    needs = relation.needs(rect)
    for need, far in zip(needs, relation.reach(rect), strict=True):
        assert need is None or need.empty or far.contains(need)
    generator = torch.Generator().manual_seed(7)
    changed = []
    for position, (value, need) in enumerate(zip(probe.values, needs, strict=True)):
        other = valid[position]() if position in valid else garbage(value, generator)
        changed.append(outside(value, need, other))
    got = probe.run(changed)[k][rect.slices()]
    assert near(got, whole[rect.slices()]), f"{probe.op.kind} output {k} {rect} needs more than {needs}"


def gaps(index):
    """Whether there may be elements between those that are read."""
    return getattr(index, "dilation", 1) > 1 or getattr(index, "stride", 1) > getattr(index, "kernel", 1)


def _check_ends(probe, relation, k, rect, expected, loose, whole):
    """The first and the last element of every range that is named make a difference."""
    needs, wanted = relation.needs(rect), expected[rect.slices()]
    if any(need is not None and need.empty for need in needs):
        return  # nothing but padding is read, so nothing else need matter
    named = zip(needs, relation.reach(rect), relation.inputs, strict=True)
    for position, (need, reach, indices) in enumerate(named):
        if need is None or position in loose or not probe.values[position].is_floating_point():
            continue
        for dim, index in enumerate(indices):
            index = index.index if isinstance(index, Only) else index
            cut = need.lo[dim] > reach.lo[dim], need.hi[dim] < reach.hi[dim]
            for at, clamped in zip((need.lo[dim], need.hi[dim] - 1), cut, strict=True):
                if (clamped and gaps(index)) or (isinstance(index, Whole) and not whole):
                    continue  # the end of the input may lie between two elements that are read
                got = _run_with_other(probe, position, need, dim, at)[k][rect.slices()]
                assert not near(got, wanted), (
                    f"{probe.op.kind} output {k} {rect} does not need {at} of dimension {dim} of input {position}"
                )


def _run_with_other(probe, position, need, dim, at):
    """The outputs where one slice of a Rect has other values."""
    part = list(need.slices())
    part[dim] = slice(at, at + 1)
    changed = probe.values[position].clone()
    size = changed[tuple(part)].shape
    changed[tuple(part)] += 1e3 * (1 + torch.rand(size, generator=torch.Generator().manual_seed(3)))
    return probe.run([changed if p == position else v for p, v in enumerate(probe.values)])


def _check_sum(probe, relation, k, whole):
    """The results over parts of each summed axis, everything else zero, add up."""
    rect = Rect.of_shape(relation.shape)
    for axis in range(len(relation.sums)):
        total = torch.zeros_like(whole)
        for number, over in enumerate(Rect.of_shape(relation.sums).split(axis, 3)):
            values = []
            for position, (value, need) in enumerate(
                zip(probe.values, relation.needs(rect, over), strict=True)
            ):
                if value.is_floating_point() and need is not None:
                    left_out = position in relation.once and number
                    zeros = torch.zeros_like(value)
                    value = zeros if left_out else outside(value, need, zeros)
                values.append(value)
            total += probe.run(values)[k]
        assert near(total, whole), f"{probe.op.kind} output {k} is no sum over axis {axis}"


def tensor(*shape, seed=1, positive=False):
    """Random numbers that no two elements share."""
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return made.abs() + 0.5 if positive else made


def integers(high, *shape, seed=2):
    """Random whole numbers below a bound."""
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))
