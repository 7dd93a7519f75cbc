"""What a Program really holds while it runs: live bytes operator by operator, and every storage's life."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from lowtide.cost.watch import Allocations, Marker
from lowtide.graph import Lifetime, Timeline
from lowtide.torch_internals import free_weak_storage, storage_expired, storage_id, weak_storage

__all__ = ["StorageMarker"]


class StorageMarker(Marker):
    """Passes on to the marker of a watch, and follows the storages that operators leave behind.

    It keeps no tensor alive: a storage is known by a weak reference, and found gone when the next operator
    is about to run.
    """

    def __init__(self, inner: Marker) -> None:
        self._inner = inner
        self._step = -1
        self._runs: list[tuple[int, int]] = []
        self._seen: dict[int, int] = {}
        self._alive: dict[int, tuple[int, int, int, int]] = {}
        self._gone: list[Lifetime] = []

    def before(self, op: int) -> None:
        """The operator is about to run: storages that nobody holds any more ended with the one before."""
        self._sweep()
        self._step += 1
        self._runs.append((op, self._seen.get(op, 0)))
        self._seen[op] = self._seen.get(op, 0) + 1
        self._inner.before(op)

    def after(self, op: int) -> None:
        """The operator has run."""
        self._inner.after(op)

    def left(self, results: Mapping[int, Any]) -> None:
        """Notice the storages of what the operator put into the table."""
        for tensor, value in results.items():
            if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
                continue
            key = storage_id(value)
            if key not in self._alive:
                size = int(value.untyped_storage().nbytes())
                self._alive[key] = (tensor, size, self._step, weak_storage(value))

    def inside(self) -> Marker | None:
        """That of the watch; what loops leave behind is theirs."""
        return self._inner.inside()

    def _sweep(self) -> None:
        for key, (tensor, size, first, weak) in list(self._alive.items()):
            if storage_expired(weak):
                self._gone.append(Lifetime(tensor, size, first, self._step))
                free_weak_storage(weak)
                del self._alive[key]

    def timeline(self, allocations: Allocations, resident: int, loops: Collection[int] = ()) -> Timeline:
        """The timeline of the run that was watched; ``resident`` was there before it began.

        Of the operators in ``loops`` it says what was live inside.
        """
        self._sweep()
        ended = [Lifetime(t, size, first, self._step) for t, size, first, _ in self._alive.values()]
        for _, _, _, weak in self._alive.values():
            free_weak_storage(weak)
        self._alive.clear()
        taken = [allocations.operators[op][time] for op, time in self._runs]
        inside = {
            k: tuple(resident + size for size in allocations.inside[op][time])
            for k, (op, time) in enumerate(self._runs)
            if op in loops and op in allocations.inside and allocations.inside[op][time]
        }
        lifetimes = sorted(self._gone + ended, key=lambda one: (one.first, one.tensor))
        return Timeline(
            live_bytes=tuple(resident + most for _, most, _ in taken),
            lifetimes=tuple(lifetimes),
            workspace_bytes=tuple(most - max(before, after) for before, most, after in taken),
            resident_bytes=resident,
            inside=inside,
        )
