"""Tiles of fused kernels: groups inside loops and around them, and none across their borders."""

import copy
import shutil

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import lowtide
from lowtide.cost.watch import watch_cpu
from lowtide.documents import read_document, write_document
from lowtide.errors import InfeasibleError
from lowtide.execute.kernels import compile_groups
from lowtide.execute.tiling import search as attempts
from lowtide.execute.tiling.plan_tiles import loop_of
from lowtide.graph import GROUP, LOOP
from lowtide.plan.check.checker import check
from lowtide.plan.result.plan import Plan
from lowtide.trace.step.group import Group
from tests.execute.tiling.tiles import in_tiles
from tests.steps import described

compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler on a CPU")


@pytest.fixture(autouse=True)
def hurried(monkeypatch, tmp_path):
    """No time is spent on how small a budget may be or on layouts, and capturing may take long."""
    torch._dynamo.reset()
    monkeypatch.setattr("lowtide.execute.kernels.ways.in_faster_layout", lambda module, *_: module)
    monkeypatch.setattr("lowtide.plan.recompute.smallest_budget._aim", lambda *_, **__: None)
    monkeypatch.setattr("lowtide.plan.time_shares.TILE_PATIENCE", 1000)
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    described(tmp_path)


class Language(nn.Module):
    """A gated layer and a head whose logits are larger than anything else; the table is the head's too."""

    def __init__(self, tokens=997, width=16):
        super().__init__()
        self.table, self.norm = nn.Embedding(tokens, width), nn.RMSNorm(width)
        self.gate, self.up = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, ids):
        x = self.table(ids)
        x = x + F.silu(self.gate(x)) * self.up(x)
        return F.linear(self.norm(x), self.table.weight)


def loss_of(model, ids):
    logits = model(ids).float()
    labels = F.pad(ids, (0, 1), value=-100)[:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def language():
    torch.manual_seed(0)
    return Language(), torch.randint(0, 997, (4, 32))


def classified(model, x, labels):
    return F.cross_entropy(model(x), labels)


def squared(model, x):
    return model(x).square().mean()


def fitted(loss, model, *batch, **options):
    options = {"time_limit": 0.2, "cache": False, "kernels": "fused", **options}
    return lowtide.fit(loss, model, *batch, **options)


def left(step, model, *batch):
    model.zero_grad()
    loss = step(model, *batch)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def kinds(graph):
    return [op.kind for op in graph.ops]


def far(got, exact):
    pairs = zip(got, exact, strict=True)
    return float(torch.cat([(one.double() - other).flatten() for one, other in pairs]).norm())


def test_a_chunked_loss_has_groups_inside_and_around(one_by_one, tmp_path):
    model, ids = language()
    step = fitted(loss_of, model, ids, budget="50%", cost="estimated")
    plan = step.plan
    (loop,) = [op for op in plan.graph.ops if op.kind == LOOP]
    assert plan.decisions.tiles
    assert any(one.kind == GROUP for one in plan.graph.ops), "around the loop"
    for body in plan.program.bodies:
        large = [t for t in body.graph.tensors if t.shape[-1:] == (997,) and t.alias is None]
        assert kinds(body.graph).count(GROUP) == 2, "the loss and its gradient"
        assert len(large) == 2, "the logits and their gradient"
    assert {"aten.mm", "lowtide.accumulate"} <= set(kinds(plan.program.bodies[0].graph))
    assert loop.axes == (128,)
    assert check(plan.graph, plan.program).peak_bytes <= plan.budget_bytes
    write_document(tmp_path / "plan.json", plan)
    assert read_document(tmp_path / "plan.json", Plan) == plan
    for one, other in zip(left(loss_of, model, ids), left(step, model, ids), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def test_the_head_is_inside_the_loop_where_logits_are_widened_in_a_group(one_by_one):
    """The logits in float32, and the views of them, are larger than the logits, but never stored."""
    model, ids = language()
    step = fitted(loss_of, model.bfloat16(), ids, budget="60%", cost="estimated")
    loop, bodies = loop_of(step.plan.program), step.plan.program.bodies
    assert loop.cut, "the ending of the step alone is cut"
    assert all("aten.mm" in kinds(body.graph) for body in bodies)


@compiler
def test_compiled_tiles_stay_inside_the_budget_and_are_as_exact_as_a_compiled_step(monkeypatch):
    monkeypatch.setattr(attempts, "grids", lambda *_: iter([(4,)]))  # compiling others takes seconds
    torch.manual_seed(0)
    model, x, labels = nn.Linear(16, 997), torch.randn(128, 16), torch.randint(0, 997, (128,))
    exact = left(classified, copy.deepcopy(model).double(), x.double(), labels)
    step = fitted(classified, model, x, labels, budget="40%")
    assert step.plan.decisions.tiles
    assert step.plan.cost == "measured"
    got = left(step, model, x, labels)
    model.zero_grad(set_to_none=True)
    _, took = watch_cpu(lambda _: step(model, x, labels).backward())
    peak = step.plan.resident_bytes + took.peak_bytes
    assert peak <= 1.005 * step.plan.budget_bytes
    assert step.plan.predicted.peak_bytes == pytest.approx(peak, rel=0.02)
    torch._dynamo.reset()
    compiled = left(torch.compile(classified), model, x, labels)
    assert far(got[1:], exact[1:]) <= 1.1 * far(compiled[1:], exact[1:])


def test_both_loops_of_a_module_hold_groups(one_by_one, monkeypatch):
    monkeypatch.setattr(attempts, "result_grids", lambda *_: iter([(2, 1, 1, 2)]))
    torch.manual_seed(0)
    layers = nn.Conv2d(2, 16, 3, padding=1), nn.SiLU(), nn.Hardtanh(), nn.Conv2d(16, 2, 3, padding=1)
    model, x = nn.Sequential(*layers), torch.randn(2, 2, 24, 24)
    step = fitted(model, x, budget="50%", cost="estimated")
    assert step.plan.decisions.tiles == 4
    assert all(GROUP in kinds(body.graph) for body in step.plan.program.bodies)
    tangent = torch.randn_like(step(x))
    step(x).backward(tangent)
    ours = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(x).backward(tangent)
    for p, gradient in zip(model.parameters(), ours, strict=True):
        torch.testing.assert_close(gradient, p.grad, rtol=1e-3, atol=1e-3)


def test_half_precision_is_added_up_in_float32(one_by_one):
    torch.manual_seed(0)
    model, x = nn.Linear(16, 61).bfloat16(), torch.randn(256, 16).bfloat16()
    labels = torch.randint(0, 61, (256,))
    exact = left(classified, copy.deepcopy(model).double(), x.double(), labels)
    whole = left(classified, model, x, labels)
    away = {}
    for fused in (True, False):
        torch._dynamo.reset()
        got = left(in_tiles(classified, (32,), fused=fused), model, x, labels)
        away[fused] = far(got[1:], exact[1:])
    once = far(whole[1:], exact[1:])
    assert away[True] <= 1.05 * once, "the sum is rounded, its parts are not"
    assert away[False] > 2 * once, "the sum is rounded tile by tile"


def test_only_a_way_that_is_taken_is_compiled(monkeypatch):
    """Others are compared by estimates of their groups."""
    made, cut = [], []

    def counted(body, mode):
        made.append({node.meta["val"].shape for node in body.graph.nodes if node.op == "placeholder"})
        raise NotImplementedError("not here")

    def planned(self, tiling, boxes, outside):
        cut.append(len(boxes))
        return kept(self, tiling, boxes, outside)

    kept = attempts.Search._planned
    monkeypatch.setattr(attempts.Search, "_planned", planned)
    monkeypatch.setattr(compile_groups, "compile_kernels", counted)
    monkeypatch.setattr(compile_groups, "_warn", lambda label, why: None)
    torch.manual_seed(0)
    model, x, labels = nn.Linear(16, 997), torch.randn(128, 16), torch.randint(0, 997, (128,))
    plan = fitted(classified, model, x, labels, budget="20%", cost="estimated").plan
    rows = 128 // plan.decisions.tiles
    assert len(set(cut)) > 1, "several ways were tried"
    assert {128, rows} == {shape[0] for shapes in made for shape in shapes if shape[1:] == (997,)}


def test_ways_are_compiled_one_by_one_where_none_that_was_estimated_fits(one_by_one):
    """Operators one by one take memory between them, which kernels do not."""
    torch.manual_seed(0)
    model, x, labels = nn.Linear(16, 997), torch.randn(128, 16), torch.randint(0, 997, (128,))
    step = fitted(classified, model, x, labels, budget="20%")
    assert step.plan.cost == "measured"
    model.zero_grad(set_to_none=True)
    _, took = watch_cpu(lambda _: step(model, x, labels).backward())
    assert step.plan.resident_bytes + took.peak_bytes <= 1.005 * step.plan.budget_bytes


def test_a_way_that_disappoints_is_followed_by_the_next(one_by_one, monkeypatch):
    """Kernels may take memory that nobody knows of before they are compiled."""
    planned = []

    def plan(self, tiling, boxes, outside, way, time_limit):
        found = search(self, tiling, boxes, outside, way, time_limit)
        final = all(call.target.final for call in way.whole.calls if isinstance(call.target, Group))
        planned.extend([(tiling.begins, len(boxes))] if final else [])
        if final and len(planned) == 1:
            raise InfeasibleError("no", budget=10, smallest_budget=12, floor=0)
        return found

    search = attempts.Search._search
    monkeypatch.setattr(attempts.Search, "_search", plan)
    monkeypatch.setattr(attempts, "_GOOD", -1.0)  # more than one way is tried,
    monkeypatch.setattr(attempts.Search, "left", lambda _: 1.0)  # however busy the machine is
    monkeypatch.setattr("lowtide.plan.time_shares.TILE_CONTENT", 1000)
    model, ids = language()
    step = fitted(loss_of, model, ids, budget="50%", cost="estimated")
    first, second = planned
    assert first != second
    assert second[1] == step.plan.decisions.tiles


def test_tiles_are_chosen_where_they_are_faster_than_recomputation(one_by_one, monkeypatch):
    torch.manual_seed(0)
    layers = [layer for k in (2, 8, 8) for layer in (nn.Conv2d(k, 8, 3, padding=1), nn.SiLU(), nn.Tanh())]
    model, x = nn.Sequential(*layers), torch.randn(8, 2, 24, 24)
    asked = {"budget": "75%", "cost": "estimated", "cache": True}
    monkeypatch.setattr("lowtide.execute.tiling.plan_tiles._NO_FUSED_TILES", 0.01)
    assert fitted(squared, model, x, **asked, kernels="eager").plan.decisions.tiles == 0
    inexact = fitted(squared, model, x, **asked, kernels="eager", exact=False).plan
    assert inexact.decisions.tiles, "also with eager kernels, where bits may differ"
    without = fitted(squared, model, x, **asked, only="recompute").plan
    plan = fitted(squared, model, x, **asked).plan
    assert without.decisions.recomputed
    assert plan.decisions.tiles
    assert plan.predicted.seconds < without.predicted.seconds
    torch._dynamo.reset()
    monkeypatch.setattr("lowtide.execute.compile.planned.in_tiles", None)  # the plan is known
    assert fitted(squared, model, x, **asked).plan.program == plan.program


def test_tiles_that_are_slower_are_not_looked_for_again(one_by_one, monkeypatch):
    model, ids = language()
    asked = {"budget": "100%", "cost": "estimated", "cache": True}
    monkeypatch.setattr("lowtide.execute.tiling.plan_tiles._NO_FUSED_TILES", -1.0)
    plan = fitted(loss_of, model, ids, **asked).plan
    assert not plan.decisions.tiles
    assert "tiles would take" in plan.no_tiles
    torch._dynamo.reset()
    monkeypatch.setattr("lowtide.execute.compile.planned.in_tiles", None)
    again = fitted(loss_of, model, ids, **asked).plan
    assert again.program == plan.program
    assert again.no_tiles == plan.no_tiles
