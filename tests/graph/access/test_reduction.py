import pytest

from lowtide.graph import Rect
from lowtide.graph.access import Same, Until, Whole
from tests.graph.access.probe import aten, check, tensor

GIVEN = tensor(3, 4, 5)


@pytest.mark.parametrize("dims", [[0], [-1], [1, 2], [2, 0], [], None])
@pytest.mark.parametrize("keep", [False, True])
def test_sums_and_means(dims, keep):
    total = check(aten.sum.dim_IntList, GIVEN, dims, keep)[0]
    mean = check(aten.mean.dim, GIVEN, dims, keep)[0]
    lengths = tuple(GIVEN.shape[d] for d in dims or (0, 1, 2))
    assert total.sums == mean.sums == lengths
    assert (total.scaled, mean.scaled) == (False, True)


def test_of_everything():
    assert check(aten.sum.default, GIVEN)[0].sums == (3, 4, 5)
    assert check(aten.mean.default, GIVEN)[0].scaled
    assert check(aten.sum.default, tensor())[0].sums == ()


def test_a_part_of_a_sum():
    relation = check(aten.sum.dim_IntList, GIVEN, [1])[0]
    assert relation.needs(Rect((1, 2), (2, 4)), Rect((3,), (4,))) == (Rect((1, 3, 2), (2, 4, 4)),)


@pytest.mark.parametrize("kind", ["amax", "amin", "logsumexp"])
@pytest.mark.parametrize("dims", [[1], [0, 2]])
def test_others_need_everything(kind, dims):
    relation = check(getattr(aten, kind).default, GIVEN, dims, whole=kind != "amin")[0]
    assert relation.sums == ()
    assert [relation.inputs[0][d] for d in dims] == [Whole()] * len(dims)


def test_others_in_their_forms():
    for call in (
        (aten.max.dim, 1), (aten.min.dim, -1, True), (aten.max.default,), (aten.argmax.default, 1),
        (aten.argmax.default,), (aten.prod.dim_int, 1), (aten.var_mean.correction, [1]),
        (aten.linalg_vector_norm.default, 2, [1]), (aten.linalg_vector_norm.default, 2),
        (aten.std.correction, [0, 1]), (aten.var.default, False), (aten.median.dim, 1),
    ):  # fmt: skip
        relations = check(call[0], GIVEN, *call[1:], whole=call[0] not in (aten.min.dim, aten.median.dim))
        assert not any(relation.sums for relation in relations)
    check(aten.any.dim, GIVEN > 0, 1)
    check(aten.all.default, GIVEN > 0)
    # An element that is not among the first may change without a difference to them.
    check(aten.topk.default, GIVEN, 2, 1, whole=False)
    check(aten.sort.default, GIVEN, 1, whole=False)
    check(aten.sort.default, GIVEN, whole=False)


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("logarithm", [False, True])
def test_softmax(dim, logarithm):
    forward = aten._log_softmax if logarithm else aten._softmax
    backward = aten._log_softmax_backward_data if logarithm else aten._softmax_backward_data
    relation = check(forward.default, GIVEN, dim, False)[0]
    assert relation.inputs[0][dim] == Whole()
    assert relation.sums == ()
    result, gradient = forward.default(GIVEN, dim, False), tensor(3, 4, 5, seed=2)
    check(backward.default, gradient, result, dim, GIVEN.dtype)


def test_softmax_of_rows_that_are_masked_whole():
    check(aten._safe_softmax.default, GIVEN, -1)


def test_running_sums():
    relation = check(aten.cumsum.default, GIVEN, 1)[0]
    assert relation.inputs[0] == (Same(0), Until(1), Same(2))
    check(aten.cummax.default, GIVEN, -1, tight=False)
    check(aten.cumprod.default, tensor(3, 4, positive=True), 0)
