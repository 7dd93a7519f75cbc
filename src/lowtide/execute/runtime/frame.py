"""What a part of a Program works on while it runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from lowtide.execute.calls.random_state import Drawing
from lowtide.execute.runtime.copies import Form, Transfers
from lowtide.execute.runtime.parameter_offload import Traveller, bring_back
from lowtide.execute.runtime.witness import Saw
from lowtide.trace.distributed.wires import Wire

__all__ = ["Frame"]


class Frame:
    """What a part of a Program works on: tensors, random states, bytes on the host, copies under way."""

    __slots__ = (
        "able",
        "drawing",
        "exchanged",
        "hosts",
        "incoming",
        "outgoing",
        "quick",
        "sent",
        "states",
        "sums",
        "table",
        "transfers",
        "travellers",
        "wires",
        "witness",
    )

    def __init__(
        self,
        tensors: int,
        states: list[torch.Tensor | None],
        drawing: Drawing,
        transfers: Transfers | None,
        witness: Saw | None = None,
        quick: bool = False,
        wires: Callable[[str], Wire] | None = None,
    ) -> None:
        self.witness = witness
        """Shown what each operator gives, while somebody holds it against the capture."""
        self.quick = quick
        """Whether nobody watches: calls may be left out that change nothing."""
        self.wires = wires
        """Who talks to other processes in place of the wires of that name; operators are shown one by one."""
        self.table: list[Any] = [None] * tensors
        self.states = states
        self.drawing = drawing
        self.hosts: dict[int, torch.Tensor] = {}
        self.sent: dict[int, tuple[Any, Form]] = {}
        """By tensor on the host: the ticket of the copy that brought it there, and how it lay in memory."""
        self.outgoing: dict[int, Any] = {}
        self.incoming: dict[int, Any] = {}
        self.sums: dict[int, Callable[[], None]] = {}
        """By result: what waits for a sum over processes, or for an exchange, that is on its way."""
        self.exchanged: int | None = None
        """The result of the latest exchange that went on beside others."""
        self.transfers = transfers
        self.travellers: dict[int, Traveller] = {}
        """Leaves that were sent to the host."""
        self.able: frozenset[int] = frozenset()
        """Leaves that own their memory alone."""

    def arrive(self, tensor: int) -> None:
        """From here on a tensor is there, if it was on its way from the host or from other processes."""
        ticket = self.incoming.pop(tensor, None)
        if ticket is not None:
            assert self.transfers is not None
            self.transfers.wait(ticket)
        if tensor in self.sums:
            self.sums.pop(tensor)()

    def settle(self) -> None:
        """From here on whatever comes from the host or from others is there: who reads it does not wait."""
        while self.sums:  # in the order in which they were started
            self.sums.pop(next(iter(self.sums)))()
        for ticket in self.incoming.values():
            assert self.transfers is not None
            self.transfers.wait(ticket)
        self.incoming.clear()

    def clear(self) -> None:
        """Let go of everything, once nothing is under way; leaves come back, now or when they are read."""
        try:
            if self.transfers is not None:
                self.transfers.settle()
        finally:
            # sums are not waited for: others may be gone, and torch holds their memory until they end
            parts = (self.table, self.states, self.hosts, self.sent, self.outgoing, self.incoming, self.sums)
            for part in parts:
                part.clear()
            for one in self.travellers.values():
                one.hide()
            with contextlib.suppress(Exception):
                bring_back(self.travellers.values())
