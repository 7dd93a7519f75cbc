"""``torch.compile(model, backend="lowtide")``: the user's loop stays as it is, a Program runs the step."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd

from lowtide.capture.joint import Leaf, read_joint
from lowtide.capture.rewrite import as_eager
from lowtide.errors import CaptureError
from lowtide.execute.interpreter import Interpreter
from lowtide.graph import Graph, Role
from lowtide.plan.plain import recompute_all, store_all
from lowtide.plan.program import Program

__all__ = ["PROGRAMS", "backend", "compile_with"]

Planner = Callable[[Graph], Program]

PROGRAMS: dict[str, Planner] = {"plain": store_all, "recompute-all": recompute_all}


def backend(
    module: fx.GraphModule, inputs: Sequence[Any], *, options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """What ``torch.compile`` calls with a captured function."""
    name = (options or {}).get("program", "plain")
    if name not in PROGRAMS:
        raise CaptureError(f"there is no program {name!r}; programs: {', '.join(PROGRAMS)}")
    return compile_with(module, inputs, PROGRAMS[name])


def compile_with(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    planner: Planner,
    watch: Callable[[Interpreter], None] | None = None,
) -> Callable[..., Any]:
    """The function with its forward and backward run by the Program that the planner gives.

    ``watch`` is shown the interpreter once it is made.
    """
    _refuse_graph_breaks(module)
    leaves = leaves_of(module)
    made: list[Interpreter] = []

    def partition(
        joint: fx.GraphModule, _: Any, *, num_fwd_outputs: int, **__: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        captured = read_joint(as_eager(joint), num_fwd_outputs, leaves)
        interpreter = Interpreter(captured, planner(captured.graph))
        made.append(interpreter)
        if watch is not None:
            watch(interpreter)
        return _modules(joint, interpreter, num_fwd_outputs)

    def forward(_: fx.GraphModule, __: Any) -> Callable[..., Any]:
        return _boxed(made[-1].forward)

    def backward(_: fx.GraphModule, __: Any) -> Callable[..., Any]:
        return _boxed(made[-1].backward)

    def inference(graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
        results: Any = graph.graph.output_node().args[0]
        captured = read_joint(as_eager(graph), len(results), leaves)
        interpreter = Interpreter(captured, planner(captured.graph))
        if watch is not None:
            watch(interpreter)
        return _boxed(interpreter.forward)

    compiled: Callable[..., Any] = aot_autograd(
        fw_compiler=forward, bw_compiler=backward, inference_compiler=inference, partition_fn=partition
    )(module, inputs)
    return compiled


def _boxed(function: Callable[[list[Any]], list[Any]]) -> Callable[[list[Any]], list[Any]]:
    """A function that takes its arguments in a list and may empty it, so that they die when consumed."""

    def call(arguments: list[Any]) -> list[Any]:
        return function(arguments)

    setattr(call, "_boxed_call", True)  # noqa: B010  the name by which torch asks for it
    return call


def leaves_of(module: fx.GraphModule) -> list[Leaf]:
    """Name and role of every input of a captured function, from where it was found."""
    leaves = []
    for node in module.graph.find_nodes(op="placeholder"):
        argument = node.meta.get("grapharg")
        source = getattr(argument, "source", None)
        name = "" if source is None else (source.name() if callable(source.name) else source.name)
        leaves.append(Leaf(_readable(name) or node.name, _role(name)))
    return leaves


def _role(source: str) -> Role:
    if "._parameters[" in source:
        return Role.PARAMETER
    return Role.BUFFER if "._buffers[" in source else Role.INPUT


def _readable(source: str) -> str:
    """``L['self']._modules['conv']._parameters['weight']`` as ``conv.weight``."""
    parts = re.findall(r"\._(?:modules|parameters|buffers)\['([^']+)'\]", source)
    return ".".join(parts) if parts else re.sub(r"^[LG]\['([^']*)'\]", r"\1", source)


def _refuse_graph_breaks(module: fx.GraphModule) -> None:
    reason = getattr(module, "compile_subgraph_reason", None)
    if reason is None or not getattr(reason, "graph_break", False):
        return
    frames = getattr(reason, "user_stack", [])
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "the captured function"
    raise CaptureError(
        f"{where}: the step cannot be captured as one graph here ({reason.reason}). "
        "Move what depends on values out of the compiled function, or compile the parts apart; "
        "torch.compile(..., fullgraph=True) shows the same place with torch's own explanation"
    )


def _modules(
    joint: fx.GraphModule, interpreter: Interpreter, num_outputs: int
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """What AOTAutograd wants of a partitioner: modules that show what goes in and comes out of each part."""
    nodes = list(joint.graph.nodes)
    placeholders = [node for node in nodes if node.op == "placeholder"]
    results = list(nodes[-1].args[0])
    of_tensor: dict[int, fx.Node] = {}
    for node, tensor in interpreter.joint.tensor_of.items():
        of_tensor.setdefault(tensor, node)
    saved = [of_tensor[t] for t in interpreter.saved]
    primals = [node for node in placeholders if not node.name.startswith("tangents")]
    tangents = [node for node in placeholders if node.name.startswith("tangents")]
    states = [f"random_state_{k}" for k in range(len(interpreter.states))]
    value = _state_value(joint) if states else None
    forward = _shell(
        joint, [(n.name, n.meta) for n in primals], [*results[:num_outputs], *saved], states, value
    )
    into = [(f"saved_{n.name}", n.meta) for n in saved] + [(name, {"val": value}) for name in states]
    into += [(n.name, n.meta) for n in tangents]
    backward = _shell(joint, into, results[num_outputs:], [], None)
    return forward, backward


def _state_value(joint: fx.GraphModule) -> Any:
    """How a random state looks to AOTAutograd."""
    values = (node.meta.get("val") for node in joint.graph.nodes)
    mode = next(value.fake_mode for value in values if hasattr(value, "fake_mode"))
    return mode.from_tensor(torch.default_generator.get_state())


def _nothing(*_: Any) -> Any:
    raise AssertionError("this module only shows inputs and outputs; the interpreter runs the step")


def _shell(
    joint: fx.GraphModule,
    inputs: Sequence[tuple[str, Any]],
    outputs: Sequence[Any],
    states: Sequence[str],
    state_value: Any,
) -> fx.GraphModule:
    """A module with these inputs and outputs, and one call that stands for everything between."""
    graph = fx.Graph()
    made = []
    for name, meta in inputs:
        node = graph.placeholder(name)
        node.meta = dict(meta)
        made.append(node)
    call = graph.call_function(_nothing, tuple(made))
    found: list[Any] = []
    for k, output in enumerate(outputs):
        if not isinstance(output, fx.Node):
            found.append(output)
            continue
        node = graph.call_function(_nothing, (call, k))
        node.meta = dict(output.meta)
        found.append(node)
    for _ in states:
        node = graph.call_function(_nothing, (call,))
        node.meta = {"val": state_value}
        found.append(node)
    graph.output(tuple(found))
    return fx.GraphModule(joint, graph)
