"""Tensor parallelism on two processes: ``parallelize_module``, then one ``lowtide.fit`` on every rank.

Heads of attention and the hidden layer of the MLP are split over the ranks. Each rank plans by itself, with a
budget of its own; whatever is recomputed, every collective runs once a step, and in the same order.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import lowtide

STEPS, RANKS, ROWS, TOKENS, WIDTH, HEADS = 20, 2, 4, 32, 32, 4
BUDGETS = "80%", "60%"
"""Of what the step takes on each rank."""


class Block(nn.Module):
    """Attention and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As many numbers for each token."""
        y = self.before(x)
        heads = [one(y).unflatten(-1, (-1, WIDTH // HEADS)) for one in (self.query, self.key, self.value)]
        query, key, value = (one.transpose(1, 2) for one in heads)
        seen = (query @ key.transpose(2, 3) / (WIDTH // HEADS) ** 0.5).softmax(-1) @ value
        x = x + self.dropout(self.out(seen.transpose(1, 2).flatten(2)))
        found: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.between(x))))
        return found


class Network(nn.Module):
    """A block between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, WIDTH), nn.Linear(WIDTH, 4)
        self.block = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Four numbers for each token."""
        found: torch.Tensor = self.last(self.block(self.first(x)))
        return found


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """How far the model is from the classes of the tokens."""
    return nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())


def batch_of(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random sequences and classes, the same on each rank."""
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(ROWS, TOKENS, 16, generator=generator)
    return x, torch.randint(0, 4, (ROWS, TOKENS), generator=generator)


def parallel() -> Network:
    """The network, split over the ranks."""
    torch.manual_seed(0)
    model, mesh = Network(), init_device_mesh("cpu", (RANKS,))
    split = dict.fromkeys(("query", "key", "value", "up"), ColwiseParallel())
    joined = dict.fromkeys(("out", "down"), RowwiseParallel())
    parallelize_module(model.block, mesh, {**split, **joined})
    return model


def trained(rank: int, *, fitted: bool) -> tuple[list[float], list[torch.Tensor]]:
    """The losses of a training loop on this rank, and the parameters at the end."""
    model = parallel()
    step: Any = loss_of
    if fitted:
        step = lowtide.fit(
            loss_of, model, *batch_of(0), budget=BUDGETS[rank], only="recompute", time_limit=1.0
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for number in range(STEPS):
        torch.manual_seed(number)
        loss = step(model, *batch_of(number))
        loss.backward()
        nn.utils.clip_grad_norm_([p for p in model.parameters() if isinstance(p, DTensor)], 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if fitted:
        dist.barrier()
        if rank == 0:
            print("\n".join(step.plan.explain().splitlines()[:5]), flush=True)
    found = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return losses, [one.detach().clone() for one in found]


def on_rank(rank: int, meeting: str) -> None:
    """Train with and without a budget, and compare."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS)
    losses, expected = trained(rank, fitted=False)
    planned, found = trained(rank, fitted=True)
    pairs = zip(expected, found, strict=True)
    same = losses == planned and all(torch.equal(one, other) for one, other in pairs)
    print(
        f"rank {rank}: losses and parameters of {STEPS} steps are the same, bit for bit: {same}", flush=True
    )
    dist.destroy_process_group()
    if not same:
        raise SystemExit(1)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(on_rank, (str(Path(folder) / "meeting"),), nprocs=RANKS)
