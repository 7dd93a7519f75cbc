"""Gradients lie as autograd keeps them: copies that it would make at the end belong to the step."""

import pytest
import torch
from torch import fx, nn

import lowtide
from lowtide.cost.watch import watch_cpu
from lowtide.errors import InfeasibleError
from lowtide.execute.compile.bits import same_bits
from lowtide.trace.eager.gradients import owners_of_gradients


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    torch._dynamo.reset()


def copies(function, *example):
    """The tensors that the captured step copies for a leaf."""
    graph = lowtide.capture(function, *example).joint.graph
    return [graph.tensors[op.outputs[0]] for op in graph.ops if op.kind == "lowtide.dense"]


class Added(nn.Module):
    """Two parameters with one gradient, and one whose gradient is a single number."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.randn(64, 64)) for _ in range(3))

    def forward(self, x):
        return (x * (self.a + self.b)).square().mean() + self.c.sum()


def twice(x):
    return torch.cat([x, x]).square().mean()


def test_a_gradient_with_the_strides_of_its_leaf_is_not_copied():
    assert copies(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), torch.randn(2, 8)) == []
    assert copies(nn.Conv2d(3, 4, 3), torch.randn(2, 3, 8, 8)) == []


def test_one_that_lies_otherwise_is_copied():
    assert [t.shape for t in copies(twice, torch.randn(16, 12).t().requires_grad_())] == [(12, 16)]
    apart = torch.randn(12, 16, 2)[..., 0].requires_grad_()  # its gradient is kept as a contiguous one
    assert copies(twice, apart) == []


def test_a_tensor_that_is_no_leaf_keeps_the_gradient_as_it_comes():
    x = torch.randn(16, 12).requires_grad_().t() * 1.0
    assert x.stride() == (1, 12)
    assert copies(twice, x) == []


def test_one_gradient_of_two_leaves_and_one_number_are_copied():
    assert [t.shape for t in copies(Added(), torch.randn(64, 64))] == [(64, 64), (64, 64)]


@pytest.mark.parametrize("only", ["recompute", "recompute,tile"])
def test_the_measured_peak_is_inside_the_budget(only):
    torch.manual_seed(0)
    model, x = Added(), torch.randn(64, 64)
    options = {"only": only, "time_limit": 0.3, "cache": False}
    with pytest.raises(InfeasibleError) as refused:
        lowtide.fit(model, x, budget=1, **options)
    whole = lowtide.fit(model, x, budget=refused.value.smallest_budget, **options)
    held = sum(t.untyped_storage().nbytes() for t in (*model.parameters(), x))
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        _, seen = watch_cpu(lambda _: whole(x).backward())
    assert seen.peak_bytes + held <= whole.plan.budget_bytes
    got = [p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    model(x).backward()
    assert all(same_bits(one, p.grad) for one, p in zip(got, model.parameters(), strict=True))
    assert all(one.stride() == p.grad.stride() for one, p in zip(got, model.parameters(), strict=True))


class Branches(nn.Module):
    """A result whose strides are neither contiguous nor channels-last."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(x).sigmoid().permute(2, 0, 1)


def test_the_gradient_of_a_result_comes_in_as_the_result_lies():
    torch.manual_seed(0)
    model, x = Branches(), torch.randn(3, 65, 8)
    step = lowtide.fit(model, x, budget="100%", time_limit=0.3, cache=False)
    found = []
    for function in (model, step):
        model.zero_grad()
        result = function(x)
        result.backward(result.detach().clone())
        found.append([p.grad.clone() for p in model.parameters()])
    assert all(same_bits(a, b) for a, b in zip(*found, strict=True))


class Wide(nn.Module):
    """What comes out is most of the memory."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4)))
        self.last = nn.Linear(32, 256)

    def forward(self, x):
        return self.last(self.layers(x)).tanh()


def test_a_gradient_that_comes_in_counts_until_backward_ends():
    torch.manual_seed(0)
    model, x = Wide(), torch.randn(256, 32)
    options = {"only": "recompute", "time_limit": 0.3, "cache": False}
    with pytest.raises(InfeasibleError) as refused:
        lowtide.fit(model, x, budget=1, **options)
    step = lowtide.fit(model, x, budget=refused.value.smallest_budget, **options)
    held = sum(t.untyped_storage().nbytes() for t in (*model.parameters(), x))
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        _, seen = watch_cpu(lambda _: (step(x) * 0.5).sum().backward())
    assert seen.peak_bytes + held <= step.plan.budget_bytes


class _Told:
    """As AOTAutograd tells of an input, or of a part of one."""

    def __init__(self, idx=None, part=False):
        if part:
            self.base, self.attr = _Told(idx), "part"
        elif idx is not None:
            self.idx = idx


@pytest.mark.parametrize(
    ("told", "returned", "owners"),
    [
        ([_Told(0), _Told(1)], ["a", None], [0, 1]),
        ([_Told(0, part=True), _Told(0, part=True), _Told(1)], ["a", "mesh", "b"], [0, 1, 2]),
        ([_Told(0, part=True), _Told(0, part=True), _Told(1)], [None, "b"], [0, 2]),
        ([_Told(), _Told(), _Told(1)], ["base", "other base", "b"], [0, 1, 2]),
        ([_Told(), _Told(), _Told(1)], [None, "other base", "b"], [0, 1, 2]),
        ([_Told(0), _Told(1)], ["a", "b", "a again"], [0, 1]),
    ],
)
def test_each_gradient_has_its_input(told, returned, owners):
    graph = fx.Graph()
    inputs = [graph.placeholder(f"x{k}") for k in range(len(told))]
    for node, one in zip(inputs, told, strict=True):
        node.meta["desc"] = one
    assert owners_of_gradients(inputs, returned) == owners
