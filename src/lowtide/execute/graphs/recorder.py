"""Watches a part of a Program while it is captured: what each operator allocates, and how long it lives.

Every operator allocates from a pool of its own, so that no address is given away twice. Tensors of a few
bytes do not: they would take a page each. They are kept in the pool of the graph, as are the results of
operators that allocate nothing larger. Which ones do is seen in a step that runs as always.
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
from lowtide.execute.graphs import segments
from lowtide.execute.graphs.operator_parts import OperatorParts, parts_of
from lowtide.execute.graphs.pages import PAGE, SMALL, Lifetimes, pages_of
from lowtide.execute.graphs.reasons import CannotCaptureError
from lowtide.torch_internals import TorchDispatchMode, tree_leaves, tree_map_only
from lowtide.trace.step.group import Group
from lowtide.units import format_bytes

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

    def __init__(self, tensor: torch.Tensor, base: int) -> None:
        storage = tensor.untyped_storage()
        self.address = storage.data_ptr()
        self.pages = pages_of(self.address - base, storage.nbytes())
        self.gone = is_freed(tensor)


class Recorder(_Operators):  # type: ignore[no-untyped-call]
    """Has each operator that allocates much do so from a pool of its own."""

    def __init__(
        self,
        pages: segments.Pages,
        graph_pool: Any,
        base: int,
        lifetimes: Lifetimes,
        alive: list[Alive],
        large: Collection[int],
    ) -> None:
        """``large`` are the operators that allocate much, by their number."""
        super().__init__("cuda")
        self._pages, self._graph_pool, self._base = pages, graph_pool, base
        self._lifetimes, self._alive, self._large = lifetimes, alive, large
        self.pools: list[Any] = []
        """Hold them until nothing is captured any more."""

    def operator(self, number: int, call: Callable[[], Any], parts: OperatorParts | None) -> Any:
        """Call it; what it leaves behind is remembered.

        What it frees before it ends is not taken again, so it is called in parts where it has any.
        """
        if number not in self._large:
            return call()
        if parts is None:
            return self._alone(call)
        return parts.together([self._alone(one) for one in parts.calls])

    def _alone(self, call: Callable[[], Any]) -> Any:
        """Call it with a pool of its own."""
        self._bury()  # before: what it reads must not lie where it writes
        before = segments.taken()
        with self._own_pool():
            result = call()
        if missing := segments.lacking():
            raise CannotCaptureError(
                f"they need {format_bytes(missing)} more than the budget leaves for them"
            )
        return self._left(result, before, segments.taken())

    @contextmanager
    def _own_pool(self) -> Iterator[None]:
        pool, device = segments.pool(), self._pages.index
        self.pools.append(pool)
        stop_allocating_to_pool(device, self._graph_pool, captured=len(self.pools) == 1)
        allocate_to_pool(device, pool.id)
        try:
            yield
        finally:
            stop_allocating_to_pool(device, pool.id)
            allocate_to_pool(device, self._graph_pool)

    def _left(self, result: Any, before: int, after: int) -> Any:
        """The result of an operator, with small tensors copied; remembers what lies on its own addresses."""
        mine = range(self._base + before, self._base + after)
        tensors = [one for one in tree_leaves(result) if isinstance(one, torch.Tensor)]
        storages = [one.untyped_storage().data_ptr() for one in tensors]

        def settled(one: torch.Tensor) -> torch.Tensor:
            storage = one.untyped_storage()
            alone = storages.count(storage.data_ptr()) == 1
            if storage.data_ptr() not in mine or storage.nbytes() > SMALL or not alone:
                return one
            copy = torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device=one.device)
            return copy.copy_(one)

        result = tree_map_only(torch.Tensor, settled, result)
        stay = [one for one in tree_leaves(result) if isinstance(one, torch.Tensor)]
        found = {one.untyped_storage().data_ptr(): one for one in stay}
        lasting = [Alive(one, self._base) for address, one in found.items() if address in mine]
        span = range(before // PAGE, after // PAGE)
        self._lifetimes.ran(span, self._pages.taken(), [one.pages for one in lasting])
        self._alive += lasting
        return result

    def _bury(self) -> None:
        """Give back the pages of what was freed."""
        gone = [one for one in self._alive if one.gone()]
        if gone:
            for one in gone:
                self._lifetimes.died(one.pages)
            self._alive[:] = [one for one in self._alive if one not in gone]
