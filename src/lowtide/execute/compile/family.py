"""One function for many shapes: traced once for all of them, with symbols for the sizes that vary.

The first shape is traced by itself. For the next one the function is traced with symbols, and each shape
takes its numbers from there. That is checked: for a shape that was traced by itself, the two must be the same
step, and whatever runs is held against its capture as always.
"""

from __future__ import annotations

import copy
import dataclasses
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from msgspec.structs import replace
from torch import fx

from lowtide.distributed_internals import is_distributed
from lowtide.execute.compile.aot import Aot
from lowtide.execute.compile.partition import ends_of
from lowtide.execute.compile.traced import Traced, traced_alone
from lowtide.execute.graphs.common_memory import CommonMemory
from lowtide.execute.graphs.replay import Replay, leave_again
from lowtide.execute.kernels.ways import Ways
from lowtide.execute.memory.device import Room
from lowtide.execute.planning.other_shapes import ShapePlans
from lowtide.execute.runtime.interpreter import Interpreter
from lowtide.torch_internals import TracingContext, tracing
from lowtide.trace.eager.gradients import copy_gradients, gradient_strides
from lowtide.trace.eager.kernels import eager_kernels
from lowtide.trace.eager.layouts import Layouts, fake_arguments, layouts
from lowtide.trace.eager.rewrite import as_eager
from lowtide.trace.shapes.concrete import Concrete, NotConcrete, SymbolicInputs
from lowtide.trace.shapes.size_arithmetic import computed_once
from lowtide.trace.shapes.template import Template, with_bytes, with_symbols_in_place
from lowtide.trace.step.boundary import Boundary
from lowtide.trace.step.joint import Joint, Leaf, read_symbolic
from lowtide.trace.step.marks import gradient_marks
from lowtide.trace.step.split_convolutions import Split

__all__ = ["Family", "Shapes"]

Whole = Callable[[], tuple[fx.GraphModule, list[frozenset[int]]] | None]
_KEPT = 4
"""Shapes that were traced by themselves and are kept to check a trace with symbols."""
_TRIES = 3
"""A function is traced with symbols so many times at most."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Alone:
    """A shape that was traced by itself, and that runs as it was captured."""

    operators: tuple[Any, ...]
    """What it calls, as Dynamo has captured it."""
    inputs: Sequence[Any]
    joint: Joint

    def fits(self, varying: Sequence[frozenset[int]], arguments: Sequence[Any]) -> bool:
        """Whether it may be one of the shapes of a function of which these sizes vary, as in a call.

        Torch takes sizes for one that are the same: they must be the same in the call too.
        """
        if len(varying) != len(self.inputs) or len(arguments) != len(self.inputs):
            return False
        stands_for: dict[int, int] = {}
        for one, other, dims in zip(self.inputs, arguments, varying, strict=True):
            if one.dim() != other.dim():
                return False
            for k in dims:
                if one.shape[k] < 2 or stands_for.setdefault(one.shape[k], other.shape[k]) != other.shape[k]:
                    return False
        return True


@dataclasses.dataclass(slots=True, eq=False)
class Shapes:
    """What is known of the shapes of a function, also of those that torch has captured apart."""

    plans: ShapePlans = dataclasses.field(default_factory=ShapePlans)
    alone: list[_Alone] = dataclasses.field(default_factory=list)
    budget_bytes: int = 0
    """The largest budget that a step with backward was planned for."""
    ways: Ways | None = None
    """How operators run with fused kernels, once that was measured for a shape."""
    graphs: weakref.WeakSet[Replay] = dataclasses.field(default_factory=weakref.WeakSet)
    """What replays steps as CUDA graphs."""
    common: dict[torch.device, CommonMemory] = dataclasses.field(default_factory=dict)
    """In which memory, on each device."""

    def replayed(self, interpreter: Interpreter, how: str, room: Room) -> Replay | None:
        """What replays a step, where that is asked for; ``room`` says what is left for its arena to lose."""
        devices = {value.device for value in interpreter.joint.values if value.device.type == "cuda"}
        if how == "off" or not devices:
            return None
        device = min(devices, key=str)
        if device not in self.common:
            self.common[device] = CommonMemory()
        found = Replay(interpreter, self.common[device], room.lost_bytes, room.no_graphs)
        self.graphs.add(found)
        return found

    @property
    def graph_bytes(self) -> int:
        """Memory that CUDA graphs hold for themselves."""
        return sum(one.tapes.size for one in self.common.values())

    def make_way(self) -> None:
        """Give up CUDA graphs, which are captured again: a step is going to be measured."""
        leave_again()
        for one in self.common.values():
            one.make_way()

    def leave(self) -> None:
        """Give up CUDA graphs: nobody calls the function any more."""
        for one in list(self.graphs):
            one.leave()

    def add(self, aot: Aot) -> None:
        """Keep a shape that was traced by itself."""
        plain = all(isinstance(one, torch.Tensor) and not is_distributed(one) for one in aot.inputs)
        if aot.joint is not None and plain:
            self.alone.insert(0, _Alone(_operators(aot.module), aot.inputs, aot.joint))
            del self.alone[_KEPT:]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Symbolic:
    """The function, traced with symbols."""

    traced: Traced
    inputs: SymbolicInputs
    template: Template
    gradients: Sequence[tuple[Any, ...] | None]
    """The strides in which autograd keeps the gradient of each input."""

    def at(
        self, module: fx.GraphModule, leaves: Sequence[Leaf], arguments: Sequence[Any], known: Layouts
    ) -> Aot:
        """The function for the shapes of these arguments; NotConcrete where it may be another one."""
        mode = known.mode()
        concrete = Concrete(mode, self.inputs.sizes(arguments))
        inputs = [concrete.like(one) for one in self.inputs.fakes]
        if _lie(inputs) != _lie(arguments) or gradient_strides(arguments) != concrete.value(self.gradients):
            raise NotConcrete
        joint = self.template.at(concrete)
        if len(joint.inputs) != len(arguments):
            raise NotConcrete  # torch puts inputs on one storage together
        joint = with_bytes(joint, arguments)
        state, capture = copy.copy(self.traced.state), copy.copy(self.traced.capture)
        state.flat_args = inputs
        state.fw_metadata = concrete.metadata(state.fw_metadata)
        capture.graph_module = ends_of(capture.graph_module, concrete.value)
        capture.updated_flat_args = concrete.value(capture.updated_flat_args)
        capture.wrappers = concrete.value(capture.wrappers)
        return Aot(module, leaves, inputs, mode, self.traced.with_records(state, capture), joint)


class Family:
    """The shapes of a function that was captured with symbols for sizes."""

    def __init__(self, whole: Whole, shapes: Shapes | None = None) -> None:
        """``whole`` gives the function of tensors alone, and which sizes of each tensor vary."""
        self._whole = whole
        self.shapes = shapes or Shapes()
        self.unlike = 0
        """How many graphs of several were captured for it, but for those that are like others."""
        self._symbolic: list[_Symbolic] = []
        self._tried: list[_Alone] = []
        """Shapes at which the function was traced with symbols."""

    @property
    def plans(self) -> ShapePlans:
        """Plans for the shapes of the function."""
        return self.shapes.plans

    def agrees(self, aot: Aot | None) -> None:
        """A capture is as it runs."""
        if aot is not None and aot.before is None and not aot.fused and not aot.split:
            self.shapes.add(aot)

    def differs(self, aot: Aot | None) -> None:
        """A capture was not as it runs: where it was made with symbols, every shape is traced by itself."""
        if aot is not None and aot.before is not None:
            self._symbolic, self._whole = [], lambda: None

    def aot(
        self,
        module: fx.GraphModule,
        leaves: Sequence[Leaf],
        arguments: Sequence[Any],
        known: Layouts,
        boundary: Boundary | None = None,
        *,
        fused: bool = False,
        split: Split = frozenset(),
    ) -> Aot:
        """The function for the shapes of these arguments, traced with symbols where that is possible.

        One of several graphs, which has a ``boundary``, is traced by itself, and so is one whose operators
        are ``fused``, or some of whose convolutions are ``split``.
        """
        for symbolic in () if boundary is not None or fused or split else (*self._symbolic, None):
            symbolic = symbolic or self._trace(module, leaves, arguments, known)
            if symbolic is not None:
                with suppress(NotConcrete):
                    return symbolic.at(module, leaves, arguments, known)
        mode = known.mode()
        alone = Aot(module, leaves, fake_arguments(mode, arguments), mode, boundary=boundary)
        alone.fused, alone.split = fused, split
        return alone

    def _trace(
        self, step: fx.GraphModule, leaves: Sequence[Leaf], arguments: Sequence[Any], known: Layouts
    ) -> _Symbolic | None:
        """The function with symbols, traced at a shape that was traced by itself; None where they differ.

        A trace may be good for some shapes alone, as where torch takes another kernel from some batch size
        on, and a shape that torch has captured apart may be another step: then another one is tried. ``step``
        is the function with the sizes of a call, ``arguments`` are those of the call.
        """
        if len(self._tried) >= _TRIES:
            return None
        found = self._whole()
        if found is None:
            return None
        module, varying = found
        operators = _operators(step)
        same_step = (one for one in self.shapes.alone if one.operators == operators)
        fitting = (one for one in same_step if one.fits(varying, arguments))
        alone = next((one for one in fitting if one not in self._tried), None)
        if alone is None:
            return None
        self._tried.append(alone)
        try:
            symbolic = _traced(module, varying, alone, leaves, known)
            if symbolic is not None:
                symbolic.at(step, leaves, alone.inputs, known)
        except Exception:  # torch's own, of any kind: sizes are traced as numbers then, which works
            self._whole = lambda: None
            return None
        if symbolic is None or not same(alone.joint, symbolic.template.joint):
            return None
        symbolic.template.named_like(alone.joint)
        self._symbolic.append(symbolic)
        return symbolic


def _traced(
    module: fx.GraphModule,
    varying: Sequence[frozenset[int]],
    alone: _Alone,
    leaves: Sequence[Leaf],
    known: Layouts,
) -> _Symbolic | None:
    """The function with symbols for the sizes that vary, traced at the sizes of a shape that is known."""
    mode = known.mode(symbolic=True)
    inputs = SymbolicInputs(mode, alone.inputs, varying)
    with tracing(TracingContext(mode)), eager_kernels(known, symbolic=True), computed_once():
        traced = traced_alone(module, inputs.fakes)
        if traced is None:
            return None
        joint, gradients = traced.capture.graph_module, gradient_strides(inputs.fakes)
        with_symbols_in_place(joint)
        if alone.joint.gradients:
            copy_gradients(joint, len(alone.joint.outputs), gradients)
        marks = gradient_marks(module) if alone.joint.gradients else None
        read = read_symbolic(as_eager(joint), len(alone.joint.outputs), leaves, marks)
    inputs.nothing_more_is_asked()  # raises NotConcrete where torch has fixed a size that varies
    return _Symbolic(traced, inputs, Template(read), gradients)


def _lie(inputs: Sequence[torch.Tensor]) -> list[Any]:
    """How inputs lie in memory, each and to each other, wherever that memory begins and ends."""
    return [one and dataclasses.replace(one, offset=0, storage_bytes=0) for one in layouts((), {}, inputs)]


def _operators(module: fx.GraphModule) -> tuple[Any, ...]:
    """What a function calls, in order."""
    return tuple((node.op, node.target) for node in module.graph.nodes if node.op != "placeholder")


aten = torch.ops.aten
_VIEWS: dict[Any, Any] = {
    "aten._unsafe_view": "aten.view",
    aten._unsafe_view.default: aten.view.default,
}
"""Operators that do the same under two names, of which torch takes either."""


def same(one: Joint, other: Joint) -> bool:
    """Whether two captures are the same step, call by call, whatever names they have."""
    return _nameless(one) == _nameless(other)


def _nameless(joint: Joint) -> tuple[Any, ...]:
    graph = joint.graph
    number = {op.id: str(k) for k, op in enumerate(graph.ops)}
    tensors = [replace(tensor, id="") for tensor in graph.tensors]
    ops = [
        replace(
            op, id="", kind=_VIEWS.get(op.kind, op.kind), differentiates=number.get(op.differentiates, "")
        )
        for op in graph.ops
    ]
    calls = [
        (call.results, *(_VIEWS.get(one, one) for one in (call.target, call.source, call.laid_out_by)))
        for call in joint.calls
    ]
    constants = {t: (value.dtype, value.tolist()) for t, value in joint.constants.items()}
    ends = joint.inputs, joint.tangents, joint.outputs, joint.gradients, joint.stopped
    return tensors, ops, calls, constants, graph.returned, graph.updated, graph.updated_early, ends
