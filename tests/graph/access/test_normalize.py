import pytest
import torch

from tests.graph.access.probe import aten, check, tensor

ROWS = tensor(3, 4, 5)


@pytest.mark.parametrize("last", [[5], [4, 5]])
@pytest.mark.parametrize("scaled", [True, False])
def test_layer_norm(last, scaled):
    weight, bias = (tensor(*last, seed=2), tensor(*last, seed=3)) if scaled else (None, None)
    relations = check(aten.native_layer_norm.default, ROWS, last, weight, bias, 1e-5)
    assert not any(relation.sums for relation in relations)


@pytest.mark.parametrize("last", [[5], [4, 5]])
@pytest.mark.parametrize("mask", [[True, True, True], [True, False, False], [False, True, True]])
def test_layer_norm_backward(last, mask):
    weight, bias = tensor(*last, seed=2), tensor(*last, seed=3)
    _, mean, scale = aten.native_layer_norm.default(ROWS, last, weight, bias, 1e-5)
    call = (tensor(3, 4, 5, seed=4), ROWS, last, mean, scale, weight, bias, mask)
    relations = check(aten.native_layer_norm_backward.default, *call)
    shapes = [(3, 4, 5), tuple(last), tuple(last)]
    assert [r.shape for r in relations] == [s for s, asked in zip(shapes, mask, strict=True) if asked]
    lead = (3, 4, 5)[: 3 - len(last)]
    assert [r.sums for r in relations] == [
        s for s, asked in zip([(), lead, lead], mask, strict=True) if asked
    ]


def test_root_mean_square_norm():
    weight = tensor(5, seed=2)
    check(aten._fused_rms_norm.default, ROWS, [5], weight, 1e-5)
    _, scale = aten._fused_rms_norm.default(ROWS, [5], weight, 1e-5)
    gradient = tensor(3, 4, 5, seed=4)

    def backward(gradient, given, last, scale, weight, mask):
        """The operator itself runs on CUDA alone."""
        scaled = gradient * weight
        inner = (scaled * given).mean(-1, keepdim=True) * scale**3
        return scaled * scale - given * inner, (gradient * given * scale).sum((0, 1))

    call = (gradient, ROWS, [5], scale, weight, [True, True])
    relations = check(aten._fused_rms_norm_backward.default, *call, run=backward)
    assert [r.sums for r in relations] == [(), (3, 4)]


@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize("space", [(3, 2), (5,)])
def test_group_norm(groups, space):
    image, weight, bias = tensor(2, 6, *space), tensor(6, seed=2), tensor(6, seed=3)
    size = torch.Size(space).numel()
    check(aten.native_group_norm.default, image, weight, bias, 2, 6, size, groups, 1e-5)
    _, mean, scale = aten.native_group_norm.default(image, weight, bias, 2, 6, size, groups, 1e-5)
    gradient = tensor(*image.shape, seed=4)
    call = (gradient, image, mean, scale, weight, 2, 6, size, groups)
    relations = check(aten.native_group_norm_backward.default, *call, [True, True, True])
    assert [r.sums for r in relations] == [(), (2, *space), (2, *space)]
