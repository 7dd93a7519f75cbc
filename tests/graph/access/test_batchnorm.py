import pytest
import torch

from lowtide.graph.access import Same, Whole
from tests.graph.access.probe import aten, check, tensor

SHAPES = [(3, 4, 3, 2), (5, 3)]


def given(shape):
    channels = shape[1]
    weight, bias, mean = (tensor(channels, seed=k) for k in (2, 3, 4))
    return tensor(*shape), weight, bias, mean, tensor(channels, seed=5, positive=True)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("training", [True, False])
def test_forward(shape, training):
    call = given(shape)
    for target in (aten.native_batch_norm.default, aten._native_batch_norm_legit.default):
        result = check(target, *call, training, 0.1, 1e-5)[0]
        assert not result.sums
        assert result.inputs[0][0] == (Whole() if training else Same(0))
    functional = aten._native_batch_norm_legit_functional.default
    relations = check(functional, *call, training, 0.1, 1e-5)
    assert len(relations) == 5
    no_stats = aten._native_batch_norm_legit.no_stats
    if training:
        check(no_stats, *call[:3], True, 0.1, 1e-5)
    else:
        check(aten._native_batch_norm_legit_no_training.default, *call, 0.1, 1e-5)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("mask", [[True, True, True], [False, True, False]])
def test_backward(shape, training, mask):
    image, weight, bias, mean, variance = given(shape)
    _, saved, scale = aten._native_batch_norm_legit_functional.default(
        image, weight, bias, mean, variance, training, 0.1, 1e-5
    )[:3]
    statistics = (None, None, saved, scale) if training else (mean, variance, saved, scale)
    call = (tensor(*shape, seed=6), image, weight, *statistics, training, 1e-5, mask)
    relations = check(aten.native_batch_norm_backward.default, *call)
    sums = [(), (shape[0], *shape[2:]), (shape[0], *shape[2:])]
    assert [r.sums for r in relations] == [s for s, asked in zip(sums, mask, strict=True) if asked]


def with_reserve(image, *rest):
    """As the kernels of cuDNN, which give some bytes more."""
    return (*aten.native_batch_norm.default(image, *rest), torch.zeros(8, dtype=torch.uint8))


def test_kernels_of_cudnn():
    """They do not run here; their arguments and results stand elsewhere, their values are the same."""
    call, reserve = given((3, 4, 3, 2)), torch.zeros(8, dtype=torch.uint8)
    image, weight = call[:2]
    check(aten.cudnn_batch_norm.default, *call, True, 0.1, 1e-5, run=with_reserve)
    _, saved, scale, _ = with_reserve(*call, True, 0.1, 1e-5)
    gradient = tensor(3, 4, 3, 2, seed=6)

    def cudnn(image, gradient, weight, mean, variance, saved, scale, eps, reserve):
        call = (gradient, image, weight, mean, variance, saved, scale, True, eps, [True, True, True])
        return aten.native_batch_norm_backward.default(*call)

    backward = (image, gradient, weight, None, None, saved, scale, 1e-5, reserve)
    relations = check(aten.cudnn_batch_norm_backward.default, *backward, run=cudnn)
    assert [r.sums for r in relations] == [(), (3, 3, 2), (3, 3, 2)]


def test_the_form_that_chooses_its_kernel():
    call = given((3, 4, 3, 2))
    check(aten._batch_norm_with_update_functional.default, *call, 0.1, 1e-5)
    check(aten._batch_norm_with_update.default, *call, 0.1, 1e-5)
    check(aten._batch_norm_no_update.default, *call, 0.1, 1e-5)
    image, weight = call[:2]
    _, saved, scale, reserve = aten._batch_norm_with_update.default(*(v.clone() for v in call), 0.1, 1e-5)
    backward = (tensor(3, 4, 3, 2, seed=6), image, weight, None, None, saved, scale, True, 1e-5)
    check(aten.batch_norm_backward.default, *backward, [True, True, True], reserve)
