"""Memory in which the graphs of all shapes of a step run, one after the other.

A step of one shape leaves nothing there that it needs later, but for what users hold. So all shapes have the
same pages. A step that runs as always has memory of its own beside them: where the budget does not hold both,
graphs are given up, and captured again when they are needed.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Protocol

import torch

from lowtide.execute.graphs.captured_step import CapturedStep, Pending
from lowtide.execute.graphs.part import SharedStorage, Tapes

__all__ = ["CommonMemory"]


class _Shape(Protocol):
    """A shape of the step, which may have graphs."""

    def make_way(self) -> None:
        """Give up the graphs; they are captured again."""


class CommonMemory:
    """What is captured of a step for all of its shapes, and which of it is in use."""

    def __init__(self, tapes: Tapes | None = None) -> None:
        self.tapes = tapes or Tapes()
        self.pending: Pending | None = None
        """The latest forward of any shape, while its backward may still come."""
        self._steps: list[CapturedStep] = []
        self._left: list[SharedStorage] = []
        """What users hold of graphs that were given up."""
        self._shapes: weakref.WeakSet[_Shape] = weakref.WeakSet()
        self._captures = 0
        self._beside: tuple[object, int] = (None, 0)
        """What lies beside the pages, and for which graphs that was looked up."""

    def join(self, shape: _Shape) -> None:
        """One more shape."""
        self._shapes.add(shape)

    def add(self, step: CapturedStep) -> None:
        """One more way of capturing a shape."""
        self._captures += 1
        step.tape.order = self._captures
        self._steps.append(step)

    def remove(self, steps: Sequence[CapturedStep]) -> None:
        """Give up these; the memory is given back with the last one."""
        if steps:
            self.tapes.wait()
        for step in steps:
            step.forward = step.backward = None
            step.tape.close()
            self._left += step.tape.storages
        gone = {id(step) for step in steps}
        self._steps = [step for step in self._steps if id(step) not in gone]
        if not self._steps:
            self._left.clear()  # its addresses keep their pages; others get new ones
            self.tapes.forget()
        if self.pending is not None and id(self.pending.tape) in gone:
            self.pending = None

    def has_others(self, own: Sequence[CapturedStep]) -> bool:
        """Whether there are graphs of other shapes."""
        return len(self._steps) > len(own)

    @property
    def held(self) -> set[int]:
        """Pages on which something lies that users hold."""
        return {page for one in self._storages() if one.held for page in one.pages}

    def is_undisturbed(self, step: CapturedStep) -> bool:
        """Whether a replay writes over nothing that is held.

        Small storages lie in the pool that all graphs share. It was theirs alone for later captures; earlier
        ones may have used the place for something else.
        """
        order, used = step.tape.order, step.tape.used
        return not any(
            one.held and (one.order == order or (not one.pages and one.order > order) or one.pages & used)
            for one in self._storages()
        )

    def copy_for(self, argument: int, value: torch.Tensor) -> torch.Tensor:
        """Memory for a copy of a tensor of the batch: that of another shape or capture, if it is enough."""
        for step in self._steps:
            known = step.static.get(argument)
            if known is not None and _reaches(value) <= known.untyped_storage().nbytes():
                flat = torch.empty(0, dtype=value.dtype, device=known.device)
                return flat.set_(known.untyped_storage(), 0, value.shape, value.stride())
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)

    def copied_bytes(self, more: Iterable[torch.Tensor]) -> int:
        """Bytes of the copies of all batches, and of these."""
        known = (one for step in self._steps for one in step.static.values())
        storages = (one.untyped_storage() for one in chain(known, more))
        return sum({one.data_ptr(): one.nbytes() for one in storages}.values())

    def make_way(self, peak_bytes: int | None = None, budget_bytes: int = 0) -> None:
        """A step is going to run as always: give up all graphs, unless both fit into the budget."""
        if peak_bytes is None or self._bytes() + peak_bytes > budget_bytes:
            for shape in list(self._shapes):
                shape.make_way()

    def _bytes(self) -> int:
        """All memory of graphs: their pages, and small tensors and what libraries keep beside these."""
        graphs = [(one.tape.order, one.backward is not None) for one in self._steps]
        if self._beside[0] != graphs:
            self._beside = graphs, self.tapes.unplanned_bytes if graphs else 0
        return self.tapes.size + self._beside[1]

    def _storages(self) -> Iterator[SharedStorage]:
        self._left = [one for one in self._left if one.held]
        yield from self._left
        for step in self._steps:
            yield from step.tape.storages


def _reaches(value: Any) -> int:
    """Bytes from the first element of a tensor to its last one."""
    if not value.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return int((last + 1) * value.element_size())
