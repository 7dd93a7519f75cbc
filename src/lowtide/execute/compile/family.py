"""One function for many shapes: traced once for all of them, with symbols for the sizes that vary.

The first shapes are traced by themselves. From the next one on, the function is traced with symbols, and each
shape takes its numbers from there. That is checked: for a shape that was traced by itself, the two must be
the same step, and whatever runs is held against its capture as always.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from msgspec.structs import replace
from torch import fx

from lowtide.execute.compile.aot import Aot
from lowtide.execute.compile.traced import Traced, traced_alone
from lowtide.execute.planning.other_shapes import ShapePlans
from lowtide.plan.program.simple import store_all
from lowtide.torch_internals import TracingContext, tracing
from lowtide.trace.eager.kernels import eager_kernels
from lowtide.trace.eager.layouts import Layouts, fake_arguments
from lowtide.trace.step.boundary import Boundary
from lowtide.trace.step.concrete import Concrete, NotConcrete, SymbolicInputs
from lowtide.trace.step.joint import Joint, Leaf

__all__ = ["Family"]

Whole = Callable[[], tuple[fx.GraphModule, list[frozenset[int]]] | None]


class Family:
    """The shapes of a function that was captured with symbols for sizes."""

    def __init__(self, whole: Whole, plans: ShapePlans | None = None) -> None:
        """``whole`` gives the function of tensors alone, and which sizes of each tensor vary."""
        self._whole = whole
        self.plans = plans or ShapePlans()
        self._usable = True
        self._traced: Traced | None = None
        self._inputs: SymbolicInputs | None = None
        self._known: tuple[list[Any], Aot] | None = None
        """A shape that was traced by itself."""

    def differs(self, aot: Aot | None) -> None:
        """A capture was not as it runs: where it was made with symbols, every shape is traced by itself."""
        if aot is not None and aot.before is not None:
            self._usable, self._traced, self._inputs = False, None, None
        self._known = None

    def aot(
        self,
        module: fx.GraphModule,
        leaves: Sequence[Leaf],
        arguments: Sequence[Any],
        layouts: Layouts,
        boundary: Boundary | None = None,
    ) -> Aot:
        """The function for the shapes of these arguments, traced with symbols where that is possible.

        One of several graphs, which has a ``boundary``, is traced by itself.
        """
        if self._usable and boundary is None:
            try:
                if self._known is not None and self._traced is None:
                    self._trace(leaves, layouts)
                if self._usable and self._traced is not None:
                    return self._at(module, leaves, arguments, layouts)
            except NotConcrete:
                pass
        mode = layouts.mode()
        inputs = fake_arguments(mode, arguments)
        alone = Aot(module, leaves, inputs, mode, boundary=boundary)
        if self._usable and self._traced is None and all(isinstance(one, torch.Tensor) for one in inputs):
            self._known = inputs, alone
        return alone

    def _trace(self, leaves: Sequence[Leaf], layouts: Layouts) -> None:
        """Trace with symbols, at the sizes of the shape that was traced by itself."""
        assert self._known is not None
        (inputs, alone), self._usable = self._known, False
        found = self._whole()
        if found is None or alone.joint is None:
            return
        module, varying = found
        mode = layouts.mode(symbolic=True)
        self._inputs = SymbolicInputs(mode, inputs, varying)
        try:
            with tracing(TracingContext(mode)), eager_kernels(layouts):
                self._traced = traced_alone(module, self._inputs.fakes)
        except Exception:  # torch's own, of any kind: sizes are traced as numbers then, which works
            return
        if self._traced is None:
            return
        again = self._at(module, leaves, inputs, layouts)
        again.compiled(lambda joint: store_all(joint.graph), lambda _: None, tuple)
        self._usable = again.joint is not None and same(alone.joint, again.joint)
        self._known = None

    def _at(
        self, module: fx.GraphModule, leaves: Sequence[Leaf], arguments: Sequence[Any], layouts: Layouts
    ) -> Aot:
        assert self._inputs is not None
        assert self._traced is not None
        sizes = self._inputs.sizes(arguments)
        mode = layouts.mode()
        inputs = fake_arguments(mode, arguments)
        concrete = Concrete(mode, sizes)
        state, capture = copy.copy(self._traced.state), copy.copy(self._traced.capture)
        state.flat_args = inputs
        state.fw_metadata = concrete.metadata(state.fw_metadata)
        capture.graph_module = concrete.graph(capture.graph_module)
        capture.updated_flat_args = concrete.value(capture.updated_flat_args)
        capture.wrappers = concrete.value(capture.wrappers)
        return Aot(module, leaves, inputs, mode, self._traced.with_records(state, capture))


def same(one: Joint, other: Joint) -> bool:
    """Whether two captures are the same step, call by call, whatever names they have."""
    return _nameless(one) == _nameless(other)


def _nameless(joint: Joint) -> tuple[Any, ...]:
    graph = joint.graph
    number = {op.id: str(k) for k, op in enumerate(graph.ops)}
    tensors = [replace(tensor, id="") for tensor in graph.tensors]
    ops = [replace(op, id="", differentiates=number.get(op.differentiates, "")) for op in graph.ops]
    calls = [(call.target, call.results, call.source, call.laid_out_by) for call in joint.calls]
    constants = {t: (value.dtype, value.tolist()) for t, value in joint.constants.items()}
    ends = joint.inputs, joint.tangents, joint.outputs, joint.gradients, joint.stopped
    return tensors, ops, calls, constants, graph.returned, graph.updated, graph.updated_early, ends
