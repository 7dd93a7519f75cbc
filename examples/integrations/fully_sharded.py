"""``fully_shard`` on two processes: each block is fitted before it is sharded, and so runs inside a budget.

A block then runs by its plan between torch's own hooks, which gather its parameters before forward and again
before backward, and free them after both (``reshard_after_forward=True``).
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import lowtide

STEPS, RANKS, ROWS, WIDTH = 20, 2, 256, 32


class Block(nn.Module):
    """A feed-forward block."""

    def __init__(self) -> None:
        super().__init__()
        wide = [layer for _ in range(2) for layer in (nn.Linear(64, 64), nn.GELU())]
        ends = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.layers = nn.Sequential(nn.LayerNorm(WIDTH), ends[0], nn.GELU(), *wide, ends[1], nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As many numbers for each row."""
        found: torch.Tensor = x + self.layers(x)
        return found


class Network(nn.Module):
    """Some blocks between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, WIDTH), nn.Linear(WIDTH, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Four numbers for each row."""
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        found: torch.Tensor = self.last(x)
        return found


def batch_of(number: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random rows and classes, others on each rank."""
    generator = torch.Generator().manual_seed(RANKS * number + rank)
    return torch.randn(ROWS, 16, generator=generator), torch.randint(0, 4, (ROWS,), generator=generator)


def trained(rank: int, *, fitted: bool, reshard: bool) -> tuple[list[float], list[torch.Tensor]]:
    """The losses of a training loop on this rank, and the parameters at the end."""
    torch.manual_seed(0)
    model, mesh = Network(), init_device_mesh("cpu", (RANKS,))
    if fitted:
        example = torch.randn(ROWS, WIDTH, requires_grad=True)
        for block in model.blocks:
            block.forward = lowtide.fit(
                block.forward, example, budget="80%", only="recompute", time_limit=0.3
            )
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for number in range(STEPS):
        torch.manual_seed(number)
        x, y = batch_of(number, rank)
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if fitted and rank == 0:
        print("\n".join(model.blocks[0].forward.plan.explain().splitlines()[:5]), flush=True)
    return losses, [parameter.full_tensor().detach().clone() for parameter in model.parameters()]


def on_rank(rank: int, meeting: str) -> None:
    """Train with and without a budget, and compare."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS)
    same = True
    for reshard in (False, True):
        losses, expected = trained(rank, fitted=False, reshard=reshard)
        planned, found = trained(rank, fitted=True, reshard=reshard)
        pairs = zip(expected, found, strict=True)
        same = same and losses == planned and all(torch.equal(one, other) for one, other in pairs)
    print(
        f"rank {rank}: losses and parameters of {STEPS} steps are the same, bit for bit: {same}", flush=True
    )
    dist.destroy_process_group()
    if not same:
        raise SystemExit(1)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(on_rank, (str(Path(folder) / "meeting"),), nprocs=RANKS)
