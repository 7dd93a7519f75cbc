"""Private names of torch for memory and time on a device, under public names.

Each says in which versions of torch it was seen, and handles what differs between them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.multiprocessing import reductions

__all__ = [
    "allocate_to_pool",
    "allocations_of",
    "blocks_of_memory",
    "empty_host_cache",
    "exclude_keys",
    "excluded_keys",
    "free_library_workspaces",
    "is_freed",
    "large_allocations",
    "lost_in_fork",
    "pause_device",
    "profiler_runs",
    "record_range",
    "release_pool",
    "reserved_for",
    "start_memory_recorder",
    "stop_allocating_to_pool",
    "stop_memory_recorder",
    "tf32_in_convolutions",
    "tf32_in_products",
    "uses_of_storage",
    "usual_segments",
]


def empty_host_cache() -> None:
    """Have PyTorch's pool give back pinned memory that nobody uses: blocks of other sizes, say.

    The private name was seen in 2.11 and 2.14 with CUDA, the public one in 2.13 and 2.14.
    """
    for owner, name in ((torch.accelerator, "empty_host_cache"), (torch._C, "_host_emptyCache")):
        if hasattr(owner, name):  # its name and place changed with the releases
            getattr(owner, name)()
            return


def pause_device(cycles: int) -> None:
    """Have a CUDA device do nothing for so many cycles, if torch can do that. Seen in 2.11, 2.13, 2.14."""
    pause = getattr(torch.cuda, "_sleep", None)
    if pause is not None:
        pause(cycles)


def record_range(name: str) -> Any:
    """A range of the recorder of events, to be entered and left. Seen in 2.11, 2.13, 2.14.

    Not the usual record_function: a dispatch mode takes that for an operator, with a range of its own.
    """
    return torch._C._profiler._RecordFunctionFast(name)


def excluded_keys() -> Any:
    """What the dispatcher leaves out in this thread: autograd in a dispatch mode. Seen in 2.11, 2.13."""
    return torch._C._dispatch_tls_local_exclude_set()


def exclude_keys(keys: Any) -> AbstractContextManager[Any]:
    """Inside, the dispatcher leaves these out. Seen in 2.11, 2.13."""
    guard: AbstractContextManager[Any] = torch._C._ExcludeDispatchKeyGuard(keys)
    return guard


def profiler_runs() -> bool:
    """Whether a profiler of torch is on in this thread: there is one at a time. Seen in 2.11, 2.13."""
    autograd: Any = torch.autograd
    return bool(autograd._profiler_enabled())


def start_memory_recorder() -> None:
    """Record allocations on the CPU and ranges. Seen in 2.11, 2.13, 2.14.

    Without timestamps it takes a tenth of a millisecond to start, and nothing is logged.
    """
    autograd: Any = torch.autograd
    memory_alone = (False, True, False, False, False)
    more = torch._C._profiler._ExperimentalConfig()
    autograd._enable_profiler_legacy(autograd.ProfilerConfig(autograd.ProfilerState.CPU, *memory_alone, more))


def stop_memory_recorder() -> list[list[Any]]:
    """End the recording; its events, thread by thread. Seen in 2.11, 2.13, 2.14."""
    autograd: Any = torch.autograd
    threads: list[list[Any]] = autograd._disable_profiler_legacy()
    return threads


def allocate_to_pool(device: int, pool: tuple[int, int]) -> None:
    """Have this thread allocate from a pool. The first of several pools counts. Seen in 2.11, 2.13."""
    torch._C._cuda_beginAllocateCurrentThreadToPool(device, pool)


def stop_allocating_to_pool(device: int, pool: tuple[int, int], *, captured: bool = False) -> None:
    """The end of that; or, of a graph that is ``captured``, of what its capture began. Seen in 2.11, 2.13."""
    torch._C._cuda_endAllocateToPool(device, pool)
    if not captured:
        torch._C._cuda_releasePool(device, pool)


def release_pool(device: int, pool: tuple[int, int]) -> None:
    """One user of a pool less. Seen in 2.11, 2.13."""
    torch._C._cuda_releasePool(device, pool)


def lost_in_fork() -> bool:
    """Whether this process was forked from one that uses CUDA: it cannot do so too. Seen in 2.11, 2.13."""
    cuda: Any = torch.cuda
    return bool(cuda._is_in_bad_fork())


def uses_of_storage(tensor: torch.Tensor) -> int:
    """How many tensors and others share the storage of a tensor. Seen in 2.11, 2.13."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def is_freed(tensor: torch.Tensor) -> Callable[[], bool]:
    """Says later whether the storage of a tensor was freed. Seen in 2.11, 2.13."""
    shared: Any = reductions
    reference = shared.StorageWeakRef(tensor.untyped_storage())
    return lambda: bool(reference.expired())


def blocks_of_memory(within: range) -> Iterator[tuple[int, int]]:
    """Address and size of what is allocated in segments at some addresses. Seen in 2.11, 2.13."""
    cuda: Any = torch.cuda
    for segment in cuda.memory_snapshot():
        address = segment["address"]
        if address in within:
            for block in segment["blocks"]:
                if block["state"] == "active_allocated":
                    yield address, block["size"]
                address += block["size"]


def large_allocations(device: int) -> int:
    """How many tensors of more than 1 MiB were allocated so far. Seen in 2.11, 2.13."""
    return int(torch._C._cuda_memoryStats(device)["allocation"]["large_pool"]["allocated"])


def reserved_for(pool: tuple[int, int] | None) -> int:
    """Bytes of the segments that PyTorch's allocator has for a pool of CUDA graphs. Seen in 2.11, 2.13."""
    cuda: Any = torch.cuda
    mine = (one for one in cuda.memory_snapshot() if tuple(one["segment_pool_id"]) == pool)
    return sum(one["total_size"] for one in mine)


def allocations_of(device: int) -> tuple[int, int, int]:
    """How many blocks were allocated so far, their bytes, and how many there are now.

    Seen in 2.11, 2.13.
    """
    found = torch._C._cuda_memoryStats(device)
    count, size = found["allocation"]["all"], found["allocated_bytes"]["all"]
    return int(count["allocated"]), int(size["allocated"]), int(count["current"])


def usual_segments() -> bool:
    """Whether PyTorch's allocator asks for segments of its own sizes: nobody has set others.

    Seen in 2.13; where settings cannot be read, those of the environment count alone.
    """
    told = [os.environ.get(name, "") for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")]
    read = getattr(torch._C, "_accelerator_getAllocatorSettings", str)
    return "large_segment_size" not in " ".join((*told, read()))


def free_library_workspaces() -> None:
    """Have cuBLAS take its workspaces anew when it needs them. Seen in 2.11, 2.13."""
    torch._C._cuda_clearCublasWorkspaces()


def tf32_in_convolutions() -> bool:
    """Whether cuDNN may round float32 to TF32. Seen in 2.11, 2.13."""
    return _tf32(lambda: torch.backends.cudnn.allow_tf32)


def tf32_in_products() -> bool:
    """Whether cuBLAS may. Seen in 2.11, 2.13."""
    return _tf32(lambda: torch.backends.cuda.matmul.allow_tf32)


def _tf32(allowed: Callable[[], bool]) -> bool:
    try:
        return allowed()
    except RuntimeError:  # set by the newer names alone, which these do not tell
        return True
