"""Parts of tensors on a mesh, and what moves between devices, against elements one by one."""

import itertools
import random

import pytest

from lowtide.errors import PlanError
from lowtide.graph.shards import Mesh, box_of, pieces


@pytest.mark.parametrize("sizes", [(1,), (4,), (2, 3), (2, 2, 2)])
def test_places_and_lines(sizes):
    mesh = Mesh(sizes)
    places = list(itertools.product(*map(range, sizes)))
    assert [mesh.place(rank) for rank in range(mesh.devices)] == places
    assert [mesh.rank(place) for place in places] == list(range(mesh.devices))
    for rank, axis in itertools.product(range(mesh.devices), range(len(sizes))):
        line = mesh.line(rank, axis)
        assert rank in line
        assert [mesh.place(one)[axis] for one in line] == list(range(sizes[axis]))


@pytest.mark.parametrize(
    ("shape", "cut"), [((7, 5), (0, 1)), ((7, 5), (1, None)), ((12, 3), (0, 0)), ((4, 4), (None, None))]
)
def test_parts_cover_all_and_differ_by_one_at_most(shape, cut):
    mesh = Mesh((2, 3))
    boxes = [box_of(shape, cut, mesh, rank) for rank in range(mesh.devices)]
    copies = [size for size, dim in zip(mesh.sizes, cut, strict=True) if dim is None]
    held = [i for box in boxes for i in itertools.product(*(range(lo, hi) for lo, hi in box))]
    times = 1
    for size in copies:
        times *= size
    assert sorted(held) == sorted(list(itertools.product(*map(range, shape))) * times)
    if 0 not in (cut.count(dim) - 1 for dim in set(cut) - {None} if cut.count(dim) > 1):
        for dim in range(len(shape)):
            lengths = {box.shape[dim] for box in boxes}
            assert max(lengths) - min(lengths) <= 1


def test_what_cannot_be_cut_is_said():
    with pytest.raises(PlanError, match="3 elements left, too few for 4 devices"):
        box_of((3, 8), (0,), Mesh((4,)), 0)
    with pytest.raises(PlanError, match=r"and not \[0\]"):
        Mesh((0,))
    with pytest.raises(PlanError, match="a mesh of 4 devices has no device 4"):
        Mesh((4,)).place(4)


@pytest.mark.parametrize("seed", range(20))
def test_pieces(seed):
    """Each device has what it wants, from whoever holds it, and nothing else moves."""
    draw = random.Random(seed)
    count, length = draw.randint(1, 5), draw.randint(5, 20)
    cuts = [length * k // count for k in range(count + 1)]
    held = list(itertools.pairwise(cuts))
    wanted = []
    for lo, hi in held:
        first = draw.randint(0, hi)
        wanted.append(draw.choice([(first, draw.randint(first, length)), (lo, hi), (0, 0)]))
    found = [pieces(held, wanted, mine) for mine in range(count)]
    enough = all(a <= lo and hi <= b for (a, b), (lo, hi) in zip(held, wanted, strict=True))
    assert [one is None for one in found] == [enough] * count
    for mine in range(0 if enough else count):
        values = [None] * found[mine].length
        for other, lo, hi in found[mine].receives:
            sent = next((a, b) for to, a, b in found[other].sends if to == mine)
            assert sent[1] - sent[0] == hi - lo
            for k in range(hi - lo):
                assert values[lo + k] is None
                values[lo + k] = held[other][0] + sent[0] + k
        assert values == list(range(*wanted[mine]))
        assert sum(len(one.sends) for one in found) == sum(len(one.receives) for one in found)
