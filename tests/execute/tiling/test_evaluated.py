"""Evaluations in tiles: what is computed without gradients gives what eager gives, inside the budget."""

import random

import pytest
import torch
from torch import nn
from torch.nn import functional

import lowtide
from lowtide.cost.watch import watch_cpu
from lowtide.errors import InfeasibleError
from lowtide.execute.tiling.regions import middles
from lowtide.graph import LOOP, Phase
from lowtide.plan.program.instructions import Loop
from tests.execute.tiling.test_random_tiles import LOSSES, drawn
from tests.execute.tiling.tiles import in_tiles, outcome

QUICK = {"time_limit": 1.0, "fullgraph": True}


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


def evaluated(function, model, batch):
    torch.manual_seed(1)
    with torch.no_grad():
        return function(model, *batch)


def close(got, want, within=1e-10):
    assert got.shape == want.shape
    return float((got - want).abs().max()) <= within * max(1.0, float(want.abs().max()))


@pytest.mark.parametrize("seed", range(7))
def test_random_networks(seed):
    """Their losses in random grids, with dropout that draws the numbers of eager."""
    model, batch, step, parts = drawn(100 + seed, LOSSES[seed])
    ran = []
    got = evaluated(in_tiles(step, parts, seen=ran), model, batch)
    assert close(got, evaluated(step, model, batch))
    assert not got.requires_grad
    assert sum(isinstance(line, Loop) for line in ran[0].forward) == 1
    assert not ran[0].backward


@pytest.mark.parametrize("seed", range(4))
def test_random_results(seed):
    """The boxes of a result are put side by side."""
    model, (image, *_), _, _ = drawn(200 + seed, LOSSES[0])
    draw = random.Random(seed)
    with torch.no_grad():
        axes = model(image).shape
    parts = [1] * len(axes)
    for axis in (0, -2, -1):
        parts[axis] = draw.randint(1, min(3, axes[axis]))

    def step(model, image):
        return model(image)

    got = evaluated(in_tiles(step, parts, end=outcome), model, (image,))
    assert close(got, evaluated(step, model, (image,)))


def test_a_region_that_ends_before_the_result():
    model = nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 2, 3), nn.Flatten(), nn.Linear(2 * 6 * 6, 3)
    ).double()
    x = torch.randn(4, 2, 8, 8, dtype=torch.float64)
    ends = []

    def end(joint):
        ends.append(middles(joint)[-1])
        return ends[-1]

    def step(model, x):
        return model(x).softmax(1)

    got = evaluated(in_tiles(step, (2, 1, 2, 1), end=end), model, (x,))
    assert ends
    assert close(got, evaluated(step, model, (x,)))


class Network(nn.Module):
    """BatchNorm among its layers: it can be cut in evaluation alone."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(3, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU()),
            *(nn.Conv2d(24, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU(), nn.Conv2d(24, 4, 1)),
        )

    def forward(self, x):
        return self.layers(x)


class Words(nn.Module):
    """Few features in, many logits out."""

    def __init__(self):
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(97, 16), nn.LayerNorm(16), nn.Linear(16, 3000)

    def forward(self, x):
        return self.head(self.norm(self.embedding(x)).relu())


def entropy(model, x, y):
    return functional.cross_entropy(model(x).movedim(1, -1).flatten(0, -2), y.flatten())


def of_words(model, x, y):
    return functional.cross_entropy(model(x).flatten(0, 1), y.flatten())


def result(model, x):
    return model(x)


def images():
    return torch.randn(4, 3, 64, 64), torch.randint(0, 4, (4, 64, 64))


CASES = {
    "images": (Network, entropy, images, 1_700_000),
    "words": (Words, of_words, lambda: tuple(torch.randint(0, 97, (2, 8, 64))), 4_000_000),
    "a result": (Network, result, lambda: images()[:1], 1_800_000),
}
"""Networks, with budgets below what their evaluation takes otherwise: 3.2, 12.6 and 3.6 MB."""


def resident(model, batch):
    """What is there before; the counters of BatchNorm are not part of the step."""
    read = [one for one in model.buffers() if one.is_floating_point()]
    return sum(one.nbytes for one in (*model.parameters(), *read, *batch))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_evaluation_stays_inside_its_budget(name, mode):
    made, function, given, budget = CASES[name]
    model, batch = made().eval(), given()
    want = evaluated(function, model, batch)
    with mode():
        step = lowtide.fit(function, model, *batch, budget=budget, **QUICK)
        step(model, *batch)
        got, seen = watch_cpu(lambda _: step(model, *batch))
    plan = step.plan
    assert plan.decisions.tiles
    assert plan.predicted.peak_bytes < plan.plain.peak_bytes
    assert seen.peak_bytes + resident(model, batch) <= plan.predicted.peak_bytes <= budget
    assert close(got, want, 1e-5)
    loops = [op for op in plan.graph.ops if op.kind == LOOP]
    assert len(loops) == 1
    assert loops[0].phase is Phase.FORWARD
    assert "forward alone" in plan.explain()


def test_a_step_is_trained_and_evaluated_by_turns():
    model = nn.Sequential(nn.Conv2d(2, 32, 1), nn.ReLU(), nn.Conv2d(32, 2, 1))
    x = torch.randn(8, 2, 32, 32)

    def squares(model, x):
        return model(x).square().sum()

    step = lowtide.fit(squares, model, x, budget=700_000, only="recompute,tile", **QUICK)
    for _ in range(2):
        model.zero_grad()
        loss = step(model, x)
        loss.backward()
        assert step.plan.decisions.tiles
        assert step.plan.predicted.peak_bytes <= 700_000
        with torch.no_grad():
            alone = step(model, x)
        assert step.plan.decisions.tiles
        assert step.plan.predicted.peak_bytes <= 700_000
        assert close(alone, loss.detach(), 1e-5)


class Small(nn.Module):
    """Tiles of few bytes a target."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, x):
        return self.layers(x)


def of_rows(model, x, y):
    return functional.cross_entropy(model(x), y)


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("weights", [False, True])
def test_counting_the_targets_is_part_of_the_plan(trains, weights):
    """It may take more than any tile."""
    model, batch = Small(), (torch.randn(16384, 2), torch.randint(0, 2, (16384,)))
    if weights:
        batch = *batch, torch.tensor([0.5, 2.0])

    def loss_of(model, x, y, *weight):
        return functional.cross_entropy(model(x), y, *weight)

    def run(step):
        loss = step(model, *batch)
        if trains:
            loss.backward()
        return loss.detach()

    with torch.set_grad_enabled(trains):
        want = run(loss_of)
        model.zero_grad()
        step = lowtide.fit(loss_of, model, *batch, budget=750_000 if weights else 320_000, **QUICK)
        run(step)
        model.zero_grad()
        got, seen = watch_cpu(lambda _: run(step))
    assert step.plan.decisions.tiles
    assert (
        seen.peak_bytes + resident(model, batch) <= step.plan.predicted.peak_bytes <= step.plan.budget_bytes
    )
    assert close(got, want, 1e-6)


def test_the_first_evaluation_stays_inside_the_budget():
    model, batch = Small(), (torch.randn(16384, 2), torch.randint(0, 2, (16384,)))
    step = lowtide.fit(of_rows, model, *batch, budget=800_000, verify=False, **QUICK)
    step(model, *batch).backward()
    model.zero_grad()
    assert step.plan.decisions.tiles
    with torch.no_grad():
        _, seen = watch_cpu(lambda _: step(model, *batch))
    assert step.plan.decisions.tiles
    assert seen.peak_bytes + resident(model, batch) <= 800_000


def test_batch_statistics_are_not_those_of_a_tile():
    model, batch = Network().train(), images()
    with torch.no_grad(), pytest.raises(InfeasibleError, match="updates.*depends on the whole batch"):
        lowtide.fit(entropy, model, *batch, budget=1_700_000, **QUICK)


def test_a_plan_that_was_kept_runs_again(tmp_path, monkeypatch):
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    made, function, given, budget = CASES["images"]
    model, batch, plans = made().eval(), given(), []
    for _ in range(2):
        torch._dynamo.reset()
        with torch.no_grad():
            step = lowtide.fit(function, model, *batch, budget=budget, cost="estimated", **QUICK)
            assert close(step(model, *batch), function(model, *batch), 1e-5)
        plans.append(step.plan)
    assert plans[0].decisions.tiles
    assert plans[1].program == plans[0].program


@pytest.mark.parametrize("name", ["images", "a result"])
def test_fused_kernels(name):
    made, function, given, _ = CASES[name]
    model, batch = made().eval(), given()
    want = evaluated(function, model, batch)
    with torch.no_grad():
        step = lowtide.fit(function, model, *batch, budget=1_400_000, kernels="fused", **QUICK)
        assert close(step(model, *batch), want, 1e-5)
    assert step.plan.decisions.tiles
