"""Random masks of a step in tiles: kept as bits, and the same ones as those of the whole step."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import fx, nn

from lowtide.graph import LOOP, Rect
from lowtide.trace.step.capture import capture
from lowtide.trace.tiles.loop import looped
from lowtide.trace.tiles.masks import pack, packed_box, packed_like, unpack, unpacked_box
from lowtide.trace.tiles.tiling import Tiling
from tests.execute.tiling.tiles import gradients, in_tiles

CLASSES = 8


def evaluated(write, *values):
    graph = fx.Graph()
    graph.output(write(graph, *(graph.placeholder(f"x{k}") for k in range(len(values)))))
    return fx.GraphModule(nn.Module(), graph)(*values)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(64,), (3, 16), (2, 3, 5), (4, 1), (2, 3, 17), (5, 31)])
def test_parts_of_a_packed_mask_are_those_of_the_mask(shape, dtype):
    mask = torch.rand(shape) < 0.5
    for laid_out in (mask, mask.t().contiguous().t() if len(shape) == 2 else mask):
        values = laid_out.to(dtype)
        bits = evaluated(lambda g, x, m=values: pack(g, x, m, numbers=m.dtype is not torch.bool), values)
        like = packed_like(values)
        assert (bits.dtype, bits.shape, bits.stride()) == (torch.uint8, like.shape, like.stride())
        for lo, hi in [(0, shape[-1]), (0, (shape[-1] + 1) // 2), (shape[-1] // 3, shape[-1])]:
            wanted = Rect((*(0 for _ in shape[:-1]), lo), (*shape[:-1], hi))
            box = packed_box(wanted)
            part = bits[box.slices()]
            found = evaluated(lambda g, x, b=box: unpack(g, x, b, shape, dtype), part)
            there = unpacked_box(box, shape)
            assert there.contains(wanted)
            assert found.dtype is dtype
            assert torch.equal(found, values[there.slices()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64])
def test_the_host_draws_the_same_mask_whatever_its_type(dtype):
    for shape in [(7,), (1000,), (40, 33)]:
        torch.manual_seed(1)
        numbers = torch.empty(shape, dtype=dtype).bernoulli_(0.3)
        after = torch.get_rng_state()
        torch.manual_seed(1)
        mask = torch.empty(shape, dtype=torch.bool).bernoulli_(0.3)
        assert torch.equal(numbers.bool(), mask)
        assert torch.equal(after, torch.get_rng_state())


class Dropped(nn.Module):
    """Tokens with dropout in several places, and one mask that is read twice."""

    def __init__(self, width=12):
        super().__init__()
        self.embedding, self.mix = nn.Embedding(CLASSES, width), nn.Linear(width, width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, tokens):
        x = F.dropout(self.embedding(tokens), 0.2)
        x = x + F.dropout(torch.tanh(self.mix(x)), 0.5)
        mask = torch.empty_like(x).bernoulli_(0.7)
        return self.head(x * mask + (1 - mask)).flatten(0, 1)


def loss_of(model, tokens, labels):
    return F.cross_entropy(model(tokens), labels)


@pytest.mark.parametrize("parts", [(2,), (4,), (7,)])
def test_masks_in_tiles_are_those_of_the_whole_step(parts):
    torch._dynamo.reset()
    model = Dropped().double()
    batch = torch.randint(0, CLASSES, (16, 9)), torch.randint(0, CLASSES, (16 * 9,))
    expected = gradients(loss_of, model, batch)
    found = gradients(in_tiles(loss_of, parts), model, batch)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_masks_go_into_tiles_as_bits():
    torch._dynamo.reset()
    model = Dropped()
    batch = torch.randint(0, CLASSES, (16, 9)), torch.randint(0, CLASSES, (16 * 9,))
    joint = capture(loss_of, model, *batch).joint
    tiling = Tiling(joint)
    whole = looped(joint, tiling.boxes((4,)))
    (loop,) = [op for op in whole.graph.ops if op.kind == LOOP]
    given = [whole.graph.tensors[t] for t in loop.inputs]
    elements = 16 * 9 * 12
    assert len(tiling.packed) == 3
    assert sum(one.dtype == "uint8" and one.bytes == elements // 12 * 2 for one in given) == 3
    assert not any(one.bytes >= elements for one in given)
    drawn = [op for op in whole.graph.ops if op.random]
    assert all(whole.graph.tensors[op.outputs[0]].dtype == "bool" for op in drawn)
