"""A step captured, costed and timed: everything that ``lowtide profile`` writes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from lowtide.cost import Cost, Note, NoteKind, Span, Step, validate_step
from lowtide.cost.cache import CostCache
from lowtide.cost.device import Device, Environment
from lowtide.cost.estimate import estimate
from lowtide.cost.measure import Measured, MeasureProgress, measure
from lowtide.cost.record import record
from lowtide.cost.watch import Marker
from lowtide.errors import CaptureError, RunError
from lowtide.execute.backend import compile_with
from lowtide.execute.compare.launching import Launching, launching
from lowtide.execute.compile.trial import untouched
from lowtide.execute.compile.user_code import check_loss, check_number, in_the_users_terms, too_large
from lowtide.execute.runtime.interpreter import Interpreter
from lowtide.graph import Graph
from lowtide.nested import leaves
from lowtide.plan.program.simple import store_all
from lowtide.trace.branches.branches import Branches
from lowtide.trace.eager.is_compiling import Answers
from lowtide.trace.step.capture import capture
from lowtide.trace.step.ending import read_update
from lowtide.trace.step.joint import Joint
from lowtide.trace.step.one_graph import one_graph, with_answers

__all__ = ["Ending", "Measuring", "Profile", "estimated_profile", "measured_profile"]

Ending = Callable[[nn.Module], None]
"""An update that ends a step: changes the parameters of a model in place."""


@dataclass(frozen=True, slots=True)
class Measuring:
    """How operators are measured."""

    cache: CostCache | None = None
    """What is known; new figures are added, and its owner saves it."""
    time_limit: float = 60.0
    progress: MeasureProgress | None = None


@dataclass(frozen=True, slots=True)
class Profile:
    """A step with its costs; ``measured`` says where they come from, None for estimates."""

    step: Step
    measured: Measured | None = None
    launching: Launching | None = None
    """What a step takes when nobody watches it; None for estimates."""


def measured_profile(
    function: Callable[..., Any],
    example: Sequence[Any],
    environment: Environment,
    *,
    trains: bool = True,
    update: Ending | None = None,
    kernels: str = "eager",
    measuring: Measuring | None = None,
) -> Profile:
    """The step ``function(*example)``, every operator measured, and the spans of one run.

    Where ``trains``, the backward pass of the scalar that the function returns belongs to it; ``update`` ends
    it by changing the model that the example starts with. Parameters, gradients, buffers and random state are
    afterwards what they were before. With ``kernels`` that are fused, groups are measured.
    """
    with _untouched(example, parameters=update is not None):
        captured = _compiled(function, example, trains, kernels)
        if trains:
            _check_loss(captured.joint)
        ending = None if update is None else read_update(captured.joint, example[0], update)
        graph = captured.joint.graph if ending is None else ending.graph
        targets = [call.target for call in captured.joint.calls] + ([] if ending is None else ending.targets)

        def run(marker: Marker | None) -> None:
            captured.run(marker)
            if ending is not None:
                ending.run(example[0], marker)

        how = measuring or Measuring()
        found = measure(
            graph, targets, run, cache=how.cache, time_limit=how.time_limit, progress=how.progress
        )
        spans = record(graph, run)
        device = next((value.device for value in captured.joint.values if value.is_cuda), torch.device("cpu"))
        alone = launching(lambda: run(None), device, before=lambda: _without_gradients(_leaves(example)))
    return Profile(_step(graph, found.costs, environment, spans, tuple(_notes(found))), found, alone)


def _notes(found: Measured) -> Iterator[Note]:
    if found.once:
        text = f"{found.once} operators were timed on a single run, without warming up"
        yield Note(NoteKind.ASSUMPTION, text)
    if found.disturbed:
        text = (
            f"{found.disturbed} operators were measured while the machine was busy: their times are those of "
            "their quickest calls; measure again when it is quiet"
        )
        yield Note(NoteKind.ASSUMPTION, text)


def estimated_profile(
    function: Callable[..., Any],
    example: Sequence[Any],
    device: Device,
    *,
    trains: bool = True,
    update: Ending | None = None,
) -> Profile:
    """The step ``function(*example)``, every operator estimated; none is run."""
    with _untouched(example), in_the_users_terms(), _gradients(trains):
        captured = capture(function, *example)
    if trains:
        _check_loss(captured.joint)
    if update is not None:
        captured = captured.with_update(example[0], update)
    graph = captured.step.graph
    return Profile(_step(graph, estimate(graph, device), device.environment))


def _step(
    graph: Graph,
    costs: tuple[Cost, ...],
    environment: Environment,
    spans: tuple[Span, ...] = (),
    notes: tuple[Note, ...] = (),
) -> Step:
    return validate_step(Step(graph, "capture", costs, spans, notes, environment=environment))


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A step, and how to run it once with a marker."""

    joint: Joint
    run: Callable[[Marker | None], None]


class _Enough(Exception):  # noqa: N818  it is no error
    """Raised before the first operator: the step is captured, and nobody wants it to run yet."""


class _Stop(Marker):
    def before(self, op: int) -> None:
        raise _Enough(op)


def _compiled(function: Callable[..., Any], example: Sequence[Any], trains: bool, kernels: str) -> _Compiled:
    """The step as one graph that can be run, which capture alone does not give; nothing of it has run."""
    made: list[Interpreter] = []

    def seen(interpreter: Interpreter) -> None:
        interpreter.marker = _Stop()
        made.append(interpreter)

    def backend(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return compile_with(module, inputs, store_all, seen, in_place=False, fused=kernels == "fused")

    ways: list[Callable[..., Any]] = []

    def once() -> None:
        with _gradients(trains):
            result = ways[-1](*example)
        if not trains:
            return
        check_loss(result)
        result.backward()

    def attempt(answers: Answers) -> None:
        ways.append(one_graph(function, Branches().given_to(backend), answers))
        made.clear()
        with in_the_users_terms(), contextlib.suppress(_Enough):
            once()

    with_answers(attempt)
    if len(made) != 1:
        raise CaptureError(
            f"the step was captured in {len(made)} pieces; take out what breaks the graph: "
            "`lowtide.fit(..., fullgraph=True)` names the line"
        )

    def run(marker: Marker | None) -> None:
        made[0].marker = marker
        try:
            once()
        except torch.OutOfMemoryError as error:
            raise too_large(error) from error
        finally:
            made[0].marker = None

    return _Compiled(made[0].joint, run)


def _gradients(wanted: bool) -> contextlib.AbstractContextManager[None]:
    return torch.enable_grad() if wanted else torch.no_grad()


def _check_loss(joint: Joint) -> None:
    """Refuse what has no backward pass of its own, before anything runs."""
    if not joint.tangents:
        raise RunError(
            "the loss does not depend on any parameter: there is no backward pass; look for detach "
            "and no_grad"
        )
    results = [joint.values[t] for t in joint.tangents]
    if len(results) > 1:
        what = " and ".join(f"a tensor of shape {tuple(one.shape)}" for one in results)
        raise RunError(
            f"the loss must be a single number to have a backward pass; it is {what}; return that number"
        )
    check_number(tuple(results[0].shape), results[0].dtype)


@contextlib.contextmanager
def _untouched(example: Sequence[Any], *, parameters: bool = False) -> Iterator[None]:
    """Afterwards gradients, buffers, random states and, if asked, parameters are what they were."""
    modules, tensors = [part for part in example if isinstance(part, nn.Module)], _leaves(example)
    changed = [buffer for module in modules for buffer in module.buffers()]
    changed += [p for module in modules for p in module.parameters()] if parameters else []
    gradients = [(tensor, tensor.grad) for tensor in tensors if tensor.is_leaf]
    with untouched(changed, [tensor.device for tensor in tensors]):
        try:
            _without_gradients([tensor for tensor, _ in gradients])
            yield
        finally:
            for tensor, gradient in gradients:
                tensor.grad = gradient


def _leaves(example: Sequence[Any]) -> list[torch.Tensor]:
    """The tensors of an example, with the parameters of its modules."""
    tensors = [leaf for leaf in leaves(example) if isinstance(leaf, torch.Tensor)]
    modules = [part for part in example if isinstance(part, nn.Module)]
    return tensors + [parameter for module in modules for parameter in module.parameters()]


def _without_gradients(tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors:
        if tensor.is_leaf:
            tensor.grad = None
