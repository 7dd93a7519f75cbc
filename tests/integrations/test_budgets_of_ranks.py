"""``DistributedDataParallel`` and ``fully_shard`` of ordinary models: each rank stays inside its own budget."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import lowtide
from lowtide.cost.watch import watch_cpu

ROWS, WIDTH, RANKS = 512, 32, 2
OPTIONS = {"time_limit": 0.3, "cost": "estimated", "only": "recompute", "verify": False}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            *[layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
        )

    def forward(self, x):
        return x + self.layers(x)


def loss_of(model, x):
    return model(x).square().mean()


def batch(rank):
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(rank))


def averaged(rank, shares):
    """Losses, gradients and the most bytes of a step that data parallelism averages, with a budget or none."""
    torch.manual_seed(0)
    model, x = DistributedDataParallel(Block(), gradient_as_bucket_view=True), batch(rank)
    step, budget = loss_of, 0
    if shares is not None:
        step = lowtide.fit(loss_of, model, x, budget=shares[rank], **OPTIONS)
        budget = max(plan.budget_bytes for plan in step.plans)
    for _ in range(2):  # the first step allocates buckets
        model.zero_grad(set_to_none=False)
        _, seen = watch_cpu(lambda _: step(model, x).backward())
    resident = x.nbytes + sum(value.nbytes for value in model.parameters())  # buckets are beside the budget
    return [value.grad.clone() for value in model.parameters()], seen.peak_bytes + resident, budget


def sharded(rank, shares):
    """The same of blocks that are fitted, then sharded."""
    torch.manual_seed(0)
    block, x = Block(), batch(rank).requires_grad_()
    budget = 0
    if shares is not None:
        block.forward = lowtide.fit(block.forward, x, budget=shares[rank], **OPTIONS)
        budget = block.forward.plan.budget_bytes
    whole = sum(value.nbytes for value in block.parameters())
    fully_shard(block, mesh=init_device_mesh("cpu", (RANKS,)), reshard_after_forward=False)
    incoming = torch.ones_like(x)
    for _ in range(2):
        block.zero_grad()
        x.grad = None
        _, seen = watch_cpu(lambda _: block(x).backward(incoming))
    found = [value.grad.full_tensor() for value in block.parameters()]
    # what is gathered and scattered passes through buffers of torch's own, beside the budget
    return found, seen.peak_bytes + x.nbytes + incoming.nbytes - 2 * whole, budget


def on_rank(rank, meeting):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS)
    told = []
    for run in (averaged, sharded):
        expected, plain, _ = run(rank, None)
        found, peak, budget = run(rank, ["80%", "70%"])
        same = all(map(torch.equal, expected, found))
        told.append(f"{run.__name__} {rank} {same} {plain} {peak} {budget}")
    os.write(1, ("\n".join(told) + "\n").encode())
    dist.destroy_process_group()


def test_each_rank_stays_inside_its_budget(forks, tmp_path):
    forks.spawn(on_rank, (str(tmp_path / "meeting"),), RANKS)
    lines = [line.split() for line in forks.printed()[0].splitlines()]
    assert sorted(line[:3] for line in lines) == [
        ["averaged", "0", "True"],
        ["averaged", "1", "True"],
        ["sharded", "0", "True"],
        ["sharded", "1", "True"],
    ]
    for name, _, _, plain, peak, budget in lines:
        assert int(peak) <= int(budget), (name, plain, peak, budget)
        assert int(peak) < int(plain)
