"""Wires over torch.distributed: messages point to point, sums by all-reduce. Bytes are counted.

gloo takes tensors of the CPU; those of CUDA go through pinned memory of the host then.

How fast they are is measured by a few messages and sums, small ones and large ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from lowtide.cost.wire import WireSpeed
from lowtide.distributed_internals import backend_of, tensor_holders
from lowtide.execute.shards.faults import RankWatch
from lowtide.trace.distributed.collectives import let_go

__all__ = ["ProcessWire", "speed_of", "timed_messages"]

_SMALL, _LARGE, _LARGE_CUDA = 1 << 10, 1 << 20, 1 << 24
"""Bytes of messages and sums that are timed."""
_TIMES = 7, 3
"""How often a small and a large one are."""
_INSTANT = 1e-9
_LEAST = 0.25
"""Of the time of a large message, at least that is taken by its bytes, whatever a small one took."""


class ProcessWire:
    """Connects the processes of a group; a ``watch`` says who is to blame where one fails."""

    def __init__(self, group: Any, watch: RankWatch) -> None:
        distributed: Any = torch.distributed
        self._group, self._watch = group, watch
        self._ranks: list[int] = distributed.get_process_group_ranks(group)
        self._place: int = distributed.get_rank(group)
        self.devices = len(self._ranks)
        self.sent_bytes = 0
        """What went to other processes, point to point and into sums."""

    @property
    def place(self) -> int:
        """Which of them this one is."""
        return self._place

    def swap(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> None:
        """All messages at once; returns when they are there."""
        with self._watch.communicating():
            self._started(sends, receives)()

    def begin_swap(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]
    ) -> Callable[[], None]:
        """All messages at once, beside what follows; what it gives waits, and says who is to blame."""
        with self._watch.communicating() as name:
            arrived = [self._started(sends, receives)]

        def ended() -> None:
            with self._watch.waiting(name):
                arrived.pop()()

        return ended

    def _started(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]
    ) -> Callable[[], None]:
        distributed: Any = torch.distributed
        moved = [(x, tensor_holders(x)) for _, x in (*sends, *receives)]
        out = [(distributed.isend, to, self._staged(x)) for to, x in sends]
        into = [(distributed.irecv, come, self._staged(x, filled=False)) for come, x in receives]
        pairs = [(x, staged) for (_, x), (*_, staged) in zip(receives, into, strict=True)]
        calls = [
            distributed.P2POp(how, _real(x), self._ranks[other], self._group)
            for how, other, x in (*out, *into)
        ]
        pending = distributed.batch_isend_irecv(calls) if calls else []
        self.sent_bytes += sum(x.nbytes for _, x in sends)
        del sends, receives, calls, into

        def ended() -> None:
            _waited_for(pending)
            for x, staged in pairs:
                _brought_back(x, staged)
            out.clear()  # memory of the host, which is sent until now
            for x, holders in moved:
                if not x.is_cuda:
                    let_go(x, holders)

        return ended

    def add_up(self, x: Tensor) -> None:
        """The sum over all processes."""
        distributed: Any = torch.distributed
        holders = tensor_holders(x)
        with self._watch.communicating():
            staged = self._staged(x)
            distributed.all_reduce(_real(staged), group=self._group)
            _brought_back(x, staged)
        self.sent_bytes += x.nbytes
        if not x.is_cuda:
            let_go(x, holders)

    def begin_sum(self, x: Tensor) -> Callable[[], None]:
        """The same beside what follows; what it gives waits, and says who is to blame where it fails.

        On CUDA the stream that computes waits. Until then torch keeps the memory from being used again.
        """
        distributed: Any = torch.distributed
        with self._watch.communicating() as name:
            staged = self._staged(x)
            pending = [distributed.all_reduce(_real(staged), group=self._group, async_op=True)]
        self.sent_bytes += x.nbytes

        def ended() -> None:
            with self._watch.waiting(name):
                pending.pop().wait()
            _brought_back(x, staged)
            if not x.is_cuda:
                let_go(x, 1)

        return ended

    def by_host(self, x: Tensor) -> bool:
        """Whether a tensor goes through memory of the host: gloo takes no others."""
        return x.is_cuda and backend_of(self._group, x.device) == "gloo"

    def _staged(self, x: Tensor, *, filled: bool = True) -> Tensor:
        """The tensor, or memory of the host in its place; ``filled`` with its values or to be filled."""
        if not self.by_host(x):
            return x
        found = torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda)
        return found.copy_(x) if filled else found


def timed_messages(wire: ProcessWire, device: torch.device) -> list[float]:
    """Seconds of a small and a large message to the next process, all at once, and of such sums."""
    count, mine = wire.devices, wire.place
    found = []
    sent = wire.sent_bytes
    for summed in (False, True):
        sizes = _SMALL, _LARGE_CUDA if device.type == "cuda" else _LARGE
        for size, repeats in zip(sizes, _TIMES, strict=True):
            x, y = (torch.zeros(size // 4, device=device) for _ in range(2))
            times = []
            for _ in range(1 + repeats):
                began = perf_counter()
                if summed:
                    wire.add_up(x)
                else:
                    wire.swap([((mine + 1) % count, x)], [((mine - 1) % count, y)])
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                times.append(perf_counter() - began)
            found.append(median(times[1:]))
    wire.sent_bytes = sent
    return found


def speed_of(times: Sequence[float], device: torch.device, devices: int) -> WireSpeed:
    """How fast a wire is by such seconds; one to nobody as is assumed where nothing is measured."""
    if devices < 2:
        return WireSpeed()
    more = (_LARGE_CUDA if device.type == "cuda" else _LARGE) - _SMALL
    small, large, small_sum, large_sum = times

    moved = 2 * more * (devices - 1) / devices
    return WireSpeed(
        more / max(large - small, _LEAST * large, _INSTANT),
        min(small, large),
        moved / max(large_sum - small_sum, _LEAST * large_sum, _INSTANT),
        min(small_sum, large_sum),
    )


def _waited_for(works: list[Any]) -> None:
    """Wait for all of them, and hold none any more: they hold what they have moved."""
    while works:
        works.pop(0).wait()


def _brought_back(x: Tensor, staged: Tensor) -> None:
    """Have in a tensor what has arrived in place of it."""
    if staged is not x:
        x.copy_(staged, non_blocking=True)


def _real(x: Tensor) -> Tensor:
    """The same memory as real numbers, which every backend sends and adds up."""
    return torch.view_as_real(x) if x.is_complex() else x
