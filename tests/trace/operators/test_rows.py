import pytest
import torch

from lowtide.graph import Rect
from lowtide.trace.operators import supported
from tests.trace.operators.tiles import check, close, randn, single, tile

aten = torch.ops.aten


def test_pointwise_and_broadcasting(rng):
    x, y = randn(3, 1, 5), randn(4, 5)
    check(rng, aten.add.Tensor, x, y, alpha=2)
    check(rng, aten.mul.Tensor, x, x)
    check(rng, aten.mul.Tensor, randn(1), randn(3, 4))
    check(rng, aten.mul.Tensor, randn(3, 4), randn())
    check(rng, aten.div.Scalar, x, 0.7)
    check(rng, aten.pow.Tensor_Scalar, randn(3, 4, 5).abs() + 1, 0.75)
    check(rng, aten.relu.default, randn(3, 4))
    check(rng, aten.gelu.default, randn(3, 4), approximate="tanh")
    check(rng, aten.where.self, randn(3, 1) > 0, x, randn())
    check(rng, aten.masked_fill.Scalar, y, y > 0, -1.5)
    check(rng, aten._to_copy.default, randn(3, 4), dtype=torch.float32)
    check(rng, aten.clone.default, randn(3, 4).t(), memory_format=torch.contiguous_format)
    check(rng, aten.copy.default, torch.zeros(3, 4, dtype=torch.float32), randn(4), grad=0)


def test_pointwise_without_the_name(rng):
    x = randn(3, 4, 5)
    check(rng, aten._prelu_kernel.default, x, randn(1, 4, 1))
    for target in (
        aten.hardswish.default,
        aten.lift_fresh_copy.default,
        aten.alias.default,
        aten.detach.default,
    ):
        check(rng, target, x)
    check(rng, aten.rsub.Scalar, x, 2.5)
    check(rng, aten.floor_divide.default, torch.randint(9, (3, 4)), torch.randint(1, 3, (4,)))


def test_matrix_products(rng):
    m, k, n = (rng.randint(1, 6) for _ in range(3))
    check(rng, aten.mm.default, randn(m, k), randn(k, n))
    check(rng, aten.addmm.default, randn(n), randn(m, k), randn(k, n), beta=0.5, alpha=2)
    check(rng, aten.addmm.default, randn(m, 1), randn(m, k), randn(k, n))
    check(rng, aten.bmm.default, randn(3, m, k), randn(3, k, n))
    check(rng, aten.baddbmm.default, randn(3, m, n), randn(3, m, k), randn(3, k, n))
    square = randn(4, 4)
    check(rng, aten.mm.default, square, square)


def test_norms(rng):
    x = randn(3, 4, 5)
    check(rng, aten.native_layer_norm.default, x, [5], randn(5), randn(5), 1e-5)
    check(rng, aten.native_layer_norm.default, x, [4, 5], None, None, 1e-5)
    for output in (1, 2):
        check(rng, aten.native_layer_norm.default, x, [5], randn(5), randn(5), 1e-5, output=output, grad=0)
    check(rng, aten._fused_rms_norm.default, x, [5], randn(5), 1e-5)
    y = randn(3, 6, 4, 5)
    check(rng, aten.native_group_norm.default, y, randn(6), randn(6), 3, 6, 20, 2, 1e-5)
    check(rng, aten.native_group_norm.default, y, None, None, 3, 6, 20, 3, 1e-5)
    statistics = randn(6).abs() + 0.5
    args = (randn(6), statistics)
    check(
        rng,
        aten._native_batch_norm_legit_no_training.default,
        y,
        randn(6),
        randn(6),
        *args,
        0.1,
        1e-5,
        grad=3,
    )
    check(rng, aten.native_batch_norm.default, y, None, None, *args, False, 0.1, 1e-5, grad=1)


def test_along_a_dimension(rng):
    x = randn(3, 4, 5)
    check(rng, aten._softmax.default, x, 1, False)
    check(rng, aten._log_softmax.default, x, -1, False)
    check(rng, aten._safe_softmax.default, x, 0)
    check(rng, aten.cumsum.default, x, 1)
    for output in (0, 1):
        check(rng, aten.cummax.default, x, 1, output=output)
    check(rng, aten.sort.default, x, -1)
    check(rng, aten.topk.default, x, 3, output=1)


def test_tables_and_places(rng):
    check(rng, aten.embedding.default, randn(7, 4), torch.randint(7, (3, 5)))
    check(rng, aten.gather.default, randn(3, 6), 1, torch.randint(6, (3, 2)))
    check(rng, aten.gather.default, randn(6, 5), 0, torch.randint(6, (2, 4)))
    check(rng, aten.index_select.default, randn(3, 6), 1, torch.randint(6, (4,)))


@pytest.mark.parametrize("causal", [False, True])
def test_attention(rng, causal):
    target = aten._scaled_dot_product_flash_attention_for_cpu.default
    query, key, value = (randn(3, 2, 6, 4) for _ in range(3))
    check(rng, target, query, key, value, 0.0, causal)
    check(rng, target, query, key, value, 0.0, causal, scale=0.3)
    if not causal:
        check(
            rng,
            target,
            query,
            randn(3, 2, 9, 4),
            randn(3, 2, 9, 4),
            0.0,
            False,
            attn_mask=randn(1, 1, 6, 9),
            grad=3,
        )


def test_heads_that_share_their_keys():
    query, key, value = randn(2, 6, 5, 4), randn(2, 3, 5, 4), randn(2, 3, 5, 4)
    one = single(aten._scaled_dot_product_flash_attention_for_cpu.default, query, key, value, 0.0, True)
    for lo, hi in ((0, 2), (2, 6), (3, 4)):
        close(tile(one, Rect((0, lo, 1, 0), (2, hi, 4, 4))), one.outputs[0][:, lo:hi, 1:4])
    assert "share their keys" in supported(one.op, one.graph, Rect((0, 1, 0, 0), (2, 3, 5, 4)))


def test_causal_attention_with_other_keys_than_queries_keeps_all_queries():
    query, key, value = randn(2, 2, 5, 4), randn(2, 2, 7, 4), randn(2, 2, 7, 4)
    one = single(aten._scaled_dot_product_flash_attention_for_cpu.default, query, key, value, 0.0, True)
    close(tile(one, Rect((0, 1, 0, 0), (1, 2, 5, 4))), one.outputs[0][:1, 1:])
    assert "causal mask" in supported(one.op, one.graph, Rect((0, 0, 1, 0), (2, 2, 5, 4)))
