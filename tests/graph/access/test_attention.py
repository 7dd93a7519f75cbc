import pytest
import torch

from lowtide.graph import Rect
from tests.graph.access.probe import aten, check, tensor

FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
MASKS = {"none": None, "plain": (5, 6), "heads": (2, 3, 5, 6), "one head": (2, 1, 5, 6)}


def given(queries=5, keys=6):
    return tensor(2, 3, queries, 4), tensor(2, 3, keys, 4, seed=2), tensor(2, 3, keys, 4, seed=3)


@pytest.mark.parametrize("mask", MASKS)
def test_forward(mask):
    options = {} if mask == "none" else {"attn_mask": tensor(*MASKS[mask], seed=4)}
    check(FORWARD, *given(), 0.0, False, options=options)


def test_causal():
    # A key that is made small loses all weight, so that its value may not matter: see what is named instead.
    result, sums = check(FORWARD, *given(6, 6), 0.0, True, tight=False)
    rows = Rect((0, 0, 2, 0), (1, 1, 4, 4))
    assert result.needs(rows)[1:] == (Rect((0, 0, 0, 0), (1, 1, 4, 4)),) * 2
    assert sums.inputs[2] is None


def kept(call, causal, options):
    result, sums = FORWARD(*call, 0.0, causal, **options)
    return tensor(*result.shape, seed=5), result, sums


@pytest.mark.parametrize(("mask", "causal"), [*((mask, False) for mask in MASKS), ("none", True)])
def test_backward(mask, causal):
    options = {} if mask == "none" else {"attn_mask": tensor(*MASKS[mask], seed=4)}
    call = given(6, 6) if causal else given()
    gradient, result, sums = kept(call, causal, options)
    relations = check(BACKWARD, gradient, *call, result, sums, 0.0, causal, options=options, tight=not causal)
    queries, keys = call[0].shape[2], call[1].shape[2]
    assert [r.sums for r in relations] == [(keys,), (queries,), (queries,)]


def test_kernels_of_cuda():
    """They do not run here; their arguments and results stand elsewhere, their values are the same."""
    call, bias = given(), tensor(2, 3, 5, 6, seed=4)
    seed = torch.zeros((), dtype=torch.int64)
    gradient, result, sums = kept(call, False, {"attn_mask": bias})

    def efficient(q, k, v, bias, _, dropout, causal):
        return (*FORWARD(q, k, v, dropout, causal, attn_mask=bias), seed, seed)

    check(aten._scaled_dot_product_efficient_attention.default, *call, bias, True, 0.0, False, run=efficient)

    def backward(gradient, q, k, v, bias, out, sums, _, __, dropout, mask, causal):
        found = BACKWARD(gradient, q, k, v, out, sums, dropout, causal, attn_mask=bias)
        weights = (q @ k.transpose(2, 3) / 2 + bias - sums[..., None]).exp()
        inner = gradient @ v.transpose(2, 3) - (gradient * out).sum(-1, keepdim=True)
        found = [*found, weights * inner]
        return [one for one, asked in zip(found, mask, strict=True) if asked]

    target = aten._scaled_dot_product_efficient_attention_backward.default
    arguments = (gradient, *call, bias, result, sums, seed, seed.clone(), 0.0)
    relations = check(target, *arguments, [True, True, True, True], False, run=backward)
    assert relations[3].shape == (2, 3, 5, 6)
    assert len(check(target, *arguments, [False, True, False, False], False, run=backward)) == 1

    def flash(q, k, v, dropout, causal):
        return (*FORWARD(q, k, v, dropout, causal), None, None, 5, 6, seed, seed, torch.empty(0))

    check(aten._scaled_dot_product_flash_attention.default, *call, 0.0, False, run=flash)
    gradient, result, sums = kept(call, False, {})

    def flash_backward(gradient, q, k, v, out, sums, *rest):
        return BACKWARD(gradient, q, k, v, out, sums, 0.0, rest[5])

    arguments = (gradient, *call, result, sums, None, None, 5, 6, 0.0, False, seed, seed.clone())
    check(aten._scaled_dot_product_flash_attention_backward.default, *arguments, run=flash_backward)


def test_heads_that_share_keys():
    call = (tensor(1, 4, 3, 4), tensor(1, 2, 5, 4, seed=2), tensor(1, 2, 5, 4, seed=3))

    def repeated(q, k, v, dropout, causal):
        return FORWARD(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), dropout, causal)

    check(FORWARD, *call, 0.0, False, run=repeated)

    def backward(gradient, q, k, v, out, sums, *rest):
        keys, values = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        query, *others = BACKWARD(gradient, q, keys, values, out, sums, *rest)
        return query, *(one.unflatten(1, (2, 2)).sum(2) for one in others)

    result, sums = repeated(*call, 0.0, False)
    check(BACKWARD, tensor(1, 4, 3, 4, seed=5), *call, result, sums, 0.0, False, run=backward)
