"""Copies to the host and back, beside the computation.

On CUDA each direction has a stream of its own; memory on the host is pinned and kept for the next step. Two
rules keep memory safe: what is being sent is not given back before its copy has ended, and what is being
fetched is not written before everything that used its memory earlier has ended. On the CPU a thread for each
direction copies to memory that PyTorch's allocator does not count, so that everything can be tested anywhere.
A forked process has none of these threads: copies end before the fork, and it starts threads of its own.
"""

from __future__ import annotations

import ctypes
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import numpy as np
import torch

from lowtide.device_internals import empty_host_cache
from lowtide.errors import RunError
from lowtide.execute.memory.host import available_bytes
from lowtide.execute.memory.pinned import PinnedPool
from lowtide.units import format_bytes

__all__ = ["CudaTransfers", "Form", "Transfers", "transfers"]

_LOOKED_AT = 64 << 20
"""From so many bytes on, what the host has left is looked at before more is taken from it."""


@dataclass(frozen=True, slots=True)
class Form:
    """How a tensor lies in its storage."""

    storage_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    on_host: bool
    """Whether it is a tensor of the host, as the seed of a kernel's random numbers is."""

    @classmethod
    def of(cls, value: torch.Tensor) -> Form:
        """That of a tensor, which may be a fake one."""
        size = int(value.untyped_storage().nbytes())
        strides = tuple(int(d) for d in value.stride())
        shape, offset = tuple(int(d) for d in value.shape), int(value.storage_offset())
        return cls(size, value.dtype, shape, strides, offset, value.device.type == "cpu")

    def over(self, flat: torch.Tensor) -> torch.Tensor:
        """The tensor whose storage is that of these bytes."""
        empty = torch.empty(0, dtype=self.dtype, device=flat.device)
        return empty.set_(flat.untyped_storage(), self.offset, self.shape, self.strides)


class Transfers(ABC):
    """Two lanes of copies beside the computation. What is under way is known by a ticket."""

    @abstractmethod
    def send(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Start to copy a tensor's storage; the bytes on the host, and a ticket for the copy."""

    @abstractmethod
    def fetch(self, host: torch.Tensor, sent: Any, form: Form) -> tuple[torch.Tensor, Any]:
        """Take memory on the device and start to copy into it; the tensor, and a ticket for the copy."""

    @abstractmethod
    def fill(self, storage: torch.UntypedStorage, host: torch.Tensor, sent: Any) -> Any:
        """Start to copy bytes from the host into memory that was just taken; a ticket for the copy."""

    @abstractmethod
    def wait(self, ticket: Any) -> None:
        """What the computation does from here on comes after the copy."""

    @abstractmethod
    def settle(self) -> None:
        """Return once nothing is under way."""


def transfers(device: torch.device) -> Transfers:
    """The lanes of a device."""
    return CudaTransfers(device) if device.type == "cuda" else _CpuTransfers()


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of the storage that a tensor is on."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


class _Lane:
    """Copies of one direction, one after the other."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.renew()

    def renew(self) -> None:
        """Have a thread of its own, which starts with the next copy."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=self._name)
        self._last: Future[None] | None = None

    def start(self, work: Callable[..., None], *arguments: Any) -> Future[None]:
        """Do this once everything before it has ended."""
        try:
            self._last = self._thread.submit(work, *arguments)
        except RuntimeError as error:
            raise RunError(
                f"the host cannot start a thread to copy tensors with: {error}; end other programs, raise "
                "the limit of threads (ulimit -u), or plan without offload: only='recompute'"
            ) from error
        return self._last

    def settle(self) -> None:
        """Return once nothing is under way."""
        if self._last is not None:
            wait([self._last])


class _CpuTransfers(Transfers):
    def __init__(self) -> None:
        self._out, self._in = _Lane("lowtide-to-host"), _Lane("lowtide-to-device")
        _WITH_THREADS.add(self)

    def send(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        flat = _bytes_of(tensor)
        host = _unpinned(flat.numel())
        return host, self._out.start(_copy, [host, flat])

    def fetch(self, host: torch.Tensor, sent: Any, form: Form) -> tuple[torch.Tensor, Any]:
        flat = torch.empty(form.storage_bytes, dtype=torch.uint8)
        return form.over(flat), self.fill(flat.untyped_storage(), host, sent)

    def fill(self, storage: torch.UntypedStorage, host: torch.Tensor, sent: Any) -> Any:
        flat = torch.empty(0, dtype=torch.uint8).set_(storage)
        after = self._out.start(_nothing) if sent is None else sent
        return self._in.start(_copy, [flat, host], after)

    def wait(self, ticket: Future[None] | None) -> None:
        if ticket is not None:
            ticket.result()

    def settle(self) -> None:
        for lane in (self._out, self._in):
            lane.settle()

    def renew(self) -> None:
        """Start threads anew: this process was forked, and has none of them."""
        for lane in (self._out, self._in):
            lane.renew()


_WITH_THREADS: WeakSet[_CpuTransfers] = WeakSet()


def _before_fork() -> None:
    for one in list(_WITH_THREADS):
        one.settle()


def _after_fork() -> None:
    for one in list(_WITH_THREADS):
        one.renew()


os.register_at_fork(before=_before_fork, after_in_child=_after_fork)


def _nothing() -> None:
    """Ends once everything before it on its lane has."""


def _copy(pair: list[torch.Tensor], after: Future[None] | None = None) -> None:
    """Copy the second tensor to the first, and hold neither once the copy is known to have ended.

    Autograd may keep the first one already, and must not take the copy for a change of it.
    """
    if after is not None:
        after.result()
    source, target = pair.pop(), pair.pop()
    ctypes.memmove(target.data_ptr(), source.data_ptr(), source.numel())  # bytes, both of them


class CudaTransfers(Transfers):
    """Copies by two streams of a device."""

    def __init__(self, device: torch.device) -> None:
        cuda: Any = torch.cuda
        self._device = device
        self._out, self._in = cuda.Stream(device), cuda.Stream(device)
        self._pool = PinnedPool()

    def send(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Start."""
        flat = _bytes_of(tensor)
        host = self.take(flat.numel())
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._out), torch.inference_mode():
            host.copy_(flat, non_blocking=True)
        return host, self.ticket(self._out)

    def take(self, size: int) -> torch.Tensor:
        """Memory of the host that a copy may write to now."""
        host, last_use = self._pool.take(size, self._pinned)
        if last_use is not None:
            self._out.wait_event(last_use)
        return host

    def ticket(self, lane: Any) -> Any:
        """That of what a lane has just started."""
        return lane.record_event()

    def come_after(self, sent: Any) -> None:
        """What is fetched next comes after what was sent with this ticket."""
        if sent is None:  # which copy brought the bytes is not known any more: all of them are waited for
            self._in.wait_stream(self._out)
        else:
            self._in.wait_event(sent)

    def fetch(self, host: torch.Tensor, sent: Any, form: Form) -> tuple[torch.Tensor, Any]:
        """Start."""
        if form.on_host:  # a kernel that expects it there would read an address of the device
            flat = host.clone()
            self._pool.used(host, self._in.record_event())
            return form.over(flat), None
        flat = torch.empty(form.storage_bytes, dtype=torch.uint8, device=self._device)
        return form.over(flat), self.fill(flat.untyped_storage(), host, sent)

    def fill(self, storage: torch.UntypedStorage, host: torch.Tensor, sent: Any) -> Any:
        """Start."""
        flat = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
        self.come_after(sent)
        self._in.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._in), torch.inference_mode():
            flat.copy_(host, non_blocking=True)
        arrived = self.ticket(self._in)
        self._pool.used(host, arrived)
        return arrived

    def wait(self, ticket: Any) -> None:
        """Have the stream that computes wait."""
        if ticket is not None:
            torch.cuda.current_stream(self._device).wait_event(ticket)

    def settle(self) -> None:
        """Wait for both lanes."""
        self._out.synchronize()
        self._in.synchronize()

    def _pinned(self, size: int) -> torch.Tensor:
        """Pinned memory; where the host has none left, once what is under way has ended; else plain."""
        try:
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        except (RuntimeError, MemoryError):
            self.settle()
            self._pool.shrink()
            empty_host_cache()
        try:
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        except (RuntimeError, MemoryError):
            return _unpinned(size)


def _unpinned(size: int) -> torch.Tensor:
    try:
        # a system that promises more than it has would end the process at the first write
        if size >= _LOOKED_AT and size > available_bytes():
            raise MemoryError
        return torch.from_numpy(np.empty(size, dtype=np.uint8))
    except MemoryError as error:
        raise RunError(
            f"the host has no {format_bytes(size)} ({size} bytes) left to keep a tensor in; free memory "
            "there, or plan without offload: only='recompute'. The next call works as soon as there is memory"
        ) from error
