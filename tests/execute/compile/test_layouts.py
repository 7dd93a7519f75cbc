"""Steps whose tensors lie otherwise in memory than usual: every result is still that of eager, bit for bit.

Torch's tracing does not know how some kernels lay their results out. What it says is held against what really
comes out, and the step is captured again where the two differ.
"""

import copy

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils import _pytree as pytree

import lowtide
from lowtide.errors import InfeasibleError
from lowtide.execute.backend import compile_with
from lowtide.execute.compile.bits import same_bits
from lowtide.plan.program.simple import recompute_all, store_all
from lowtide.trace.eager.dynamo import lowtides
from tests.execute.modules import CASES, Case, objective, once
from tests.execute.runtime.test_exactness import differences, run

pytestmark = pytest.mark.usefixtures("fresh")


def transposed(tensor):
    """The same values, the last two axes swapped in memory."""
    return tensor.transpose(-1, -2).contiguous().transpose(-1, -2) if tensor.dim() > 1 else tensor


def permuted(tensor):
    """The same values, all axes in the opposite order in memory."""
    order = tuple(reversed(range(tensor.dim())))
    return tensor.permute(order).contiguous().permute(order)


def channels_last(tensor):
    """The same values, the second axis last in memory."""
    return tensor.movedim(1, -1).contiguous().movedim(-1, 1) if tensor.dim() > 2 else tensor


ALIASED = "inputs on one storage, changed in place"
"""Their layout is what the case is about."""
LAYOUTS = (transposed, permuted, channels_last)


def laid_out(case, how):
    """The case with every input in another layout, and its loss inside of the step.

    From outside a gradient comes in the layout of the result, whatever that of eager's would be.
    """

    def change(tensor):
        if tensor.layout is not torch.strided:
            return tensor
        return how(tensor.detach()).requires_grad_(tensor.requires_grad)

    def batch():
        return pytree.tree_map_only(torch.Tensor, change, case.batch())

    def forward(model, *inputs):
        return objective(case.forward(model, *inputs))

    def drive(step, model, inputs):
        loss = step(model, *inputs)
        yield loss
        if loss is not None:
            loss.backward()

    return Case(case.build, batch, forward, drive, case.whole)


def strides(model, case):
    """How the step's inputs and parameters lie in memory."""
    torch.manual_seed(0)
    tensors = (t for t in [*pytree.tree_leaves(case.batch()), *model.parameters()] if torch.is_tensor(t))
    return [t.stride() if t.layout is torch.strided else None for t in tensors]


@pytest.mark.parametrize(
    "name", [name for name, one in CASES.items() if one.drive is once and name != ALIASED]
)
def test_inputs_may_lie_in_memory_as_they_like(name):
    """In each of the layouts.

    One that is that of another, as for tensors of two axes, is not run again; nor is the usual one, in which
    test_exactness.py runs every case.
    """
    torch.manual_seed(7)
    known, refused = [strides(CASES[name].build(), CASES[name])], []
    for how in LAYOUTS:
        torch._dynamo.reset()
        case = laid_out(CASES[name], how)
        torch.manual_seed(7)
        model = case.build()
        if how is channels_last:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.data = channels_last(parameter.data)
        if (lies := strides(model, case)) in known:
            continue
        known.append(lies)
        try:
            expected = run(case, model, case.forward, steps=1)
        except RuntimeError as error:
            refused.append(error)
            continue
        backend = lowtides(lambda m, i: compile_with(m, i, recompute_all))
        compiled = torch.compile(case.forward, backend=backend, fullgraph=case.whole)
        assert not list(differences(expected, run(case, model, compiled, steps=1))), how.__name__
    if len(known) == 1:
        pytest.skip("its tensors lie in memory in one way only")
    if len(refused) == len(known) - 1:
        pytest.skip(f"eager PyTorch refuses it: {refused}")


class Normed(nn.Module):
    """The backward of GroupNorm gets a gradient that is not contiguous, which tracing takes for contiguous."""

    def __init__(self):
        super().__init__()
        self.group, self.layer = nn.GroupNorm(1, 4), nn.LayerNorm(4)

    def forward(self, x):
        return self.layer(self.group(x).movedim(1, -1)).movedim(-1, 1)


class Turned(nn.Module):
    """What a linear layer gives along another axis."""

    def __init__(self, behind=lambda x: x):
        super().__init__()
        self.linear, self.behind = nn.Linear(2, 4), behind

    def forward(self, x):
        return self.behind(self.linear(x.transpose(1, 2)).transpose(1, 2))


STEPS = {
    "GroupNorm behind LayerNorm over channels": (
        lambda: Normed().double(),
        lambda: (torch.randn(2, 4, 8, dtype=torch.float64),),
        lambda m, x: (m(x) * torch.linspace(0, 1, 64, dtype=torch.float64).view(2, 4, 8)).sum(),
    ),
    "mse_loss of a transposed result": (
        Turned,
        lambda: (torch.randn(2, 2, 8), torch.randn(2, 4, 8)),
        lambda m, x, y: F.mse_loss(m(x), y),
    ),
    "huber_loss of a transposed result": (
        Turned,
        lambda: (torch.randn(2, 2, 8), torch.randn(2, 4, 8)),
        lambda m, x, y: F.huber_loss(m(x), y),
    ),
    "dropout behind rrelu of a transposed result": (
        lambda: Turned(lambda x: F.dropout(F.rrelu(x, training=True), 0.5)),
        lambda: (torch.randn(2, 2, 8),),
        lambda m, x: m(x).square().mean(),
    ),
    "maximum of a transposed result, broadcast": (
        lambda: Turned(lambda x: torch.maximum(x, x.mean(0).detach())),
        lambda: (torch.randn(2, 2, 8),),
        lambda m, x: m(x).square().mean(),
    ),
}


def left_behind(step, model, batch):
    model.zero_grad()
    torch.manual_seed(3)
    loss = step(model, *batch)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters()), torch.get_rng_state()]


@pytest.mark.parametrize("name", STEPS)
def test_results_that_tracing_does_not_know(name):
    """In the smallest budget, where as much as possible is made again."""
    build, batch, loss = STEPS[name]
    torch.manual_seed(0)
    model, batch = build(), batch()
    options = {"only": "recompute", "time_limit": 0.2}
    with pytest.raises(InfeasibleError) as refused:
        lowtide.fit(loss, model, *batch, budget=1, **options)
    expected = left_behind(loss, model, batch)
    step = lowtide.fit(loss, model, *batch, budget=refused.value.smallest_budget, **options)
    assert all(same_bits(a, b) for a, b in zip(expected, left_behind(step, model, batch), strict=True))


IN_PLACE = {
    "mul_ by a number in half precision": lambda x: (x + 1).bfloat16().mul_(0.7).float(),
    "addcmul_": lambda x: (x * 1.1).addcmul_(x, x, value=0.1),
    "addcdiv_": lambda x: (x * 1.1).addcdiv_(x, x.abs() + 1, value=0.1),
    "addcdiv": lambda x: torch.addcdiv(x * 1.1, x, x.abs() + 1, value=0.1),
    "masked_fill_ of a transposed tensor": lambda x: (x * 2).t().masked_fill_(x.t() > 0, 0.5).sum(0),
    "into a part": lambda x: (x * 2).index_fill_(0, torch.tensor([1]), 3.0)[:, 1:].mul_(2).sum(0),
    "label smoothing in half precision": lambda x: F.cross_entropy(
        x.bfloat16(), torch.zeros(len(x), dtype=torch.long), label_smoothing=0.1
    ).float(),
    "std in half precision": lambda x: x.bfloat16().std(1).float(),
    "a product that is scaled, in half precision": lambda x: torch.baddbmm(
        x.bfloat16().view(2, 4, 10),
        x.bfloat16().view(2, 4, 10) @ x.bfloat16().view(2, 10, 4),
        x.bfloat16().view(2, 4, 10),
        beta=0.3,
        alpha=0.7,
    ).float(),
}


@pytest.mark.parametrize("planner", [store_all, recompute_all], ids=lambda p: p.__name__)
@pytest.mark.parametrize("name", IN_PLACE)
def test_operators_in_place_round_as_they_do_in_eager(name, planner):
    function = IN_PLACE[name]

    def loss(x):
        return function(x).square().sum()

    torch.manual_seed(0)
    x = torch.randn(2, 40) if "product" in name else torch.randn(8, 8)
    expected, got = [], []
    backend = lowtides(lambda m, i: compile_with(m, i, planner))
    compiled = torch.compile(loss, backend=backend, fullgraph=True)
    for step, found in ((loss, expected), (compiled, got)):
        leaf = copy.deepcopy(x).requires_grad_()
        value = step(leaf)
        value.backward()
        found += [value.detach(), leaf.grad]
    assert all(same_bits(a, b) for a, b in zip(expected, got, strict=True))
