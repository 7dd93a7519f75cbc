"""What the operators of a captured function take, each by itself, forward and backward."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import fx

from lowtide.cost.cache import open_cache
from lowtide.cost.clock import Clock, CpuClock, CudaClock
from lowtide.cost.device import cache_folder
from lowtide.cost.probe import environment
from lowtide.cost.samples import judged
from lowtide.cost.types import Cost, Figure, Origin
from lowtide.errors import FileError
from lowtide.torch_internals import tree_leaves, tree_map_only
from lowtide.trace.groups.functions import Values

__all__ = ["CallTimer", "TimedCall", "calls_of"]

_HALF = (torch.bfloat16, torch.float16)
_TAKEN: dict[tuple[Path, str], list[float]] = {}
"""What both of two ways took that were compared in this process."""


class TimedCall:
    """One operator on tensors of some layouts; equal to others on such tensors."""

    def __init__(self, node: fx.Node, values: Values) -> None:
        self.node, self.given = node, _described((node.args, node.kwargs), values)
        self.result = values[node]
        gives = next((one for one in tree_leaves(self.result) if isinstance(one, torch.Tensor)), None)
        self.dtype = None if gives is None else gives.dtype
        self.name = str(getattr(node.target, "__name__", node.target))
        self._key = node.op, self.name, repr(self.given), self.dtype

    def __eq__(self, other: object) -> bool:
        """Whether it does the same."""
        return isinstance(other, TimedCall) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def signature(self) -> str:
        """Stands for it in the cache of costs."""
        return f"call.{self.name}/{hashlib.sha256(repr(self._key).encode()).hexdigest()[:24]}"

    @property
    def large(self) -> int:
        """How many bytes its tensors have."""
        return sum(one.nbytes for one in tree_leaves(self.given) if isinstance(one, _Tensor))


class _Tensor:
    """What a tensor is like."""

    def __init__(self, value: torch.Tensor) -> None:
        self.shape, self.stride, self.dtype = tuple(value.shape), value.stride(), value.dtype
        self.requires_grad, self.nbytes = value.requires_grad, value.numel() * value.element_size()

    def __repr__(self) -> str:
        return f"{self.shape} {self.stride} {self.dtype} {self.requires_grad}"

    def made(self, device: torch.device, generator: torch.Generator) -> torch.Tensor:
        """Such a tensor."""
        empty = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)
        filled = empty.normal_(generator=generator) if empty.is_floating_point() else empty.zero_()
        return filled.requires_grad_(self.requires_grad)


def _described(given: Any, values: Values) -> Any:
    """Arguments, with what tensors are like in their place."""

    return fx.node.map_arg(given, lambda node: tree_map_only(torch.Tensor, _Tensor, values[node]))


def calls_of(values: Values) -> Counter[TimedCall]:
    """The operators of a function that compute with tensors, the largest first."""
    calls = (TimedCall(node, values) for node in values if node.op in ("call_function", "call_method"))
    found = Counter(
        call for call in calls if call.large and call.dtype is not None and call.dtype.is_floating_point
    )
    return Counter(dict(sorted(found.items(), key=lambda one: -one[0].large)))


class CallTimer:
    """What operators take, forward and backward."""

    def __init__(self, device: torch.device, deadline: float) -> None:
        self._device, self._deadline = device, deadline
        self._clock: Clock = CudaClock(device) if device.type == "cuda" else CpuClock()
        self._generator = torch.Generator(device).manual_seed(0)
        self._cache = open_cache(cache_folder(), environment(device.type))
        self._known: dict[TimedCall, float | None] = {}

    def __call__(self, call: TimedCall) -> float | None:
        """Seconds; None where it cannot run by itself, or no time is left."""
        if call not in self._known:
            kept = self._cache.get(call.signature)
            self._known[call] = None if kept is None or kept.seconds is None else kept.seconds.value
            if kept is None and time.monotonic() < self._deadline:
                with contextlib.suppress(Exception):  # as where it writes over a parameter, or memory ends
                    self._known[call] = self._seconds(call)
        return self._known[call]

    def faster(
        self, old: Counter[TimedCall], new: Counter[TimedCall], gain: float, *, whole: bool = False
    ) -> bool:
        """Whether the new calls take less than the old ones, by this share.

        Calls that cannot be timed, or not in time, do not count; or nothing is faster, where the ``whole``
        must be known. A plan is for one of the two: what is found once stays, in this process, and where all
        was measured in the next ones.
        """
        names = [call.signature for calls in (old, new) for call in calls.elements()]
        key = f"ways/{hashlib.sha256(repr(names).encode()).hexdigest()[:24]}"
        here = self._cache.path, key
        if here not in _TAKEN:
            kept = [self._cache.get(f"{key}.{name}") for name in ("old", "new")]
            taken = [cost.seconds.value for cost in kept if cost is not None and cost.seconds is not None]
            _TAKEN[here] = taken if len(taken) == len(kept) else self._compared(key, old, new, whole)
        before, after = _TAKEN[here]
        return after < (1 - gain) * before

    def _compared(
        self, key: str, old: Counter[TimedCall], new: Counter[TimedCall], whole: bool
    ) -> list[float]:
        unknown = any(self(call) is None for call in (*old, *new))
        taken = [0.0 if unknown and whole else self._together(calls) for calls in (old, new)]
        for name, seconds in zip(("old", "new"), taken, strict=True):
            if not unknown:
                self._cache.add(f"{key}.{name}", Cost(seconds=Figure(seconds, Origin.MEASURED)))
        return taken

    def _together(self, calls: Counter[TimedCall]) -> float:
        return sum(count * (self(call) or 0.0) for call, count in calls.items())

    def save(self) -> None:
        """Keep what was measured for the next time, where it can be kept."""
        with contextlib.suppress(FileError):
            self._cache.save()

    def _seconds(self, call: TimedCall) -> float:
        run = self._runnable(call)
        run()
        samples, _ = self._clock.again(run, self._deadline)
        figure = judged(samples, 1)
        if not figure.disturbed:
            self._cache.add(call.signature, Cost(seconds=Figure(figure.seconds, Origin.MEASURED)))
        return figure.seconds

    def _runnable(self, call: TimedCall) -> Callable[[], Any]:
        made: list[torch.Tensor] = []

        def real(like: _Tensor) -> torch.Tensor:
            made.append(like.made(self._device, self._generator))
            return made[-1]

        args, kwargs = tree_map_only(_Tensor, real, call.given)
        node, kind = call.node, self._device.type
        wanted = [one for one in made if one.requires_grad]
        half = call.dtype in _HALF and any(one.dtype == torch.float32 for one in made)

        def run() -> Any:
            with torch.enable_grad(), torch.autocast(kind, call.dtype, enabled=half):
                if node.op == "call_method":
                    result = getattr(args[0], str(node.target))(*args[1:], **kwargs)
                else:
                    result = node.target(*args, **kwargs)  # type: ignore[operator]
            if wanted and isinstance(result, torch.Tensor) and result.requires_grad:
                if call.name == "contiguous":  # gradients are converted back
                    return result.detach().contiguous()
                gradient = torch.ones_like(result)  # what lies in memory may be numbers that are slow
                return torch.autograd.grad(result, wanted, gradient, allow_unused=True)
            return result

        return run
