"""Train convolutions on an image whose step does not fit the budget: it is cut into tiles.

python examples/tiles_on_a_large_image.py
"""

from __future__ import annotations

import torch
from torch import nn

import lowtide
from lowtide.units import format_bytes

SIZE = 256
BUDGET = "8MiB"


def network() -> nn.Module:
    """Convolutions alone: each pixel of the result needs only its neighbourhood of the image."""
    wide = [layer for _ in range(2) for layer in (nn.Conv2d(16, 16, 3, padding=1), nn.ReLU())]
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), *wide, nn.Conv2d(16, 1, 1))


def loss_of(model: nn.Module, image: torch.Tensor) -> torch.Tensor:
    """A sum over the pixels, which may be added up tile by tile."""
    return model(image).square().mean()


if __name__ == "__main__":
    torch.manual_seed(0)
    model, image = network(), torch.randn(1, 3, SIZE, SIZE)
    step = lowtide.fit(loss_of, model, image, budget=BUDGET, only="recompute,tile", time_limit=2)
    plan = step.plan
    print(f"budget   {format_bytes(plan.budget_bytes)}")
    print(f"plain    {format_bytes(plan.plain.peak_bytes)}")
    print(f"planned  {format_bytes(plan.predicted.peak_bytes)} in {plan.decisions.tiles} tiles")
    loss = step(model, image)
    loss.backward()
    print(f"loss     {loss.item():.6f}")
