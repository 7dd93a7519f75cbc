"""Private names of torch for memory and time on a device, under public names.

Each says in which versions of torch it was seen, and handles what differs between them.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = [
    "empty_host_cache",
    "pause_device",
    "record_range",
    "start_memory_recorder",
    "stop_memory_recorder",
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
