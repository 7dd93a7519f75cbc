"""Wires over torch.distributed: messages point to point, sums by all-reduce. Bytes are counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lowtide.execute.shards.faults import RankWatch
from lowtide.trace.distributed.collectives import let_go

__all__ = ["ProcessWire"]


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
        distributed: Any = torch.distributed
        with self._watch.communicating():
            calls = [distributed.P2POp(distributed.isend, x, self._ranks[to], self._group) for to, x in sends]
            calls += [
                distributed.P2POp(distributed.irecv, x, self._ranks[k], self._group) for k, x in receives
            ]
            for work in distributed.batch_isend_irecv(calls) if calls else ():
                work.wait()
        self.sent_bytes += sum(x.nbytes for _, x in sends)

    def add_up(self, x: Tensor) -> None:
        """The sum over all processes."""
        distributed: Any = torch.distributed
        with self._watch.communicating():
            distributed.all_reduce(x, group=self._group)
        self.sent_bytes += x.nbytes

    def begin_sum(self, x: Tensor) -> Callable[[], None]:
        """The same beside what follows; what it gives waits, and says who is to blame where it fails.

        On CUDA the stream that computes waits. Until then torch keeps the memory from being used again.
        """
        distributed: Any = torch.distributed
        with self._watch.communicating() as name:
            pending = [distributed.all_reduce(x, group=self._group, async_op=True)]
        self.sent_bytes += x.nbytes

        def ended() -> None:
            with self._watch.waiting(name):
                pending.pop().wait()
            if not x.is_cuda:
                let_go(x, 1)

        return ended
