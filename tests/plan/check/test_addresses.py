"""The checker of address plans against looking at every pair, and against rows that are wrong on purpose."""

import random

import msgspec
import pytest

from lowtide.errors import PlanError
from lowtide.plan.address.allocations import program_allocations
from lowtide.plan.address.place import place
from lowtide.plan.address.types import Placed
from lowtide.plan.check.addresses import check_addresses, check_storages
from tests.plan.address.instances import most_live, overlaps
from tests.wild_steps import looped_step, programs_of, wild_step

replace = msgspec.structs.replace


def scattered(seed):
    """Rows at random places; about half of the lists have two that overlap."""
    draw = random.Random(seed)
    rows = []
    for _ in range(draw.randint(0, 7)):
        birth = draw.randrange(8)
        row = (birth, birth + draw.randint(1, 4), draw.randint(0, 9))
        rows.append(Placed(*row, offset=draw.randrange(60)))
    return rows


def test_the_sweep_finds_what_looking_at_every_pair_finds():
    wrong = 0
    for seed in range(400):
        rows = scattered(seed)
        if overlaps(rows):
            wrong += 1
            with pytest.raises(PlanError, match="overlap at event"):
                check_addresses(rows, arena_bytes=100)
        else:
            assert check_addresses(rows, arena_bytes=100) == most_live(rows)
    assert 50 < wrong < 350


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (Placed(0, 2, 8, offset=93), "outside of the arena of 100 bytes"),
        (Placed(0, 2, 8, offset=-1), "outside of the arena"),
        (Placed(0, 2, 8, offset=6), "no multiple of 4"),
        (Placed(0, 2, 8, offset=4, pinned=8), "pinned at 8"),
        (Placed(2, 2, 8, offset=0), "from event 2 to 2"),
        (Placed(-1, 2, 8, offset=0), "from event -1"),
        (Placed(0, 2, -8, offset=0), "from event 0 to 2"),
    ],
)
def test_a_row_that_is_wrong_by_itself_is_named(row, said):
    with pytest.raises(PlanError, match=said):
        check_addresses([Placed(0, 1, 0, offset=0), row], arena_bytes=100, alignment=4)


def test_one_may_begin_where_and_when_the_other_ends():
    rows = [Placed(0, 2, 8, offset=0), Placed(2, 3, 8, offset=0), Placed(0, 3, 4, offset=8)]
    assert check_addresses(rows, arena_bytes=12) == 12


def storages(rows, graph, program, workspace):
    return check_storages(rows, graph, program, workspace_bytes=workspace, offload=("parameters",))


@pytest.mark.parametrize("seed", range(24))
def test_rows_that_forget_or_shorten_a_storage_are_refused(seed):
    """Inside of loops too: every fourth Program has one."""
    if seed % 4 == 0:
        step, turned = looped_step(seed)
        graph, _, workspace, _ = step
        program = programs_of(seed, step, turned)
    else:
        graph, _, workspace, _ = step = wild_step(seed)
        program = programs_of(seed, step)
    rows = place(program_allocations(graph, program, workspace), alignment=1, time_limit=0.01).allocations
    storages(rows, graph, program, workspace)
    draw = random.Random(seed)
    there = [k for k, row in enumerate(rows) if row.bytes and row.tensors and row.use.value != "given"]
    for k in draw.sample(there, min(4, len(there))):
        row = rows[k]
        others = [*rows[:k], *rows[k + 1 :]]
        for wrong in (
            others,
            [*others, replace(row, bytes=row.bytes - 1)],
            [*others, replace(row, death=row.death + 1)],
            [*others, row, row],
        ):
            with pytest.raises(PlanError):
                storages(wrong, graph, program, workspace)


def test_a_workspace_that_is_forgotten_is_found():
    for seed in range(1, 40):
        graph, _, workspace, _ = step = wild_step(seed)
        program = programs_of(seed, step)
        rows = place(program_allocations(graph, program, workspace), time_limit=0.01).allocations
        fewer = [row for row in rows if row.use.value != "workspace"]
        if len(fewer) < len(rows):
            with pytest.raises(PlanError, match="its allocations have"):
                storages(fewer, graph, program, workspace)
            return
    raise AssertionError("no step with a workspace")
