"""How groups round: half precision between operators as eager PyTorch, every budget alike, none far from float64."""

import copy
import random
import shutil

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import lowtide
from lowtide.errors import CaptureError, InfeasibleError
from lowtide.inductor_internals import compile_kernels
from tests.random_models import random_step
from tests.steps import described

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler on a CPU")
aten = torch.ops.aten


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    described(tmp_path)
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    torch._dynamo.reset()


def compiled(function, *inputs):
    """What the kernels of a function give."""
    mode = FakeTensorMode()
    values = [mode.from_tensor(x) for x in inputs]
    with mode:
        body = make_fx(function)(*values)
    return compile_kernels(body, mode)(list(inputs))


def arithmetic(x, y):
    """Chains of operators that give the same bits wherever their results are rounded alike."""
    product = x * y
    return (
        ((product + x) * y - x * 0.7) * y,
        product / 3 + y,
        (product.float() * y.float()).to(x.dtype) * y + x,
        torch.where(x > 0, product * 0.3, y) * y,
        (x * 1.1).sum(-1, keepdim=True) * y + x,
    )


def transcendental(x, y):
    """Chains of functions whose last bit may differ in float32, and hardly ever in half precision."""
    return (
        F.silu(x * y) * y + x,
        F.gelu(x * y, approximate="tanh") * y,
        aten._softmax(x * 1.1, -1, False) * y,
        aten.silu_backward(x * 1.1, y) + x,
        torch.exp(x * y) / y,
    )


def share(some, others):
    """How many values differ in each pair, as a share."""
    return [float((a != b).float().mean()) for a, b in zip(some, others, strict=True)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_after_every_operator(dtype):
    torch.manual_seed(0)
    x, y = (torch.randn(32, 65).to(dtype) for _ in range(2))
    for function, most in ((arithmetic, 0.0), (transcendental, 0.01)):
        eager = function(x, y)
        wide = [one.to(dtype) for one in function(x.float(), y.float())]
        assert min(share(wide, eager)) > 0.05, "rounding at the end alone is told from rounding in between"
        assert max(share(compiled(function, x, y), eager)) <= most


class Block(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.norm, self.gate, self.up = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        y = self.norm(x)
        return x + F.silu(self.gate(y)) * torch.tanh(self.up(y))


def squared(model, x):
    return model(x).square().mean()


def left(step, model, *batch):
    """Loss and gradients."""
    model.zero_grad(set_to_none=True)
    loss = step(model, *batch)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def test_every_budget_gives_the_same_bits():
    """Groups are those of the step, in float32 and in half precision, however often they run."""

    def loss_of(model, x):
        with torch.autocast("cpu", torch.bfloat16):
            return squared(model, x)

    torch.manual_seed(0)
    model, x = nn.Sequential(*(Block() for _ in range(4))), torch.randn(256, 16)
    found, plans = [], []
    for budget in ("100%", "80%", "70%"):
        torch._dynamo.reset()
        options = {
            "only": "recompute",
            "cost": "estimated",
            "time_limit": 1.0,
            "cache": False,
            "verify": False,
        }
        step = lowtide.fit(loss_of, model, x, budget=budget, kernels="fused", **options)
        plans.append(step.plan)
        found.append(left(step, model, x))
    assert [bool(plan.decisions.recomputed) for plan in plans] == [False, True, True]
    assert plans[2].predicted.peak_bytes < plans[1].predicted.peak_bytes < plans[0].predicted.peak_bytes
    for other in found[1:]:
        assert all(torch.equal(one, two) for one, two in zip(found[0], other, strict=True))


TIMES, LEAST = 2.0, 2
"""Gradients are so many times as far from float64 as eager's at most, or so many roundings of the largest one."""


def as_exact(number):
    """Hold a random step in a random budget against float64; False where that is not possible."""
    draw, step = random.Random(f"rounding {number}"), random_step(number)
    if step.outside or step.dtype is torch.float64:
        return False
    torch.manual_seed(number)
    model, batch = step.build(), [t.detach() for t in step.batch()]
    wide = copy.deepcopy(model).double()
    in_double = [t.double() if t.is_floating_point() else t for t in batch]
    try:
        eager, again = (left(step.loss, copy.deepcopy(model), *batch) for _ in range(2))
        with torch.autocast("cpu", enabled=False):
            exact = left(step.loss, wide, *in_double)
    except RuntimeError:
        return False
    if not all(torch.equal(one, two) for one, two in zip(eager, again, strict=True)):
        return False  # it draws random numbers, other ones in float64
    torch._dynamo.reset()
    options = {"only": "recompute", "time_limit": 0.2, "cache": False, "verify": False}
    budget = draw.choice(["100%", "85%", "70%", "55%"])
    try:
        fitted = lowtide.fit(
            step.loss, copy.deepcopy(model), *batch, budget=budget, kernels="fused", **options
        )
    except InfeasibleError as error:
        torch._dynamo.reset()
        budget = error.smallest_budget
        fitted = lowtide.fit(
            step.loss, copy.deepcopy(model), *batch, budget=budget, kernels="fused", **options
        )
    except CaptureError:
        return False
    got = left(fitted, copy.deepcopy(model), *batch)
    kinds = {one.dtype for one in got} | ({torch.bfloat16} if "autocast" in step.words else set())
    unit = max(torch.finfo(kind).eps for kind in kinds)
    norms = [float(one.norm()) for one in exact]
    for k, (mine, theirs, true) in enumerate(zip(got, eager, exact, strict=True)):
        far, allowed = (float((one.double() - true).norm()) for one in (mine, theirs))
        assert far <= TIMES * allowed + LEAST * unit * max(norms), (
            f"step {number} ({step.words}), {budget}, value {k}: {far:.3g} from float64, eager {allowed:.3g}"
        )
    return True


@pytest.mark.parametrize("number", [28, pytest.param(31, marks=pytest.mark.extended)])
def test_random_steps_are_as_near_to_float64_as_eager(number):
    assert as_exact(number), "it draws no random numbers"
