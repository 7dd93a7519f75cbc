"""Gradients are added up over tiles: products of half precision without a rounding of each part."""

import copy
import math
import statistics

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from lowtide import zoo
from lowtide.execute.kernels import compile_groups
from lowtide.graph import ACCUMULATE
from lowtide.trace.tiles import accumulate as accumulating
from tests.execute.tiling.tiles import in_tiles

CUDA = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    ],
)


@pytest.fixture
def one_by_one(monkeypatch):
    """Groups run operator by operator: nothing is compiled."""

    def refused(*_):
        raise NotImplementedError("not here")

    torch._dynamo.reset()
    monkeypatch.setattr(compile_groups, "compile_kernels", refused)
    monkeypatch.setattr(compile_groups, "_warn", lambda label, why: None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("turned", [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("block", [(1024, 256), (7, 3)])
@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_a_product_is_added_in_float32(dtype, turned, block, device, monkeypatch):
    """Also where factors are converted block by block, and by CUDA's kernel, which converts none."""
    monkeypatch.setattr(accumulating, "_ROWS", block[0])
    monkeypatch.setattr(accumulating, "_DEPTH", block[1])
    torch.manual_seed(0)
    left, right = (torch.randn(shape).to(device, dtype) for shape in ((20, 10), (10, 6)))
    left = left.t().contiguous().t() if turned[0] else left
    right = right.t().contiguous().t() if turned[1] else right
    into = torch.randn(20, 6).to(device)
    exact = into.double() + left.double() @ right.double()
    torch.ops.lowtide.accumulate.product(into, left, right)
    assert float((into - exact).abs().max()) < 1e-5, "half precision would give 1e-2"


class Net(nn.Module):
    def __init__(self, *, turned):
        super().__init__()
        self.turned, self.weight = turned, nn.Parameter(torch.randn(*((12, 16) if turned else (16, 12))))
        self.bias, self.scale = nn.Parameter(torch.randn(12)), nn.Parameter(torch.randn(16))

    def forward(self, x):
        x = x * self.scale
        return F.linear(x, self.weight, self.bias) if self.turned else x @ self.weight + self.bias


def loss_of(model, x, labels):
    return F.cross_entropy(model(x), labels)


def left(step, model, *batch):
    model.zero_grad()
    step(model, *batch).backward()
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("turned", [True, False])
def test_gradients_of_tiles_are_rounded_once(turned, fused, one_by_one):
    """Where operators are fused: those of a weight, which are products, and sums over rows."""
    torch.manual_seed(0)
    model, x = Net(turned=turned).bfloat16(), torch.randn(64, 16).bfloat16()
    labels = torch.randint(0, 12, (64,))
    exact = left(loss_of, copy.deepcopy(model).double(), x.double(), labels)
    whole = left(loss_of, model, x, labels)
    seen = []
    got = left(in_tiles(loss_of, (16,), seen=seen, fused=fused), model, x, labels)
    added = [op for op in seen[0].bodies[0].graph.ops if op.kind == ACCUMULATE]
    assert len(added) == 3
    assert [op.overload for op in added].count("product") == (1 if fused else 0)
    far = [[float((g.double() - e).norm()) for g, e in zip(one, exact, strict=True)] for one in (got, whole)]
    names = [name for name, _ in model.named_parameters()]
    for name, mine, theirs in zip(names, *far, strict=True):
        assert (mine <= 1.1 * theirs) or not fused, name
    assert fused or far[0][0] > 1.5 * far[1][0], "sums that are rounded tile by tile are further away"


@pytest.mark.parametrize("fused", [True, False])
def test_small_gradients_are_added_up_in_float64(fused, one_by_one):
    """As tensors of the tile's step, whose memory is counted like that of others."""
    torch.manual_seed(0)
    model, x, labels = nn.Linear(16, 300), torch.randn(64, 16), torch.randint(0, 300, (64,))
    seen = []
    got = left(in_tiles(loss_of, (16,), seen=seen, fused=fused), model, x, labels)
    assert [one.dtype for one in got] == [torch.float32] * 2
    sums = [t for t in seen[0].bodies[0].graph.tensors if t.label.startswith("gradient of")]
    assert sorted(t.bytes for t in sums) == sorted([4 * 16 * 300, (8 if fused else 4) * 300])


def test_many_tiles_are_as_close_to_float64_as_the_whole(one_by_one):
    """Sums of sixteen parts: float32 would be 1.2 times as far as the whole."""
    ratios = []
    step = in_tiles(zoo.build("convpool").loss, (1, 1, 4, 4), fused=True)
    for seed in range(16):
        built = zoo.build("convpool", seed=seed)
        wide = copy.deepcopy(built.model).double()
        exact = left(built.loss, wide, *(x.double() for x in built.batch))
        far = [
            max(float((g.double() - e).norm() / e.norm()) for g, e in zip(found, exact, strict=True))
            for found in (left(one, built.model, *built.batch) for one in (step, built.loss))
        ]
        ratios.append(math.log(far[0] / far[1]))
    assert math.exp(statistics.fmean(ratios)) <= 1.1
