"""A step run by eager PyTorch and by a Program, in one process: memory, time, what changed."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import fx, nn

from lowtide.cost.watch import Allocations, Marker, timing_event, watch_cpu, watch_cuda
from lowtide.errors import BudgetError, CaptureError, RunError
from lowtide.execute.backend import Planner, compile_with
from lowtide.execute.compare.launching import launching
from lowtide.execute.compare.timeline import StorageMarker
from lowtide.execute.compile.bits import largest_difference, same_bits
from lowtide.execute.compile.user_code import check_loss, in_the_users_terms, users_step
from lowtide.execute.memory.optimizer_state import state_of, with_state
from lowtide.execute.runtime.interpreter import Interpreter
from lowtide.graph import Graph, Recording, Timeline
from lowtide.nested import leaves
from lowtide.plan.program.instructions import Loop, Program, Run
from lowtide.plan.program.simple import with_update
from lowtide.plan.program.simulate import simulate
from lowtide.plan.result.measured_run import MeasuredRun
from lowtide.plan.result.plan import Plan, Side
from lowtide.trace.branches.branches import Branches
from lowtide.trace.eager.is_compiling import Answers
from lowtide.trace.step.ending import read_update
from lowtide.trace.step.one_graph import one_graph, with_answers
from lowtide.units import format_bytes

__all__ = ["Comparison", "MeasuredSide", "StepOutcome", "compare"]

T = TypeVar("T")
Loss = Callable[..., torch.Tensor]
TextProgress = Callable[[str], None]


_IN_A_ROW = 10
"""Steps on a CUDA device that are timed together."""


@dataclass(frozen=True, slots=True)
class MeasuredSide:
    """What one way of running the step took."""

    peak_bytes: int
    seconds: float
    host_seconds: float
    """Until the host has handed a step to the device; on the CPU operators run on the host."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Both ways side by side. Peaks count what was on the device before the step."""

    eager: MeasuredSide
    measured: MeasuredSide
    predicted_peak_bytes: int
    loss_equal: bool
    bitwise: bool
    max_rel_grad_diff: float
    operators: int
    runs: int
    recording: Recording
    """What the program held while it ran."""
    program: Program
    """Of forward and backward; an update runs behind it."""
    graph: Graph
    """What ran, with the update."""
    ran: Program
    """The program, with the update."""
    eager_bytes: tuple[int, ...] = ()
    """What eager PyTorch held from allocation to allocation; on the CPU alone."""

    def hold(self, budget_bytes: int) -> None:
        """Raise a BudgetError where the program was measured to take more than this."""
        if self.measured.peak_bytes > budget_bytes:
            raise BudgetError(
                f"the step took {format_bytes(self.measured.peak_bytes)} ({self.measured.peak_bytes} bytes), "
                f"more than its budget of {format_bytes(budget_bytes)} ({budget_bytes} bytes). This is a "
                "fault of Lowtide: please report it with the step; a smaller budget is what helps until then"
            )

    def as_file(self, target: str, device: str, plan: Plan | None) -> MeasuredRun:
        """The same as a file, with the plan that ran."""
        return MeasuredRun(
            target=target,
            device=device,
            eager=Side(self.eager.peak_bytes, self.eager.seconds),
            measured=Side(self.measured.peak_bytes, self.measured.seconds),
            predicted_peak_bytes=self.predicted_peak_bytes,
            loss_equal=self.loss_equal,
            bitwise=self.bitwise,
            difference=self.max_rel_grad_diff if math.isfinite(self.max_rel_grad_diff) else None,
            graph=self.graph,
            program=self.ran,
            recording=self.recording,
            eager_bytes=self.eager_bytes,
            plan=plan,
        )

    def as_json(self) -> dict[str, Any]:
        """Keys as ``lowtide run --json`` prints them."""
        return {
            "eager": asdict(self.eager),
            "predicted": {"peak_bytes": self.predicted_peak_bytes},
            "measured": asdict(self.measured),
            "loss_equal": self.loss_equal,
            "bitwise": self.bitwise,
            # JSON has no infinity
            "max_rel_grad_diff": self.max_rel_grad_diff if math.isfinite(self.max_rel_grad_diff) else None,
            "operators": self.operators,
            "runs": self.runs,
        }


@dataclass(frozen=True, slots=True, eq=False)
class StepOutcome:
    """Everything a step leaves behind, copied."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor]
    parameters: dict[str, torch.Tensor]
    """As the update left them; none where the step has no update."""


@dataclass(frozen=True, slots=True)
class _Way:
    """A way of running the step: the loss, what ends the step, and who tells a marker about operators."""

    loss: Loss
    update: Callable[[nn.Module, Marker | None], None] | None = None
    interpreter: Interpreter | None = None


class _Subject:
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

    def step(self, way: _Way, marker: Marker | None = None) -> torch.Tensor:
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

    def watch(self, way: _Way) -> tuple[torch.Tensor, Allocations]:
        """The step, and what it took."""
        return self._watched(lambda _: self.step(way))

    def follow(self, way: _Way) -> tuple[StorageMarker, Allocations]:
        """What the step took, operator by operator and storage by storage."""
        markers: list[StorageMarker] = []

        def run(marker: Marker) -> None:
            markers.append(StorageMarker(marker))
            self.step(way, markers[0])

        _, found = self._watched(run)
        return markers[0], found

    def _watched(self, run: Callable[[Marker], T]) -> tuple[T, Allocations]:
        return watch_cuda(run, self.device) if self.device.type == "cuda" else watch_cpu(run)


def compare(
    model: nn.Module,
    batch: Sequence[Any],
    loss: Loss,
    planner: Planner,
    *,
    trains: bool = True,
    update: Callable[[nn.Module], None] | None = None,
    in_place: bool = True,
    optimizer: torch.optim.Optimizer | None = None,
    kernels: str = "eager",
    seed: int = 0,
    repeats: int = 5,
    progress: TextProgress = lambda _: None,
) -> Comparison:
    """Run the step both ways with the same random seed and compare what they take and what they leave.

    ``update`` ends the step, if it is given: it changes the parameters by their gradients, as it stands on
    one side and as its captured operators on the other. The model is left as it was, without gradients.
    Without ``in_place`` the planner's program runs exactly as it is given. With no ``repeats`` nothing is
    timed: seconds are NaN. With ``kernels`` that are fused the program is one of groups. The state of an
    ``optimizer``, which takes no step here, counts as resident.
    """
    subject = _Subject(model, batch, trains, update is not None, seed)
    subject.state = state_of(optimizer, subject.device)
    made: list[Interpreter] = []

    def backend(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        how: dict[str, Any] = {"in_place": in_place, "state": subject.state, "fused": kernels == "fused"}
        return compile_with(module, inputs, planner, made.append, **how)

    progress("eager step")
    eagerly = _Way(loss, None if update is None else lambda model, _: update(model))
    subject.reset()
    with users_step():
        subject.step(eagerly)  # what a first step sets up once and for all
    subject.reset()
    resident = subject.resident_bytes()
    result, eager = subject.watch(eagerly)
    before = subject.outcome(result)
    progress("capturing and planning")
    ways: list[Loss] = []

    def attempt(answers: Answers) -> None:
        ways.append(one_graph(loss, Branches().given_to(backend), answers))
        made.clear()
        subject.reset()
        with in_the_users_terms():
            subject.step(_Way(ways[-1]))

    with_answers(attempt)
    compiled = ways[-1]
    if not made:
        raise CaptureError("the step runs no operator on a tensor: pass its tensors as arguments")
    interpreter = made[-1]
    graph, program = with_state(interpreter.joint.graph, subject.state()), interpreter.program
    planned = _Way(compiled, interpreter=interpreter)
    if update is not None:
        ending = read_update(interpreter.joint, model, update)
        graph, program = ending.graph, with_update(ending.graph, program)
        planned = _Way(compiled, ending.run, interpreter)
    progress("the program")
    subject.reset()
    resident = max(resident, subject.resident_bytes())
    if interpreter.leaves:  # the recorder on the CPU knows only memory that was taken while it watched
        subject.watch(planned)
        subject.reset()
    storages, marked = subject.follow(planned)
    loops = {line.op for line in program.instructions if isinstance(line, Loop)}
    timeline = storages.timeline(marked, resident, loops)
    subject.reset()
    result, ours = subject.watch(planned)
    after = subject.outcome(result)
    progress("timing both")
    seconds = _timed(subject, [eagerly, planned], repeats)
    host = _launched(subject, [eagerly, planned], repeats, seconds)
    subject.reset()
    return Comparison(
        eager=MeasuredSide(resident + eager.peak_bytes, seconds[0], host[0]),
        measured=MeasuredSide(resident + ours.peak_bytes, seconds[1], host[1]),
        predicted_peak_bytes=_predicted(graph, program, marked, resident),
        loss_equal=same_bits(before.loss, after.loss),
        bitwise=_equal(before, after),
        max_rel_grad_diff=_largest_difference(before, after),
        operators=len(graph.ops),
        runs=sum(isinstance(line, Run) for line in program.instructions),
        recording=_recording(graph, program, timeline),
        program=interpreter.program,
        graph=graph,
        ran=program,
        eager_bytes=tuple(resident + size for size in eager.curve),
    )


def _recording(graph: Graph, program: Program, timeline: Timeline) -> Recording:
    ran = [graph.ops[line.op].id for line in program.instructions if isinstance(line, Run)]
    return Recording(tuple(ran), timeline)


def _predicted(graph: Graph, program: Program, marked: Allocations, resident: int) -> int:
    """The simulated peak, with measured workspaces and with what else is on the device."""
    workspaces = [marked.workspace_bytes(k) or 0 for k in range(len(graph.ops))]
    timeline = simulate(graph, program, workspace_bytes=workspaces)
    return timeline.peak_bytes + resident - timeline.resident_bytes


def _timed(subject: _Subject, ways: Sequence[_Way], repeats: int) -> list[float]:
    """The median time of a step of each, taken in turns so that both meet the same machine.

    On a CUDA device some steps run one after the other, as they do in training: the host prepares a step
    while the device still works on the one before. The first of them, before which the device waits for the
    host, is not counted.
    """
    if not repeats:
        return [math.nan for _ in ways]
    clock = _on_device if subject.device.type == "cuda" else _on_host
    times: list[list[float]] = [[] for _ in ways]
    for _ in range(repeats + 1):
        for k, way in enumerate(ways):
            subject.reset()
            times[k].append(clock(subject, way))
    return [statistics.median(taken[1:]) for taken in times]


def _launched(subject: _Subject, ways: Sequence[_Way], repeats: int, seconds: Sequence[float]) -> list[float]:
    """The median time until the call of a step of each returns; on the CPU, where nothing is left, all."""
    if subject.device.type != "cuda" or not repeats:
        return list(seconds)
    return [
        launching(partial(subject.step, way), subject.device, repeats, subject.reset).host_seconds
        for way in ways
    ]


def _on_host(subject: _Subject, way: _Way) -> float:
    start = time.perf_counter()
    subject.step(way)
    return time.perf_counter() - start


def _on_device(subject: _Subject, way: _Way) -> float:
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


def _equal(a: StepOutcome, b: StepOutcome) -> bool:
    return (
        same_bits(a.loss, b.loss)
        and all(same_bits(a.gradients[name], b.gradients[name]) for name in a.gradients)
        and all(same_bits(a.buffers[name], b.buffers[name]) for name in a.buffers)
        and all(same_bits(a.parameters[name], b.parameters[name]) for name in a.parameters)
    )


def _largest_difference(a: StepOutcome, b: StepOutcome) -> float:
    """The largest difference of a gradient element, over the largest element of that gradient."""
    largest = 0.0
    for name, one in a.gradients.items():
        other = b.gradients[name]
        if (one is None) != (other is None):
            return float("inf")
        if one is not None and other is not None:
            largest = max(largest, largest_difference(one, other))
    return largest
