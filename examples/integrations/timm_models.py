"""Models of timm inside budgets: a residual network, and a vision transformer with stochastic depth."""

from __future__ import annotations

import timm
import torch
from torch import nn

import lowtide

STEPS = 20
NAMES = {
    "resnet10t": {"img_size": 64, "budget": "90%"},
    "vit_tiny_patch16_224": {"img_size": 96, "budget": "80%", "depth": 2, "drop_path_rate": 0.1},
}


def batch_of(number: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random images and classes."""
    generator = torch.Generator().manual_seed(number)
    images = torch.randn(16, 3, size, size, generator=generator)
    return images, torch.randint(0, 10, (16,), generator=generator)


def loss_of(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The loss of a batch."""
    return nn.functional.cross_entropy(model(images), labels)


def trained(name: str, *, fitted: bool) -> tuple[list[float], list[torch.Tensor]]:
    """The losses of a training loop, and the parameters and buffers at the end."""
    torch.manual_seed(0)
    known = dict(NAMES[name])
    budget, size = known.pop("budget"), known["img_size"]
    if not name.startswith("vit"):  # a convolution takes any size
        del known["img_size"]
    model = timm.create_model(name, num_classes=10, **known).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = loss_of
    if fitted:
        step = lowtide.fit(
            loss_of, model, *batch_of(0, size), budget=budget, only="recompute", time_limit=1.0
        )
        print("\n".join(step.explain().splitlines()[:3]))
    losses = []
    for number in range(STEPS):
        torch.manual_seed(number)
        loss = step(model, *batch_of(number, size))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [tensor.detach().clone() for tensor in model.state_dict().values()]


if __name__ == "__main__":
    every = True
    for name in NAMES:
        (losses, expected), (planned, found) = trained(name, fitted=False), trained(name, fitted=True)
        same = losses == planned and all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
        every = every and same
        print(f"{name}: {same}")
    print(f"losses, parameters and buffers of {STEPS} steps are the same, bit for bit: {every}")
