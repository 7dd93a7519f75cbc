"""Steps that look like sums over a batch and are not, or hardly: tiles give the same result, or refuse."""

import pytest
import torch
from torch.nn import functional

from lowtide.errors import CaptureError
from tests.execute.tiles import in_tiles


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


def made(*shape, seed=0, grad=False):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_(grad)


def result(function, *arguments, scale=1.0):
    """Loss, gradients of arguments, and the random state that the step leaves."""
    leaves = [a for a in arguments if isinstance(a, torch.Tensor) and a.requires_grad]
    for leaf in leaves:
        leaf.grad = None
    torch.manual_seed(7)
    loss = function(*arguments)
    (loss * scale).backward()
    return loss.detach(), [leaf.grad for leaf in leaves], torch.get_rng_state()


def assert_equal(found, expected):
    torch.testing.assert_close(found[0], expected[0], rtol=1e-10, atol=1e-10)
    assert [g is None for g in found[1]] == [g is None for g in expected[1]]
    for ours, theirs in zip(found[1], expected[1], strict=True):
        if theirs is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    assert torch.equal(found[2], expected[2])


def assert_same(function, *arguments, parts=(3,)):
    """In tiles the function does what it does eagerly, twice."""
    expected = result(function, *arguments)
    tiled = in_tiles(function, parts)
    for _ in range(2):
        assert_equal(result(tiled, *arguments), expected)


def assert_refused(function, *arguments, parts=(3,), match):
    with pytest.raises(Exception, match=match) as caught:
        in_tiles(function, parts)(*arguments)
    assert isinstance(getattr(caught.value, "inner_exception", caught.value), CaptureError)


X, W = made(7, 5), made(5, 4, seed=1, grad=True)


def square(value):
    return value.pow(2).mean()


def test_constants_written_in_the_function_reach_the_tiles():
    assert_same(lambda x, w: square(x @ w + torch.tensor([1.0, 2.0, 3.0, 4.0])), X, W)
    assert_same(lambda w, x: square((x @ w)[torch.tensor([1, 1, 6, 0])] * torch.tensor(2.0)), W, X)


def test_a_parameter_that_nothing_depends_on_gets_zeros_as_in_the_plain_step():
    def overwritten(x, w, v):
        z = v * torch.ones(7, 4)
        z[:] = x[:, :4]
        return square(z + x @ w)

    assert_same(overwritten, X, W, made(4, seed=2, grad=True))


def test_a_quotient_that_is_rounded_is_no_sum():
    assert_refused(
        lambda x, w: torch.div((x @ w).sum(), 0.3, rounding_mode="trunc"), X, W, match="no sum over parts"
    )


def test_random_numbers_that_nobody_reads_are_drawn_all_the_same():
    def first(x, w):
        torch.rand(5)
        return square(functional.dropout(x @ w, 0.5))

    def between(x, w):
        shape_alone = functional.dropout(x @ w, 0.5)
        last = square(functional.dropout(x @ w, 0.5) + torch.zeros_like(shape_alone))
        torch.rand(3)
        return last

    assert_same(first, X, W)
    assert_same(between, X, W)


def test_random_numbers_that_depend_on_the_model_and_that_nobody_reads_are_refused():
    def unread(x, w):
        torch.bernoulli((x @ w).sigmoid())
        return square(functional.dropout(x @ w, 0.5))

    assert_refused(unread, X, W, match="that nobody reads")


def test_a_dropout_that_is_switched_off_scales_nothing():
    assert_same(lambda x, w: square(torch.native_dropout(x @ w, 0.5, False)[0]), X, W)


@pytest.mark.parametrize(
    ("options", "why"),
    [({"scale_grad_by_freq": True}, "how often"), ({"sparse": True}, "its gradient is sparse")],
)
def test_a_table_whose_gradient_is_no_sum_over_places_is_refused(options, why):
    places = torch.tensor([[0, 0, 1], [2, 0, 4], [4, 3, 0], [1, 1, 1]])
    assert_refused(lambda i, w: square(functional.embedding(i, w, **options)), places, W, match=why)


def test_a_tile_without_any_gradient_is_refused_in_words():
    assert_refused(
        lambda x, w: square(functional.pad(x @ w, (0, 0, 0, 7))), X, W, parts=(4,), match="depends on nothing"
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_the_scale_of_one_backward_does_no_harm_to_the_next(dtype):
    x, w = X.to(dtype), W.detach().to(dtype).requires_grad_()
    tiny = torch.finfo(dtype).tiny / 8

    def function(x, w):
        return square(torch.tanh(x @ w))

    tiled = in_tiles(function, (3,))
    for scale in (1.0, tiny, 1.0, 0.0, 1.0, float("inf"), 1.0, float("nan"), -4.0, 1024.0, 0.5):
        theirs = result(function, x, w, scale=scale)[1][0]
        ours = result(tiled, x, w, scale=scale)[1][0]
        assert torch.equal(torch.isfinite(ours), torch.isfinite(theirs))
        if torch.isfinite(theirs).all():
            close = 1e-2 if dtype is torch.float16 else 1e-5
            torch.testing.assert_close(ours, theirs, rtol=close, atol=close * min(1, abs(scale)))
