"""How long the host is busy with a step: until the call returns, while the device may still work on it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

__all__ = ["Launching", "launching"]

_LONG = 1.0
"""After so many seconds no step is repeated."""


@dataclass(frozen=True, slots=True)
class Launching:
    """What one step takes, by itself."""

    host_seconds: float
    """Until the host has handed everything to the device; on the CPU all of the step."""
    step_seconds: float
    """Until the device has done it too."""


def launching(
    step: Callable[[], object],
    device: torch.device,
    repeats: int = 5,
    before: Callable[[], object] = lambda: None,
) -> Launching:
    """The median of some steps, each on a device that has nothing else to do; ``before`` is not timed."""
    host: list[float] = []
    whole: list[float] = []
    while len(whole) < repeats and sum(whole) < _LONG:
        before()
        _synchronize(device)
        began = time.perf_counter()
        step()
        host.append(time.perf_counter() - began)
        _synchronize(device)
        whole.append(time.perf_counter() - began if device.type == "cuda" else host[-1])
    return Launching(statistics.median(host), statistics.median(whole))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
