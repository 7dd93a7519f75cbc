"""What a device holds outside a step, and what it could still give."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lowtide.distributed_internals import local_of
from lowtide.execute.memory.host import available_bytes
from lowtide.execute.memory.reserved import counted_bytes
from lowtide.plan.program.memory import rounded

__all__ = ["Room"]

_MARGIN = 0.05
"""Of what is free: left alone by the budget ``auto``, for what the allocator loses between blocks."""

_LATER = 2 << 20
"""Bytes that libraries may still take on a CUDA device, at their first call in some thread or stream."""


class Room:
    """The memory of the device that a step's arguments are on."""

    def __init__(self, arguments: Sequence[Any]) -> None:
        strided = (a for a in arguments if isinstance(a, torch.Tensor) and a.layout is torch.strided)
        tensors = [local_of(a) for a in strided]
        on_cuda = [t for t in tensors if t.is_cuda]
        self.device = on_cuda[0].device if on_cuda else torch.device("cpu")
        mine = on_cuda if on_cuda else tensors
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in mine}
        self.argument_bytes = sum(rounded(size, self.device.type) for size in storages.values())
        self.graph_bytes = 0
        """What is left alone on a CUDA device for graphs of the step."""
        self.lost_bytes = 0
        """The part of it that is for what their arena loses."""
        self.no_graphs = ""
        """Why nothing is, if nothing is on purpose."""
        self.counts_reserved = False
        """Whether what PyTorch's allocator has reserved counts outside of the step, not what is allocated."""
        self.between_bytes = 0
        """What others need between forward and backward of the step."""

    def outside_bytes(self) -> int:
        """What is there and is no argument of the step: optimiser state, other models, libraries."""
        if self.device.type != "cuda":
            return 0
        self._settled()
        if self.counts_reserved:
            torch.cuda.empty_cache()
            there = torch.cuda.memory_reserved(self.device)
        else:
            there = torch.cuda.memory_allocated(self.device)
        there += self._graphs_of_others()
        return max(0, there - self.argument_bytes) + _LATER + self.graph_bytes

    def allocated_bytes(self) -> int:
        """What is allocated on a CUDA device, the arguments included; 0 on the host."""
        return self.outside_bytes() + self.argument_bytes if self.device.type == "cuda" else 0

    def free_bytes(self) -> int:
        """What a step may take here in all, with its arguments and what is beside it, less a margin."""
        if self.device.type != "cuda":
            return int(available_bytes() * (1 - _MARGIN)) + self.argument_bytes
        free, _ = torch.cuda.mem_get_info(self.device)
        held = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        there = torch.cuda.memory_allocated(self.device) + self._graphs_of_others()
        return int((free + held) * (1 - _MARGIN)) + there

    def _graphs_of_others(self) -> int:
        """Memory of CUDA graphs of other steps, which PyTorch's allocator does not count."""
        index = self.device.index
        return counted_bytes(torch.cuda.current_device() if index is None else index)

    def _settled(self) -> None:
        """Libraries take memory at their first call in a thread: let that be now, in autograd's too."""
        with torch.enable_grad():
            small = torch.ones(16, 16, device=self.device, requires_grad=True)
            made = torch.nn.functional.linear(torch.mm(small, small), small, small[0])
            torch.autograd.grad(made.sum(), small)
