"""Networks of the zoo in tiles: loss and gradients are those of the whole step.

In float64 to 1e-10, in float32 no further from float64 than a few times what eager is, for every network that
can be cut.
"""

import functools
from unittest.mock import patch

import pytest
import torch
from torch import nn

import lowtide
from lowtide import zoo
from lowtide.execute.tiling.regions import endings
from lowtide.plan.program.instructions import Loop
from lowtide.trace.tiles.tiling import Tiling
from lowtide.zoo import vgg
from tests.execute.tiling.tiles import assert_as_exact, gradients, in_tiles

CONVPOOL = "convpool:batch=3,size=22,channels=2"
UNET = "unet:base=1,batch=2,size=188"
ALEXNET = "alexnet:batch=2,size=91"
VGG = "vgg19:batch=3,size=32,classes=10"
BODY = "vgg16body:width=1,size=100"
GPT2 = "gpt2:batch=3,layers=1,width=16,heads=2,length=5,vocab=256"
DROPPING = f"{GPT2},dropout=20"

SCALES = (1.0, 1024.0, 1024.0, 3.0)
"""Of the loss in step after step: as expected, higher, as expected again, lower."""


class Narrow(nn.Linear):
    def __init__(self, inputs, outputs):
        super().__init__(min(inputs, 16), min(outputs, 16))


@functools.cache
def built(address, dtype):
    """The network and its batch; VGG-19 with few channels."""
    stages = tuple((4, count) for _, count in vgg.STAGES)
    if address.startswith("vgg19"):
        with patch.object(vgg, "STAGES", stages), patch.object(vgg.nn, "Linear", Narrow):
            made = zoo.build(address)
    else:
        made = zoo.build(address)
    batch = tuple(x.to(dtype) if x.is_floating_point() else x for x in made.batch)
    return made.model.to(dtype), batch, made.loss


def trained(function, model, batch, scales=SCALES):
    """Loss and gradients of a few steps, each from the parameters that the one before has left."""
    before = [p.detach().clone() for p in model.parameters()]
    found = []
    for seed, scale in enumerate(scales):
        loss, got = gradients(function, model, batch, scale=scale, seed=seed)
        found.append((loss, *got))
        with torch.no_grad():
            for p, gradient in zip(model.parameters(), got, strict=True):
                p.sub_(gradient / scale, alpha=1e-3)
    with torch.no_grad():
        for p, value in zip(model.parameters(), before, strict=True):
            p.copy_(value)
    return found


@functools.cache
def whole(address, dtype, scales):
    model, batch, loss = built(address, dtype)
    return trained(loss, model, batch, scales)


def ending(joint):
    """Where a loop over the ending of the step begins."""
    found = endings(Tiling(joint))
    assert len(found) == 1
    return found


def everything(joint):
    return ()


def largest(want, got):
    """The largest difference, over the largest element of the tensor that it is in."""
    pairs = zip(want, got, strict=True)
    return max(float((a - b).abs().max() / a.abs().max().clamp(min=1e-30)) for a, b in pairs)


def compared(address, parts, cut, dtype, scales=SCALES):
    torch._dynamo.reset()
    model, batch, loss = built(address, dtype)
    programs = []
    tiled = trained(in_tiles(loss, parts, cut, programs), model, batch, scales)
    assert len(programs) == 1
    differences = [largest(a, b) for a, b in zip(whole(address, dtype, scales), tiled, strict=True)]
    return differences, programs[0]


CASES = [
    (CONVPOOL, (2, 1, 1, 1), everything, 2),
    (CONVPOOL, (1, 1, 4, 4), everything, 9),
    (CONVPOOL, (2, 2, 3, 2), everything, 24),
    (UNET, (1, 2, 2), everything, 4),
    (UNET, (2, 1, 3), everything, 4),
    (ALEXNET, (2, 2, 1, 2), everything, 8),
    (VGG, (2,), everything, 2),
    (BODY, (1, 1, 3), everything, 3),
    (GPT2, (3,), everything, 3),
    (GPT2, (4,), ending, 4),
    (DROPPING, (2,), everything, 2),
    (DROPPING, (4,), ending, 4),
]


def words(value):
    return value.__name__ if callable(value) else None


@pytest.mark.parametrize(("address", "parts", "cut", "tiles"), CASES, ids=words)
def test_steps_in_tiles_are_those_of_the_whole(address, parts, cut, tiles):
    differences, program = compared(address, parts, cut, torch.float64)
    (loop,) = [line for line in program.forward if hasattr(line, "tiles")]
    assert len(loop.tiles) == tiles
    assert bool(loop.cut) == (cut is ending)
    assert max(differences) < 1e-10


SINGLE = [
    (*case[:3],)
    for case in CASES
    if case[0] not in (GPT2, ALEXNET, VGG) and case[1] not in ((2, 1, 1, 1), (2, 2, 3, 2), (2, 1, 3))
]


@pytest.mark.parametrize(("address", "parts", "cut"), SINGLE, ids=words)
def test_steps_in_single_precision(address, parts, cut):
    """Of one step: later ones may have another element in a maximum, where last digits differ."""
    torch._dynamo.reset()
    model, batch, loss = built(address, torch.float32)
    (tiled,) = trained(in_tiles(loss, parts, cut), model, batch, SCALES[:1])
    (eager,), (exact,) = (whole(address, dtype, SCALES[:1]) for dtype in (torch.float32, torch.float64))
    assert_as_exact(tiled, eager, exact)


def test_masks_of_dropout_differ_from_step_to_step():
    """Otherwise the comparisons with dropout would say nothing about it."""
    model, batch, loss = built(DROPPING, torch.float64)
    first, second = (gradients(loss, model, batch, seed=seed)[0] for seed in (0, 1))
    assert float(abs(first - second)) > 1e-6


class Skipping(nn.Module):
    """Convolutions, one of them transposed and one in groups, a pool and a skip."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.down = nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2)
        self.up = nn.ConvTranspose2d(6, 4, 2, stride=2)
        self.last = nn.Conv2d(8, 2, 1)

    def forward(self, x):
        x = self.first(x).relu()
        below = nn.functional.max_pool2d(self.down(x), 3, 1, 1)
        return self.last(torch.cat([x, self.up(below)], 1)).flatten(2).square().mean()


@pytest.mark.parametrize("parts", [(2, 1, 1), (1, 1, 2)])
def test_images_may_lie_with_channels_last_inside_tiles(parts):
    torch.manual_seed(0)
    model, x = Skipping().double(), torch.randn(3, 3, 12, 12, dtype=torch.float64)
    seen = []

    def function(model, x):
        return model(x)

    loss, wanted = gradients(function, model, (x,))
    tiled = in_tiles(function, parts, seen=seen, channels_last=True)
    ours, got = gradients(tiled, model, (x,))
    assert abs(ours - loss) <= 1e-12
    assert all(torch.allclose(a, b, rtol=1e-10, atol=1e-12) for a, b in zip(wanted, got, strict=True))
    body = seen[0].bodies[0].graph
    assert next(op.strides for op in body.ops if op.kind == "aten.relu")[0][1] == 1


def test_what_is_written_over_without_gradients_has_them_still():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Conv2d(16, 3, 3, padding=1)).double()
    batch = torch.randn(1, 3, 48, 48).double(), torch.randn(1, 3, 48, 48).double()

    def loss_of(model, x, wanted):
        y = model(x)
        with torch.no_grad():
            y.clamp_(min=-0.5)
        return 1 - nn.functional.cosine_similarity(y, wanted, dim=1).mean()

    options = {"budget": "25%", "only": "recompute,tile", "cost": "estimated", "time_limit": 2.0}
    step = lowtide.fit(loss_of, model, *batch, **options)
    assert any(isinstance(line, Loop) for line in step.plan.program.instructions)
    step(model, *batch).backward()
    found = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    loss_of(model, *batch).backward()
    for one, parameter in zip(found, model.parameters(), strict=True):
        assert torch.allclose(one, parameter.grad, rtol=1e-10, atol=1e-16)
