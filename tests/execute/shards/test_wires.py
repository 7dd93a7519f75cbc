"""Tensors that a backend does not take go through memory of the host, and come back."""

import os
from datetime import timedelta
from functools import partial

import pytest
import torch

import lowtide
from lowtide.cost.wire import WireSpeed
from lowtide.distributed_internals import backend_of
from lowtide.execute.shards import meshes
from lowtide.execute.shards.faults import RankWatch
from lowtide.execute.shards.wires import ProcessWire
from tests.execute.shards.test_mesh_step import OPTIONS, Network, joined, loss_of


class ByHost(ProcessWire):
    """Takes no tensor itself."""

    def by_host(self, x):
        return True


def noted(seen, place, function, *args, **keywords):
    """A call, with the memory of the tensor that it is given."""
    seen.append(args[place].data_ptr())
    return function(*args, **keywords)


def talked(rank, port, count):
    distributed = torch.distributed
    store = distributed.TCPStore("127.0.0.1", int(port), count, rank == 0, timedelta(seconds=30))
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=count)
    group = distributed.group.WORLD
    assert backend_of(group, torch.device("cpu")) == "gloo"
    watch, seen = RankWatch(store, rank, count), []
    for place, name in enumerate(("all_reduce", "P2POp")):
        setattr(distributed, name, partial(noted, seen, place, getattr(distributed, name)))
    assert not ProcessWire(group, watch).by_host(torch.ones(1))
    for kind in (ProcessWire, ByHost):
        wire = kind(group, watch)
        x, y, z, c = (torch.full((2, 3), float(rank + one)) for one in range(4))
        c = torch.complex(c, -c)
        seen.clear()
        wire.add_up(x)
        wire.add_up(c)
        later = wire.begin_sum(y)
        wire.swap([((rank + 1) % count, x)], [((rank - 1) % count, z)])
        later()
        assert x.eq(3).sum() == z.eq(3).sum() == 6 == c.real.eq(12).sum()
        assert y.eq(sum(one + 1 for one in range(count))).all()
        assert wire.sent_bytes == sum(one.nbytes for one in (x, c, y, x))
        own = {one.data_ptr() for one in (x, y, z, c)}
        assert own.isdisjoint(seen) if kind is ByHost else own.issuperset(seen)
        assert len(seen) == 5
    watch.close()
    distributed.barrier()
    distributed.destroy_process_group()


def test_tensors_go_through_the_host_and_come_back(forks, free_port):
    forks.spawn(talked, (free_port, 3), 3)


def meshed(rank, port):
    joined(rank, port)
    os.environ["LOCAL_RANK"] = str(rank)
    meshes._device_type = lambda: "cuda"
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=30))
    here = meshes.connected((2, 1), links=[WireSpeed()] * 2)
    assert [wire.devices for wire in here.wires] == [2, 1]
    here.watch.close()
    torch.distributed.destroy_process_group()
    os.write(1, b"done\n")


def test_processes_of_one_gpu_have_a_mesh_of_several_axes(forks, free_port):
    """Over gloo no process needs a GPU of its own, with the number that torchrun gives it."""
    forks.spawn(meshed, (free_port,), 2)
    assert forks.printed()[0].splitlines() == ["done"] * 2


def trained_on_cuda(rank, port):
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=120))
    torch.manual_seed(0)
    model = Network().double().cuda()
    batch = {"x": torch.randn(4, 3, 65, 33).double().cuda(), "y": torch.randn(4, 2, 33, 17).double().cuda()}
    loss_of(model, batch, scale=2.0).backward()
    expected = {name: p.grad.clone().cpu() for name, p in model.named_parameters()}
    model.zero_grad()
    meshes._speeds = lambda wires, meeting: (WireSpeed(1e15, 0.0),)  # else so small a step is not split
    step = lowtide.fit(loss_of, model, batch, scale=2.0, budget="100%", mesh=2, **OPTIONS)
    assert step.communications
    for _ in range(2):
        model.zero_grad()
        before = step.sent_bytes
        step(model, batch, scale=2.0).backward()
        assert step.sent_bytes - before == step.planned_wire_bytes
        for name, p in model.named_parameters():
            wanted = expected[name][step.boxes[name].slices()]
            assert torch.allclose(p.grad.cpu(), wanted, rtol=1e-10, atol=1e-13), name
    torch.distributed.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_two_processes_of_one_gpu_train_over_gloo(forks, free_port):
    forks.spawn(trained_on_cuda, (free_port,), 2)
