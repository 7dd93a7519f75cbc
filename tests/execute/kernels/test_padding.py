"""Padded products in a step: chosen by measurement, and inside plans like any other operator."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import lowtide
from lowtide.execute.kernels import compile_groups, padding, timed_calls, ways
from lowtide.graph import LOOP
from lowtide.plan.check.checker import check
from lowtide.trace.eager.layouts import learned
from lowtide.trace.groups.padded import Product
from tests.trace.groups.test_channels_last import captured


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    monkeypatch.setattr(compile_groups, "compile_kernels", None)
    monkeypatch.setattr(compile_groups, "_warn", lambda label, why: None)
    torch._dynamo.reset()


HEAD = Product(16, 997, torch.bfloat16)


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.norm = nn.Embedding(997, 16), nn.LayerNorm(16)

    def forward(self, ids):
        return functional.linear(self.norm(self.table(ids)), self.table.weight)


def loss_of(model, ids):
    with torch.autocast("cpu", torch.bfloat16):
        return functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def left(step, model, ids):
    model.zero_grad()
    loss = step(model, ids)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("budget", ["100%", "45%"])
def test_a_step_with_a_padded_head(budget, monkeypatch):
    monkeypatch.setattr(ways, "faster_padded", lambda *_: frozenset([HEAD]))
    torch.manual_seed(0)
    model, ids = Language(), torch.randint(0, 997, (8, 32))
    exact = left(loss_of, copy.deepcopy(model), ids)
    asked = {"budget": budget, "cost": "estimated", "time_limit": 0.5, "kernels": "fused", "cache": False}
    step = lowtide.fit(loss_of, model, ids, **asked)
    graphs = [step.plan.graph, *(body.graph for body in step.plan.program.bodies)]
    products = [op for graph in graphs for op in graph.ops if op.kind in ("aten.mm", "aten.addmm")]
    sizes = {graph.tensors[t].shape for graph in graphs for op in graph.ops for t in op.outputs}
    assert products
    assert any(1000 in (shape or ()) for shape in sizes), "997 and three columns of zeros"
    assert any(op.kind == LOOP for op in step.plan.graph.ops) is (budget == "45%")
    for one, other in zip(exact, left(step, model, ids), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-3)
    assert check(step.plan.graph, step.plan.program).peak_bytes <= step.plan.budget_bytes


def test_other_shapes_are_padded_like_the_first(monkeypatch):
    monkeypatch.setattr(ways, "faster_padded", lambda *_: frozenset([HEAD]))
    torch.manual_seed(0)
    model = Language()
    asked = {
        "budget": "100%",
        "only": "recompute",
        "time_limit": 0.5,
        "kernels": "fused",
        "cost": "estimated",
    }
    step = lowtide.fit(loss_of, model, torch.randint(0, 997, (8, 32)), **asked)
    monkeypatch.setattr(ways, "faster_padded", None)
    ids = torch.randint(0, 997, (8, 40))
    for one, other in zip(left(loss_of, model, ids), left(step, model, ids), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-3)
    assert any(1000 in (tensor.shape or ()) for tensor in step.plan.graph.tensors)


@pytest.mark.parametrize(("pads", "chosen"), [(0.1, {HEAD}), (10.0, set())])
def test_padding_counts(pads, chosen, monkeypatch):
    def seconds(_, call):
        if call.node.target is torch.constant_pad_nd:
            return pads
        return 0.3 if "1000" in repr(call.given) else 1.0

    monkeypatch.setattr(timed_calls.CallTimer, "_seconds", seconds)
    monkeypatch.setattr(padding, "_DEVICE", "cpu")
    model = Language()
    module, inputs = captured(loss_of, model, torch.randint(0, 997, (8, 32)))
    assert padding.faster_padded(module, inputs, learned(), 5.0) == chosen


def test_a_product_that_cannot_be_padded_leaves_others_alone(monkeypatch):
    """What the function returns must lie in memory as before."""

    def both(model, ids):
        return loss_of(model, ids), functional.linear(model.table.weight, torch.ones(5, 16))

    def seconds(_, call):
        return 0.1 if call.node.target is torch.constant_pad_nd or "1000" in repr(call.given) else 1.0

    monkeypatch.setattr(timed_calls.CallTimer, "_seconds", seconds)
    monkeypatch.setattr(padding, "_DEVICE", "cpu")
    module, inputs = captured(both, Language(), torch.randint(0, 997, (8, 32)))
    assert padding.faster_padded(module, inputs, learned(), 5.0) == {HEAD}


def test_nothing_is_measured_without_tensor_cores(monkeypatch):
    monkeypatch.setattr(timed_calls.CallTimer, "_seconds", None)
    module, inputs = captured(loss_of, Language(), torch.randint(0, 997, (8, 32)))
    assert padding.faster_padded(module, inputs, learned(), 5.0) == frozenset()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_vocabulary_of_odd_size_is_padded_on_tensor_cores():
    def head(x, weight, labels):
        return functional.cross_entropy(functional.linear(x, weight).float(), labels)

    x = torch.randn(4096, 512, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(50257, 512, device="cuda", dtype=torch.bfloat16).requires_grad_()
    labels = torch.randint(0, 50257, (4096,), device="cuda")
    module, inputs = captured(head, x, weight, labels)
    chosen = padding.faster_padded(module, inputs, learned(), 10.0)
    assert chosen == {Product(512, 50257, torch.bfloat16)}
