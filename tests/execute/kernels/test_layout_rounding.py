"""Rounding of convolutions in two layouts: measured one by one, and what it does to a step."""

import copy
import math
import shutil
import statistics

import pytest
import torch
from torch import nn
from torch._inductor import config

import lowtide
from lowtide.execute.kernels import layout, rounding
from lowtide.execute.kernels.timed_calls import parts_of
from lowtide.trace.eager.layouts import fake_arguments, learned
from lowtide.trace.groups.channels_last import in_channels_last
from lowtide.trace.groups.functions import values_of
from tests.trace.groups.test_channels_last import captured

compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler on a CPU")


def compared(model, *shape, trained=True):
    """The operators of a step in both layouts."""
    x = torch.randn(shape, dtype=next(model.parameters()).dtype).requires_grad_(trained)
    model.requires_grad_(trained)
    module, inputs = captured(lambda x: model(x).mean(), x)
    fakes = fake_arguments(learned().mode(), inputs)
    changed = in_channels_last(module, fakes)
    return parts_of(values_of(module, fakes), values_of(changed, fakes))


def looked_at(parts):
    pairs = ([call for calls in part for call in calls if rounding._is_looked_at(call)] for part in parts)
    return [pair for pair in pairs if pair]


@pytest.mark.parametrize(
    "convolution",
    [
        nn.Conv2d(3, 12, 3),
        nn.Conv2d(3, 12, 3, stride=2, padding=1, bias=False),
        nn.Conv2d(3, 4, 3, padding="same", dilation=2),
        nn.Conv2d(3, 3, 15, padding=7, groups=3),
        nn.ConvTranspose2d(3, 12, 2, stride=2),
        nn.ConvTranspose2d(3, 6, 3, stride=2, padding=1, output_padding=1, groups=3),
    ],
)
def test_what_is_measured_is_the_rounding_of_float32(convolution, monkeypatch):
    """Something that is compared with another part, or another convolution, would be as far as it is large."""
    monkeypatch.setattr(rounding, "_ELEMENTS", 2 * 3 * 20 * 20)  # of three samples two
    (pair,) = looked_at(compared(convolution, 3, 3, 20, 20))
    for found in rounding.distances(*pair):
        wanted = {"weight", "result", "input"} | ({"bias"} if convolution.bias is not None else set())
        assert found.keys() == wanted
        assert all(1e-9 <= one < 2e-6 for one in found.values())


@pytest.mark.parametrize(
    ("dtype", "trained"), [(torch.float32, True), (torch.float32, False), (torch.bfloat16, True)]
)
def test_half_precision_and_inference_are_not_looked_at(dtype, trained):
    parts = compared(nn.Conv2d(3, 4, 3).to(dtype), 1, 3, 8, 8, trained=trained)
    assert parts
    assert bool(looked_at(parts)) is (trained and dtype is torch.float32)


@pytest.mark.parametrize(
    ("old", "new", "close"),
    [
        ({"weight": 2e-6}, {"weight": 1e-6}, False),
        ({"weight": 2e-6}, {"weight": 1.9e-6}, True),
        ({"weight": 1e-6}, {"weight": 2e-6}, True),
        ({"weight": 4e-6, "bias": 2e-7}, {"weight": 4e-6, "bias": 1e-7}, False),  # all of them count
        ({"weight": 2e-7}, {"weight": 1e-7}, False),
        ({"weight": 2e-7, "result": 1e-6}, {"weight": 1e-7, "result": 1e-6}, True),  # it is lost in others
        ({"weight": 1e-7, "result": 2e-6}, {"weight": 1e-7, "result": 1e-6}, False),
    ],
)
def test_distances_of_convolutions_are_put_together(old, new, close, monkeypatch):
    least = {"result": 1e-9, "input": 1e-9}
    monkeypatch.setattr(rounding, "distances", lambda *_: [least | old, least | new])
    assert rounding.as_close(compared(nn.Conv2d(3, 4, 3), 1, 3, 8, 8)) is close


def test_what_cannot_be_measured_is_left_as_it_is(monkeypatch):
    def fail(*_):
        raise RuntimeError("memory ends")

    monkeypatch.setattr(rounding, "distances", fail)
    assert rounding.as_close(compared(nn.Conv2d(3, 4, 3), 1, 3, 8, 8))


def loss_of(model, x, weights):
    return (model(x) * weights).mean()


def furthest(step, model, batches):
    """The distance of the furthest gradient from float64, of each batch."""
    wide, found = copy.deepcopy(model).double(), []
    for batch in batches:
        gradients = []
        for run, one, given in ((step, model, batch), (loss_of, wide, [x.double() for x in batch])):
            one.zero_grad()
            run(one, *given).backward()
            gradients.append([p.grad.double() for p in one.parameters()])
        found.append(max(float((a - b).norm() / b.norm()) for a, b in zip(*gradients, strict=True)))
    return found


@compiler
@pytest.mark.extended
def test_gradients_are_as_close_to_float64_as_those_of_torch_compile(monkeypatch, tmp_path):
    """Even where the user's layout is faster: on one CPU, gradients of this convolution are twice as far so.

    Kernels that Inductor has on disk may be those of other settings.
    """
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    monkeypatch.setattr(layout, "_GAIN", 1.0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(16, 16, 3), nn.ReLU())
    batches = [(torch.randn(1, 16, 64, 64), torch.randn(1, 16, 62, 62)) for _ in range(8)]
    torch._dynamo.reset()
    with config.patch(force_disable_caches=True):
        theirs = furthest(torch.compile(loss_of), model, batches)
        torch._dynamo.reset()
        step = lowtide.fit(loss_of, model, *batches[0], budget="100%", kernels="fused", time_limit=4.0)
        ours = furthest(step, model, batches)
    ratio = statistics.fmean(math.log(a / b) for a, b in zip(ours, theirs, strict=True))
    assert math.exp(ratio) <= 1.3, "eight batches do not tell 1.1 from a little more"
