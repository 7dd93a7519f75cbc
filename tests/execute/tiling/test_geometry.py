"""How a very large image is cut, against the arithmetic of its layers; nothing of that size is allocated."""

import functools
import math

import pytest
import torch

from lowtide import zoo
from lowtide.errors import InfeasibleError
from lowtide.execute.memory.device import Room
from lowtide.execute.tiling.capture_tiles import Cutter
from lowtide.execute.tiling.geometry import geometry
from lowtide.execute.tiling.regions import grids
from lowtide.execute.tiling.search import Search
from lowtide.graph import LOOP
from lowtide.plan.request import PlanRequest
from lowtide.plan.result.plan import Side
from lowtide.trace.step.capture import capture
from lowtide.trace.tiles.loop import looped
from lowtide.trace.tiles.tiling import Tiling

SIZE = 20_480
LAYERS = (
    (3, 64), (64, 64), 2, (64, 128), (128, 128), 2, (128, 256), (256, 256), (256, 256), 2,
    (256, 512), (512, 512), (512, 512), 2, (512, 512), (512, 512), (512, 512), 2,
)  # fmt: skip
"""Of VGG-16: channels before and after each convolution, and the pools."""


@functools.cache
def tiling(size=SIZE):
    torch._dynamo.reset()
    built = zoo.build("vgg16body")
    image = torch.zeros(1).expand(1, 3, size, size)
    labels = torch.zeros(1, dtype=torch.int64).expand(1, size // 32, size // 32)
    return Tiling(capture(built.loss, built.model, image, labels).joint)


def along(lo, hi):
    """Lengths of what each layer makes for these places of the last map, from the last layer to the first."""
    size = SIZE // 32
    for layer in reversed(LAYERS):
        yield hi - lo
        if layer == 2:
            lo, hi, size = 2 * lo, 2 * hi, 2 * size
        else:
            lo, hi = max(0, lo - 1), min(size, hi + 1)
    yield hi - lo


def computed(box):
    """Elements of convolutions, ReLUs, pools and their indices; those of the largest; pixels read."""
    heights, widths = (list(along(lo, hi)) for lo, hi in list(box)[1:])
    channels, made = 512, []
    for layer, high, wide in zip(reversed(LAYERS), heights, widths, strict=False):
        channels = layer[1] if layer != 2 else channels
        made.append(channels * high * wide)
        channels = layer[0] if layer != 2 else channels
    return 2 * sum(made), max(made), heights[-1] * widths[-1]


def test_the_overlap_is_that_of_the_layers():
    boxes = tiling().boxes((1, 4, 4))
    assert len(boxes) == 16
    found = geometry(tiling(), boxes)
    whole = computed(tiling().boxes((1, 1, 1))[0])
    made, largest, read = zip(*(computed(box) for box in boxes), strict=True)
    assert whole[2] == SIZE**2
    assert found.overlap == pytest.approx(sum(made) / whole[0], rel=1e-4)
    assert found.read == pytest.approx(sum(read) / whole[2], rel=1e-4)
    assert found.elements == max(largest)


def test_grids_of_an_image_are_of_squares():
    """One image: its batch cannot be cut, and long images have more parts along their length."""
    whole = tiling()
    assert list(grids(whole))[:4] == [(1, 2, 2), (1, 3, 3), (1, 4, 4), (1, 6, 6)]
    whole.axes = (1, 100, 640)
    try:
        assert list(grids(whole))[:4] == [(1, 1, 2), (1, 1, 3), (1, 1, 4), (1, 1, 6)]
        assert list(grids(whole))[6] == (1, 3, 16)
    finally:
        whole.axes = (1, 640, 640)


@pytest.mark.parametrize(("parts", "sizes"), [(4, [2, 2, 1]), (2, [3, 2]), (5, [1] * 5), (9, [1] * 5)])
def test_tiles_have_one_size_but_the_last(parts, sizes):
    whole = tiling()
    whole.axes, axes = (1, 5, 5), whole.axes
    try:
        boxes = whole.boxes((1, parts))
    finally:
        whole.axes = axes
    assert [box.shape[1] for box in boxes] == sizes
    assert math.prod(boxes[0].shape) == 5 * sizes[0]


def test_a_grid_has_nine_bodies_at_most():
    torch._dynamo.reset()
    built = zoo.build("convpool:size=56")
    joint = capture(built.loss, built.model, *built.batch).joint
    boxes = Tiling(joint).boxes((1, 1, 4, 6))  # 14 places: 4, 4, 4, 2 by 3, 3, 3, 3, 2
    whole = looped(joint, boxes)
    region = next(
        call.target for op, call in zip(whole.graph.ops, whole.calls, strict=True) if op.kind == LOOP
    )
    assert len(region.tiles) == 20
    assert len(region.bodies) == 9


def test_no_tile_has_a_tensor_beyond_32_bits(monkeypatch):
    """In four or nine tiles the first maps have 7 and 3.2 billion elements, which fit into this budget."""
    tried = []

    def planned(self, tiling, boxes, beside):
        tried.append(len(boxes))
        raise InfeasibleError("", budget=1, smallest_budget=2, floor=0)

    monkeypatch.setattr(Search, "_planned", planned)
    whole = tiling()
    asked = Room(()), PlanRequest.of("1TB")
    cutter = Cutter(whole.joint, (), *asked)
    search = Search(whole.joint, cutter, *asked, 10**12, Side(10**12, 1.0))
    search.attempts(whole, grids(whole))
    assert tried[0] == 16
