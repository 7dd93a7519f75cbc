import pytest

from lowtide.graph import Rect
from tests.graph.access.probe import aten, check, tensor

CALLS = {
    "mm": (tensor(3, 4), tensor(4, 5, seed=2)),
    "bmm": (tensor(2, 3, 4), tensor(2, 4, 5, seed=2)),
    "mv": (tensor(3, 4), tensor(4, seed=2)),
    "dot": (tensor(7), tensor(7, seed=2)),
    "addmm": (tensor(5), tensor(3, 4, seed=2), tensor(4, 5, seed=3)),
    "addmv": (tensor(3), tensor(3, 4, seed=2), tensor(4, seed=3)),
    "baddbmm": (tensor(2, 3, 5), tensor(2, 3, 4, seed=2), tensor(2, 4, 5, seed=3)),
    "linear": (tensor(2, 3, 4), tensor(5, 4, seed=2), tensor(5, seed=3)),
}


@pytest.mark.parametrize("kind", CALLS)
def test_products(kind):
    relation = check(getattr(aten, kind).default, *CALLS[kind])[0]
    assert relation.sums == ((7,) if kind == "dot" else (4,))
    assert relation.once == {"linear": (2,)}.get(kind, (0,) if kind.startswith(("add", "badd")) else ())


def test_what_is_added_may_be_repeated():
    for shape in ((), (1, 5), (3, 1), (3, 5)):
        check(aten.addmm.default, tensor(*shape), *CALLS["mm"])
    check(aten.addmm.default, tensor(5), *CALLS["mm"], options={"beta": 0.5, "alpha": 2.0})


def test_a_part_of_the_sum_reads_a_part_of_the_inner_dimension():
    relation = check(aten.mm.default, *CALLS["mm"])[0]
    needs = relation.needs(Rect((1, 0), (2, 5)), Rect((1,), (3,)))
    assert needs == (Rect((1, 1), (2, 3)), Rect((1, 0), (3, 5)))
