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
from lowtide.cost.clock import clock_of
from lowtide.cost.device import cache_folder
from lowtide.cost.probe import environment
from lowtide.cost.samples import judged
from lowtide.cost.types import Cost, Figure, Origin
from lowtide.errors import FileError
from lowtide.torch_internals import tree_leaves, tree_map_only
from lowtide.trace.groups.functions import Values

__all__ = ["CallTimer", "Like", "Part", "TimedCall", "parts_of"]

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
        return sum(one.nbytes for one in tree_leaves(self.given) if isinstance(one, Like))


class Like:
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

    return fx.node.map_arg(given, lambda node: tree_map_only(torch.Tensor, Like, values[node]))


Part = tuple[tuple[TimedCall, ...], tuple[TimedCall, ...]]
"""What runs in one way, and what runs in its place in another."""


def parts_of(before: Values, after: Values) -> Counter[Part]:
    """The operators of a function that run otherwise in a changed copy of it, the largest first.

    Each stands beside its copy and what was put in front of that. The names of nodes are those of the copied.
    """
    old = {node.name: _counted(node, before) for node in before}
    found: Counter[Part] = Counter()
    new: list[TimedCall] = []
    for node in after:
        new += _counted(node, after)
        if node.name in old:
            part = tuple(old[node.name]), tuple(new)
            found.update([part] if part[0] != part[1] else [])
            new = []
    return Counter(dict(sorted(found.items(), key=lambda one: -_large(one[0]))))


def _counted(node: fx.Node, values: Values) -> list[TimedCall]:
    """The call of a node, if it computes with tensors."""
    if node.op not in ("call_function", "call_method"):
        return []
    call = TimedCall(node, values)
    return [call] if call.large and call.dtype is not None and call.dtype.is_floating_point else []


def _large(part: Part) -> int:
    return sum(call.large for calls in part for call in calls)


class CallTimer:
    """What operators take, forward and backward."""

    def __init__(self, device: torch.device, deadline: float) -> None:
        self._device, self._deadline = device, deadline
        self._clock = clock_of(device)
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

    def faster(self, parts: Counter[Part], gain: float) -> bool:
        """Whether these parts take less in the new way than in the old one, by this share.

        A part with a call that cannot be timed, or not in time, does not count in either. A plan is for one
        of the two: what is found once stays, in this process, and where all was measured in the next ones.
        """
        names = [
            ([[call.signature for call in calls] for calls in part], count) for part, count in parts.items()
        ]
        key = f"ways/{hashlib.sha256(repr(names).encode()).hexdigest()[:24]}"
        here = self._cache.path, key
        if here not in _TAKEN:
            kept = [self._cache.get(f"{key}.{name}") for name in ("old", "new")]
            taken = [cost.seconds.value for cost in kept if cost is not None and cost.seconds is not None]
            _TAKEN[here] = taken if len(taken) == len(kept) else self._compared(key, parts)
        before, after = _TAKEN[here]
        return after < (1 - gain) * before

    def _compared(self, key: str, parts: Counter[Part]) -> list[float]:
        taken, unknown = [0.0, 0.0], False
        for part, count in parts.items():
            seconds = [[self(call) for call in calls] for calls in part]
            if any(one is None for times in seconds for one in times):
                unknown = True
                continue
            for way, times in enumerate(seconds):
                taken[way] += count * sum(one for one in times if one is not None)
        for name, together in zip(("old", "new"), taken, strict=True):
            if not unknown:
                self._cache.add(f"{key}.{name}", Cost(seconds=Figure(together, Origin.MEASURED)))
        return taken

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

        def real(like: Like) -> torch.Tensor:
            made.append(like.made(self._device, self._generator))
            return made[-1]

        args, kwargs = tree_map_only(Like, real, call.given)
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
