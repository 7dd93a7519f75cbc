"""Storages count as they are, what fits is stored, and a measured peak above the budget is an error."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import lowtide
from lowtide.commands.main import main
from lowtide.cost.watch import watch_cpu
from lowtide.errors import InfeasibleError
from lowtide.execute.compare.compare import Comparison


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    torch._dynamo.reset()


def convolutions():
    return nn.Sequential(*(nn.Conv2d(3, 3, 3, padding=1) for _ in range(3)))


LOSSES = {
    "mse": F.mse_loss,
    "smooth l1": F.smooth_l1_loss,
    "soft margin": lambda y, t: F.soft_margin_loss(y, t.sign()),
    "cross entropy of shares": lambda y, t: F.binary_cross_entropy(torch.sigmoid(y), torch.sigmoid(t)),
    "fold": lambda y, t: F.fold(F.unfold(y, 3, padding=1), y.shape[2:], 3, padding=1).square().mean(),
}


def taken(step, model, x):
    """What a step takes, with the memory under what goes in."""
    leaves = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in (*model.parameters(), x)}
    step(model, x).backward()
    model.zero_grad(set_to_none=True)
    _, seen = watch_cpu(lambda _: step(model, x).backward())
    return seen.peak_bytes + sum(leaves.values())


@pytest.mark.parametrize(
    ("name", "only"), [*((name, "recompute") for name in LOSSES), ("mse", "recompute,tile")]
)
def test_results_on_a_larger_storage_stay_inside_the_budget(name, only):
    model, x = convolutions(), torch.randn(2, 3, 24, 24)
    options = {"only": only, "time_limit": 0.2, "cache": False}

    def loss(model, x):
        return LOSSES[name](model(x), x)

    for budget in ("100%", "80%"):
        try:
            step = lowtide.fit(loss, model, x, budget=budget, **options)
        except InfeasibleError as error:
            assert budget != "100%"
            step = lowtide.fit(loss, model, x, budget=error.smallest_budget, **options)
        assert taken(step, model, x) <= step.plan.budget_bytes


def test_a_batch_that_is_a_view_takes_all_that_is_under_it():
    model, data = convolutions(), torch.randn(8, 2, 3, 24, 24)
    x = data[0]
    step = lowtide.fit(
        lambda m, x: F.mse_loss(m(x), x), model, x, budget="80%", only="recompute,tile", time_limit=0.2
    )
    assert step.plan.resident_bytes >= data.untyped_storage().nbytes()
    assert taken(step, model, x) <= step.plan.budget_bytes


@pytest.mark.parametrize("rows", [2, 16])
def test_all_of_the_plain_peak_is_enough(rows):
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
    x = torch.randn(rows, 3, 16, 16)
    step = lowtide.fit(
        lambda m, x: m(x).square().mean(), model, x, budget="100%", time_limit=0.3, cache=False
    )
    assert step.plan.overhead == 0
    with torch.no_grad():
        step(model, x)


def test_a_measured_peak_above_the_budget_has_its_own_exit_code(monkeypatch, capsys):
    held = Comparison.hold
    monkeypatch.setattr(Comparison, "hold", lambda self, budget: held(self, self.measured.peak_bytes - 1))
    with pytest.raises(SystemExit) as ended:
        main(["run", "convpool", "--budget", "100%", "--repeats", "1"])
    assert ended.value.code == 4
    said = capsys.readouterr()
    assert "more than its budget of" in said.err
    assert "predicted" in said.out, "what was measured is shown all the same"
