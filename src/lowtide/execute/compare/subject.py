"""A model with its batch, whose steps leave no trace: run, watched and timed in one way or another."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from lowtide.cost.watch import Allocations, Marker, timing_event, watch_cpu, watch_cuda
from lowtide.errors import RunError
from lowtide.execute.compare.launching import launching
from lowtide.execute.compare.timeline import StorageMarker
from lowtide.execute.compile.user_code import check_loss
from lowtide.execute.runtime.interpreter import Interpreter
from lowtide.nested import leaves

__all__ = ["Loss", "StepOutcome", "StepRunner", "Subject", "launched", "timed"]

T = TypeVar("T")
Loss = Callable[..., torch.Tensor]

_IN_A_ROW = 10
"""Steps on a CUDA device that are timed together."""


@dataclass(frozen=True, slots=True, eq=False)
class StepOutcome:
    """Everything a step leaves behind, copied."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor]
    parameters: dict[str, torch.Tensor]
    """As the update left them; none where the step has no update."""


@dataclass(frozen=True, slots=True)
class StepRunner:
    """A way of running the step: the loss, what ends the step, and who tells a marker about operators."""

    loss: Loss
    update: Callable[[nn.Module, Marker | None], None] | None = None
    interpreter: Interpreter | None = None


class Subject:
    """A model with its batch, put back as it was after every step."""

    def __init__(
        self, model: nn.Module, batch: Sequence[Any], trains: bool, updates: bool, seed: int
    ) -> None:
        self.model, self.batch, self.trains, self.seed = model, tuple(batch), trains, seed
        self.device = next(_tensors([*model.parameters(), *batch]), torch.empty(0)).device
        self._buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        changed = model.named_parameters() if updates else ()
        self.state: Callable[[], Sequence[torch.Tensor]] = tuple
        """Gives an optimiser's state."""
        # on the host, so that what the step has on the device does not change
        self._parameters = {name: p.detach().to("cpu", copy=True) for name, p in changed}

    def reset(self) -> None:
        """Parameters, buffers and random state as at the start, no gradients."""
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                buffer.copy_(self._buffers[name])
            for name, value in self._parameters.items():
                self.model.get_parameter(name).copy_(value)
        self.model.zero_grad(set_to_none=True)
        torch.manual_seed(self.seed)

    def step(self, way: StepRunner, marker: Marker | None = None) -> torch.Tensor:
        """Run it once; the loss. Gradients, and what the update changes, stay until it is reset."""
        if way.interpreter is not None:
            way.interpreter.marker = marker
        try:
            result = way.loss(self.model, *self.batch)
            if self.trains:
                check_loss(result)
                result.backward()  # type: ignore[no-untyped-call]
            if way.update is not None:
                way.update(self.model, marker)
        finally:
            if way.interpreter is not None:
                way.interpreter.marker = None
        if not isinstance(result, torch.Tensor):
            raise RunError(f"the function must return a tensor; it returns a {type(result).__name__}")
        return result.detach()

    def outcome(self, loss: torch.Tensor) -> StepOutcome:
        """What the step that gave this loss has left behind."""
        gradients = {
            name: None if p.grad is None else p.grad.detach().to("cpu", copy=True)
            for name, p in self.model.named_parameters()
        }
        buffers = {name: buffer.to("cpu", copy=True) for name, buffer in self.model.named_buffers()}
        parameters = {
            name: self.model.get_parameter(name).detach().to("cpu", copy=True) for name in self._parameters
        }
        return StepOutcome(loss.to("cpu", copy=True), gradients, buffers, parameters)

    def resident_bytes(self) -> int:
        """What is on the device before the step: what CUDA's allocator counts, or the storages known here."""
        if self.device.type == "cuda":
            return torch.cuda.memory_allocated(self.device)
        held = _tensors([*self.model.parameters(), *self.model.buffers(), *self.batch, *self.state()])
        sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
        return sum(sizes.values())

    def watch(self, way: StepRunner) -> tuple[torch.Tensor, Allocations]:
        """The step, and what it took."""
        return self._watched(lambda _: self.step(way))

    def follow(self, way: StepRunner) -> tuple[StorageMarker, Allocations]:
        """What the step took, operator by operator and storage by storage."""
        markers: list[StorageMarker] = []

        def run(marker: Marker) -> None:
            markers.append(StorageMarker(marker))
            self.step(way, markers[0])

        _, found = self._watched(run)
        return markers[0], found

    def _watched(self, run: Callable[[Marker], T]) -> tuple[T, Allocations]:
        return watch_cuda(run, self.device) if self.device.type == "cuda" else watch_cpu(run)


def timed(
    subject: Subject, ways: Sequence[StepRunner], repeats: int, turn: Callable[[int], None] = lambda _: None
) -> list[float]:
    """The median time of a step of each, taken in turns so that both meet the same machine.

    On a CUDA device some steps run one after the other, as they do in training: the host prepares a step
    while the device still works on the one before. The first of them, before which the device waits for the
    host, is not counted. ``turn`` is told after each turn how many there were.
    """
    if not repeats:
        return [math.nan for _ in ways]
    clock = _on_device if subject.device.type == "cuda" else _on_host
    times: list[list[float]] = [[] for _ in ways]
    for number in range(repeats + 1):
        for k, way in enumerate(ways):
            subject.reset()
            times[k].append(clock(subject, way))
        turn(number + 1)
    return [statistics.median(taken[1:]) for taken in times]


def launched(
    subject: Subject, ways: Sequence[StepRunner], repeats: int, seconds: Sequence[float]
) -> list[float]:
    """The median time until the call of a step of each returns; on the CPU, where nothing is left, all."""
    if subject.device.type != "cuda" or not repeats:
        return list(seconds)
    return [
        launching(partial(subject.step, way), subject.device, repeats, subject.reset).host_seconds
        for way in ways
    ]


def _on_host(subject: Subject, way: StepRunner) -> float:
    start = time.perf_counter()
    subject.step(way)
    return time.perf_counter() - start


def _on_device(subject: Subject, way: StepRunner) -> float:
    """Seconds of a step on a CUDA device, from the end of one to the end of the last that follow it."""
    with torch.cuda.device(subject.device):
        start, end = timing_event(), timing_event()
        for number in range(_IN_A_ROW + 1):
            subject.model.zero_grad(set_to_none=True)
            subject.step(way)
            if number == 0:
                start.record()
        end.record()
        torch.cuda.synchronize()
    return float(start.elapsed_time(end)) * 1e-3 / _IN_A_ROW


def _tensors(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    return (leaf for leaf in leaves(values) if isinstance(leaf, torch.Tensor))
