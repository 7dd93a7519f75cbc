"""A mesh as users give it, as devices in a grid with a process and connections each."""

from __future__ import annotations

import math
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import msgspec
import torch

from lowtide.cores import usable_cores
from lowtide.cost.wire import WireSpeed
from lowtide.distributed_internals import default_store, group_seconds
from lowtide.errors import RunError
from lowtide.execute.shards.faults import RankWatch
from lowtide.execute.shards.meeting import Meeting
from lowtide.execute.shards.wires import ProcessWire, speed_of, timed_messages
from lowtide.graph.shards import Mesh

__all__ = ["Connected", "connected"]


_JOINING = 300.0
"""Seconds until processes have met, and until a communication fails, where the user says nothing else."""


@dataclass(frozen=True, slots=True)
class Connected:
    """One process of a mesh."""

    mesh: Mesh
    rank: int
    """Which device of the mesh it has."""
    wires: tuple[ProcessWire, ...]
    """To others along each axis."""
    meeting: Meeting
    watch: RankWatch
    speeds: tuple[WireSpeed, ...]
    """Of each wire."""
    crowding: float = 1.0
    """How many times longer operators take where processes of a host have more threads than processors."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of the wires."""
        return tuple(f"axis {axis} of {list(self.mesh.sizes)}" for axis in range(len(self.wires)))

    @property
    def lines(self) -> dict[str, tuple[int, ...]]:
        """The devices that each wire connects, by its name."""
        return {name: self.mesh.line(self.rank, axis) for axis, name in enumerate(self.names)}


def connected(mesh: Any, store: Any = None, links: Sequence[WireSpeed] = ()) -> Connected:
    """This process in a mesh: a number of devices, numbers along each axis, or torch's DeviceMesh.

    Where nobody has called ``init_process_group`` and torchrun has started this process, it is called here.
    Processes meet in the ``store``, or in that of torch.distributed. A mesh that one of them cannot have, or
    that is not the same for all, is refused by all. How fast they are connected is measured then, by a few
    messages and sums, unless ``links`` say it for each axis.
    """
    distributed: Any = torch.distributed
    if not distributed.is_available():
        raise RunError("this torch is built without torch.distributed; install another build")
    _initialised(distributed)
    rank, world = distributed.get_rank(), distributed.get_world_size()
    group, where = distributed.group.WORLD, store or default_store()
    meeting = Meeting(where, rank, world, group_seconds(group))
    watch = RankWatch(where, rank, world)
    meeting.agree("compare versions", _versions(), "Install the same versions everywhere")
    sizes = meeting.settled("look at the mesh", lambda: _sizes(mesh, world))
    told = {"the mesh": "x".join(map(str, sizes))}
    meeting.agree("compare meshes", told, "Give all processes the same mesh")
    groups = [group]
    if hasattr(mesh, "get_group") or len(sizes) > 1:
        if not hasattr(mesh, "get_group"):
            alone = "nccl" not in distributed.get_backend()  # processes may share a GPU then
            mesh = distributed.init_device_mesh("cpu" if alone else _device_type(), sizes)
        groups = [mesh.get_group(axis) for axis in range(len(sizes))]
    wires = tuple(ProcessWire(one, watch) for one in groups)
    speeds = tuple(links) or _speeds(wires, meeting)
    return Connected(Mesh(sizes), rank, wires, meeting, watch, speeds, _crowding(meeting))


def _crowding(meeting: Meeting) -> float:
    """How many threads of processes on this host there are for each of its processors, and 1 at least.

    On CUDA each process is taken to have a device of its own.
    """
    mine = msgspec.json.encode((platform.node(), torch.get_num_threads()))
    told = meeting.everybody("count threads", mine)
    heard = [msgspec.json.decode(one, type=tuple[str, int]) for one in told]
    threads = sum(count for host, count in heard if host == heard[meeting.rank][0])
    return 1.0 if _device_type() == "cuda" else max(1.0, threads / usable_cores())


def _speeds(wires: Sequence[ProcessWire], meeting: Meeting) -> tuple[WireSpeed, ...]:
    """How fast each wire is: the same numbers on all processes, those of the slowest."""
    distributed: Any = torch.distributed
    device = torch.device("cpu" if "gloo" in distributed.get_backend() else _device_type())
    mine = [timed_messages(one, device) if one.devices > 1 else [0.0] * 4 for one in wires]
    heard = meeting.everybody("compare how fast connections are", msgspec.json.encode(mine))
    told = [msgspec.json.decode(one, type=list[list[float]]) for one in heard]
    slowest = [[max(some) for some in zip(*along, strict=True)] for along in zip(*told, strict=True)]
    return tuple(speed_of(times, device, one.devices) for one, times in zip(wires, slowest, strict=True))


def _versions() -> dict[str, str]:
    own = str(sys.modules["lowtide"].__version__)
    return {"the version of lowtide": own, "the version of torch": str(torch.__version__)}


def _sizes(mesh: Any, world: int) -> tuple[int, ...]:
    """How many devices are along each axis of a mesh of all processes, in their order."""
    if hasattr(mesh, "get_group"):
        ranks, sizes = mesh.mesh.flatten().tolist(), tuple(mesh.mesh.shape)
    else:
        sizes = (mesh,) if isinstance(mesh, int) and not isinstance(mesh, bool) else mesh
        right = isinstance(sizes, tuple | list) and sizes
        if not right or not all(isinstance(one, int) and one > 0 and one is not True for one in sizes):
            raise RunError(
                f"mesh={mesh!r}: give a number of devices, such as 4, numbers along each axis, such as "
                "(2, 2), or a DeviceMesh of torch.distributed"
            )
        ranks, sizes = list(range(math.prod(sizes))), tuple(sizes)
    if ranks != list(range(world)):
        raise RunError(
            f"a mesh of {'x'.join(map(str, sizes))} has {len(ranks)} devices, and {world} processes run; "
            f"start as many (`torchrun --nproc-per-node {len(ranks)}`), or give a mesh of all processes, in "
            "their order"
        )
    return sizes


def _device_type() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _initialised(distributed: Any) -> None:
    """Join the processes that torchrun has started, unless the user's script has."""
    if distributed.is_initialized():
        return
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise RunError(
            "a step on a mesh runs in several processes: start the script by `torchrun --nproc-per-node 2 "
            "script.py`, or call torch.distributed.init_process_group first"
        )
    if _device_type() == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    try:
        limit = timedelta(seconds=_JOINING)
        store, rank, world = next(distributed.rendezvous("env://", timeout=limit))
        # what processes before a restart have left in the store of torchrun is theirs
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = distributed.PrefixStore(f"lowtide/attempt {attempt}", store)
        backend = "nccl" if _device_type() == "cuda" else "gloo"
        distributed.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit)
    except (RuntimeError, ValueError) as error:
        where = f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
        raise RunError(
            f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} cannot join the others at {where}: "
            f"{str(error).partition(chr(10))[0]}; see whether this host can be reached from all others"
        ) from error
