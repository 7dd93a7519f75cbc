"""Models that ``fully_shard`` spreads over processes: blocks are fitted before they are sharded."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import lowtide
from lowtide.errors import CaptureError
from lowtide.execute.compile.bits import same_bits

OPTIONS = {"budget": "100%", "time_limit": 0.3, "cost": "estimated", "only": "recompute"}


@pytest.fixture
def mesh(tmp_path, monkeypatch):
    """One process that is a group of its own."""
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    torch._dynamo.reset()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()
        torch._dynamo.reset()


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 4)

    def forward(self, x):
        return self.down(nn.functional.gelu(self.up(x)))


def loss_of(model, x):
    return model(x).square().mean()


def test_a_sharded_model_is_refused_with_the_way_out(mesh):
    model = Network()
    fully_shard(model, mesh=mesh)
    with pytest.raises(CaptureError, match=r"FSDPNetwork is sharded.*Fit each block before it is sharded"):
        lowtide.fit(loss_of, model, torch.randn(16, 8), **OPTIONS)
    with pytest.raises(CaptureError, match="before it is sharded"):  # the method of a block, too late
        lowtide.fit(model.forward, torch.randn(16, 8), **OPTIONS)
    inside = nn.Sequential(model)
    with pytest.raises(CaptureError, match="before it is sharded"):
        lowtide.fit(lambda x: inside(x).sum(), torch.randn(16, 8), **OPTIONS)


@pytest.mark.parametrize("reshard", [False, True])
def test_a_block_that_was_fitted_before_runs_by_its_plan(mesh, reshard):
    def trained(*, fitted):
        torch.manual_seed(0)
        model, step = Network(), None
        if fitted:
            step = lowtide.fit(model.forward, torch.randn(16, 8), **OPTIONS)
            model.forward = step
        fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for number in range(3):
            x = torch.randn(16, 8, generator=torch.Generator().manual_seed(number))
            loss_of(model, x).backward()
            optimizer.step()
            optimizer.zero_grad()
        return step, [parameter.full_tensor() for parameter in model.parameters()]

    (_, expected), (step, found) = trained(fitted=False), trained(fitted=True)
    assert all(same_bits(one, other) for one, other in zip(expected, found, strict=True))
    assert step.plan.budget_bytes > 0
