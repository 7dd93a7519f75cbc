"""The update that ends a training step, as operators behind those of backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from lowtide.cost.watch import Marker
from lowtide.errors import CaptureError
from lowtide.graph import Graph, Op, Phase, Role, validate
from lowtide.torch_internals import FakeTensorMode
from lowtide.trace.step.builder import Builder
from lowtide.trace.step.joint import Joint

__all__ = ["Update", "read_update"]

PREFIX = "update."


@dataclass(frozen=True, slots=True)
class Update:
    """A step with its update, and how the update is run."""

    graph: Graph
    """Forward, backward and update; tensors and operators of the step without it keep their positions."""
    module: fx.GraphModule
    """Takes the parameters, then their gradients."""
    parameters: tuple[str, ...]
    graded: tuple[str, ...]
    """Parameters that have a gradient."""
    ops: Mapping[fx.Node, int]
    made: Mapping[fx.Node, int]
    """Tensors of the graph that the update makes for itself."""

    @property
    def targets(self) -> list[Any]:
        """The functions behind the operators, in order."""
        return [node.target for node in self.ops]

    def run(self, model: nn.Module, marker: Marker | None = None) -> None:
        """Change the model's parameters by their gradients, and tell the marker about each operator."""
        named = dict(model.named_parameters())
        gradients = [named[name].grad for name in self.graded]
        with torch.no_grad():
            _Marking(self, marker or Marker()).run(*(named[name] for name in self.parameters), *gradients)


class _Marking(fx.Interpreter):
    def __init__(self, update: Update, marker: Marker) -> None:
        super().__init__(update.module)
        self._update, self._marker = update, marker

    def run_node(self, n: fx.Node) -> Any:
        op = self._update.ops.get(n)
        if op is not None:
            self._marker.before(op)
        try:
            result = super().run_node(n)
        finally:
            if op is not None:
                self._marker.after(op)
        if n in self._update.made:
            self._marker.left({self._update.made[n]: result})
        return result


def read_update(joint: Joint, model: nn.Module, update: Callable[[nn.Module], None]) -> Update:
    """The captured step with ``update(model)`` behind it. The model stays as it is.

    Parameters are told by their names, so that the step must have been captured from this model.
    """
    tensors = joint.graph.tensors
    named = {tensors[t].name: t for t in joint.inputs if t is not None and tensors[t].role is Role.PARAMETER}
    gradient = {
        tensors[leaf].name: t
        for leaf, t in zip(joint.inputs, joint.gradients, strict=False)
        if leaf is not None and t is not None
    }
    parameters = {name: p for name, p in model.named_parameters() if name in named}
    if not parameters:
        raise CaptureError(
            "the update changes a model of which the captured step reads no parameter; give the "
            "model of the step"
        )
    graded = tuple(name for name in parameters if name in gradient)
    module = _traced(model, parameters, graded, update)
    builder = Builder(tensors, PREFIX)
    given = [*(named[name] for name in parameters), *(gradient[name] for name in graded)]
    nodes = list(module.graph.nodes)
    placeholders = [node for node in nodes if node.op == "placeholder"]
    builder.tensor_of.update(zip(placeholders, given, strict=True))
    ops: dict[fx.Node, int] = {}
    for node in nodes:
        if node.op == "get_attr":
            builder.add_constant(node, getattr(module, str(node.target), None))
        elif node.op == "call_function":
            before = len(builder.ops)
            builder.add_call(node, Phase.UPDATE)
            if len(builder.ops) > before:
                ops[node] = len(joint.graph.ops) + before
    behind = (_named(op, builder) for op in builder.ops)
    graph = joint.graph
    whole = msgspec.structs.replace(graph, tensors=tuple(builder.tensors), ops=(*graph.ops, *behind))
    made = {node: t for node, t in builder.tensor_of.items() if t >= len(tensors)}
    return Update(validate(whole), module, tuple(parameters), graded, ops, made)


def _named(op: Op, builder: Builder) -> Op:
    """Operators that change a parameter are called after it."""
    changed = [builder.tensors[t] for t in op.outputs if builder.tensors[t].role is Role.PARAMETER]
    return msgspec.structs.replace(op, name=f"update_{changed[0].label}") if len(changed) == 1 else op


class _Ending(nn.Module):
    """The update as a module, so that torch can put other tensors in the place of the model's parameters."""

    def __init__(self, model: nn.Module, update: Callable[[nn.Module], None]) -> None:
        super().__init__()
        self.model, self._update = model, update

    def forward(self) -> None:
        self._update(self.model)


def _traced(
    model: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    graded: tuple[str, ...],
    update: Callable[[nn.Module], None],
) -> fx.GraphModule:
    ending = _Ending(model, update)

    def step(*values: torch.Tensor) -> None:
        found = dict(zip(parameters, values, strict=False))
        for name, gradient in zip(graded, values[len(found) :], strict=True):
            found[name].grad = gradient
        torch.func.functional_call(ending, {f"model.{name}": value for name, value in found.items()}, ())

    mode = FakeTensorMode(allow_non_fake_inputs=True)  # numbers that the update makes tensors of
    values = [mode.from_tensor(parameter.detach()) for parameter in parameters.values()]
    places = {name: k for k, name in enumerate(parameters)}
    gradients = [torch.empty_like(values[places[name]]) for name in graded]
    try:
        module: fx.GraphModule = make_fx(step)(*values, *gradients)
    except Exception as error:  # the user's own code, or torch's tracing of it
        said = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        raise CaptureError(
            f"the update cannot be captured: {said}; write it with operators on tensors alone"
        ) from error
    return module
