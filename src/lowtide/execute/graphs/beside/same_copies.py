"""Copies to the host and back in captured parts: the same memory of the host in every replay.

It is taken before a part is captured: each copy of the Program has its own. Tiles run one after the other,
so all tiles of all loops share theirs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from lowtide.execute.graphs.arena.errors import CannotCaptureError
from lowtide.execute.runtime.copies import CudaTransfers, Transfers

__all__ = ["SameCopies", "SeenTurns"]


class SeenTurns:
    """Notes what tiles copy to the host, in a step that runs as always."""

    def __init__(self) -> None:
        self.sizes: list[Counter[int]] = []
        """How often one tile copies so many bytes at most; first for tiles, then for those inside of them."""
        self._depth = 0

    @contextmanager
    def turn(self, sizes: Sequence[int], own: Transfers) -> Iterator[Transfers]:
        """Inside, a tile runs that copies so many bytes each time."""
        if self._depth == len(self.sizes):
            self.sizes.append(Counter())
        self.sizes[self._depth] |= Counter(sizes)
        self._depth += 1
        try:
            yield own
        finally:
            self._depth -= 1


class SameCopies(CudaTransfers):
    """Copies to the same memory of the host whenever they are replayed."""

    def __init__(
        self, device: torch.device, sizes: Sequence[Sequence[int]], in_turns: Sequence[Mapping[int, int]]
    ) -> None:
        """``sizes`` are those of the copies to the host in forward and in backward, in order.

        ``in_turns`` tells how often one tile copies so many bytes, and a tile inside of a tile.
        """
        super().__init__(device)
        self._parts = [[self._pinned(size) for size in part] for part in sizes]
        self._in_turns = [
            [self._pinned(size) for size, count in one.items() for _ in range(count)] for one in in_turns
        ]
        buffers = (one for some in (*self._parts, *self._in_turns) for one in some)
        if not all(one.is_pinned() for one in buffers):
            raise CannotCaptureError("the host has no pinned memory left to offload to")
        self._left: list[torch.Tensor] = []
        self._turns: list[list[torch.Tensor]] = []
        """What is left for the tile that runs now, and for the tiles around it."""
        self._read: dict[int, Any] = {}
        """By address on the host: the latest copy from there."""
        self._busy: list[Any] = []
        self._under_way: dict[int, Any] = {}
        """Events of the graph that is captured now: others have ended with theirs."""

    def begin(self, part: int) -> None:
        """A part is captured from here on."""
        self._left, self._turns, self._read = list(reversed(self._parts[part])), [], {}
        self._busy, self._under_way = [], {}

    def join(self) -> None:
        """The graph that is captured ends once its copies have."""
        stream = torch.cuda.current_stream(self._device)
        for lane in self._busy:
            stream.wait_stream(lane)
        self._busy, self._under_way = [], {}

    @contextmanager
    def turn(self, _sizes: Sequence[int], _own: Transfers) -> Iterator[Transfers]:
        """Inside, a tile runs."""
        depth = len(self._turns)
        if depth == len(self._in_turns):
            raise CannotCaptureError("tiles copy to the host that did not in the step before")
        self._turns.append(list(self._in_turns[depth]))
        try:
            yield self
        finally:
            self._turns.pop()

    def take(self, size: int) -> torch.Tensor:
        """Memory for the next copy."""
        if self._turns:
            left = self._turns[-1]
            found = next((k for k, one in enumerate(left) if one.numel() == size), None)
        else:
            left = self._left
            found = len(left) - 1 if left and left[-1].numel() == size else None
        if found is None:
            raise CannotCaptureError("tensors of another size are offloaded than the plan says")
        host = left.pop(found)
        read = self._read.get(host.data_ptr())  # by the tile before
        if id(read) in self._under_way:
            self._out.wait_event(read)
        return host.detach()

    def ticket(self, lane: Any) -> Any:
        """An event inside of the graph."""
        if lane not in self._busy:
            self._busy.append(lane)
        event = super().ticket(lane)
        self._under_way[id(event)] = event
        return event

    def come_after(self, sent: Any) -> None:
        """Copies of a graph before have ended with it."""
        if id(sent) in self._under_way:
            super().come_after(sent)

    def wait(self, ticket: Any) -> None:
        """The same."""
        if id(ticket) in self._under_way:
            super().wait(ticket)

    def send(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Start, if it is one of the device."""
        if tensor.device.type == "cpu":
            raise CannotCaptureError("a tensor of the host is offloaded")
        return super().send(tensor)

    def fill(self, storage: torch.UntypedStorage, host: torch.Tensor, sent: Any) -> Any:
        """Start."""
        arrived = super().fill(storage, host, sent)
        self._read[host.data_ptr()] = arrived
        return arrived

    def settle(self) -> None:
        """Nothing is under way while a graph is captured."""
