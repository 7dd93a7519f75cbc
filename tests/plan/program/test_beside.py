"""Exchanges that may go on beside others: the same peak, with what is on its way as a tensor of its own."""

import random
from dataclasses import dataclass
from itertools import pairwise

import pytest
from msgspec.structs import replace

from lowtide.errors import PlanError
from lowtide.graph import EXCHANGE, SUM, Graph, Op, Phase, Role, Tensor
from lowtide.plan.address.allocations import program_allocations
from lowtide.plan.address.boxes import peak_bytes
from lowtide.plan.check.checker import check
from lowtide.plan.check.time import seconds_of
from lowtide.plan.program.beside import with_beside
from lowtide.plan.program.copy_lanes import Lanes
from lowtide.plan.program.instructions import Drop, Fetch, Program, Run, Send
from lowtide.plan.program.simple import store_all
from lowtide.plan.program.simulate import simulate


@dataclass
class Step:
    graph: Graph
    workspace: tuple[int, ...]
    parts: dict[int, int]


def some_step(chance):
    """Operators in a row, forward and backward, that read results of earlier ones; some communicate."""
    tensors, ops, workspace, parts = [Tensor("x", 8, Role.INPUT)], [], [], {}
    count = chance.randint(6, 14)
    for k in range(count):
        kind = chance.choice([EXCHANGE, EXCHANGE, SUM, "f", "f", "f", "f"])
        reads = tuple(sorted(chance.sample(range(len(tensors)), min(len(tensors), chance.randint(1, 2)))))
        reads = reads[:1] if kind != "f" else reads
        tensors.append(Tensor(f"t{k}", chance.randint(1, 40)))
        phase = Phase.FORWARD if k < count // 2 else Phase.BACKWARD
        ops.append(Op(f"o{k}", kind, phase, reads, (k + 1,)))
        workspace.append(chance.choice([0, 0, chance.randint(1, 30)]))
        if kind == EXCHANGE:
            parts[k] = chance.randint(1, 40)
    return Step(Graph(tuple(tensors), tuple(ops)), tuple(workspace), parts)


def as_a_tensor(step, program, op):
    """The peak where what is on its way is an output of the exchange, which takes no workspace then.

    None where nothing runs beside it. It is dropped before the first line that has to wait.
    """
    graph = step.graph
    extra, (result,) = len(graph.tensors), graph.ops[op].outputs
    ops = list(graph.ops)
    ops[op] = replace(ops[op], outputs=(result, extra))
    wider = Graph((*graph.tensors, Tensor("on its way", step.parts[op])), tuple(ops))
    parts = [list(program.forward), list(program.backward)]
    for part in parts:
        (at,) = [k for k, one in enumerate(part) if isinstance(one, Run) and one.op == op] or [-1]
        if at < 0:
            continue
        end = at + 1
        while end < len(part) and not waits(graph, part[end], result):
            end += 1
        if not any(isinstance(one, Run) for one in part[at + 1 : end]):
            return None
        part.insert(end, Drop((extra,)))
    workspace = tuple(0 if k == op else size for k, size in enumerate(step.workspace))
    return simulate(wider, Program(*map(tuple, parts)), workspace_bytes=workspace).peak_bytes


def beside(graph, program, workspace, parts):
    """The exchanges that go on beside others, each with the bytes that are known of it."""
    lines = with_beside(graph, program, workspace, parts).instructions
    found = {line.op: line.beside for line in lines if isinstance(line, Run) and line.beside}
    assert all(parts[op] == size for op, size in found.items())
    return set(found)


def waits(graph, line, result):
    if isinstance(line, Drop):
        return result in line.tensors
    return graph.ops[line.op].kind in (EXCHANGE, SUM) or result in graph.ops[line.op].inputs


@pytest.mark.parametrize("seed", range(300))
def test_the_peak_stays_what_it_is(seed):
    step = some_step(random.Random(seed))
    program = store_all(step.graph)
    peak = simulate(step.graph, program, workspace_bytes=step.workspace).peak_bytes
    expected = set()
    for op in step.parts:
        other = as_a_tensor(step, program, op)
        if other is not None and other <= peak:
            expected.add(op)
    assert beside(step.graph, program, step.workspace, step.parts) == expected


def test_some_are_beside_others_and_some_are_not():
    """The test above sees both."""
    told = set()
    for seed in range(300):
        step = some_step(random.Random(seed))
        found = beside(step.graph, store_all(step.graph), step.workspace, step.parts)
        told |= {op in found for op in step.parts}
    assert told == {False, True}


def test_an_exchange_that_runs_again_waits():
    sizes = {"x": 8, "y": 8, "z": 100, "w": 8, "large": 300}
    tensors = tuple(
        Tensor(name, size, Role.INPUT if name == "x" else Role.ACTIVATION) for name, size in sizes.items()
    )
    reads = [("e", EXCHANGE, 0, 1), ("f", "f", 0, 2), ("g", "g", 1, 3), ("h", "h", 3, 4)]
    ops = tuple(Op(name, kind, Phase.FORWARD, (a,), (b,)) for name, kind, a, b in reads)
    graph = Graph(tensors, ops)
    once = Program((Run(0), Run(1), Drop((2,)), Run(2), Run(3)))
    twice = Program((Run(0), Run(1), Drop((1, 2)), Run(0), Run(2), Run(3)))
    assert beside(graph, once, (), {0: 50}) == {0}
    assert beside(graph, once, (), {0: 250}) == set()
    assert beside(graph, twice, (), {0: 50}) == set()


def marked(seed):
    """A random step with times, its Program as it is and with exchanges beside others, maybe too many of them."""
    chance = random.Random(f"marked {seed}")
    step = some_step(chance)
    plain = store_all(step.graph)
    program = with_beside(step.graph, plain, step.workspace, step.parts)
    if seed % 2:
        lines = [
            replace(line, beside=step.parts.get(line.op, 0)) if isinstance(line, Run) else line
            for line in plain.instructions
        ]
        program = Program(tuple(lines[: len(plain.forward)]), tuple(lines[len(plain.forward) :]))
    seconds = tuple(chance.choice([0.0, 1.0, 3.0]) for _ in step.graph.ops)
    wire = {k: chance.choice([1.0, 2.0, 8.0]) for k, op in enumerate(step.graph.ops) if op.kind != "f"}
    return step, plain, program, seconds, wire


@pytest.mark.parametrize("seed", range(100))
def test_simulation_checker_and_addresses_agree(seed):
    """On the peak, whatever goes on beside others, and on the time."""
    step, plain, program, seconds, wire = marked(seed)
    lanes = Lanes(step.graph, None, wire)
    found = simulate(step.graph, program, workspace_bytes=step.workspace, seconds=seconds, lanes=lanes)
    assert check(step.graph, program, workspace_bytes=step.workspace).peak_bytes == found.peak_bytes
    took = seconds_of(step.graph, program, seconds, {}, None, wire)
    assert sum(found.seconds) == pytest.approx(took)
    rows = program_allocations(step.graph, program, step.workspace)
    assert found.resident_bytes + peak_bytes(rows) == found.peak_bytes
    before = seconds_of(step.graph, plain, seconds, {}, None, wire)
    assert took <= before + 1e-9
    if not seed % 2:
        peak = simulate(step.graph, plain, workspace_bytes=step.workspace).peak_bytes
        assert found.peak_bytes == peak


def test_some_steps_take_less_time():
    """The test above sees both, and exchanges that take more memory beside others."""
    faster, larger = set(), set()
    for seed in range(200):
        step, plain, program, seconds, wire = marked(seed)
        times = [seconds_of(step.graph, one, seconds, {}, None, wire) for one in (plain, program)]
        peaks = [
            simulate(step.graph, one, workspace_bytes=step.workspace).peak_bytes for one in (plain, program)
        ]
        faster.add(times[1] < times[0])
        larger.add(peaks[1] > peaks[0])
    assert faster == larger == {False, True}


def test_what_is_no_exchange_waits():
    graph = Graph((Tensor("x", 8, Role.INPUT), Tensor("y", 8)), (Op("f", "f", Phase.FORWARD, (0,), (1,)),))
    with pytest.raises(PlanError, match="goes on beside 'f', which is no exchange"):
        check(graph, Program((Run(0, beside=8),)))
    exchange = replace(graph, ops=(replace(graph.ops[0], kind=EXCHANGE),))
    check(exchange, Program((Run(0, beside=8),)))
    with pytest.raises(PlanError, match="no exchange of some bytes"):
        check(exchange, Program((Run(0, beside=-8),)))
    nothing = replace(exchange, ops=(replace(exchange.ops[0], outputs=()),))
    with pytest.raises(PlanError, match="no exchange of some bytes"):
        check(nothing, Program((Run(0, beside=8),)))
    assert seconds_of(nothing, Program((Run(0, beside=8),)), (1.0,), {}, None, {0: 2.0}) == 1.0


def test_a_program_for_other_sizes_is_marked_anew():
    step, _, program, *_ = marked(0)
    assert with_beside(step.graph, program, step.workspace, {}) == program
    twice = with_beside(step.graph, program, step.workspace, step.parts)
    assert twice == program


def with_copies(chance, graph, program):
    """The same with some tensors on the host between two lines that need them."""
    lines, cut = list(program.instructions), len(program.forward)
    for t in range(len(graph.tensors)):
        needs = [k for k, line in enumerate(lines) if isinstance(line, Run) and t in touched(graph, line)]
        gaps = [pair for pair in pairwise(needs) if pair[1] - pair[0] > 2]
        if not gaps or graph.tensors[t].role is Role.INPUT or chance.random() < 0.5:
            continue
        first, second = chance.choice(gaps)
        back = chance.randint(first + 2, second)
        lines[back:back] = [Fetch(t)]
        lines[first + 1 : first + 1] = [Send(t), Drop((t,))]
        cut += 2 * (first < cut) + (back < cut)
    return Program(tuple(lines[:cut]), tuple(lines[cut:]))


def touched(graph, line):
    op = graph.ops[line.op]
    return (*op.inputs, *op.outputs)


@pytest.mark.parametrize("seed", range(146))
def test_what_comes_back_from_the_host_counts_while_an_exchange_is_on_its_way(seed):
    """Also where nothing runs between the copy and the end of the exchange."""
    chance = random.Random(f"copies {seed}")
    step = some_step(chance)
    program = with_copies(chance, step.graph, store_all(step.graph))
    peaks = {way(step.graph, program).peak_bytes for way in (simulate, check)}
    for size in range(1, 100, 3):
        marked = with_beside(step.graph, program, (), dict.fromkeys(step.parts, size))
        peaks |= {way(step.graph, marked).peak_bytes for way in (simulate, check)}
        rows = program_allocations(step.graph, marked, ())
        peaks.add(simulate(step.graph, marked).resident_bytes + peak_bytes(rows))
    assert len(peaks) == 1


def test_a_copy_right_before_the_end_of_an_exchange():
    sizes = {"x": 8, "a": 50, "y": 10, "b": 5, "s": 1, "z": 10}
    tensors = tuple(
        Tensor(name, size, Role.INPUT if name == "x" else Role.ACTIVATION) for name, size in sizes.items()
    )
    kinds = [("f", (0,), 1), (EXCHANGE, (0,), 2), ("f", (0,), 3), (SUM, (3,), 4), ("f", (1, 2), 5)]
    ops = (Op(f"o{k}", kind, Phase.FORWARD, reads, (t,)) for k, (kind, reads, t) in enumerate(kinds))
    graph = Graph(tensors, tuple(ops))
    lines = (Run(0), Send(1), Drop((1,)), Run(1), Run(2), Fetch(1), Run(3), Run(4))
    assert check(graph, Program(lines)).peak_bytes == 84
    assert beside(graph, Program(lines), (), {1: 11}) == {1}
    assert beside(graph, Program(lines), (), {1: 12}) == set()
