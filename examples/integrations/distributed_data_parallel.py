"""``DistributedDataParallel`` on two processes: each rank's share of the step inside a budget of its own.

Torch breaks the graph inside of ``DistributedDataParallel``; Lowtide plans the graphs together, and gradients
are averaged in buckets as always.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lowtide

STEPS, RANKS = 20, 2


class Network(nn.Module):
    """A network of the user's: torch captures its forward, inside of ``DistributedDataParallel`` too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Four numbers for each row."""
        found: torch.Tensor = self.layers(x)
        return found


def batch_of(number: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random rows and classes, others on each rank."""
    generator = torch.Generator().manual_seed(RANKS * number + rank)
    return torch.randn(256, 16, generator=generator), torch.randint(0, 4, (256,), generator=generator)


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The loss of a batch."""
    return nn.functional.cross_entropy(model(x), y)


def trained(rank: int, *, fitted: bool) -> tuple[list[float], list[torch.Tensor]]:
    """The losses of a training loop on this rank, and the parameters at the end."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = loss_of
    if fitted:
        step = lowtide.fit(loss_of, model, *batch_of(0, rank), budget="80%", time_limit=0.3)
    losses = []
    for number in range(STEPS):
        torch.manual_seed(number)
        loss = step(model, *batch_of(number, rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [parameter.detach().clone() for parameter in model.parameters()]


def on_rank(rank: int, meeting: str) -> None:
    """Train with and without a budget, and compare."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS)
    (losses, expected), (planned, found) = trained(rank, fitted=False), trained(rank, fitted=True)
    same = losses == planned and all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    print(
        f"rank {rank}: losses and parameters of {STEPS} steps are the same, bit for bit: {same}", flush=True
    )
    dist.destroy_process_group()
    if not same:
        raise SystemExit(1)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(on_rank, (str(Path(folder) / "meeting"),), nprocs=RANKS)
