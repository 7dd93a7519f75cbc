"""The mixin for Hugging Face's Trainer: the training of the plain one, bit for bit."""

import importlib.util
import runpy
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import nn

from lowtide.errors import InfeasibleError, RunError
from lowtide.execute.compile.bits import same_bits
from lowtide.integrations.hugging_face import TrainerMixin
from tests.steps import described

EXAMPLES = Path(__file__).parents[2] / "examples" / "integrations"
NEEDED = {
    "hugging_face_trainer": ("transformers", "accelerate"),
    "accelerate_loop": ("transformers", "accelerate"),
    "lora": ("transformers", "peft"),
    "trl_trainers": ("trl", "datasets", "transformers", "accelerate"),
    "lightning_trainer": ("lightning",),
    "timm_models": ("timm", "torchvision"),
    "gradient_scaler": (),
    "distributed_data_parallel": (),
    "fully_sharded": (),
    "tensor_parallel": (),
}
"""What each example imports."""
LONG = ("distributed_data_parallel", "fully_sharded", "tensor_parallel")
"""Start processes; tests of their own run what they show."""


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    torch._dynamo.reset()


class LikeTrainer:
    """What a Trainer does around the loss: it may take things out of the batch, and knows of a count."""

    scale = 2.0

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(inputs["x"])
        loss = (outputs - labels).square().sum() * self.scale
        loss = loss / (len(labels) if num_items_in_batch is None else num_items_in_batch)
        return (loss, outputs) if return_outputs else loss


class Budgeted(TrainerMixin, LikeTrainer):
    budget = "100%"
    fit_options: ClassVar = {"time_limit": 0.3, "cache": False}


class LikeTRL(LikeTrainer):
    """Keeps a record in compute_loss, and calls the model a second time without gradients."""

    def __init__(self):
        self._metrics = []

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, dict(inputs), False, num_items_in_batch)
        with torch.no_grad():
            self._metrics.append((loss.item(), model(inputs["x"]).sum().item()))
        return loss


class BudgetedTRL(TrainerMixin, LikeTRL):
    budget = "100%"
    fit_options: ClassVar = {"time_limit": 0.3, "cache": False}


def trained(trainer, **keywords):
    torch.manual_seed(0)
    model, losses = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.2), nn.Tanh(), nn.Linear(32, 4)), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for number in range(20):
        torch.manual_seed(number)
        rows = 16 if number % 5 else 12
        batch = {"x": torch.randn(rows, 8), "labels": torch.randn(rows, 4)}
        loss = trainer.compute_loss(model, batch, **keywords)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *(p.detach() for p in model.parameters())]


@pytest.mark.parametrize("keywords", [{}, {"num_items_in_batch": torch.tensor(7)}], ids=["mean", "count"])
def test_twenty_steps_are_those_of_the_plain_trainer(keywords):
    expected, trainer = trained(LikeTrainer(), **keywords), Budgeted()
    found = trained(trainer, **keywords)
    assert all(same_bits(one, other) for one, other in zip(expected, found, strict=True))
    assert trainer.fitted.plan.budget_bytes > 0


def test_a_trainer_that_keeps_a_record_does_so_once_a_step():
    plain, trainer = LikeTRL(), BudgetedTRL()
    expected, found = trained(plain), trained(trainer)
    assert all(same_bits(one, other) for one, other in zip(expected, found, strict=True))
    assert trainer._metrics == plain._metrics
    assert len(plain._metrics) == 20
    assert trainer.fitted.plan.budget_bytes > 0


def test_what_is_fitted_may_be_said():
    class Model(Budgeted):
        fits = "model"

    expected, trainer = trained(LikeTrainer()), Model()
    found = trained(trainer)
    assert all(same_bits(one, other) for one, other in zip(expected, found, strict=True))
    trainer.fits = "forward"
    with pytest.raises(
        RunError, match="fits='forward' of Model is not possible; set it to one of auto, loss, model"
    ):
        trained(trainer)


def test_the_model_is_what_it_was():
    class Model(Budgeted):
        fits = "model"

    model, own = nn.Linear(8, 4), nn.Linear(8, 4)
    own.forward = forward = own.forward
    for one in (model, own):
        batch = {"x": torch.randn(16, 8), "labels": torch.randn(16, 4)}
        Model().compute_loss(one, batch).backward()
        assert one.weight.grad is not None
    assert "forward" not in model.__dict__
    assert own.forward is forward


def test_evaluation_and_outputs_are_those_of_the_trainer():
    trainer, model = Budgeted(), nn.Linear(8, 4)
    batch = {"x": torch.randn(16, 8), "labels": torch.randn(16, 4)}
    loss, outputs = trainer.compute_loss(model, dict(batch), return_outputs=True)
    assert outputs.shape == (16, 4)
    model.eval()
    assert torch.equal(trainer.compute_loss(model, dict(batch)), loss)
    assert trainer.fitted is None


def test_a_budget_that_is_too_small_is_told():
    class Tight(Budgeted):
        budget = 1

    with pytest.raises(InfeasibleError, match="the smallest budget"):
        trained(Tight())


@pytest.fixture
def _forked(forks, tmp_path, monkeypatch):
    """Processes of an example need not import torch."""
    described(tmp_path)
    monkeypatch.setattr(torch.multiprocessing, "spawn", forks.spawn)


@pytest.mark.usefixtures("_forked")
@pytest.mark.parametrize(
    "name",
    [pytest.param(one, marks=pytest.mark.extended) if one in LONG else one for one in NEEDED],
)
def test_an_example_trains_as_the_same_loop_without_lowtide(name, capsys, forks):
    missing = [one for one in NEEDED[name] if importlib.util.find_spec(one) is None]
    if missing:
        pytest.skip(f"{missing[0]} is not installed: pip install {' '.join(NEEDED[name])}")
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    printed = capsys.readouterr().out + forks.printed()[0]
    assert "are the same, bit for bit: True" in printed


def test_every_example_is_tried():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(NEEDED)
