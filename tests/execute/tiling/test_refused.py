"""Whatever goes wrong while a way to cut a step is tried, that way is not taken: no search ends in torch's errors."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import lowtide
from lowtide.errors import InfeasibleError
from lowtide.execute.tiling.capture_tiles import Cutter


class CircularPadding(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(2)

    def forward(self, x):
        return F.pad(self.norm(x.movedim(1, -1)).movedim(-1, 1), [2, 1, 0, 2], mode="circular")


class CopyIntoSlice(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x):
        h = self.first(x)
        wider = h.new_zeros(*h.shape[:2], h.shape[2] + 2, h.shape[3])
        wider[:, :, 1:-1] = h
        return self.second(wider)


def batchnorm():
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)]
    return nn.Sequential(*layers, nn.BatchNorm2d(8), nn.ReLU()).bfloat16()


STEPS = {
    "BatchNorm in bfloat16": (batchnorm, (4, 3, 24, 24)),
    "circular padding": (CircularPadding, (4, 2, 16, 16)),
    "a copy into a slice": (CopyIntoSlice, (2, 2, 24, 24)),
}


def loss_of(model, x):
    return model(x).square().mean()


@pytest.mark.parametrize("budget", ["80%", "45%"])
@pytest.mark.parametrize("name", STEPS)
def test_steps_that_tiles_cannot_run_are_planned_without_or_refused(name, budget):
    torch._dynamo.reset()
    torch.manual_seed(0)
    build, shape = STEPS[name]
    model = build()
    x = torch.randn(shape, dtype=next(model.parameters()).dtype)
    try:
        step = lowtide.fit(
            loss_of, model, x, budget=budget, only="recompute,tile", time_limit=0.5, cache=False
        )
    except InfeasibleError as error:
        assert error.smallest_budget > error.budget
        return
    assert step.plan.decisions.tiles or step.plan.no_tiles
    step(model, x).backward()


@pytest.mark.parametrize("error", [RuntimeError, TypeError, ZeroDivisionError, AssertionError])
def test_a_way_that_fails_is_not_taken(monkeypatch, error):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 3, 3, padding=1))
    x = torch.randn(2, 3, 24, 24)

    def broken(*_, **__):
        raise error("derivative for aten::copy is not implemented")

    monkeypatch.setattr(Cutter, "cut_up", broken)
    with pytest.raises(InfeasibleError, match=r"\ntiles: .*derivative for aten::copy is not implemented"):
        lowtide.fit(loss_of, model, x, budget="40%", only="recompute,tile", time_limit=0.5, cache=False)
