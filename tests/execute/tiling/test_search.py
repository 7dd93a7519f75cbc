"""Which ways to cut a step the search tries."""

import dataclasses
import time
from functools import partial
from types import SimpleNamespace
from typing import ClassVar

import msgspec
import pytest
import torch
from torch import nn

import lowtide
from lowtide import zoo
from lowtide.errors import InfeasibleError
from lowtide.execute.tiling import regions
from lowtide.execute.tiling import search as attempts
from lowtide.execute.tiling.capture_tiles import Cutter
from lowtide.execute.tiling.geometry import Geometry, geometry
from lowtide.graph import Graph
from lowtide.plan.make import plan_loop as tile
from lowtide.plan.program.instructions import Loop
from lowtide.plan.request import PlanRequest
from lowtide.plan.result.plan import Side
from tests.steps import described


def test_tokens_that_attend_to_each_other_hold_no_loops(monkeypatch):
    """A tile of one token would compute those before it again; there are as many different ones as tokens."""
    torch._dynamo.reset()
    tried, cut_up = [], Cutter.cut_up

    def counted(self, tiling, boxes, channels_last, inner=None):
        tried.append(inner)
        return cut_up(self, tiling, boxes, channels_last, inner)

    monkeypatch.setattr(Cutter, "cut_up", counted)
    built = zoo.build("gpt2:batch=2,layers=2,width=32,heads=4,length=16,vocab=512")
    with pytest.raises(InfeasibleError):
        lowtide.fit(
            built.loss,
            built.model,
            *built.batch,
            budget="20%",
            only="recompute,tile",
            cost="estimated",
            time_limit=0.3,
            cache=False,
        )
    assert tried == [None] * len(tried)


def test_ctrl_c_ends_the_search_with_the_best_plan_so_far(monkeypatch):
    torch._dynamo.reset()
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 1, 3, padding=1))
    fit = partial(
        lowtide.fit,
        lambda model, x: model(x).square().mean(),
        model,
        torch.randn(1, 1, 48, 48),
        budget="40%",
        only="recompute,tile",
        cost="estimated",
        time_limit=0.3,
        cache=False,
    )
    limits, make_plan = [], tile.make_plan

    def stopped(graph, costs, request, room, **how):
        """As if Ctrl-C came while the first tile was planned."""
        limits.append(request.limits.time_limit)
        plan = make_plan(graph, costs, request, room, **how)
        return msgspec.structs.replace(plan, interrupted=len(limits) == 1)

    monkeypatch.setattr(tile, "make_plan", stopped)
    with pytest.warns(UserWarning, match="interrupted"):
        plan = fit().plan
    assert plan.interrupted
    assert plan.decisions.tiles
    assert limits[0] > 0
    assert limits[1:] == [0.0] * len(limits[1:])


def test_ctrl_c_while_tiles_are_captured_keeps_the_best_plan(monkeypatch):
    calls, cut_up = [], Cutter.cut_up

    def stopped(self, *args, **how):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return cut_up(self, *args, **how)

    monkeypatch.setattr(Cutter, "cut_up", stopped)
    monkeypatch.setattr(attempts.Search, "left", lambda _: 1e3)  # however slow the machine is
    monkeypatch.setattr("lowtide.plan.time_shares.TILE_CONTENT", 1e3)
    with pytest.warns(UserWarning, match="interrupted"):
        plan = images("52%").plan
    assert len(calls) == 2
    assert plan.interrupted
    assert plan.decisions.tiles
    monkeypatch.setattr(Cutter, "cut_up", interrupted)
    with pytest.raises(KeyboardInterrupt):
        images("52%")


def test_ctrl_c_while_tiles_are_captured_keeps_the_plan_without_them(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(Cutter, "cut_up", interrupted)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6)]
    x, model = torch.randn(256, 8), nn.Sequential(*layers)
    with pytest.warns(UserWarning, match="interrupted"):
        plan = lowtide.fit(
            lambda model, x: model(x).square().mean(),
            model,
            x,
            budget="75%",
            only="recompute,tile",
            cost="estimated",
            time_limit=0.3,
            cache=False,
        ).plan
    assert plan.interrupted
    assert plan.decisions.tiles == 0
    assert "interrupted" in plan.explain()


def interrupted(*_, **__):
    raise KeyboardInterrupt


class Sized(attempts.Search):
    """A search that captures nothing: a part of n needs 8 times a working set of 1000 / n bytes."""

    tried_parts: ClassVar[list] = []

    def tried(self, cut, boxes, outside):
        self.tried_parts.append(len(boxes))
        self.needed = 8 * 1000 // len(boxes)
        if self.needed <= self.budget:
            self.needed, self.best = 0, SimpleNamespace(overhead=1.0)
        return True


def parts_tried(budget, monkeypatch, share=0.0, **changed):
    """The numbers of parts that are captured for a budget, of 2, 4, 8, ... 64."""
    graph = Graph((), ())
    whole = SimpleNamespace(boxes=lambda parts: range(parts[0]), begins=(), ends="")
    room = SimpleNamespace(outside_bytes=lambda: 0)
    monkeypatch.setattr(
        attempts, "geometry", lambda _, boxes, __: Geometry(1000 // len(boxes), 0, 1, share, 1.0, 1.0)
    )
    monkeypatch.setattr(Sized, "tried_parts", [])
    search = Sized(
        SimpleNamespace(graph=graph),
        SimpleNamespace(measuring=0.0, compiling=0.0),
        room,
        PlanRequest.of("1GB"),
        budget,
        Side(8000, 1.0),
    )
    for name, value in changed.items():
        setattr(search, name, value)
    search.attempts(whole, [(2**k,) for k in range(1, 7)])
    return search.tried_parts


def test_tiles_that_surely_do_not_fit_are_not_captured(monkeypatch):
    assert parts_tried(4000, monkeypatch) == [2, 4, 8, 16, 32, 64]
    assert parts_tried(510, monkeypatch) == [2, 16, 32, 64]
    assert parts_tried(126, monkeypatch) == [8, 64]  # of 2 and 4 not even one operator fits
    assert parts_tried(430, monkeypatch) == [4, 16, 32, 64]  # 16 need 500, no more than 15% above it
    assert parts_tried(16, monkeypatch) == [64]


def test_crowded_tiles_are_tried_after_all_from_the_smallest_on(monkeypatch):
    assert parts_tried(1000, monkeypatch, share=1.0) == [64, 32, 16, 8, 4]  # of 4 parts each needs 2000
    assert parts_tried(100, monkeypatch, share=1.0) == [64]  # it does not fit, and larger ones do not either


def test_with_a_plan_the_search_ends_sooner(monkeypatch):
    long_ago = time.monotonic() - 25  # of a time limit of 10 s
    assert parts_tried(1000, monkeypatch, began=long_ago) == [2, 8]
    assert parts_tried(1000, monkeypatch, began=long_ago - 60) == []


def images(budget):
    """Eight images, which are cut apart."""
    torch._dynamo.reset()
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 1, 3, padding=1))
    return lowtide.fit(
        lambda model, x: model(x).square().mean(),
        model,
        torch.randn(8, 1, 16, 16),
        budget=budget,
        only="recompute,tile",
        cost="estimated",
        time_limit=0.3,
        cache=False,
    )


class Positions(nn.Module):
    """Of the parameter for places a tile takes its own part."""

    def __init__(self):
        super().__init__()
        self.places = nn.Parameter(torch.randn(64, 32))
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 4))

    def forward(self, x):
        return self.layers(x + self.places)


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (nn.Sequential(nn.Linear(8, 512), nn.GELU(), nn.Linear(512, 8)), (32, 8)),
        (Positions(), (64, 32)),
    ],
    ids=["linear", "positions"],
)
def test_ways_that_gradients_alone_rule_out_have_no_plan(model, shape, monkeypatch):
    """With all of them tried, none is found below what was taken for impossible."""
    torch._dynamo.reset()
    x, looked, attempt = torch.randn(shape), [], attempts.Search.attempt

    def watched(self, cut, parts):
        found = geometry(cut, cut.boxes(parts))
        leaves = sum(one.numel() * 4 for one in (*model.parameters(), x))
        looked.append(leaves + found.gradient_bytes)
        return attempt(self, cut, parts)

    def without(cut, boxes, samples):
        return dataclasses.replace(geometry(cut, boxes, samples), gradient_bytes=0)

    monkeypatch.setattr(regions, "counts", lambda length: [length // 4] if length > 4 else [])
    monkeypatch.setattr(attempts.Search, "attempt", watched)
    monkeypatch.setattr(attempts, "geometry", without)
    fit = partial(
        lowtide.fit,
        lambda model, x: model(x).square().sum(),
        model,
        x,
        only="recompute,tile",
        cost="estimated",
        time_limit=0.3,
        cache=False,
    )
    fit(budget="70%")
    torch._dynamo.reset()
    with pytest.raises(InfeasibleError, match="none that was tried fits"):
        fit(budget=f"{min(looked) - 1}B")


class Worded(nn.Module):
    """A head whose logits the loss makes twice as large."""

    def __init__(self, words=499, width=16):
        super().__init__()
        self.table, self.head = nn.Embedding(words, width), nn.Linear(width, words, bias=False)

    def forward(self, ids):
        return self.head(self.table(ids).tanh())


def widened(model, ids):
    return nn.functional.cross_entropy(model(ids).float(), ids)


def test_a_loop_that_begins_before_the_logits_is_tried_too(tmp_path, monkeypatch):
    """One that begins behind them has all of them, and their gradient, beside a tile."""
    described(tmp_path)
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    torch.manual_seed(0)
    model, ids = Worded().bfloat16(), torch.randint(0, 499, (512,))
    monkeypatch.setattr("lowtide.plan.time_shares.TILE_PATIENCE", 1000)
    logits, words = 512 * 499 * 2, 499 * 16 * 2
    options = {"only": ("recompute", "tile"), "cost": "estimated", "cache": False, "time_limit": 1.0}
    budget = 2 * logits + 6 * words + (1 << 16)
    torch._dynamo.reset()
    plan = lowtide.fit(widened, model, ids, budget=budget, **options).plan
    (loop,) = [one for one in plan.program.instructions if isinstance(one, Loop)]
    (begun,) = [one for one in plan.graph.tensors if one.id in loop.cut]
    assert begun.shape == (512, 16)
    assert plan.predicted.peak_bytes <= budget
