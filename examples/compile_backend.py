"""Train a network with torch.compile(model, backend="lowtide") inside 60% of its memory, beside eager.

python examples/compile_backend.py
"""

from __future__ import annotations

import copy

import torch
from torch import nn

BUDGET = "60%"


def network() -> nn.Module:
    """Twelve blocks that keep much for backward: activations are most of its memory."""
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU()) for _ in range(12)]
    return nn.Sequential(*blocks, nn.Linear(64, 1))


def train(name: str, model: nn.Module, step: nn.Module) -> None:
    """A training loop as always."""
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(5):
        x = torch.randn(2048, 64)
        loss = nn.functional.mse_loss(step(x), x.square().mean(1, keepdim=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(f"{name:<8}", *(f"{loss:.9f}" for loss in losses))


if __name__ == "__main__":
    torch.manual_seed(0)
    model = network()
    same = copy.deepcopy(model)
    train("eager", model, model)
    # The one line that is new. The step is captured and planned at its first call.
    compiled = torch.compile(same, backend="lowtide", options={"budget": BUDGET, "time_limit": 2})
    train("lowtide", same, compiled)
