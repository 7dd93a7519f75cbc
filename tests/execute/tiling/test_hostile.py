"""Steps that look like sums over a batch and are not, or hardly: tiles give the same result, or refuse."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from lowtide.errors import CaptureError, InfeasibleError
from lowtide.execute.fit import fit
from lowtide.execute.runtime import tile_loop as loops
from lowtide.execute.tiling import search as attempts
from tests.execute.tiling.tiles import in_tiles


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


def assert_refused(function, *arguments, parts=(3,), cut=lambda _: (), match):
    with pytest.raises(Exception, match=match) as caught:
        in_tiles(function, parts, cut)(*arguments)
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


COUNTED = torch.tensor([1, 0, 1, 1, 0, 1, 1], dtype=torch.float64)


def test_a_sum_over_something_that_has_no_gradient():
    assert_same(lambda x, w, m: ((x @ w).pow(2).sum(1) * m).sum() / m.sum(), X, W, COUNTED)
    assert_same(lambda x, w, m: (x @ w).pow(2).sum() * m.mean(), X, W, COUNTED)
    expected = result(lambda x, w: square(x @ w).float(), X, W)
    found = result(in_tiles(lambda x, w: square(x @ w).float(), (3,)), X, W)
    assert found[0].dtype == torch.float32
    assert_close = torch.testing.assert_close
    assert_close(found[0], expected[0], rtol=1e-6, atol=0)
    assert_close(found[1], expected[1], rtol=1e-6, atol=0)


def test_a_sum_over_something_that_has_a_gradient():
    """The sum is cut, and what the loss makes of it stays outside."""
    assert_same(lambda x, w: (x @ w).pow(2).sum() / w.sum(), X, W)
    assert_same(lambda x, w: (x @ w).pow(2).sum() * (x @ w).sum(), X, W)
    assert_same(lambda x, w: (x @ w).pow(2).sum().sqrt().exp(), X, W)

    def masked(x, w):
        return (x @ w).pow(2).sum() / (1 + functional.dropout(w, 0.5).pow(2).sum())

    assert_same(masked, X, W)


def test_what_a_dropout_gives_has_a_gradient():
    """An operator that cannot run in tiles behind one is not taken for something without a gradient."""

    def ordered(x, w):
        return (torch.fft.fft(functional.dropout(x @ w, 0.5), dim=0).abs()).sum()

    assert_refused(ordered, X, W, match="cannot run in tiles")


def test_a_quotient_that_is_rounded_has_no_gradient():
    assert_same(lambda x, w: torch.div((x @ w).sum(), 0.3, rounding_mode="trunc") + w.sum(), X, W)


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


def test_a_region_that_begins_at_one_of_several_results_reads_no_other():
    def normal(x, w):
        spread, mean = torch.var_mean(x @ w, 0)
        return square(x[:, :1] * (x @ w - mean) / spread)

    def cut(joint):
        op = next(op for op in joint.graph.ops if op.kind == "aten.var_mean")
        return (joint.graph.tensors[op.outputs[0]].id,)

    assert_refused(normal, X, W, cut=cut, match="begins at one result of aten.var_mean and reads another")


def network():
    torch.manual_seed(0)
    layers = [nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4)]
    return nn.Sequential(*layers), (torch.randn(512, 16), torch.randint(0, 4, (512,)))


def classified(model, x, y):
    return functional.cross_entropy(model(x), y)


@pytest.fixture
def hurried(monkeypatch):
    """No time is spent on how small a budget may be, nor on loops that begin or end in the middle."""
    monkeypatch.setattr("lowtide.plan.recompute.smallest_budget._aim", lambda *_, **__: None)
    monkeypatch.setattr(attempts, "endings", lambda _: [])
    monkeypatch.setattr(attempts, "middles", lambda _: [])


@pytest.fixture
def in_four(hurried, monkeypatch):
    """Nothing but four tiles of the whole step is tried."""
    monkeypatch.setattr(attempts, "grids", lambda _: iter([(4,)]))


QUICK = {"only": "recompute,tile", "cost": "estimated", "time_limit": 0.3, "cache": False}


@pytest.mark.usefixtures("hurried")
def test_a_way_to_cut_that_is_impossible_spoils_no_other(monkeypatch):
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()]
    model, x = nn.Sequential(*layers), torch.randn(4, 3, 16, 16)
    monkeypatch.setattr(attempts, "grids", lambda _: iter([(4, 1, 1, 1), (4, 1, 2, 2)]))
    monkeypatch.setattr(attempts, "_GOOD", -1.0)

    def enlarged(model, x):
        return square(functional.interpolate(model(x), size=(17, 17), mode="bilinear"))

    assert fit(enlarged, model, x, budget="60%", **QUICK).plan.decisions.tiles == 4


@pytest.mark.usefixtures("in_four")
def test_what_an_optimiser_holds_counts_beside_tiles():
    model, batch = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0)
    classified(model, *batch).backward()
    optimizer.step()
    model.zero_grad(set_to_none=True)
    held = sum(p.numel() * p.element_size() for p in model.parameters())
    plan = fit(classified, model, *batch, budget="430KiB", optimizer=optimizer, **QUICK).plan
    assert plan.decisions.tiles > 1
    assert plan.resident_bytes > 3 * held


@pytest.mark.usefixtures("in_four")
def test_memory_that_runs_out_in_a_tile_leaves_everything_as_it_was(monkeypatch):
    model, batch = network()
    fitted = fit(classified, model, *batch, budget="45%", **QUICK)
    assert fitted.plan.decisions.tiles > 1
    whole, turns = loops._Turn.__call__, []

    def second_fails(self, *arguments):
        turns.append(1)
        if len(turns) == 2:
            raise torch.OutOfMemoryError("out of memory")
        return whole(self, *arguments)

    monkeypatch.setattr(loops._Turn, "__call__", second_fails)
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(torch.OutOfMemoryError):
        fitted(model, *batch)
    assert all(torch.equal(p, q) and p.grad is None for p, q in zip(model.parameters(), before, strict=True))
    ours = fitted(model, *batch)
    torch.testing.assert_close(ours, classified(model, *batch))


@pytest.mark.usefixtures("in_four")
def test_tiles_that_do_not_fit_are_told_in_terms_of_the_budget():
    model, batch = network()
    with pytest.raises(InfeasibleError, match="tiles: none that was tried fits; 4 of them would need"):
        fit(classified, model, *batch, budget="165KiB", **QUICK)
