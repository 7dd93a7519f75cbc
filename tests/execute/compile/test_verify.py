"""The first planned step is compared with eager, and what is said where they differ."""

import shutil

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.device_internals import tf32_in_convolutions, tf32_in_products
from lowtide.errors import RunError
from lowtide.execute.compile import verify
from lowtide.execute.compile.bits import same_bits
from lowtide.execute.compile.verify import Verification, in_tf32
from lowtide.execute.kernels import ways
from lowtide.execute.kernels.layout import in_layout
from lowtide.execute.runtime import launch


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    torch._dynamo.reset()


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def loss_of(model, x):
    return model(x).square().mean()


def fitted(**options):
    torch.manual_seed(0)
    model, x = Pair(), torch.randn(6, 8)
    options = {"budget": "100%", "cost": "estimated", "time_limit": 0.2, "cache": False, **options}
    return lowtide.fit(loss_of, model, x, **options)


def scale_tanh_backward(monkeypatch, by):
    """Let the executor run one operator of backward wrongly."""
    call_of = launch._call

    def wrong_call_of(line):
        call = call_of(line)

        def wrong(frame):
            call(frame)
            for t in line.outputs:
                frame.table[t].mul_(by)

        return wrong if line.function is torch.ops.aten.tanh_backward.default else call

    monkeypatch.setattr(launch, "_call", wrong_call_of)


@pytest.fixture
def wrong_tanh(monkeypatch):
    """An executor that runs one operator of backward wrongly, by very little."""
    scale_tanh_backward(monkeypatch, 1 + 2**-20)


def test_a_difference_names_the_parameter_its_module_and_what_to_report(wrong_tanh):
    with pytest.raises(RunError) as refused:
        fitted()
    said = str(refused.value)
    assert "the gradient of 'first." in said
    assert "of module 'first'" in said
    assert f"please report it with torch {torch.__version__}, the model and the plan" in said
    assert "without tiles" in said


@pytest.mark.parametrize("by", [1 + 2**-22, 1 + 2**-10])
def test_where_eager_differs_from_itself_any_value_may_differ_by_rounding(monkeypatch, by):
    """A few runs do not show every value that a kernel with atomic additions can reach."""

    def spread(self, eager, changed, near):
        yield [1e-9, *(0.0 for _ in list(verify._values(eager))[1:])]

    monkeypatch.setattr(Verification, "_spread", spread)
    scale_tanh_backward(monkeypatch, by)
    if by < 1.0001:
        fitted()
        return
    with pytest.raises(RunError, match="would be rounding"):
        fitted()


def test_eager_runs_again_until_rounding_explains_what_differs(monkeypatch):
    """Each run takes a step: one is enough where it tells as much as eight."""
    runs = []

    def spread(self, eager, changed, near):
        for by in (0.0, 1e-9, 1e-9):
            runs.append(by)
            yield [by, *(0.0 for _ in list(verify._values(eager))[1:])]

    monkeypatch.setattr(Verification, "_spread", spread)
    scale_tanh_backward(monkeypatch, 1 + 2**-22)
    fitted()
    assert runs == [0.0, 1e-9]


def test_values_are_compared_part_by_part(monkeypatch):
    monkeypatch.setattr(verify, "_PART", 4)
    cpu, one = torch.device("cpu"), torch.arange(30.0).view(6, 5).t()
    other = one.clone()
    other[4, 5] += 0.5
    assert verify._apart(one, other, cpu) == 0.5
    assert verify._size(one, cpu) == 29
    other[0, 0] = torch.nan
    assert verify._apart(one, other, cpu) == float("inf")
    assert verify._size(other, cpu) == 29.5
    assert verify._apart(None, one, cpu) == 29
    assert verify._apart(other, None, cpu) == float("inf"), "no gradient is not one of NaN"
    changed = verify._changed(one, {}, 2.0**-10)
    assert changed.stride() == one.stride()
    relative = (changed / one)[one != 0]
    assert {round(2**10 * (float(x) - 1)) for x in relative} == {-1, 0, 1}
    empty = torch.zeros(0, 3)
    assert (verify._apart(empty, empty, cpu), verify._size(empty, cpu)) == (0.0, 0.0)


def test_it_is_the_default_and_can_be_left_out(monkeypatch):
    compared = []
    monkeypatch.setattr(Verification, "compare", lambda self, planned, near: compared.append(self.plan))
    fitted(verify=False)
    assert not compared
    found = fitted()
    assert compared == [found.plan]


def test_it_is_left_out_where_the_plain_step_does_not_fit_the_device(wrong_tanh, monkeypatch):
    monkeypatch.setattr("lowtide.execute.memory.device.Room.free_bytes", lambda self: 900)
    found = fitted(budget="2KiB")
    assert found.plan.plain.peak_bytes > 900


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), ValueError("other")])
def test_it_is_left_out_where_eager_runs_out_of_memory(wrong_tanh, monkeypatch, error):
    def fails(self, arguments, *, near=False):
        raise error

    monkeypatch.setattr(Verification, "_eager", fails)
    if isinstance(error, ValueError):
        with pytest.raises(lowtide.LowtideError, match="ValueError: other"):
            fitted()
    else:
        with pytest.warns(UserWarning, match="not compared with eager PyTorch, which ran out of memory"):
            assert fitted().plan is not None


def test_nothing_of_the_model_or_the_random_state_moves():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x = torch.randn(6, 8)
    state = torch.get_rng_state()
    lowtide.fit(loss_of, model, x, budget="100%", cost="estimated", time_limit=0.2, cache=False)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.key, self.value = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        weights = torch.softmax(x @ self.key(x).transpose(1, 2) / 3, -1)
        return weights @ self.value(x)


def test_a_gradient_that_is_zero_in_exact_arithmetic_may_be_any_rounding_in_tiles():
    """That of the bias of keys: softmax gives the same whatever is added to all of a row."""
    torch.manual_seed(0)
    model, x = Attention(), torch.randn(16, 24, 8)
    options = {"only": "recompute,tile", "cost": "estimated", "time_limit": 1.0, "cache": False}
    found = lowtide.fit(lambda m, x: F.mse_loss(m(x), x), model, x, budget="45%", **options)
    assert found.plan.decisions.tiles
    loss = found(model, x)
    loss.backward()
    assert float(model.key.bias.grad.abs().max()) < 1e-6, "zero, but for rounding"


class Rows(nn.Module):
    """Rows that are cut apart."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8))

    def forward(self, x):
        return self.layers(x)


@pytest.mark.parametrize("wrong", [False, True])
def test_tiles_may_be_as_far_from_float64_as_eager_is(monkeypatch, wrong):
    """A long sum of eager's may round more than changed arguments show; what is wrong is further away."""
    monkeypatch.setattr(Verification, "_spread", lambda self, eager, **_: [[0.0] * 99])
    monkeypatch.setattr(verify, "_ROUNDINGS", 0)
    if wrong:
        scale_tanh_backward(monkeypatch, 1 + 2**-10)
    torch.manual_seed(0)
    model, x = Rows(), torch.randn(256, 8)
    options = {"only": "recompute,tile", "cost": "estimated", "time_limit": 1.0, "cache": False}
    if wrong:
        with pytest.raises(RunError, match="differs by"):
            lowtide.fit(loss_of, model, x, budget="40%", **options)
    else:
        assert lowtide.fit(loss_of, model, x, budget="40%", **options).plan.decisions.tiles


def test_a_target_that_may_not_be_changed_stays_as_it_is():
    """The loss takes probabilities alone, and one of them is 1 already."""
    torch.manual_seed(0)
    model, x, target = Rows(), torch.randn(256, 8), torch.ones(256, 8)

    def loss(model, x, target):
        return F.binary_cross_entropy(torch.sigmoid(model(x)), target)

    options = {"only": "recompute,tile", "cost": "estimated", "time_limit": 1.0, "cache": False}
    assert lowtide.fit(loss, model, x, target, budget="60%", **options).plan.decisions.tiles


def test_a_checkpoint_with_dropout_is_compared_with_what_eager_gives():
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5), nn.Tanh(), nn.Linear(64, 8)),
        torch.randn(64, 8),
    )

    def loss(model, x):
        return checkpoint(lambda y: checkpoint(model, y, use_reentrant=False), x, use_reentrant=False).sum()

    found = []
    for step in (loss, lowtide.fit(loss, model, x, budget="100%", time_limit=0.3, cache=False)):
        model.zero_grad()
        torch.manual_seed(1)
        step(model, x).backward()
        found.append([p.grad.clone() for p in model.parameters()])
    assert all(same_bits(one, other) for one, other in zip(*found, strict=True))


class Unrolled(nn.Module):
    """The gates of a cell are parts of a tensor, and are computed in place."""

    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(48, 48)

    def forward(self, x):
        state = torch.zeros_like(x[0])
        for one in x:
            state = self.cell(one, state)
        return state.square().mean()


def test_a_cell_is_not_refused_for_its_last_bits():
    torch.manual_seed(0)
    model, x = Unrolled(), torch.randn(3, 64, 48)
    step = lowtide.fit(model, x, budget="100%", time_limit=0.2, cache=False)
    step(x).backward()
    found = [p.grad for p in model.parameters()]
    model.zero_grad()
    model(x).backward()
    for one, p in zip(found, model.parameters(), strict=True):
        assert torch.allclose(one, p.grad, rtol=0, atol=1e-6 * float(p.grad.abs().max()))


def test_convolutions_and_products_may_round_to_tf32(monkeypatch):
    kinds = ["aten.relu", "aten.convolution_backward"]
    for convolutions, products in ((True, False), (False, True), (False, False)):
        monkeypatch.setattr(verify, "tf32_in_convolutions", lambda: convolutions)  # noqa: B023
        monkeypatch.setattr(verify, "tf32_in_products", lambda: products)  # noqa: B023
        assert in_tf32(kinds) == convolutions
        assert in_tf32(["aten.addmm"]) == products
        assert not in_tf32(["aten.relu"])


def test_the_settings_of_pytorch_are_read():
    assert tf32_in_convolutions() == torch.backends.cudnn.allow_tf32
    assert tf32_in_products() == torch.backends.cuda.matmul.allow_tf32


@pytest.mark.parametrize("near", [False, True])
def test_what_a_step_leaves_is_compared_wherever_it_is_kept(monkeypatch, near):
    """On a device with room, nothing is copied to the host."""
    seen, stepped = [], verify.stepped

    def watched(*args, **keywords):
        seen.append(keywords["near"])
        return stepped(*args, **keywords)

    monkeypatch.setattr(Verification, "near", near)
    monkeypatch.setattr(verify, "stepped", watched)
    fitted()
    assert seen == [near]


@pytest.mark.parametrize("near", [False, True])
def test_what_is_wrong_is_found_wherever_it_is_kept(monkeypatch, near, wrong_tanh):
    monkeypatch.setattr(Verification, "near", near)
    with pytest.raises(RunError, match="differs by"):
        fitted()


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler on a CPU")
def test_images_with_channels_last_may_be_rounded_otherwise_where_no_kernel_is_fused(monkeypatch):
    def channels_last(module, arguments, layouts, _):
        return in_layout(module, arguments, layouts, channels_last=True)

    monkeypatch.setattr(ways, "in_faster_layout", channels_last)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 24, 3), nn.ReLU(), nn.Conv2d(24, 24, 3), nn.ReLU(), nn.Conv2d(24, 5, 1)
    )
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        step = lowtide.fit(
            lambda model, x: model(x), model, x, budget="1GiB", kernels="fused", time_limit=0.5
        )
        torch.testing.assert_close(step(model, x), model(x))
    assert not any(op.body is not None for op in step.plan.graph.ops)
    assert any(op.kind == "aten.clone" for op in step.plan.graph.ops)
