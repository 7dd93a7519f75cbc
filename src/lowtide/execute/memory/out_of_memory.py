"""Memory that runs out in the middle of a step: how that is recognised, and what is said about it."""

from __future__ import annotations

import contextlib
import re
import traceback

import torch

from lowtide.errors import LowtideError, RunError
from lowtide.execute.memory.host import available_bytes
from lowtide.plan.result.plan import Plan
from lowtide.units import format_bytes

__all__ = ["OutOfMemoryError", "forget_frames", "in_spite_of", "ran_out", "while_measuring"]

_SAID = ("out of memory", "not enough memory", "can't allocate memory", "ALLOC_FAILED")
"""What errors of devices, of the host's allocator and of libraries have in their text."""
_WANTED = re.compile(r"^.*?ried to allocate [\d.]+ \w+")


class OutOfMemoryError(RunError, torch.OutOfMemoryError):
    """A planned step that ran out of memory; whoever waits for torch's own error gets this one too."""


def ran_out(error: BaseException) -> bool:
    """Whether this is how torch, Python or a library says that there is no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _SAID)


def forget_frames(error: BaseException | None) -> None:
    """Have an error, and those behind it, hold nothing of what ran when they were raised."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def in_spite_of(plan: Plan, error: BaseException, device: torch.device, model: str) -> RunError | None:
    """The error for a step that ran out of memory though it was planned, or None for any other error.

    ``model`` says in what state the model is.
    """
    if isinstance(error, LowtideError) or not ran_out(error):
        return None
    peak, budget = format_bytes(plan.predicted.peak_bytes), format_bytes(plan.budget_bytes)
    return OutOfMemoryError(
        f"no memory is left for the step, though its plan has a peak of {peak} inside a budget of {budget}: "
        f"{_wanted(error)}. Somebody else holds memory that the plan counts on: {_held(plan, device)}. Free "
        "it, or plan again with a smaller budget, or with budget='auto', which takes what is free then. "
        f"{model}; the next call works as soon as there is memory"
    )


def while_measuring(error: BaseException, device: torch.device) -> RunError | None:
    """The error for a step that ran out of memory while it was measured for a plan, or None for any other."""
    if isinstance(error, LowtideError) or not ran_out(error):
        return None
    return OutOfMemoryError(
        f"there is no memory left to measure the step: {_wanted(error)}; {_held(None, device)}. Free memory, "
        "take a smaller batch, or plan with cost='estimated', which measures no operators. "
        "The model is as it was"
    )


def _wanted(error: BaseException) -> str:
    """What torch says in one sentence."""
    line = str(error).strip().partition("\n")[0] or type(error).__name__
    found = _WANTED.match(line)
    return (found.group() if found else line).rstrip(".")


def _held(plan: Plan | None, device: torch.device) -> str:
    if device.type != "cuda":
        return f"the host has {format_bytes(available_bytes())} left"
    with contextlib.suppress(RuntimeError):
        free, total = torch.cuda.mem_get_info(device)
        own = torch.cuda.memory_reserved(device)
        beside = f", {format_bytes(plan.beside_bytes)} outside the step when it was planned" if plan else ""
        return (
            f"of the {format_bytes(total)} of the device other programs hold "
            f"{format_bytes(max(0, total - free - own))} and this one {format_bytes(own)}{beside}; "
            f"{format_bytes(free)} is free"
        )
    return "the device does not say who"
