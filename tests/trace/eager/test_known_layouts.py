"""Fake results lie in memory as real ones do, before any step has run: each way to order the axes is tried."""

import itertools

import pytest
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch.utils import _pytree as pytree

from lowtide.trace.eager.layouts import Layouts, fake_arguments, layouts

ATEN = torch.ops.aten
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")],
    ),
]


def in_each_order(shape, device):
    """Tensors of a shape whose axes lie in memory in each order."""
    for order in itertools.permutations(range(len(shape))):
        there = torch.rand([shape[k] for k in order], device=device)
        yield there.permute([order.index(k) for k in range(len(shape))])


def differs(operator, *args):
    """How real results lie and how fake ones do, where that is not the same."""
    real = layouts(args, {}, operator(*args))
    mode = Layouts().mode()
    flat, spec = pytree.tree_flatten(list(args))
    with mode, enable_python_dispatcher():
        given = pytree.tree_unflatten(fake_arguments(mode, flat), spec)
        fake = layouts(given, {}, operator(*given))
    return [] if fake == real else [(operator, args, fake, real)]


def of_two(first, second):
    """Calls of operators that read two tensors of one shape."""
    mean, weight = first.new_zeros(*first.shape[:2], 1), first.new_ones(4)
    every = [True, True, True]
    for dim in range(3):
        yield ATEN._log_softmax_backward_data.default, first, second, dim, torch.float32
        yield ATEN._softmax_backward_data.default, first, second, dim, torch.float32
    yield ATEN.native_layer_norm_backward.default, first, second, [4], mean, mean, weight, weight, every
    yield ATEN.native_dropout_backward.default, first, second > 0.5, 2.0
    yield ATEN.gelu_backward.default, first, second
    yield ATEN.add.Tensor, first, second


@pytest.mark.parametrize("device", DEVICES)
def test_operators_of_two_tensors(device):
    tensors = list(in_each_order((2, 3, 4), device))
    calls = [call for pair in itertools.product(tensors, repeat=2) for call in of_two(*pair)]
    assert len(calls) == 36 * 10
    assert [wrong for call in calls for wrong in differs(*call)] == []


def test_results_are_contiguous_also_at_size_one():
    tensors = list(in_each_order((2, 1, 4), "cpu"))
    kinds = ("_softmax_backward_data", "_log_softmax_backward_data", "native_layer_norm_backward")
    calls = [call for pair in itertools.product(tensors, repeat=2) for call in of_two(*pair)]
    calls = [call for call in calls if call[0].overloadpacket.__name__ in kinds]
    assert len(calls) == 36 * 7
    assert [wrong for call in calls for wrong in differs(*call)] == []


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64, torch.bfloat16])
def test_views_as_another_type(dtype):
    tensors = [torch.zeros(2, 1, 4), torch.zeros(1, 2, 2), torch.zeros(4, 2, 1).permute(1, 2, 0)[..., ::1]]
    found, tried = [], 0
    for tensor in tensors:
        try:
            tensor.view(dtype)
        except RuntimeError:  # no view has this type
            continue
        tried += 1
        found += differs(ATEN.view.dtype, tensor, dtype)
    assert tried >= 2
    assert found == []


def test_operators_of_others_are_not_known():
    @torch.library.custom_op("lowtide_tests::view", mutates_args=())
    def view(x: torch.Tensor) -> torch.Tensor:
        return x.new_zeros(1, 3)

    view.register_fake(lambda x: x.new_empty(1, 3))
    assert differs(torch.ops.lowtide_tests.view.default, torch.zeros(4, 1)) == []


@pytest.mark.parametrize("shape", [(2, 3, 4), (2, 1, 4), (1, 3, 1), (2, 1, 1, 4)])
def test_views_with_dimensions_of_size_one(shape):
    sizes = [shape, (-1,), (shape[0], -1), (-1, shape[-1]), (*shape, 1), (1, *shape), (-1, 1, shape[-1])]
    found, tried = [], 0
    for tensor, size in itertools.product(in_each_order(shape, "cpu"), sizes):
        try:
            tensor.view(size)
        except RuntimeError:  # no view has this shape
            continue
        tried += 1
        found += differs(ATEN.view.default, tensor, list(size))
    assert tried > 10
    assert found == []


@pytest.mark.parametrize("device", DEVICES)
def test_copies_into_parts(device):
    whole = torch.zeros(8, 64, device=device)
    parts = [
        whole[:, 1:],
        whole[1:],
        whole[:4],
        whole.t(),
        whole[2:4, 3:5],
        whole[:, ::2],
        whole[:1].expand(8, 64),
    ]
    sources = [(part, source) for part in parts for source in (part.clone(), part.double())]
    assert [wrong for part, source in sources for wrong in differs(ATEN.copy.default, part, source)] == []
