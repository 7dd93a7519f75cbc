"""Other orders of independent instructions: all of them valid, and the best as good as trying them all."""

import random

import msgspec
import pytest

from lowtide.graph import Graph, Op, Role, Tensor
from lowtide.plan.address.allocations import program_allocations
from lowtide.plan.address.independent import parts_of
from lowtide.plan.address.place import place
from lowtide.plan.address.reorder import OrderedStep, place_in_any_order
from lowtide.plan.check.addresses import check_addresses, check_storages
from lowtide.plan.check.checker import check
from lowtide.plan.program.copy_lanes import Link
from lowtide.plan.program.instructions import Drop, Fetch, Program, Run, Send
from lowtide.plan.program.simulate import simulate
from tests.wild_steps import looped_step, programs_of, wild_step


def any_order(part, draw):
    """A random order of a part's movable units."""
    before, order = part.between(), []
    while len(order) < len(before):
        ready = [k for k in before if k not in order and before[k] <= set(order)]
        order.append(draw.choice(ready))
    return order


def shuffled(graph, program, draw):
    parts = parts_of(graph, program)
    forward, backward = (tuple(part.lines(any_order(part, draw))) for part in parts)
    return msgspec.structs.replace(program, forward=forward, backward=backward)


@pytest.mark.parametrize("seed", range(80))
def test_every_order_that_is_offered_is_valid(seed):
    step, turned = looped_step(seed) if seed % 4 == 0 else (wild_step(seed), None)
    graph, _, workspace, able = step
    program = programs_of(seed, step, turned) if turned else programs_of(seed, step)
    options = {"workspace_bytes": workspace, "offload": ("parameters",), "able": able}
    check(graph, program, **options)
    draw = random.Random(seed)
    for _ in range(5):
        other = shuffled(graph, program, draw)
        check(graph, other, **options)
        assert sorted(map(repr, runs(program))) == sorted(map(repr, runs(other)))


def runs(program):
    return [line for line in program.instructions if not isinstance(line, Drop)]


def step_of(rows):
    """A step from the bytes of each result and the results that its operator reads; the last one is shown."""
    tensors = [Tensor("x", 8, Role.INPUT), *(Tensor(f"t{k}", size) for k, (size, _) in enumerate(rows))]
    ops = [Op(f"f{k}", "f", inputs=(0, *reads), outputs=(k + 1,)) for k, (_, reads) in enumerate(rows)]
    graph = Graph(tuple(tensors), tuple(ops), returned=(len(rows),))
    return graph, in_turn(graph, range(len(rows)))


def random_rows(seed, count=6):
    draw = random.Random(seed)
    return [
        (draw.choice([4, 8, 12, 20, 32]), draw.sample(range(1, k + 1), min(k, draw.choice([0, 1, 1, 2]))))
        for k in range(count)
    ]


def in_turn(graph, order):
    """Operators in an order, each tensor dropped behind the last that touches it."""
    last = {t: k for k in order for t in (*graph.ops[k].inputs, *graph.ops[k].outputs)}
    lines = []
    for k in order:
        lines.append(Run(k))
        gone = tuple(t for t, at in last.items() if at == k and t and t not in graph.returned)
        lines += [Drop(gone)] if gone else []
    return Program(tuple(lines))


def arena(graph, program):
    found = place(program_allocations(graph, program), time_limit=1.0)
    assert found.optimal
    return found.arena_bytes


def all_orders(graph, order=()):
    """Every order in which operators run after those that they read from."""
    if len(order) == len(graph.ops):
        yield order
    for k, op in enumerate(graph.ops):
        if k not in order and all(t - 1 in order for t in op.inputs if t):
            yield from all_orders(graph, (*order, k))


def least_of_all_orders(graph, program):
    """The smallest arena of all orders whose peak is no higher."""
    most = check(graph, program).peak_bytes
    leaves = graph.tensors[0].bytes
    best = arena(graph, program)
    for order in all_orders(graph):
        other = in_turn(graph, order)
        peak = check(graph, other).peak_bytes
        if peak <= most and peak - leaves < best:
            best = min(best, arena(graph, other))
    return best


HOLE = [
    (3, ()), (3, (1,)), (5, (2, 1)), (2, (2,)), (2, (1, 2)), (2, (5,)), (7, (4, 6)), (1, (4,)), (3, (7,)),
    (5, (9,)), (2, ()),
]  # fmt: skip
"""In the given order 11 bytes are live at most, and an arena of 12 is needed; there are 1,320 orders."""


@pytest.mark.parametrize("rows", [HOLE, *(random_rows(seed) for seed in range(5))])
def test_the_best_of_all_orders_is_found(rows):
    graph, program = step_of(rows)
    found = place_in_any_order(OrderedStep(graph, program), time_limit=60.0, most_orders=120)
    assert found.addresses.arena_bytes == least_of_all_orders(graph, program)
    assert found.given_bytes == arena(graph, program)
    assert (found.moved > 0) == (found.program != program)
    check_addresses(found.addresses.allocations, arena_bytes=found.addresses.arena_bytes)
    check_storages(found.addresses.allocations, graph, found.program)


def test_a_hole_goes_away_with_another_order_of_the_same_peak():
    graph, program = step_of(HOLE)
    given = place(program_allocations(graph, program), time_limit=1.0)
    assert (given.live_bytes, given.arena_bytes, given.optimal) == (11, 12, True)
    found = place_in_any_order(OrderedStep(graph, program), time_limit=60.0, most_orders=120)
    assert (found.addresses.live_bytes, found.addresses.arena_bytes) == (11, 11)
    assert check(graph, found.program).peak_bytes == check(graph, program).peak_bytes
    assert found.moved


@pytest.mark.parametrize("seed", range(0, 40, 2))
def test_neither_the_peak_nor_the_time_rises(seed):
    step = wild_step(seed)
    graph, seconds, workspace, able = step
    program = programs_of(seed, step)
    link = Link(40.0, 30.0, 0.1)
    ordered = OrderedStep(graph, program, workspace, seconds, {}, link)
    found = place_in_any_order(ordered, alignment=8, time_limit=60.0, most_orders=10)
    options = {"workspace_bytes": workspace, "offload": ("parameters",), "able": able}
    before, after = (check(graph, one, **options) for one in (program, found.program))
    assert after.peak_bytes <= before.peak_bytes
    first, then = (
        sum(simulate(graph, one, seconds=seconds, link=link).seconds) for one in (program, found.program)
    )
    assert then <= first * (1 + 1e-9)
    assert found.addresses.arena_bytes <= found.given_bytes
    check_storages(found.addresses.allocations, graph, found.program, **options)


def test_copies_keep_their_order_and_drops_that_wait_for_them_too():
    tensors = (Tensor("x", 8, Role.INPUT), *(Tensor(f"t{k}", 8) for k in range(3)))
    ops = (
        Op("f", "f", inputs=(0,), outputs=(1,)),
        Op("g", "g", inputs=(0,), outputs=(2,)),
        Op("h", "h", inputs=(1, 2), outputs=(3,)),
    )
    graph = Graph(tensors, ops, returned=(3,))
    program = Program(
        (Run(0), Run(1), Send(1), Send(2), Drop((1,)), Drop((2,)), Fetch(1), Fetch(2), Run(2), Drop((1, 2)))
    )
    draw = random.Random(0)
    for _ in range(20):
        other = shuffled(graph, program, draw)
        moves = [line for line in other.forward if isinstance(line, Send | Fetch)]
        assert moves == [Send(1), Send(2), Fetch(1), Fetch(2)]
        check(graph, other)


def test_what_draws_random_numbers_stays_in_order():
    tensors = (Tensor("x", 8, Role.INPUT), *(Tensor(f"t{k}", 8) for k in range(4)))
    ops = tuple(
        Op(f"f{k}", "f", inputs=(0,), outputs=(k + 1,), device="cpu", random=k % 2 == 0) for k in range(4)
    )
    graph = Graph(tensors, ops, returned=(1, 2, 3, 4))
    program = Program(tuple(Run(k) for k in range(4)))
    seen, draw = set(), random.Random(0)
    for _ in range(200):
        order = [line.op for line in shuffled(graph, program, draw).forward]
        assert order.index(0) < order.index(2)
        seen.add(tuple(order))
    assert len(seen) == 12
