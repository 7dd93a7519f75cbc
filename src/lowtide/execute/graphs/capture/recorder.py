"""Watches a part of a Program while it is captured: what each operator allocates, and how long it lives.

Every operator that allocates much does so from a pool of its own, so that PyTorch's allocator asks for each
piece anew. Others allocate from the pool of the graph. Which ones do is seen in a step that runs as always.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from lowtide.device_internals import (
    allocate_to_pool,
    is_freed,
    large_allocations,
    stop_allocating_to_pool,
)
from lowtide.execute.graphs.arena import segments
from lowtide.execute.graphs.arena.memory import CaptureMemory
from lowtide.execute.graphs.capture.operator_parts import OperatorParts, parts_of
from lowtide.torch_internals import TorchDispatchMode, tree_leaves
from lowtide.trace.step.group import Group

__all__ = ["Alive", "Recorder", "Sizes"]


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Is shown operators one by one; those of compiled groups as one."""

    def __init__(self, device_type: str) -> None:
        """Those of the host are not counted where the step is on another device."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._device_type = device_type
        self._number = 0
        self._inside = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """One operator."""
        given = kwargs or {}
        if not self._counts(args, given):
            return func(*args, **given)
        return self._numbered(lambda: func(*args, **given), parts_of(func, args, given))

    def _counts(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Whether an operator is one of the device; whether offload takes memory of the host may change."""
        devices = [one.device for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        asked = kwargs.get("device")
        devices += [] if asked is None else [torch.device(asked)]
        return any(one.type == self._device_type for one in devices)

    @contextmanager
    def watching(self, groups: Iterable[Group]) -> Iterator[None]:
        """Be shown what runs, groups too: their kernels allocate without an operator."""
        listed = list(groups)
        for group in listed:
            group.measured = lambda once, arguments: self._numbered(lambda: once(*arguments))
        try:
            with self:
                yield
        finally:
            for group in listed:
                group.measured = None

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, operators are not counted: they are no part of what is captured."""
        before, self._inside = self._inside, True
        try:
            yield
        finally:
            self._inside = before

    def _numbered(self, call: Callable[[], Any], parts: OperatorParts | None = None) -> Any:
        if self._inside:  # of a group
            return call()
        self._number += 1
        self._inside = True
        try:
            return self.operator(self._number, call, parts)
        finally:
            self._inside = False

    def operator(self, number: int, call: Callable[[], Any], parts: OperatorParts | None) -> Any:
        """Call an operator, as a whole or in parts."""
        raise NotImplementedError


class Sizes(_Operators):  # type: ignore[no-untyped-call]
    """Sees which operators allocate much."""

    def __init__(self, device: int) -> None:
        super().__init__("cuda")
        self._device = device
        self.large: set[int] = set()

    def operator(self, number: int, call: Callable[[], Any], _parts: OperatorParts | None) -> Any:
        """Call it, and count."""
        before = large_allocations(self._device)
        result = call()
        if large_allocations(self._device) != before:
            self.large.add(number)
        return result


class Alive:
    """A storage that an operator has left behind."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.address = tensor.untyped_storage().data_ptr()
        self.gone = is_freed(tensor)


class Recorder(_Operators):  # type: ignore[no-untyped-call]
    """Has each operator that allocates much do so from a pool of its own."""

    def __init__(
        self, memory: CaptureMemory, device: int, graph_pool: Any, alive: list[Alive], large: Collection[int]
    ) -> None:
        """``large`` are the operators that allocate much, by their number."""
        super().__init__("cuda")
        self._memory, self._device, self._graph_pool = memory, device, graph_pool
        self._alive, self._large = alive, large
        self.pools: list[Any] = []
        """Hold them until nothing is captured any more."""
        self.has_begun_own = False
        """Whether the pool of the graph is this recorder's doing by now, and no more that of its capture."""

    def begins(self) -> None:
        """A graph is captured from here on."""
        self.has_begun_own = False

    def operator(self, number: int, call: Callable[[], Any], parts: OperatorParts | None) -> Any:
        """Call it; what it leaves behind is remembered.

        What it frees before it ends has a place of its own, so it is called in parts where it has any.
        """
        if number not in self._large:
            return call()
        if parts is None:
            return self._alone(call)
        return parts.together([self._alone(one) for one in parts.calls])

    def _alone(self, call: Callable[[], Any]) -> Any:
        """Call it with a pool of its own."""
        self._bury()  # before: what it reads must not lie where it writes
        self._memory.begin()
        with self._own_pool():
            result = call()
        tensors = [one for one in tree_leaves(result) if isinstance(one, torch.Tensor)]
        storages = {one.untyped_storage().data_ptr(): one for one in tensors}
        stay = self._memory.ran(
            {address: one.untyped_storage().nbytes() for address, one in storages.items()}
        )
        self._alive += [Alive(one) for address, one in storages.items() if address in stay]
        return result

    @contextmanager
    def _own_pool(self) -> Iterator[None]:
        pool, device = segments.pool(self._memory.operator), self._device
        self.pools.append(pool)
        stop_allocating_to_pool(device, self._graph_pool, captured=not self.has_begun_own)
        self.has_begun_own = True
        allocate_to_pool(device, pool.id)
        try:
            yield
        finally:
            stop_allocating_to_pool(device, pool.id)
            allocate_to_pool(device, self._graph_pool)

    def _bury(self) -> None:
        """Say what was freed."""
        gone = [one for one in self._alive if one.gone()]
        for one in gone:
            self._memory.died(one.address)
        if gone:
            self._alive[:] = [one for one in self._alive if one not in gone]
