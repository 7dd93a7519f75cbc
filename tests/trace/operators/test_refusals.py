import pytest
import torch
from torch import fx

from lowtide.errors import CaptureError, GraphError
from lowtide.graph import Rect
from lowtide.trace.operators import InputPart, emit, supported
from tests.trace.operators.tiles import randn, single, tile

aten = torch.ops.aten


REFUSED = [
    ("draws random numbers", aten.bernoulli.p, (randn(3), 0.5)),
    ("draws random numbers", aten.native_dropout.default, (randn(3), 0.5, True)),
    ("draws random numbers", aten.rand_like.default, (randn(3),)),
    ("writes into", aten.add_.Tensor, (randn(3), 1)),
    ("whole batch", aten.native_batch_norm.default, (randn(2, 3), None, None, None, None, True, 0.1, 1e-5)),
    ("another type", aten.view.dtype, (randn(3), torch.int64)),
    (
        "whole batch",
        aten._batch_norm_with_update.default,
        (randn(2, 3), None, None, randn(3), randn(3), 0.1, 1e-5),
    ),
    ("not next to", aten.slice_scatter.default, (randn(6), randn(3), 0, 0, 6, 2)),
    ("ends of rows", aten.roll.default, (randn(6), [2])),
    ("a mask", aten.index.Tensor, (randn(3), [torch.tensor([True, False, True])])),
    ("not among", aten.nonzero.default, (randn(3),)),
    ("not among", torch.ops.prims.sin.default, (randn(3),)),
    ("is empty", aten.slice.Tensor, (randn(3), 0, 2, 2)),
]


@pytest.mark.parametrize(("words", "target", "args"), REFUSED)
def test_what_cannot_be_run_on_parts_says_why(words, target, args):
    one = single(target, *args)
    assert words in supported(one.op, one.graph)
    with pytest.raises(CaptureError, match=words):
        tile(one, Rect.of_shape((1,) * one.outputs[0].ndim))


def test_only_the_first_result_where_others_speak_of_the_whole():
    one = single(aten.max_pool2d_with_indices.default, randn(1, 1, 4, 4), [2, 2])
    assert supported(one.op, one.graph) is None
    assert "first result" in supported(one.op, one.graph, output=1)


def test_a_part_that_does_not_hold_what_is_needed_is_named():
    one = single(aten.relu.default, randn(4))
    target = fx.Graph()
    parts = [InputPart(target.placeholder("x"), Rect((1,), (3,)))]
    with pytest.raises(GraphError, match=r"needs \[0:2\] of input 0 .* and \[1:3\] is there"):
        emit(target, one.call, one.op, one.graph, parts, Rect((0,), (2,)))
    with pytest.raises(GraphError, match="no part of an output"):
        emit(target, one.call, one.op, one.graph, parts, Rect((3,), (5,)))


def test_a_sum_over_nothing_is_refused():
    one = single(aten.mm.default, randn(2, 4), randn(4, 3))
    with pytest.raises(GraphError, match="nothing is summed"):
        tile(one, Rect((0, 0), (2, 3)), over=Rect((1,), (1,)))
