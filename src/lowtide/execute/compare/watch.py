"""``with lowtide.watch(step) as watched``: predicted against actual memory while training runs.

predicted ┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄   what the plan promises
actual     ▆ ▇ ▇ ▇ █        the most of each step, from ``watched.step()`` to ``watched.step()``
"""

from __future__ import annotations

import warnings
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Protocol

import torch

from lowtide.cost.watch import CpuRecording
from lowtide.device_internals import profiler_runs
from lowtide.errors import MemoryWarning, PlanError, RunError
from lowtide.execute.fit import Fitted
from lowtide.execute.memory.host import available_bytes
from lowtide.notebook import Curve, curves_svg, shown_html
from lowtide.plan.budget import parse_budget
from lowtide.plan.result.plan import Plan
from lowtide.units import format_bytes

__all__ = ["Watch", "WatchedStep", "watch"]

_SAME = 5e-4
_ROUNDING = 1.01
"""A step that takes what its plan promises is no reason to warn, however close to the budget that is."""


@dataclass(frozen=True, slots=True)
class WatchedStep:
    """One step of training: the most that was allocated, and what the plan had promised."""

    number: int
    """From 1."""
    peak_bytes: int
    predicted_bytes: int | None
    limit_bytes: int


class _Meter(Protocol):
    """Counts from one step to the next."""

    def start(self) -> None: ...

    def stop(self) -> int:
        """The most since the start."""


class _CudaMeter:
    """The counters of the caching allocator: one call a step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def start(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def stop(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)


class _CpuMeter:
    """Every allocation of this thread; ``held`` is there before the first, which torch does not count."""

    def __init__(self, held: int) -> None:
        self._held = held
        self._recording: CpuRecording | None = None

    def start(self) -> None:
        if profiler_runs():
            raise RunError(
                "a profiler of torch is on in this thread, and there is one at a time: leave it before "
                "lowtide.watch counts memory on the CPU"
            )
        self._recording = CpuRecording()

    def stop(self) -> int:
        if self._recording is None:
            return self._held
        taken, self._recording = self._recording.stop(), None
        most = self._held + taken.peak_bytes
        self._held += taken.end_bytes  # gradients and optimiser state stay
        return most


class Watch:
    """What steps of training took; call :meth:`step` at the end of each."""

    def __init__(
        self, what: Fitted | Plan | str | int, *, warn_at: float, device: torch.device | None
    ) -> None:
        self._what, self.warn_at = what, warn_at
        plan = self._plan()
        self.device = device or _device(plan)
        self._limit = _limit(what, self.device) if plan is None else 0
        self.steps: list[WatchedStep] = []
        self._level = 0
        self._meter: _Meter = (
            _CudaMeter(self.device)
            if self.device.type == "cuda"
            else _CpuMeter(plan.resident_bytes if plan is not None else 0)
        )

    def __enter__(self) -> Watch:
        self._meter.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Steps that were not marked count as one."""
        peak = self._meter.stop()
        if not self.steps or peak > self.peak_bytes:
            self._take(peak)

    def step(self) -> WatchedStep:
        """The end of a step: what it took. Warns where that is almost the limit, or more."""
        taken = self._take(self._meter.stop())
        self._meter.start()
        return taken

    @property
    def peak_bytes(self) -> int:
        """The most that any step took."""
        return max((one.peak_bytes for one in self.steps), default=0)

    @property
    def predicted_bytes(self) -> int | None:
        """What the plan promises now; None where only a limit is known."""
        plan = self._plan()
        return None if plan is None else plan.predicted.peak_bytes

    @property
    def limit_bytes(self) -> int:
        """The budget."""
        plan = self._plan()
        return self._limit if plan is None else plan.budget_bytes

    def report(self) -> str:
        """What was seen, in words."""
        if not self.steps:
            return f"watched    no step yet on {self.device}"
        most = max(self.steps, key=lambda one: one.peak_bytes)
        lines = [
            f"watched    {len(self.steps)} steps on {self.device}",
            f"budget     {format_bytes(self.limit_bytes)}; warns at {self.warn_at:.0%}",
        ]
        if most.predicted_bytes is not None:
            lines.append(f"predicted  {format_bytes(most.predicted_bytes)}")
        beyond = ""
        if most.predicted_bytes:
            over = most.peak_bytes / most.predicted_bytes - 1
            beyond = f", {over:+.1%} over what was predicted" if abs(over) >= _SAME else ", as predicted"
        took = f"{format_bytes(most.peak_bytes)} in step {most.number}"
        lines.append(f"peak       {took}: {most.peak_bytes / most.limit_bytes:.0%} of the budget{beyond}")
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """The steps as plain JSON values."""
        return {
            "device": str(self.device),
            "warn_at": self.warn_at,
            "limit_bytes": self.limit_bytes,
            "steps": [asdict(one) for one in self.steps],
        }

    def _repr_html_(self) -> str:
        """What a notebook shows: the most of each step, beside what was predicted."""
        rows = [tuple(line.split(maxsplit=1)) for line in self.report().splitlines()]
        curves = [Curve("actual", [one.peak_bytes for one in self.steps])]
        curves.append(Curve("predicted", [one.predicted_bytes or 0 for one in self.steps]))
        picture = curves_svg(curves, limit=self.limit_bytes) if self.steps else ""
        return shown_html("Watched steps", [(name, rest) for name, rest in rows], picture)

    def _plan(self) -> Plan | None:
        if isinstance(self._what, Plan):
            return self._what
        if isinstance(self._what, Fitted) and self._what.planned:
            return max(self._what.plans, key=lambda plan: plan.predicted.peak_bytes)
        return None

    def _take(self, peak: int) -> WatchedStep:
        limit = self.limit_bytes
        taken = WatchedStep(len(self.steps) + 1, peak, self.predicted_bytes, limit)
        self.steps.append(taken)
        near = max(self.warn_at * limit, (taken.predicted_bytes or 0) * _ROUNDING)
        level = 2 if peak > limit else 1 if peak > near else 0
        if level > self._level:
            self._level = level
            warnings.warn(_warning(taken), MemoryWarning, stacklevel=3)
        return taken


def watch(
    step_or_budget: Fitted | Plan | str | int,
    *,
    warn_at: float = 0.9,
    device: str | torch.device | None = None,
) -> Watch:
    """Predicted against actual memory while training runs, and a warning before the limit.

    Takes what ``lowtide.fit`` gave, a plan, or a budget such as ``"8GiB"`` or ``"auto"``. Call ``step()`` of
    what it gives at the end of each step of training. A :class:`~lowtide.errors.MemoryWarning` comes where a
    step takes more than the share ``warn_at`` of the budget, and more than its plan promises, and once more
    where it takes more than the budget.

    On CUDA the allocator's own counters are read once a step, and its peak is reset. On the CPU, where torch
    has none, every allocation of the calling thread is recorded, which slows small operators down.
    """
    if not 0 < warn_at <= 1:
        raise PlanError(f"give warn_at as a share of the budget, more than 0 and at most 1, not {warn_at}")
    place = torch.device(device) if device is not None else None
    return Watch(step_or_budget, warn_at=warn_at, device=place)


def _device(plan: Plan | None) -> torch.device:
    """Where the step runs; without a plan, a CUDA device if there is one."""
    if plan is not None:
        on_cuda = [t.device for t in plan.graph.tensors if t.device.startswith("cuda")]
        return torch.device(on_cuda[0] if on_cuda else "cpu")
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _limit(what: Any, device: torch.device) -> int:
    """A budget in bytes, where there is no plan that says it."""
    if isinstance(what, Fitted):
        raise RunError("the step has not been planned yet: call it once, then watch it")
    if not isinstance(what, str | int) or isinstance(what, bool):
        raise RunError(
            f"lowtide.watch takes what lowtide.fit gave, a plan or a budget; this is a {type(what).__name__}"
        )
    budget = parse_budget(what)
    if budget.share is not None:
        raise PlanError(
            f"{what!r} is a share of what a step takes: give watch the fitted step, or a budget in bytes"
        )
    return budget.resolve(0, _all_of(device) if budget.auto else None)


def _all_of(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else available_bytes()


def _warning(taken: WatchedStep) -> str:
    limit, peak = format_bytes(taken.limit_bytes), format_bytes(taken.peak_bytes)
    promised = (
        "" if taken.predicted_bytes is None else f"; {format_bytes(taken.predicted_bytes)} was predicted"
    )
    share = f"{taken.peak_bytes / taken.limit_bytes:.0%}"
    said = f"step {taken.number} took {peak}, {share} of its budget of {limit}{promised}"
    if taken.peak_bytes > taken.limit_bytes:
        return (
            f"{said}. Something beside the step has grown, or was not there when it was planned, such as "
            "gradients of the step before or the state of an optimizer: free it, name it to lowtide.fit, or "
            "give a larger budget"
        )
    return f"{said}. What comes on top, as larger shapes or more state, may not fit: give a larger budget"
