import pytest
import torch

from lowtide.graph import Rect
from lowtide.graph.access import Same, Whole
from tests.graph.access.probe import Probe, aten, check, integers, tensor

# Which elements are read depends on values: of a dimension that is said to be read whole a few may be.


@pytest.mark.parametrize("shape", [(6,), (2, 3), ()])
def test_embedding(shape):
    table, indices = tensor(7, 4), integers(7, *shape)
    relation = check(aten.embedding.default, table, indices, whole=False)[0]
    assert relation.inputs[0] == (Whole(), Same(len(shape)))
    gradient = tensor(*shape, 4, seed=3)
    for padding, by_frequency in ((-1, False), (2, False), (-1, True)):
        # A row that no index names has no gradient: parts of the table need not see every index.
        relation = check(
            aten.embedding_dense_backward.default, gradient, indices, 7, padding, by_frequency, keep=(0,),
            tight=padding < 0,
        )[0]  # fmt: skip
        assert relation.sums == shape


def test_gather_and_its_gradient():
    given, index = tensor(4, 5), integers(5, 4, 2)
    check(aten.gather.default, given, 1, index, whole=False)
    check(aten.gather.default, given, 0, integers(4, 3, 2), whole=False)
    check(aten.scatter_add.default, given, 1, index, tensor(4, 2, seed=3), tight=False)
    check(aten.scatter.src, given, 1, index, tensor(4, 2, seed=3), tight=False)
    check(aten.scatter.value, given, -1, index, 0.5, tight=False)


def test_rows_by_number():
    relation = check(aten.index_select.default, tensor(4, 5, 3), 1, integers(5, 6), whole=False)[0]
    assert relation.needs(Rect((0, 2, 1), (1, 4, 2))) == (Rect((0, 0, 1), (1, 5, 2)), Rect((2,), (4,)))


CALLS = [
    [None, (6,)],
    [(6,)],
    [(2, 3), (3,)],
    [None, (2, 1), (1, 3)],
    [(3,), None, (3,)],
    [None, None, ()],
]


@pytest.mark.parametrize("shapes", CALLS)
def test_several_indices(shapes):
    given = tensor(4, 5, 3)
    indices = [None if s is None else integers(3, *s, seed=k) for k, s in enumerate(shapes)]
    check(aten.index.Tensor, given, indices, whole=False)
    out = aten.index.Tensor(given, indices)
    check(aten.index_put.default, given, indices, tensor(*out.shape, seed=3), True, tight=False)


def test_each_index_is_read_where_it_stands():
    given, rows, columns = tensor(4, 5, 3), integers(3, 2, 1), integers(3, 6)
    relation = Probe(aten.index.Tensor, (given, [None, rows, columns])).access.relations[0]
    assert relation.inputs == ((Same(0), Whole(), Whole()), (Same(1), Whole()), (Same(2),))
    relation = Probe(aten.index.Tensor, (given, [columns, None, columns.clone()])).access.relations[0]
    assert relation.inputs == ((Whole(), Same(1), Whole()), (Same(0),), (Same(0),))


def test_a_grid():
    image, grid = tensor(2, 3, 5, 4), torch.tanh(tensor(2, 3, 2, 2, seed=2))
    check(aten.grid_sampler_2d.default, image, grid, 0, 0, False, loose=[1], whole=False)
    gradient = tensor(2, 3, 3, 2, seed=3)
    call = (gradient, image, grid, 0, 0, False)
    image_part, grid_part = check(
        aten.grid_sampler_2d_backward.default, *call, [True, True], loose=[2], whole=False, keep=(2, 3)
    )
    assert (image_part.sums, grid_part.sums) == ((3, 2), (3,))
    places = (Same(4), Same(5))
    assert image_part.inputs == ((Same(0), Same(1), *places), None, (Same(0), *places, Whole()))
    assert grid_part.inputs[1] == (Same(0), Same(4), Whole(), Whole())
    relations = check(aten.grid_sampler_2d_backward.default, *call, [False, True], tight=False)
    assert [r.shape for r in relations] == [(2, 3, 2, 2)]


def test_a_mask_is_not_known():
    for shape in ((4, 5), (4,)):
        mask = torch.ones(shape, dtype=torch.bool)
        assert not Probe(aten.index.Tensor, (tensor(4, 5), [mask])).access.known


def test_single_numbers():
    number, first = tensor(), integers(1)
    check(aten.gather.default, number, 0, first)
    check(aten.gather.default, number, 0, integers(1, 1))
    check(aten.scatter_add.default, number, 0, first, tensor(seed=2))
    check(aten.scatter_add.default, tensor(3), 0, first, tensor(seed=2), tight=False)
    check(aten.index_select.default, number, 0, first)
    check(aten.index_select.default, tensor(3, 2), 0, first, whole=False)
