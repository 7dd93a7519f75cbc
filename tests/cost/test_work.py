"""FLOP and bytes by hand, and against the counter that torch has."""

import pytest
import torch
from torch.nn.functional import conv2d, conv_transpose2d, embedding, scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

from lowtide import zoo
from lowtide.cost.work import bytes_moved, flop, is_view
from tests.cost.steps import Captured, parameter


def flops(captured, kind, number=0):
    return flop(captured.graph, captured.graph.ops[captured.op(kind, number)])


def moved(captured, kind, number=0):
    return bytes_moved(captured.graph, captured.graph.ops[captured.op(kind, number)])


def test_a_convolution_by_hand():
    x = torch.randn(2, 3, 10, 12, requires_grad=True)
    captured = Captured(lambda x, w: conv2d(x, w, stride=2, padding=1).sum(), x, parameter(8, 3, 3, 3))
    # 2 images, 8 channels of 5 x 6 places, each a sum of 3 x 3 x 3 products
    forward = 2 * (2 * 8 * 5 * 6) * (3 * 3 * 3)
    assert flops(captured, "convolution") == (forward, True)
    assert flops(captured, "convolution_backward") == (2 * forward, True)
    image, weight, out = 2 * 3 * 10 * 12 * 4, 8 * 3 * 3 * 3 * 4, 2 * 8 * 5 * 6 * 4
    assert moved(captured, "convolution") == image + weight + out
    # the gradient of a sum is one number seen everywhere: it is not read as often as it is used
    assert moved(captured, "convolution_backward") == 2 * (image + weight) + 4


def test_groups_divide_the_work_of_every_part():
    x = torch.randn(2, 8, 6, 6, requires_grad=True)
    captured = Captured(lambda x, w: conv2d(x, w, groups=8).sum(), x, parameter(8, 1, 3, 3))
    forward = 2 * (2 * 8 * 4 * 4) * (3 * 3)
    assert flops(captured, "convolution") == (forward, True)
    assert flops(captured, "convolution_backward") == (2 * forward, True)


def test_an_image_without_gradient_needs_half_the_backward():
    captured = Captured(lambda x, w: conv2d(x, w).sum(), torch.randn(1, 1, 4, 4), parameter(1, 1, 3, 3))
    assert flops(captured, "convolution_backward") == flops(captured, "convolution") == (2 * 4 * 9, True)


def test_a_transposed_convolution_meets_its_weights_at_every_place_of_the_input():
    x = torch.randn(2, 4, 5, 5, requires_grad=True)
    captured = Captured(lambda x, w: conv_transpose2d(x, w, stride=2).sum(), x, parameter(4, 6, 2, 2))
    assert flops(captured, "convolution") == (2 * (2 * 5 * 5) * (4 * 6 * 2 * 2), True)
    assert flops(captured, "convolution_backward") == (4 * (2 * 5 * 5) * (4 * 6 * 2 * 2), True)


def test_attention_by_hand():
    query, key = parameter(2, 3, 10, 4), parameter(2, 3, 12, 4)
    captured = Captured(lambda q, k: scaled_dot_product_attention(q, k, k).sum(), query, key)
    kind = "_scaled_dot_product_flash_attention_for_cpu"
    pairs = 2 * 3 * 10 * 12
    assert flops(captured, kind) == (2 * pairs * (4 + 4), True)
    assert flops(captured, f"{kind}_backward") == (2 * pairs * 5 * 4, True)


@pytest.mark.parametrize("name", ["unet", "alexnet"])
def test_products_and_convolutions_of_a_network_agree_with_torch(name):
    built = zoo.build(zoo.small(name))
    with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(built.trains):
        result = built.step()
        if built.trains:
            result.backward()
    captured = Captured(built.loss, built.model, *built.batch, trains=built.trains)
    counts = [flop(captured.graph, op) for op in captured.graph.ops]
    assert sum(count for count, exact in counts if exact) == counter.get_total_flops()


def test_everything_else_counts_an_operation_an_element_by_convention():
    captured = Captured(lambda x, w: (x * w).relu().sum(), torch.randn(6, 7), parameter(7))
    assert flops(captured, "mul") == (42, False)
    assert flops(captured, "relu") == (42, False)
    assert flops(captured, "sum") == (42, False), "a sum adds what it reads"
    assert moved(captured, "mul") == 4 * (42 + 7 + 42)
    assert moved(captured, "sum") == 4 * (42 + 1)


def test_views_move_nothing_and_compute_nothing():
    captured = Captured(lambda x, w: (x.t() @ w).view(-1).sum(), torch.randn(4, 3), parameter(4, 5))
    for kind in ("permute" if "aten.permute" in {op.kind for op in captured.graph.ops} else "t", "view"):
        op = captured.graph.ops[captured.op(kind)]
        assert is_view(captured.graph, op)
        assert moved(captured, kind) == 0
        assert flops(captured, kind) == (0, False)


def test_a_table_is_read_only_where_it_is_looked_up():
    captured = Captured(lambda i, w: embedding(i, w).sum(), torch.tensor([1, 5, 5]), parameter(1000, 8))
    assert moved(captured, "embedding") == 3 * 8 + 2 * 3 * 8 * 4
