"""Budgets for what is reserved on a CUDA device: what PyTorch's allocator has taken from it, used or not.

PyTorch's allocator is given a limit, beyond which it gives back what it does not use before it takes more.
What it cannot give back, in between blocks that are in use, is lost. A plan is tried with the limit, and made
again with less where that is too much.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import torch

from lowtide.device_internals import lost_in_fork
from lowtide.errors import PlanError, RunError
from lowtide.plan.budget import Budget
from lowtide.plan.request import PlanRequest
from lowtide.units import format_bytes

__all__ = [
    "FragmentedError",
    "count",
    "counted_bytes",
    "inside",
    "lift",
    "refuse_elsewhere",
    "refuse_shared",
    "settle",
    "told",
    "tried_within",
]

_SHARES = (0.97, 0.92, 0.86, 0.78, 0.68)
"""Parts of the budget that are planned for, one after the other: the allocator may lose the rest."""

Step = TypeVar("Step")


class _Counted(Protocol):
    """Memory of a device that PyTorch's allocator does not count."""

    index: int

    @property
    def size(self) -> int:
        """Its bytes."""


_LIMITS: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()
"""By step: its device, and what may be reserved there."""
_COUNTED: weakref.WeakSet[Any] = weakref.WeakSet()


class FragmentedError(RunError):
    """A step that fits into a budget of reserved bytes by its plan, but not as the allocator places it."""


def count(memory: _Counted) -> None:
    """Take this memory off the limit as long as it is there."""
    _COUNTED.add(memory)


def counted_bytes(index: int) -> int:
    """Such memory on a device: that of CUDA graphs of steps."""
    return sum(one.size for one in _COUNTED if one.index == index)


def lift(index: int) -> None:
    """Have no limit until it is settled again: addresses without memory count for PyTorch's allocator."""
    if any(device == index for device, _ in _LIMITS.values()):
        _limited(index, None)


def settle(index: int) -> None:
    """Have the smallest of the limits that steps have on a device."""
    limits = [size for device, size in _LIMITS.values() if device == index]
    if limits:
        _limited(index, min(limits) - counted_bytes(index))


def _limited(index: int, size: int | None) -> None:
    if lost_in_fork():
        return  # the limit is that of the process that this one was forked from
    _, total = torch.cuda.mem_get_info(index)
    share = 1.0 if size is None else min(1.0, max(size, 0) / total)
    torch.cuda.set_per_process_memory_fraction(share, index)


def refuse_elsewhere(limit: int, device: torch.device) -> None:
    """Refuse a limit for a step that does not run on a CUDA device."""
    if limit and device.type != "cuda":
        raise PlanError(
            "a budget of reserved bytes is for a step on a CUDA device, whose allocator reserves more than "
            f"it uses; this one is on the {device.type.upper()}: leave out `reserved`"
        )


def refuse_shared(limit: int) -> None:
    """Refuse a limit for a step that several processes run: one of them alone would plan again."""
    if limit:
        raise PlanError(
            "a budget of reserved bytes is for a step of one process; with a mesh, leave out `reserved`"
        )


def tried_within(limit: int, device: torch.device, run: Callable[[], object]) -> bool:
    """Run something while no more than so many bytes can be reserved; a FragmentedError where it needs more.

    Nothing runs where there is no limit, which 0 stands for.
    """
    if not limit:
        return True
    index = torch.cuda.current_device() if device.index is None else device.index
    gc.collect()
    torch.cuda.empty_cache()
    _limited(index, limit)
    try:
        run()
    except torch.OutOfMemoryError as error:
        raise FragmentedError(
            f"the step does not run in {format_bytes(limit)} of reserved memory: {str(error).splitlines()[0]}"
        ) from None
    finally:
        _limited(index, None)
        settle(index)
    return True


def inside(make: Callable[[PlanRequest], Step], request: PlanRequest, given: Iterable[torch.Tensor]) -> Step:
    """A step as it is asked for; with a budget of reserved bytes, one that was tried inside of it.

    ``given`` are tensors that it takes: their device is the step's.
    """
    if not request.reserved:
        return make(request)
    device = next((one.device for one in given if one.is_cuda), torch.device("cpu"))
    refuse_elsewhere(request.reserved, device)
    index = torch.cuda.current_device() if device.index is None else device.index
    for share in _SHARES:
        try:
            step = make(replace(request, budget=Budget(bytes=int(share * request.reserved))))
        except FragmentedError as error:
            refused = error
            continue
        _LIMITS[step] = index, request.reserved
        weakref.finalize(step, _let_go, index)
        gc.collect()
        torch.cuda.empty_cache()
        settle(index)
        return step
    raise FragmentedError(
        f"{refused}. Plans for as little as {_SHARES[-1]:.0%} of it were tried: PyTorch's allocator loses "
        "more. Give more, or set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, with which it loses less"
    )


def _let_go(index: int) -> None:
    """A step is gone, and its limit with it."""
    _limited(index, None)
    settle(index)


def told(limit: int) -> list[str]:
    """What may be reserved, and what is on the device beside it, for people."""
    if not limit:
        return []
    cuda: Any = torch.cuda
    index = cuda.current_device()
    free, total = torch.cuda.mem_get_info(index)
    beside = max(0, total - free - torch.cuda.memory_reserved(index) - counted_bytes(index))
    return [
        f"reserved   at most {format_bytes(limit)}; the CUDA context and other programs take "
        f"{format_bytes(beside)} beside it"
    ]
