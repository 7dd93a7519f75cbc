"""``torch.amp.GradScaler`` around a fitted step: the loss is scaled outside of it."""

from __future__ import annotations

import torch
from torch import nn

import lowtide

STEPS = 20


def batch_of(number: int) -> dict[str, torch.Tensor]:
    """Random rows and classes."""
    generator = torch.Generator().manual_seed(number)
    return {
        "x": torch.randn(256, 16, generator=generator),
        "y": torch.randint(0, 4, (256,), generator=generator),
    }


def loss_of(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss of a batch."""
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def trained(*, fitted: bool) -> tuple[list[float], list[torch.Tensor]]:
    """The losses of a training loop, and the parameters at the end."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    step = loss_of
    if fitted:
        step = lowtide.fit(loss_of, model, batch_of(0), budget="70%", time_limit=1.0)
    losses = []
    for number in range(STEPS):
        torch.manual_seed(number)
        loss = step(model, batch_of(number))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [parameter.detach().clone() for parameter in model.parameters()]


if __name__ == "__main__":
    (losses, expected), (planned, found) = trained(fitted=False), trained(fitted=True)
    print("losses    ", losses[::5])
    print("in budget ", planned[::5])
    same = losses == planned and all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    print(f"losses and parameters of {STEPS} steps are the same, bit for bit: {same}")
