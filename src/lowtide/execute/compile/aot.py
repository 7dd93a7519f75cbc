"""A function that AOTAutograd has traced once, compiled for as many Programs as are asked for.

Tracing takes longer than anything else that torch does for a step. A step is compiled twice at least: by the
plain Program to be measured, then as it is planned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx

from lowtide.errors import RunError
from lowtide.execute.compile.partition import shells
from lowtide.execute.compile.traced import Compilers, Traced, traced_and_compiled
from lowtide.execute.kernels.compile_groups import compile_groups
from lowtide.execute.runtime.interpreter import Interpreter
from lowtide.execute.runtime.parameter_offload import bring_back, guarded
from lowtide.execute.tiling.plan_tiles import with_loop
from lowtide.plan.program.instructions import Program
from lowtide.torch_internals import (
    FakeTensorMode,
    TracingContext,
    backward_keeps_graph,
    boxed,
    inside_double_backward,
    is_batched,
    tracing,
)
from lowtide.trace.eager.gradients import copy_gradients, gradient_strides
from lowtide.trace.eager.kernels import eager_kernels
from lowtide.trace.eager.layouts import layouts_of
from lowtide.trace.eager.rewrite import as_eager
from lowtide.trace.groups.decompose import decompose
from lowtide.trace.groups.rewrite import in_groups
from lowtide.trace.groups.slices import slice_convolutions
from lowtide.trace.refusal import calls_torch, traced
from lowtide.trace.shapes import numbers
from lowtide.trace.step.boundary import Boundary, return_uses, traced_with, uses_apart
from lowtide.trace.step.joint import Joint, Leaf, read_joint
from lowtide.trace.step.marks import gradient_marks
from lowtide.trace.step.split_convolutions import Split, split_convolutions

__all__ = ["Aot", "KeepsGraphError", "Programs", "State", "Watch"]

Programs = Callable[[Joint], Program]
Watch = Callable[[Interpreter], None]
State = Callable[[], Sequence[torch.Tensor]]


class Aot:
    """The function for the shapes of its inputs, which are fake tensors of one mode."""

    def __init__(
        self,
        module: fx.GraphModule,
        leaves: Sequence[Leaf],
        inputs: Sequence[Any],
        mode: FakeTensorMode,
        before: Traced | None = None,
        joint: Joint | None = None,
        boundary: Boundary | None = None,
    ) -> None:
        """``before`` is the function as it was traced before, for inputs like these.

        ``joint`` is what was read of that trace. ``boundary`` is that of one of several graphs.
        """
        self._leaves, self._mode = leaves, mode
        self.module, self.inputs = module, inputs
        self.fused = False
        """Whether operators run in groups, as compiled kernels."""
        self.split: Split = frozenset()
        """Which convolutions run in less memory: their backward in two calls, or in slices."""
        self.joint: Joint | None = joint
        """What was traced, once it was compiled for the first time."""
        self.before = self._traced = before
        self._boundary = boundary
        self.several: frozenset[int] = frozenset()
        """Inputs whose gradient is a sum over several uses, once it was compiled; with a boundary alone."""

    @calls_torch
    def compiled(self, program: Programs, watch: Watch, state: State) -> Callable[..., Any]:
        """The function run by a Program; shows the interpreter. The state is that of an optimiser."""
        made: list[Interpreter] = []

        def interpreter(joint: Joint) -> Interpreter:
            self.joint = joint
            chosen = program(joint)
            made.append(Interpreter(with_loop(joint, chosen), chosen, state))
            watch(made[-1])
            return made[-1]

        def partition(
            joint: fx.GraphModule, _: Any, *, num_fwd_outputs: int, **__: Any
        ) -> tuple[fx.GraphModule, fx.GraphModule]:
            return shells(joint, interpreter(self._read(joint, num_fwd_outputs)), num_fwd_outputs)

        def forward(_: fx.GraphModule, __: Any) -> Callable[..., Any]:
            _nothing_donated()
            return _boxed(made[-1].forward)

        def backward(_: fx.GraphModule, __: Any) -> Callable[..., Any]:
            return _boxed(_once(made[-1]))

        def inference(graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
            results: Any = graph.graph.output_node().args[0]
            if self.joint is None:
                numbers.put_numbers_in(graph, self.module)
            joint = self.joint or self._joint(graph, len(results), None)
            return _boxed(interpreter(joint).forward)

        compilers = Compilers(partition, forward, backward, inference)
        with tracing(TracingContext(self._mode)):
            if self._traced is not None:
                compiled = self._traced.compiled(compilers)
            else:
                known = layouts_of([value for value in self.inputs if isinstance(value, torch.Tensor)])
                values = numbers.stand_ins_of(self.module)
                with (
                    traced(),
                    eager_kernels(known),
                    traced_with(self._boundary),
                    numbers.traced_numbers(values),
                ):
                    compiled, self._traced = traced_and_compiled(self.module, self.inputs, compilers)
        if self._traced is None:  # it is traced again the next time
            self.joint = None
        return _watched_over(compiled, made)

    def _read(self, joint: fx.GraphModule, num_outputs: int) -> Joint:
        """The traced function as a Graph; what eager does otherwise is changed in it at first."""
        if self.joint is None:
            numbers.put_numbers_in(joint, self.module)
            apart = self._apart(joint, num_outputs)
            copy_gradients(joint, num_outputs, gradient_strides(self.inputs))
            marks = gradient_marks(self.module)
            self.joint = self._joint(joint, num_outputs, marks, apart)
        return self.joint

    def _joint(
        self, module: fx.GraphModule, num_outputs: int, marks: str | None, apart: Sequence[int] = ()
    ) -> Joint:
        read = partial(read_joint, num_outputs=num_outputs, leaves=self._leaves, marks=marks, apart=apart)
        if self.split:
            split_convolutions(module, self.split)
        if not self.fused and not self.split:
            return read(as_eager(module))
        operators = replace(read(as_eager(_copy(module))), split=bool(self.split))  # what tiles are cut from
        if self.fused:
            decompose(module)
        module = as_eager(module)
        module = in_groups(module, num_outputs) if self.fused else module
        if self.split and not slice_convolutions(module, num_outputs, self.split) and not self.fused:
            return operators
        joint = read(module)
        if self.fused:
            operators = replace(operators, kernels=compile_groups(joint))
        return replace(joint, split=bool(self.split), ungrouped=operators)

    def _apart(self, joint: fx.GraphModule, num_outputs: int) -> list[int]:
        """Have backward return gradients of uses, as the boundary says; which inputs they are for."""
        if self._boundary is None:
            return []
        uses = uses_apart(joint, num_outputs)
        self.several = frozenset(uses)
        return return_uses(joint, num_outputs, {k: uses[k] for k in self._boundary.apart if k in uses})


def _copy(module: fx.GraphModule) -> fx.GraphModule:
    """The same module with a graph of its own."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in module.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    return fx.GraphModule(module, graph)


def _watched_over(compiled: Callable[..., Any], made: Sequence[Interpreter]) -> Callable[..., Any]:
    """The function; leaves that it leaves on the host are back when they are read, or without a backward."""

    def call(*arguments: Any) -> Any:
        results = compiled(*arguments)
        travellers, made[-1].travellers = made[-1].travellers, []
        if travellers:
            guarded(results, travellers)
        return results

    return call if made and made[-1].leaves else compiled


def _nothing_donated() -> None:
    """Say that backward writes over nothing: torch's own refusal of a second backward would hide ours."""
    context = TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []


def _boxed(function: Callable[[list[Any]], list[Any]]) -> Callable[[list[Any]], list[Any]]:
    """A function that takes its arguments in a list and may empty it, so that they die when consumed."""

    def call(arguments: list[Any]) -> list[Any]:
        return function(arguments)

    return boxed(call)


class KeepsGraphError(RunError):
    """A backward is to run again, or to be differentiated."""

    interpreter: Interpreter | None = None
    """What was to run it."""


def _once(interpreter: Interpreter) -> Callable[[list[Any]], list[Any]]:
    """Backward, refused where the caller wants to come back for more: what it reads dies as it is read."""

    def call(arguments: list[Any]) -> list[Any]:
        if backward_keeps_graph() or _differentiated():
            arguments.clear()
            bring_back()
            refused = KeepsGraphError(
                "retain_graph=True and create_graph=True are not possible in a step that Lowtide runs: "
                "memory is given back while backward runs, and backward has no gradient of its own. Add the "
                "losses up and call backward once, or call the compiled function once for each backward "
                "(several losses from one call: add them up before backward, even where torch suggests "
                "retain_graph=True); leave what needs second derivatives uncompiled"
            )
            refused.interpreter = interpreter
            raise refused
        if any(map(is_batched, arguments[len(interpreter.saved) :])):
            arguments.clear()
            bring_back()
            raise RunError(
                "is_grads_batched=True is not possible in a step that Lowtide runs: memory is planned "
                "for one gradient. Call the step once for each gradient, or leave it as it is for this"
            )
        return interpreter.backward(arguments)

    return call


def _differentiated() -> bool:
    """Whether backward is to have a backward (create_graph).

    The engine leaves gradients on for it. AOTAutograd may run it inside a function of its own, which switches
    them off: always from torch 2.13 on, before that where something saved requires a gradient.
    """
    return torch.is_grad_enabled() or inside_double_backward()
