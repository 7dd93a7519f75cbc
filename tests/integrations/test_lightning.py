"""The callback for Lightning: the training of the plain Trainer, bit for bit; the module is what it was."""

import importlib.util
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lowtide.errors import InfeasibleError, RunError
from lowtide.execute.compile.bits import same_bits
from lowtide.integrations.lightning import BudgetCallback

HAS_LIGHTNING = importlib.util.find_spec("lightning") is not None


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    torch._dynamo.reset()


class LikeCallback:
    """Lightning's callback, as far as it is called here."""

    def on_train_start(self, trainer, pl_module):
        self.started = True

    def on_train_end(self, trainer, pl_module):
        self.started = False

    def on_exception(self, trainer, pl_module, exception):
        self.failed = True


class Budget(BudgetCallback, LikeCallback):
    pass


class LikeModule(nn.Module):
    """A LightningModule, as far as the callback knows it: logs in training_step, and returns more than the loss."""

    automatic_optimization = True

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.2), nn.Tanh(), nn.Linear(32, 4))
        self.told = []

    def log(self, name, value, prog_bar=False, on_epoch=False):
        assert not (isinstance(value, torch.Tensor) and value.requires_grad)
        self.told.append((name, float(value), prog_bar, on_epoch))

    def training_step(self, batch, batch_idx):
        x, y = batch
        found = self.layers(x)
        loss = (found - y).square().mean()
        self.log("loss", loss.detach(), True)
        self.log("largest", found.detach().amax(), on_epoch=True)
        self.log("rows", len(x))
        return {"loss": loss, "found": found.detach(), "more": ("sum", [found.detach().sum()])}


class LogsGraphs(LikeModule):
    """Hands tensors with their graphs to log, which Lightning detaches itself."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        found = self.layers(x)
        loss = (found - y).square().mean()
        self.log("loss", loss)
        self.log("mean", found.mean())
        return {"loss": loss, "found": found}


def trainer_of(module, devices=1):
    return SimpleNamespace(world_size=devices, strategy=SimpleNamespace(model=module))


def trained(module_class=LikeModule, callback=None, steps=20):
    """What the steps give, accumulating and clipping gradients, and what was logged."""
    torch.manual_seed(0)
    module, seen = module_class(), []
    if callback is not None:
        callback.on_train_start(trainer_of(module), module)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    for number in range(steps):
        torch.manual_seed(number)
        rows = 16 if number % 5 else 12
        results = module.training_step((torch.randn(rows, 8), torch.randn(rows, 4)), number)
        (results["loss"] / 2).backward()
        seen += [results["loss"].detach(), results["found"].detach()]
        if number % 2:
            nn.utils.clip_grad_norm_(module.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    if callback is not None:
        callback.on_train_end(trainer_of(module), module)
    return module, [*seen, *(p.detach() for p in module.parameters())]


def test_twenty_steps_log_and_train_as_without_it():
    callback = Budget("100%", time_limit=0.3, cache=False)
    (plain, expected), (module, found) = trained(), trained(callback=callback)
    assert all(same_bits(one, other) for one, other in zip(expected, found, strict=True))
    assert module.told == plain.told
    assert len(plain.told) == 60
    assert callback.fitted.plan.budget_bytes > 0
    assert module.__dict__.keys() == plain.__dict__.keys()
    assert not callback.started


def test_what_is_logged_and_given_beside_the_loss_is_without_its_graph():
    callback = Budget("100%", time_limit=0.3, cache=False)
    module, _ = trained(LogsGraphs, callback)
    assert [name for name, *_ in module.told] == ["loss", "mean"] * 20
    torch._dynamo.reset()
    callback.on_train_start(trainer_of(module), module)
    results = module.training_step((torch.randn(16, 8), torch.randn(16, 4)), 0)
    assert results["loss"].requires_grad
    assert not results["found"].requires_grad


class ReadsValues(LikeModule):
    """Breaks the graph: what is in training_step then runs several times while it is planned."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        found = self.layers(x)
        loss = (found - y).square().mean()
        self.log("loss", loss.detach())
        if loss > 0.5:
            loss = loss * 2
        return {"loss": loss, "found": found.detach()}


def test_a_step_in_several_graphs_logs_each_batch_once():
    callback = Budget("300%", time_limit=0.1, cost="estimated")
    (plain, expected), (module, found) = (trained(ReadsValues, one, steps=4) for one in (None, callback))
    assert len(callback.fitted.plans) > 1
    assert all(same_bits(one, other) for one, other in zip(expected, found, strict=True))
    assert module.told == plain.told
    assert len(plain.told) == 4


def test_the_module_is_what_it_was_after_an_error():
    callback, module = Budget(1, only="recompute", time_limit=0.1, cost="estimated"), LikeModule()

    def step(batch, batch_idx):
        return LikeModule.training_step(module, batch, batch_idx)

    module.training_step = step
    callback.on_train_start(trainer_of(module), module)
    with pytest.raises(InfeasibleError, match="the smallest budget") as caught:
        module.training_step((torch.randn(16, 8), torch.randn(16, 4)), 0)
    callback.on_exception(trainer_of(module), module, caught.value)
    assert callback.failed
    assert module.training_step is step
    assert "log" not in module.__dict__
    assert module.told == []


def test_loops_with_another_training_step_are_refused():
    module = LikeModule()
    with pytest.raises(RunError, match=r"one device.*on 2\. Take Trainer\(devices=1"):
        Budget().on_train_start(trainer_of(module, devices=2), module)
    with pytest.raises(RunError, match="one device"):
        Budget().on_train_start(trainer_of(nn.Sequential(module)), module)
    module.automatic_optimization = False
    with pytest.raises(RunError, match="LikeModule optimizes by hand.*lowtide.fit inside of training_step"):
        Budget().on_train_start(trainer_of(module), module)

    class Fetches(LikeModule):
        def training_step(self, dataloader_iter):
            raise AssertionError

    module = Fetches()
    with pytest.raises(RunError, match="takes dataloader_iter"):
        Budget().on_train_start(trainer_of(module), module)
    assert "training_step" not in module.__dict__


@pytest.mark.skipif(not HAS_LIGHTNING, reason="lightning is not installed: pip install lightning")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_lightning_trains_validates_and_counts_metrics_as_without_it(precision):
    import lightning
    import torchmetrics

    class Ours(BudgetCallback, lightning.Callback):
        pass

    class Network(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(
                nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Dropout(0.2), nn.GELU(), nn.Linear(32, 4)
            )
            self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=4)

        def training_step(self, batch, batch_idx):
            x, y = batch
            found = self.layers(x)
            loss = nn.functional.cross_entropy(found, y)
            self.accuracy(found, y)
            self.log_dict({"loss": loss, "mean": found.mean()}, on_step=True, on_epoch=True)
            self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
            return loss

        def validation_step(self, batch, batch_idx):
            x, y = batch
            self.log("validation", nn.functional.cross_entropy(self.layers(x), y))

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def run(*callbacks):
        lightning.seed_everything(0, verbose=False)
        module = Network()
        data = torch.utils.data.TensorDataset(torch.randn(640, 8), torch.randint(0, 4, (640,)))
        trainer = lightning.Trainer(
            accelerator="cpu", max_epochs=2, callbacks=list(callbacks), precision=precision, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        batches = torch.utils.data.DataLoader(data, 64, shuffle=True)
        trainer.fit(module, batches, torch.utils.data.DataLoader(data, 64))
        return module, trainer.callback_metrics

    callback = Ours("100%", time_limit=0.3, cache=False)
    (plain, expected), (module, found) = run(), run(callback)
    assert callback.fitted.plan.budget_bytes > 0
    assert found == expected
    assert {"validation", "accuracy", "loss_epoch", "mean_step"} <= found.keys()
    state = module.state_dict()
    assert all(same_bits(value, state[name]) for name, value in plain.state_dict().items())
    assert "training_step" not in module.__dict__
