"""Both parts of a step as graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from lowtide.execute.graphs.capture.part_capture import Replayable
from lowtide.execute.graphs.part import Tape
from lowtide.execute.runtime.copies import Form

__all__ = ["CapturedStep", "Pending"]


class CapturedStep:
    """Both parts of the step, captured for what users hold of earlier steps."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.static: dict[int, torch.Tensor] = {}
        """Copies of the batch, by argument."""
        self.batch: set[int] = set()
        """The storages of the batch that it reads, copies or not."""
        self.fixed: dict[int, int] = {}
        """Addresses of parameters and buffers, and of a batch that is not copied, by argument."""
        self.forward: Replayable | None = None
        self.outputs: list[Any] = []
        """Tensors among them as values."""
        self.saved: list[torch.Tensor] | None = None
        """What forward has left for the backward that is still to be captured."""
        self.where: list[tuple[Form, int]] = []
        """Where the tensors among them lie."""
        self.others: list[Any] = []
        """Bytes on the host and random states among them."""
        self.tangents: list[torch.Tensor] = []
        self.backward: Replayable | None = None
        self.gradients: list[Any] = []


class Pending(NamedTuple):
    """A forward that was replayed, until its backward comes."""

    gone: Callable[[], bool]
    """Whether it cannot come any more."""
    token: int
    """The address of what autograd keeps in place of the tensors that forward saves."""
    tape: CapturedStep
