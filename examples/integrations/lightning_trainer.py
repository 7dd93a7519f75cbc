"""A module trained by Lightning's Trainer inside 80% of the memory of its step: the same losses, bit for bit.

Gradients of two batches are accumulated and clipped, and ``training_step`` logs, all of it as always.
"""

from __future__ import annotations

import logging
import warnings

import lightning
import torch
from torch import nn

from lowtide.integrations.lightning import BudgetCallback

STEPS = 20


class Budget(BudgetCallback, lightning.Callback):
    """The callback, for this package of Lightning."""


class Losses(lightning.Callback):
    """Notes what was logged."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: object) -> None:
        """After a batch."""
        self.seen.append(trainer.callback_metrics["loss"].item())


class Network(lightning.LightningModule):
    """A classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4)
        )

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """The loss of a batch, with a penalty."""
        x, y = batch
        logits = self.layers(x)
        penalty = logits.square().mean()
        loss = nn.functional.cross_entropy(logits, y) + 0.01 * penalty
        self.log("loss", loss)
        self.log("penalty", penalty, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def trained(*, fitted: bool) -> tuple[list[float], list[torch.Tensor]]:
    """The losses that were logged, the penalty of the epoch, and the parameters at the end."""
    lightning.seed_everything(0, verbose=False)
    model, losses = Network(), Losses()
    data = torch.utils.data.TensorDataset(torch.randn(256 * STEPS, 16), torch.randint(0, 4, (256 * STEPS,)))
    loader = torch.utils.data.DataLoader(data, batch_size=256, shuffle=True)
    budget = Budget("80%", time_limit=1.0)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        callbacks=[losses, budget] if fitted else [losses],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, loader)
    if budget.fitted is not None:
        print(budget.fitted.explain().splitlines()[0])
    penalty = trainer.callback_metrics["penalty"].item()
    return [*losses.seen, penalty], [parameter.detach().clone() for parameter in model.parameters()]


if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    (losses, expected), (planned, found) = trained(fitted=False), trained(fitted=True)
    print("losses    ", losses[::5])
    print("in budget ", planned[::5])
    same = losses == planned and all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    print(f"losses and parameters of {STEPS} steps are the same, bit for bit: {same}")
