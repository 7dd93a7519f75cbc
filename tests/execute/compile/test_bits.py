import pytest
import torch

from lowtide.execute.compile.bits import largest_difference, same_bits

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64]
)
def test_nan_is_itself_and_minus_zero_is_not_zero(dtype):
    one = torch.tensor([NAN, 0.0, 1.0], dtype=dtype)
    assert same_bits(one, one.clone())
    assert not same_bits(torch.zeros(2, dtype=dtype), -torch.zeros(2, dtype=dtype))
    assert not same_bits(one, one.nan_to_num())


def test_types_shapes_and_absence_count():
    assert same_bits(None, None)
    assert not same_bits(None, torch.zeros(1))
    assert not same_bits(torch.zeros(2), torch.zeros(2, dtype=torch.int32))
    assert not same_bits(torch.zeros(2), torch.zeros(1, 2))
    assert same_bits(torch.arange(6.0).view(2, 3).t(), torch.arange(6.0).view(2, 3).t().contiguous())
    assert same_bits(torch.tensor([True, False]), torch.tensor([True, False]))
    assert not same_bits(torch.zeros(0), torch.zeros(0).to_sparse())


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_sparse_tensors_are_compared_by_their_entries(layout):
    dense = torch.tensor([[NAN, 0.0], [0.0, 2.0]])
    one, other = dense.to_sparse(layout=layout), dense.to_sparse(layout=layout)
    assert same_bits(one, other)
    assert largest_difference(one, other) == 0
    assert not same_bits(one, (dense * 2).to_sparse(layout=layout))
    assert largest_difference(one, (dense * 2).to_sparse(layout=layout)) == 1


def test_the_largest_difference():
    assert largest_difference(torch.tensor([1.0, -4.0]), torch.tensor([2.0, -4.0])) == 0.25
    assert largest_difference(torch.zeros(2), torch.tensor([0.0, 3.0])) == 3
    assert largest_difference(torch.tensor([NAN, INF]), torch.tensor([NAN, INF])) == 0
    assert largest_difference(torch.tensor([NAN, 1.0]), torch.tensor([1.0, 1.0])) == INF
    assert largest_difference(torch.zeros(0), torch.zeros(0)) == 0
    assert largest_difference(torch.tensor([1j]), torch.tensor([2j])) == 1
