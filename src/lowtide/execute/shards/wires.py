"""Wires over torch.distributed: messages point to point, sums by all-reduce. Bytes are counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lowtide.execute.shards.faults import RankWatch

__all__ = ["ProcessWire"]


class ProcessWire:
    """Connects the processes of a group; a ``watch`` says who is to blame where one fails."""

    def __init__(self, group: Any, watch: RankWatch) -> None:
        distributed: Any = torch.distributed
        self._group, self._watch = group, watch
        self._ranks: list[int] = distributed.get_process_group_ranks(group)
        self._place: int = distributed.get_rank(group)
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
            calls = [
                distributed.P2POp(distributed.isend, _real(x), self._ranks[to], self._group)
                for to, x in sends
            ]
            calls += [
                distributed.P2POp(distributed.irecv, _real(x), self._ranks[k], self._group)
                for k, x in receives
            ]
            for work in distributed.batch_isend_irecv(calls) if calls else ():
                work.wait()
        self.sent_bytes += sum(x.nbytes for _, x in sends)

    def add_up(self, x: Tensor) -> None:
        """The sum over all processes."""
        distributed: Any = torch.distributed
        with self._watch.communicating():
            distributed.all_reduce(_real(x), group=self._group)
        self.sent_bytes += x.nbytes


def _real(x: Tensor) -> Tensor:
    """The same memory as real numbers, which every backend sends and adds up."""
    return torch.view_as_real(x) if x.is_complex() else x
