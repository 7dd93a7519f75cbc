"""A step run by eager PyTorch and by a Program, in one process: memory, time, what changed.

Where eager PyTorch runs out of memory, the Program may run alone: nothing is compared then.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import fx, nn

from lowtide.cost.watch import Allocations
from lowtide.errors import BudgetError, CaptureError
from lowtide.execute.backend import Planner, compile_with
from lowtide.execute.compare.subject import Loss, StepOutcome, StepRunner, Subject, launched, timed
from lowtide.execute.compile.bits import largest_difference, same_bits
from lowtide.execute.compile.user_code import in_the_users_terms, users_step
from lowtide.execute.memory.optimizer_state import state_of, with_state
from lowtide.execute.memory.out_of_memory import forget_frames, ran_out
from lowtide.execute.runtime.interpreter import Interpreter
from lowtide.graph import Graph, Recording, Timeline
from lowtide.pace import Pace
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

__all__ = ["Comparison", "MeasuredSide", "compare"]

TextProgress = Callable[[str], None]
_T = TypeVar("_T")


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

    eager: MeasuredSide | None
    """None where eager PyTorch ran out of memory: nothing is compared then."""
    measured: MeasuredSide
    predicted_peak_bytes: int
    loss_equal: bool | None
    bitwise: bool | None
    max_rel_grad_diff: float | None
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
            eager=None if self.eager is None else Side(self.eager.peak_bytes, self.eager.seconds),
            measured=Side(self.measured.peak_bytes, self.measured.seconds),
            predicted_peak_bytes=self.predicted_peak_bytes,
            loss_equal=self.loss_equal,
            bitwise=self.bitwise,
            difference=_finite(self.max_rel_grad_diff),
            graph=self.graph,
            program=self.ran,
            recording=self.recording,
            eager_bytes=self.eager_bytes,
            plan=plan,
        )

    def as_json(self) -> dict[str, Any]:
        """Keys as ``lowtide run --json`` prints them."""
        return {
            "eager": None if self.eager is None else asdict(self.eager),
            "predicted": {"peak_bytes": self.predicted_peak_bytes},
            "measured": asdict(self.measured),
            "loss_equal": self.loss_equal,
            "bitwise": self.bitwise,
            "max_rel_grad_diff": _finite(self.max_rel_grad_diff),
            "operators": self.operators,
            "runs": self.runs,
        }


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
    alone: bool = False,
    progress: TextProgress = lambda _: None,
) -> Comparison:
    """Run the step both ways with the same random seed and compare what they take and what they leave.

    ``update`` ends the step, if it is given: it changes the parameters by their gradients, as it stands on
    one side and as its captured operators on the other. The model is left as it was, without gradients.
    Without ``in_place`` the planner's program runs exactly as it is given. With no ``repeats`` nothing is
    timed: seconds are NaN. With ``kernels`` that are fused the program is one of groups. The state of an
    ``optimizer``, which takes no step here, counts as resident. Where eager PyTorch runs out of memory, that
    is an error, unless the program may run ``alone``.
    """
    subject = Subject(model, batch, trains, update is not None, seed)
    subject.state = state_of(optimizer, subject.device)
    made: list[Interpreter] = []

    def backend(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        how: dict[str, Any] = {"in_place": in_place, "state": subject.state, "fused": kernels == "fused"}
        return compile_with(module, inputs, planner, made.append, **how)

    progress("eager step")
    eagerly = StepRunner(loss, None if update is None else lambda model, _: update(model))
    before = _unless_out_of_memory(partial(_eager, subject, eagerly), subject, alone=alone)
    if before is None:
        progress("eager PyTorch runs out of memory: the program runs alone, and nothing is compared")
    progress("capturing")
    ways: list[Loss] = []

    def attempt(answers: Answers) -> None:
        ways.append(one_graph(loss, Branches().given_to(backend), answers))
        made.clear()
        subject.reset()
        with in_the_users_terms():
            subject.step(StepRunner(ways[-1]))

    with_answers(attempt)
    compiled = ways[-1]
    if not made:
        raise CaptureError("the step runs no operator on a tensor: pass its tensors as arguments")
    interpreter = made[-1]
    graph, program = with_state(interpreter.joint.graph, subject.state()), interpreter.program
    planned = StepRunner(compiled, interpreter=interpreter)
    if update is not None:
        ending = read_update(interpreter.joint, model, update)
        graph, program = ending.graph, with_update(ending.graph, program)
        planned = StepRunner(compiled, ending.run, interpreter)
    progress("the program")
    subject.reset()
    resident = max(0 if before is None else before.resident_bytes, subject.resident_bytes())
    if interpreter.leaves:  # the recorder on the CPU knows only memory that was taken while it watched
        subject.watch(planned)
        subject.reset()
    storages, marked = subject.follow(planned)
    loops = {line.op for line in program.instructions if isinstance(line, Loop)}
    timeline = storages.timeline(marked, resident, loops)
    subject.reset()
    result, ours = subject.watch(planned)
    after = subject.outcome(result)
    times = None
    if before is not None:
        both = partial(_timed, subject, [eagerly, planned], repeats, progress)
        times = _unless_out_of_memory(both, subject, alone=alone)
        if times is None:
            progress("eager PyTorch runs out of memory while it is timed: nothing is compared")
            before = None
    seconds, host = times or _timed(subject, [planned], repeats, progress)
    subject.reset()
    eager = None
    if before is not None:
        eager = MeasuredSide(resident + before.took.peak_bytes, seconds[0], host[0])
    left = None if before is None else before.left
    return Comparison(
        eager=eager,
        measured=MeasuredSide(resident + ours.peak_bytes, seconds[-1], host[-1]),
        predicted_peak_bytes=_predicted(graph, program, marked, resident),
        loss_equal=None if left is None else same_bits(left.loss, after.loss),
        bitwise=None if left is None else _equal(left, after),
        max_rel_grad_diff=None if left is None else _largest_difference(left, after),
        operators=len(graph.ops),
        runs=sum(isinstance(line, Run) for line in program.instructions),
        recording=_recording(graph, program, timeline),
        program=interpreter.program,
        graph=graph,
        ran=program,
        eager_bytes=() if before is None else tuple(resident + size for size in before.took.curve),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Eager:
    """A step of eager PyTorch: what was there before, what it took, and what it left behind."""

    resident_bytes: int
    took: Allocations
    left: StepOutcome


def _eager(subject: Subject, way: StepRunner) -> _Eager:
    """The step as the user wrote it."""
    subject.reset()
    with users_step():
        subject.step(way)  # what a first step sets up once and for all
    subject.reset()
    resident = subject.resident_bytes()
    result, took = subject.watch(way)
    return _Eager(resident, took, subject.outcome(result))


def _unless_out_of_memory(call: Callable[[], _T], subject: Subject, *, alone: bool) -> _T | None:
    """What a call that runs eager PyTorch gives; None where memory runs out and that is no error."""
    try:
        return call()
    except Exception as error:
        if not alone or not ran_out(error.__cause__ or error):
            raise
        forget_frames(error)
    subject.reset()
    gc.collect()
    torch.cuda.empty_cache()
    return None


def _timed(
    subject: Subject, ways: Sequence[StepRunner], repeats: int, progress: TextProgress
) -> tuple[list[float], list[float]]:
    """Seconds of a step of each, and until its call returns."""
    timing = "timing both" if len(ways) > 1 else "timing"
    progress(timing)
    pace = Pace()

    def turn(done: int) -> None:
        if pace.due():
            progress(f"{timing}: {done} of {repeats + 1} times")

    seconds = timed(subject, ways, repeats, turn)
    return seconds, launched(subject, ways, repeats, seconds)


def _recording(graph: Graph, program: Program, timeline: Timeline) -> Recording:
    ran = [graph.ops[line.op].id for line in program.instructions if isinstance(line, Run)]
    return Recording(tuple(ran), timeline)


def _predicted(graph: Graph, program: Program, marked: Allocations, resident: int) -> int:
    """The simulated peak, with measured workspaces and with what else is on the device."""
    workspaces = [marked.workspace_bytes(k) or 0 for k in range(len(graph.ops))]
    timeline = simulate(graph, program, workspace_bytes=workspaces)
    return timeline.peak_bytes + resident - timeline.resident_bytes


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


def _finite(value: float | None) -> float | None:
    """JSON has no infinity."""
    return value if value is not None and math.isfinite(value) else None
