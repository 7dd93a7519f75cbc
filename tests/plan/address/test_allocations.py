"""What Programs take: the same bytes as the simulation and the checker count, instruction by instruction."""

from pathlib import Path

import pytest

from lowtide.formats.registry import read_file
from lowtide.graph import Graph, Op, Role, Tensor
from lowtide.plan.address.allocations import graph_allocations, program_allocations
from lowtide.plan.address.names import names_of
from lowtide.plan.address.place import place
from lowtide.plan.address.types import Purpose
from lowtide.plan.check.addresses import check_addresses, check_storages
from lowtide.plan.program.instructions import Drop, Fetch, Program, Run, Send
from lowtide.plan.program.simulate import simulate
from tests.planning import plan_for
from tests.wild_steps import looped_step, programs_of, wild_step

DOCUMENT = Path(__file__).parents[3] / "examples" / "documents" / "001_825e28a4f520ddc2.txt"


def a_program(seed):
    """A graph, workspaces and a Program, every fourth with a loop."""
    if seed % 4 == 0:
        step, turned = looped_step(seed)
        return step[0], step[2], programs_of(seed, step, turned)
    step = wild_step(seed)
    return step[0], step[2], programs_of(seed, step)


def moved_bytes(rows):
    """Leaves that leave for the host, each once."""
    return sum({row.tensors: row.bytes for row in rows if row.use is Purpose.LEAF}.values())


@pytest.mark.parametrize("seed", range(80))
def test_programs_take_what_the_simulation_and_the_checker_count(seed):
    graph, workspace, program = a_program(seed)
    asked = program_allocations(graph, program, workspace, alignment=8)
    found = place(asked, alignment=8, time_limit=0.02)
    live = check_addresses(found.allocations, arena_bytes=found.arena_bytes, alignment=8)
    timeline = simulate(graph, program, workspace_bytes=workspace)
    assert live + timeline.resident_bytes - moved_bytes(asked) == timeline.peak_bytes
    peak = check_storages(
        found.allocations, graph, program, workspace_bytes=workspace, offload=("parameters",)
    )
    assert peak == timeline.peak_bytes
    names = names_of(asked, graph, program)
    assert len(set(names)) == len(names)


def test_a_leaf_that_leaves_comes_back_to_its_place():
    tensors = (
        *(Tensor(name, 20, Role.PARAMETER) for name in ("w", "u")),
        Tensor("a", 30),
        Tensor("b", 30),
        Tensor("c", 20),
    )
    ops = (
        Op("f", "f", inputs=(0,), outputs=(2,)),
        Op("g", "g", inputs=(1, 2), outputs=(3,)),
        Op("h", "h", inputs=(0, 1, 3), outputs=(4,)),
    )
    graph = Graph(tensors, ops, returned=(4,))
    lines = (
        Send(0),
        Run(0),
        Drop((0,)),
        Run(1),
        Send(1),
        Drop((1, 2)),
        Fetch(0),
        Fetch(1),
        Run(2),
        Drop((3,)),
    )
    program = Program(lines)
    asked = program_allocations(graph, program, alignment=16)
    leaves = [(one.birth, one.death, one.tensors, one.pinned) for one in asked if one.use is Purpose.LEAF]
    assert leaves == [(0, 2, (0,), 0), (0, 5, (1,), 32), (6, 10, (0,), 0), (7, 10, (1,), 32)]
    found = place(asked, alignment=16)
    assert check_addresses(found.allocations, arena_bytes=found.arena_bytes, alignment=16) == 90
    check_storages(found.allocations, graph, program, offload=("parameters",))
    assert found.arena_bytes == 128
    assert names_of(asked, graph, program) == ["w", "u", "a", "b", "w#2", "u#2", "c"]


def chain():
    tensors = (
        Tensor("x", 10, Role.INPUT),
        Tensor("a", 30),
        Tensor("b", 30),
        Tensor("v", 30, alias=2),
        Tensor("c", 20),
    )
    ops = (
        Op("f", "f", inputs=(0,), outputs=(1,)),
        Op("g", "g", inputs=(1,), outputs=(2,)),
        Op("view", "view", inputs=(2,), outputs=(3,)),
        Op("h", "h", inputs=(3,), outputs=(4,)),
    )
    return Graph(tensors, ops, returned=(4,))


def rows_of(allocations):
    return [(one.birth, one.death, one.bytes, one.use.value, one.at, one.tensors) for one in allocations]


def test_a_program_by_hand():
    program = Program(
        (Run(0), Run(1), Drop((1,)), Run(2), Drop((2,)), Run(3), Drop((3,))),
    )
    assert rows_of(program_allocations(chain(), program, [0, 7, 0, 0])) == [
        (0, 2, 30, "tensor", (0,), (1,)),
        (1, 6, 30, "tensor", (1,), (2,)),
        (1, 2, 7, "workspace", (1,), ()),
        (5, 7, 20, "tensor", (5,), (4,)),
    ]
    names = names_of(program_allocations(chain(), program, [0, 7, 0, 0]), chain(), program)
    assert names == ["a", "b", "g:workspace", "c"]


def test_an_operator_in_place_takes_the_place_of_its_input():
    program = Program((Run(0), Run(1, in_place=0), Drop((1,)), Run(2), Drop((2,)), Run(3), Drop((3,))))
    assert rows_of(program_allocations(chain(), program)) == [
        (0, 6, 30, "tensor", (0,), (1, 2)),
        (5, 7, 20, "tensor", (5,), (4,)),
    ]


def test_a_tensor_on_the_host_takes_nothing_until_it_is_fetched():
    program = Program(
        (Run(0), Run(1), Send(1), Drop((1,)), Run(2), Fetch(1), Drop((1,)), Run(3), Drop((2, 3)))
    )
    assert [row[:4] for row in rows_of(program_allocations(chain(), program))][:3] == [
        (0, 3, 30, "tensor"),
        (1, 8, 30, "tensor"),
        (5, 6, 30, "fetched"),
    ]
    names = names_of(program_allocations(chain(), program), chain(), program)
    assert names == ["a", "b", "a#2", "c"]


def test_document_001_fits_into_its_live_bytes():
    graph = read_file(DOCUMENT).step.graph
    for alignment in (1, 256, 512):
        found = place(graph_allocations(graph), alignment=alignment)
        assert found.live_bytes == 96_337_920
        assert found.arena_bytes == 96_337_920
        check_addresses(found.allocations, arena_bytes=found.arena_bytes, alignment=alignment)


def test_workspaces_of_a_graph_live_for_one_operator():
    rows = rows_of(graph_allocations(chain(), [0, 0, 0, 5]))
    assert (3, 4, 5, "workspace", (3,), ()) in rows
    assert [row[-1] for row in rows if row[-1]] == [(1,), (2,), (4,)]


def test_a_plan_fits_into_the_bytes_that_it_promises_where_nothing_is_wasted():
    from lowtide.plan.program.costs import Costs

    graph, seconds, workspace, able = wild_step(11)
    costs = Costs(tuple(seconds), tuple(workspace), "imported")
    plan = plan_for(graph, costs, 10**9, able=able, time_limit=0.05)
    found = place(program_allocations(graph, plan.program, plan.workspace_bytes))
    assert found.live_bytes + plan.resident_bytes == plan.predicted.peak_bytes
