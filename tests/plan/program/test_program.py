import functools

import msgspec
import pytest
from hypothesis import given, settings

from lowtide.errors import PlanError
from lowtide.graph import Graph, Op, Phase, Role, Tensor, liveness
from lowtide.plan.program.in_place import with_in_place
from lowtide.plan.program.instructions import Drop, Program, Run
from lowtide.plan.program.simple import kept_throughout, recompute_all, store_all
from lowtide.plan.program.simulate import simulate
from tests.plan.graphs import training_steps

PROGRAMS = [store_all, recompute_all, functools.partial(recompute_all, each_use=True)]


def values_of(graph, program):
    """Run a program on symbols: every tensor is the expression that made it, dropped ones are gone."""
    table = {k: t.id for k, t in enumerate(graph.tensors) if t.role in (Role.PARAMETER, Role.INPUT)}
    for line in program.instructions:
        if isinstance(line, Drop):
            for tensor in line.tensors:
                del table[tensor]
            continue
        op = graph.ops[line.op]
        made = tuple(table[t] for t in op.reads)
        for position, tensor in enumerate(op.outputs):
            table[tensor] = (op.id, position, made)
    return table


@settings(max_examples=80, deadline=None)
@given(training_steps())
def test_every_program_computes_the_same_and_drops_only_what_is_done(graph):
    expected = values_of(graph, Program(tuple(Run(k) for k in range(len(graph.ops)))))
    wanted = set(kept_throughout(graph))
    written = {t for op in graph.ops for t in op.outputs}
    for planner in PROGRAMS:
        got = values_of(graph, planner(graph))
        assert {t: got[t] for t in wanted & written} == {t: expected[t] for t in wanted & written}


@settings(max_examples=80, deadline=None)
@given(training_steps())
def test_storing_everything_takes_what_lifetimes_say(graph):
    # what the step returns is held to the end by whoever called it
    returned = graph.returned
    keeper = Op("end", "k", Phase.BACKWARD, inputs=tuple(returned))
    longer = Graph(graph.tensors, (*graph.ops, keeper), returned=graph.returned, updated=graph.updated)
    assert simulate(graph, store_all(graph)).live_bytes == liveness(longer).live_bytes[:-1]


@settings(max_examples=80, deadline=None)
@given(training_steps())
def test_nothing_that_forward_can_make_is_kept_for_backward(graph):
    program = recompute_all(graph)
    held = set()
    for line in program.forward:
        if isinstance(line, Drop):
            held -= set(line.tensors)
        else:
            held |= set(graph.ops[line.op].outputs)
    storage = graph.storages()
    assert {storage[t] for t in held} <= {storage[t] for t in kept_throughout(graph)}


@settings(max_examples=80, deadline=None)
@given(training_steps())
def test_in_place_never_takes_more_and_never_overwrites_what_is_needed(graph):
    for planner in PROGRAMS:
        program = planner(graph)
        able = [k for k, op in enumerate(graph.ops) if graph.tensors[op.outputs[0]].alias is None]
        able = [
            k
            for k in able
            if graph.tensors[graph.ops[k].inputs[0]].bytes == graph.tensors[graph.ops[k].outputs[0]].bytes
        ]
        changed = with_in_place(graph, program, able)
        assert simulate(graph, changed).peak_bytes <= simulate(graph, program).peak_bytes
        assert overwritten(graph, changed) == set()


def overwritten(graph, program):
    """Tensors that are read after an operator in place has written over their storage."""
    place, spoiled, found = {}, set(), set()
    for number, line in enumerate(program.instructions):
        if isinstance(line, Drop):
            for tensor in line.tensors:
                place.pop(tensor, None)
            continue
        op = graph.ops[line.op]
        found |= {t for t in op.reads if t in spoiled}
        for position, tensor in enumerate(op.outputs):
            if tensor in place:
                continue  # what is held stays: the second result passes by
            base = graph.tensors[tensor].alias
            source = (
                base if base is not None else op.inputs[0] if position == 0 and line.in_place == 0 else None
            )
            place[tensor] = place.get(source, source) if source is not None else (number, tensor)
            spoiled.discard(tensor)
        if line.in_place == 0:
            spoiled |= {t for t in place if place[t] == place[op.outputs[0]] and t != op.outputs[0]} | {
                op.inputs[0]
            }
    return found


def test_a_program_is_data():
    program = Program((Run(0), Drop((1, 2))), (Run(1, in_place=0),))
    data = msgspec.json.encode(program)
    assert msgspec.json.decode(data, type=Program) == program
    assert b'"lowtide":"program"' in data


X, Y = Tensor("x", 4, Role.INPUT), Tensor("y", 4)
GRAPH = Graph((X, Y), (Op("a", "k", inputs=(0,), outputs=(1,)), Op("b", "k", Phase.BACKWARD, inputs=(1,))))


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (Program((Run(1),)), "'b' reads 'y'"),
        (Program((Run(0), Drop((1,)), Run(1))), "'b' reads 'y'"),
        (Program((Run(0), Drop((1,)), Drop((1,)))), "drops 'y'"),
    ],
)
def test_a_program_that_reads_what_it_does_not_hold_is_refused(program, message):
    with pytest.raises(PlanError, match=message):
        simulate(GRAPH, program)


def test_cuda_gives_memory_in_whole_blocks():
    tensors = (Tensor("x", 513, Role.INPUT, device="cuda:0"), Tensor("y", 1, device="cuda:0"))
    graph = Graph(tensors, (Op("a", "k", inputs=(0,), outputs=(1,)),))
    assert simulate(graph, store_all(graph)).live_bytes == (1024 + 512,)
