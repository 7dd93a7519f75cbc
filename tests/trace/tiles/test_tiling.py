"""What cannot be cut into tiles says why, with the user's line where an operator is the reason."""

import inspect

import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import CaptureError, InfeasibleError
from lowtide.trace.step.capture import capture
from lowtide.trace.tiles.loop import looped
from lowtide.trace.tiles.tiling import Tiling


def linear():
    return nn.Linear(4, 4)


def rows():
    return torch.randn(6, 4)


def refusal(function, model, *batch):
    """What is said when the step is cut in two."""
    torch._dynamo.reset()
    joint = capture(function, model, *batch).joint
    with pytest.raises(CaptureError) as caught:
        looped(joint, Tiling(joint).boxes((2,)))
    return str(caught.value)


def line(function, text):
    """``file:line`` of the function's line that has this text."""
    lines, first = inspect.getsourcelines(function)
    return f"{__file__}:{first + next(k for k, one in enumerate(lines) if text in one)}"


def summed(model, x):
    return model(x).square().sum()


def test_batch_norm_in_training_updates_its_statistics():
    model = nn.Sequential(linear(), nn.BatchNorm1d(4))
    assert "the step updates '1.running_mean', which depends on the whole batch" in refusal(
        summed, model, rows()
    )


def normalised(model, x):
    x = model(x)
    x = nn.functional.batch_norm(x, None, None, training=True)
    return x.square().sum()


def test_statistics_of_the_batch():
    said = refusal(normalised, linear(), rows())
    assert said.startswith(line(normalised, "batch_norm("))
    assert said.endswith("cannot run in tiles: its statistics are those of the whole batch")


def test_two_results():
    assert "only a step that gives one result" in refusal(lambda m, x: (m(x).sum(), m(x)), linear(), rows())


def test_a_result_that_is_no_loss():
    assert "a result of shape (6,), not a loss" in refusal(lambda m, x: m(x).sum(1), linear(), rows())


def long(model, x):
    y = model(x)
    return y.norm()


def topmost(model, x):
    y = model(x)
    return y.max()


@pytest.mark.parametrize(
    ("function", "text", "kind"),
    [
        (long, "norm()", "aten.linalg_vector_norm"),
        (topmost, "max()", "aten.max"),
    ],
)
def test_losses_that_are_no_sum(function, text, kind):
    said = refusal(function, linear(), rows())
    assert said == f"{line(function, text)}: the loss is no sum over parts behind {kind}"


def gambled(model, x):
    y = model(x)
    return (torch.bernoulli(y.sigmoid()) * y).sum()


def test_random_numbers_that_depend_on_parameters():
    said = refusal(gambled, linear(), rows())
    assert said.startswith(line(gambled, "bernoulli"))
    assert "it draws random numbers" in said


def cornered(model, x):
    y = model(x)
    y = nn.functional.interpolate(y, scale_factor=2, mode="bilinear", align_corners=True)
    return y.square().sum()


def test_only_the_parts_that_are_cut_stand_against_it():
    joint = capture(cornered, nn.Conv2d(1, 1, 3), torch.randn(2, 1, 9, 9)).joint
    tiling = Tiling(joint)
    assert len(looped(joint, tiling.boxes((2,))).graph.ops) > 0
    with pytest.raises(CaptureError, match="aten.upsample_bilinear2d cannot run in tiles: dimension 3 grows"):
        looped(joint, tiling.boxes((1, 1, 1, 2)))


@pytest.mark.parametrize(
    ("model", "function", "why"),
    [
        (nn.Sequential(linear(), nn.BatchNorm1d(4)), summed, "the step updates"),
        (linear(), long, "the loss is no sum over parts behind aten.linalg_vector_norm"),
    ],
)
def test_a_budget_that_cannot_be_met_tells_why_tiles_do_not_help(model, function, why, tmp_path, monkeypatch):
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    torch._dynamo.reset()
    with pytest.raises(InfeasibleError) as caught:
        lowtide.fit(
            function,
            model,
            torch.randn(64, 4),
            budget=1500,
            only="recompute,tile",
            cost="estimated",
            time_limit=0.3,
        )
    (said,) = [one for one in str(caught.value).splitlines() if one.startswith("tiles: ")]
    assert why in said


def test_tiles_that_do_not_fit_say_so_too(tmp_path, monkeypatch):
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    torch._dynamo.reset()
    with pytest.raises(InfeasibleError, match=r"help: a smaller batch.*\ntiles: none"):
        lowtide.fit(
            summed,
            linear(),
            torch.randn(4, 4),
            budget=200,
            only="recompute,tile",
            cost="estimated",
            time_limit=0.2,
        )


class InThirds(nn.Module):
    """Rows of the first and the last third go through one layer, those between through another."""

    def __init__(self):
        super().__init__()
        self.outer, self.inner = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        first, middle, last = x.split(x.shape[0] // 3)
        return torch.cat([self.outer(first), self.inner(middle), self.outer(last)])


class Numbered(nn.Module):
    """Every row has a number of its own."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x) * torch.arange(x.shape[0], device=x.device)[:, None]


class Placed(nn.Module):
    """Every row is cut off at a place of its own."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x).triu(-20)


class Crossed(nn.Module):
    """Every row needs one of the first six and one of the last, those between the other way round."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        first, last = x[:12], x[12:24]
        z, w = torch.cat([first, last, first]), torch.cat([last, first, last])
        return self.layer(z) * w


@pytest.mark.parametrize(
    ("model", "count", "written"),
    [
        (Crossed(), 12, 7),
        (nn.Sequential(nn.Linear(4, 4), nn.Tanh()), 12, 3),
        (nn.Sequential(nn.Linear(4, 4), nn.Tanh()), 8, 4),  # the last one is shorter
        (InThirds(), 12, 10),  # but for the first third they need other parts
        (InThirds(), 3, 3),
        (Numbered(), 12, 3),
        (Placed(), 12, 12),
    ],
)
def test_in_a_hurry_tiles_are_the_same(model, count, written, monkeypatch):
    torch._dynamo.reset()
    joint = capture(lambda model, x: model(x).square().sum(), model, torch.randn(36, 4)).joint
    tiling, tile, calls = Tiling(joint), Tiling.tile, []

    def counted(self, over, *more, **how):
        calls.append(over)
        return tile(self, over, *more, **how)

    boxes = tiling.boxes((count,))
    exact = tiling.tiles(boxes)
    monkeypatch.setattr(Tiling, "tile", counted)
    hurried = tiling.tiles(boxes, hurried=True)
    assert len(calls) == written

    def told(tiles):
        bodies = list({id(one.joint): one.joint for one in tiles}.values())
        which = [next(k for k, body in enumerate(bodies) if body is one.joint) for one in tiles]
        graphs = [bodies[k].graph for k in which]
        return [(one.over, one.given, one.wanted) for one in tiles], graphs, which

    assert told(hurried) == told(exact)
