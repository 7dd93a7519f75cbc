"""A step captured, costed and timed: everything that ``lowtide profile`` writes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.utils._pytree import tree_leaves

from lowtide.capture.joint import Joint
from lowtide.cost import Cost, Note, NoteKind, Span, Step, validate_step
from lowtide.cost.cache import CostCache
from lowtide.cost.device import Device, Environment
from lowtide.cost.estimate import estimate
from lowtide.cost.measure import Measured, Progress, measure
from lowtide.cost.record import record
from lowtide.cost.watch import Marker
from lowtide.errors import CaptureError, LowtideError, RunError
from lowtide.execute.backend import compile_with
from lowtide.execute.interpreter import Interpreter
from lowtide.graph import Graph
from lowtide.plan.plain import store_all

__all__ = ["Profile", "estimated_profile", "measured_profile"]


@dataclass(frozen=True, slots=True)
class Profile:
    """A step with its costs; ``measured`` says where they come from, None for estimates."""

    step: Step
    measured: Measured | None = None


def measured_profile(
    function: Callable[..., Any],
    example: Sequence[Any],
    environment: Environment,
    *,
    trains: bool = True,
    cache: CostCache | None = None,
    time_limit: float = 60.0,
    progress: Progress | None = None,
) -> Profile:
    """The step ``function(*example)``, every operator measured, and the spans of one run.

    Where ``trains``, the backward pass of the scalar that the function returns belongs to it. Gradients,
    buffers and random state are afterwards what they were before. New figures are added to the cache, whose
    owner saves it.
    """
    with _untouched(example):
        captured = _capture(function, example, trains)
        graph = captured.joint.graph
        targets = [call.target for call in captured.joint.calls]
        found = measure(graph, targets, captured.run, cache=cache, time_limit=time_limit, progress=progress)
        spans = record(graph, captured.run)
    text = f"{found.once} operators were timed on a single run, without warming up"
    notes = (Note(NoteKind.ASSUMPTION, text),) if found.once else ()
    return Profile(_step(graph, found.costs, environment, spans, notes), found)


def estimated_profile(
    function: Callable[..., Any], example: Sequence[Any], device: Device, *, trains: bool = True
) -> Profile:
    """The step ``function(*example)``, every operator estimated; none is run."""
    with _untouched(example):
        graph = _capture(function, example, trains).joint.graph
    return Profile(_step(graph, estimate(graph, device), device.environment))


def _step(
    graph: Graph,
    costs: tuple[Cost, ...],
    environment: Environment,
    spans: tuple[Span, ...] = (),
    notes: tuple[Note, ...] = (),
) -> Step:
    where = {
        "name": environment.name,
        "kind": environment.kind,
        "versions": environment.versions,
        "settings": environment.settings,
    }
    attributes = graph.attributes | {"environment": where}
    named = Graph(graph.tensors, graph.ops, graph.name, graph.ordered, attributes)
    return validate_step(Step(named, "capture", costs, spans, notes))


@dataclass(frozen=True, slots=True)
class _Captured:
    """A step, and how to run it once with a marker."""

    joint: Joint
    run: Callable[[Marker], None]


class _Enough(Exception):  # noqa: N818  it is no error
    """Raised before the first operator: the step is captured, and nobody wants it to run yet."""


class _Stop(Marker):
    def before(self, op: int) -> None:
        raise _Enough(op)


def _capture(function: Callable[..., Any], example: Sequence[Any], trains: bool) -> _Captured:
    """The step as one graph; nothing of it has run."""
    made: list[Interpreter] = []

    def seen(interpreter: Interpreter) -> None:
        interpreter.marker = _Stop()
        made.append(interpreter)

    backend = functools.partial(compile_with, planner=store_all, watch=seen, in_place=False)
    compiled = torch.compile(_fresh(function), backend=backend, dynamic=False, fullgraph=True)

    def once() -> None:
        with torch.enable_grad() if trains else torch.no_grad():
            result = compiled(*example)
        if trains:
            _scalar(result).backward()

    try:
        once()
    except _Enough:
        pass
    except BackendCompilerFailed as error:
        if isinstance(error.inner_exception, LowtideError):
            raise error.inner_exception from None
        raise CaptureError(f"the step cannot be captured: {_first_line(error.inner_exception)}") from error
    except LowtideError:
        raise
    except Exception as error:  # the user's own code, or torch's tracing of it
        stack = getattr(error, "real_stack", None)
        where = f"{stack[-1].filename}:{stack[-1].lineno}: " if stack else ""
        said = f"{type(error).__name__}: {_first_line(error)}"
        raise CaptureError(f"{where}the step cannot be captured as one graph: {said}") from error
    if len(made) != 1:
        raise CaptureError(f"the step was captured in {len(made)} pieces; it must be one function of tensors")

    def run(marker: Marker) -> None:
        made[0].marker = marker
        try:
            once()
        except torch.OutOfMemoryError as error:
            raise RunError(
                f"the step does not fit into the memory of the device: {_first_line(error)}"
            ) from error
        finally:
            made[0].marker = None

    return _Captured(made[0].joint, run)


def _fresh(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function with code of its own, so that torch keeps what it compiled for others apart."""
    if not isinstance(function, FunctionType):
        return function
    twin = FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin


def _scalar(result: Any) -> Any:
    if not isinstance(result, torch.Tensor) or result.numel() != 1:
        what = (
            f"a tensor of shape {tuple(result.shape)}"
            if isinstance(result, torch.Tensor)
            else repr(type(result))
        )
        raise RunError(f"the loss must be a single number to have a backward pass; it is {what}")
    if not result.requires_grad:
        raise RunError("the loss does not depend on any parameter: there is no backward pass")
    return result


def _first_line(error: BaseException | None) -> str:
    return str(error).strip().partition("\n")[0]


@contextlib.contextmanager
def _untouched(example: Sequence[Any]) -> Iterator[None]:
    """Afterwards gradients, buffers and random states are what they were."""
    modules = [part for part in example if isinstance(part, nn.Module)]
    leaves = [leaf for leaf in tree_leaves(list(example)) if isinstance(leaf, torch.Tensor)]
    leaves += [parameter for module in modules for parameter in module.parameters()]
    buffers = [(buffer, buffer.detach().clone()) for module in modules for buffer in module.buffers()]
    gradients = [(leaf, leaf.grad) for leaf in leaves if leaf.is_leaf]
    devices = {leaf.device for leaf in leaves if leaf.device.type == "cuda"}
    with torch.random.fork_rng(devices=sorted(devices, key=str)):
        try:
            for leaf, _ in gradients:
                leaf.grad = None
            yield
        finally:
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)
            for leaf, gradient in gradients:
                leaf.grad = gradient
