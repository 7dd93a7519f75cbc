"""Convolutions in slices of the batch: how many there are, and that they give the same."""

import pytest
import torch

from lowtide.cost import slices
from lowtide.cost.clock import CpuClock
from lowtide.cost.slices import bounds, in_slices, slices_for

aten = torch.ops.aten


def arguments(batch=6, transposed=False):
    torch.manual_seed(0)
    weight = torch.randn(4, 3, 3, 3).transpose(0, int(transposed)).contiguous()
    return [
        torch.randn(batch, 3, 9, 9),
        weight,
        torch.randn(4),
        [1, 1],
        [1, 1],
        [1, 1],
        transposed,
        [0, 0],
        1,
    ]


@pytest.fixture(autouse=True)
def _forgotten(monkeypatch):
    monkeypatch.setattr(slices, "_KNOWN", {})


def needs(monkeypatch, bytes_of, *, same=True):
    """Have a convolution need so much for a slice of a number of images; bits are the same, or are not."""

    class Told:
        def first(self, function):
            made = function()
            count = function.args[1] if function.func is in_slices else 1
            return made, 0.0, bytes_of(-(-len(made) // count))

    monkeypatch.setattr(slices, "clock_of", lambda device: Told())
    monkeypatch.setattr(slices, "equal", lambda one, other: same)


def test_slices_cover_the_batch():
    for batch in range(1, 9):
        for count in range(1, batch + 1):
            found = bounds(batch, count)
            assert [k for lo, hi in found for k in range(lo, hi)] == list(range(batch))
            sizes = [hi - lo for lo, hi in found]
            assert len(sizes) == count
            assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4, 6])
def test_they_give_what_the_whole_gives(count, transposed):
    given = arguments(transposed=transposed)
    torch.testing.assert_close(in_slices(given, count), aten.convolution.default(*given))


def test_they_are_as_few_as_need_no_more_than_the_result(monkeypatch):
    size = aten.convolution.default(*arguments()).nbytes
    needs(monkeypatch, lambda images: images * size)
    assert slices_for(arguments()) == 6
    needs(monkeypatch, lambda images: images * size // 2)
    assert slices_for(arguments()) == 6, "it is known"
    slices._KNOWN.clear()
    assert slices_for(arguments()) == 4
    slices._KNOWN.clear()
    needs(monkeypatch, lambda images: images * size // 6)
    assert slices_for(arguments()) == 1, "the whole does"


def test_they_are_left_where_they_do_not_help(monkeypatch):
    size = aten.convolution.default(*arguments()).nbytes
    needs(monkeypatch, lambda images: 10 * size)
    assert slices_for(arguments()) == 1
    slices._KNOWN.clear()
    needs(monkeypatch, lambda images: images * size, same=False)
    assert slices_for(arguments()) == 1, "the bits differ"
    slices._KNOWN.clear()
    needs(monkeypatch, lambda images: images * size)
    assert slices_for(arguments(batch=1)) == 1


def test_what_is_chosen_holds_for_the_kernels_of_this_machine():
    given = [
        torch.randn(2, 8, 64, 64),
        torch.randn(8, 8, 3, 3),
        None,
        [1, 1],
        [0, 0],
        [1, 1],
        False,
        [0, 0],
        1,
    ]
    count = slices_for(given)
    whole, _, needed = CpuClock().first(lambda: aten.convolution.default(*given))
    made, _, taken = CpuClock().first(lambda: in_slices(given, count))
    assert torch.equal(whole, made)
    assert taken < needed or count == 1
