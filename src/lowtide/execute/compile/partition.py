"""What AOTAutograd wants of a partitioner: modules that show what goes in and comes out of each part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from lowtide.execute.runtime.copies import Form
from lowtide.execute.runtime.interpreter import Interpreter

__all__ = ["ends_of", "shells"]


def shells(
    joint: fx.GraphModule, interpreter: Interpreter, num_outputs: int
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Forward and backward as the interpreter will run them: inputs, outputs and what passes between."""
    nodes = list(joint.graph.nodes)
    placeholders = [node for node in nodes if node.op == "placeholder"]
    results = list(nodes[-1].args[0])
    saved = [_saved(interpreter, t) for t in interpreter.saved]
    primals = [node for node in placeholders if not node.name.startswith("tangents")]
    tangents = [node for node in placeholders if node.name.startswith("tangents")]
    more = _host_values(joint, interpreter)
    forward = _shell(joint, [(n.name, n.meta) for n in primals], [*results[:num_outputs], *saved], more)
    into = [(n.name, n.meta) for n in saved]
    into += [(f"on_host_{k}", {"val": value}) for k, value in enumerate(more)]
    into += [(n.name, n.meta) for n in tangents]
    gradients = results[num_outputs : num_outputs + len(primals)]  # those behind go another way
    backward = _shell(joint, into, gradients, [])
    return forward, backward


def ends_of(module: fx.GraphModule, value: Callable[[Any], Any]) -> fx.GraphModule:
    """A module with the inputs and the results of a joint one, and ``value`` of what is known of each."""
    graph, output = fx.Graph(), module.graph.output_node()
    made: dict[fx.Node, fx.Node] = {}

    def end(node: fx.Node) -> fx.Node:
        if node not in made:
            is_input = node.op == "placeholder"
            made[node] = graph.placeholder(node.name) if is_input else graph.call_function(_nothing)
            made[node].meta = {**node.meta, "val": value(node.meta.get("val"))}
            made[node].meta.pop("tensor_meta", None)
        return made[node]

    for node in module.graph.find_nodes(op="placeholder"):
        end(node)
    results: Any = output.args[0]
    graph.output(tuple(end(one) if isinstance(one, fx.Node) else value(one) for one in results))
    graph.output_node().meta = dict(output.meta)
    return fx.GraphModule({}, graph)


def _saved(interpreter: Interpreter, tensor: int) -> fx.Node:
    """What stands for a tensor that passes from forward to backward."""
    node = fx.Graph().placeholder(f"saved_{tensor}")
    node.meta = {"val": interpreter.joint.values[tensor]}
    return node


def _host_values(joint: fx.GraphModule, interpreter: Interpreter) -> list[Any]:
    """How bytes and random states on the host look to AOTAutograd."""
    values = (node.meta.get("val") for node in joint.graph.nodes)
    mode = next(value.fake_mode for value in values if hasattr(value, "fake_mode"))
    sizes = [Form.of(interpreter.joint.values[t]).storage_bytes for t in interpreter.hosts]
    with mode:
        found = [torch.empty(size, dtype=torch.uint8) for size in sizes]
    return found + [mode.from_tensor(torch.default_generator.get_state()) for _ in interpreter.states]


def _nothing(*_: Any) -> Any:
    raise AssertionError("this module only shows inputs and outputs; the interpreter runs the step")


def _shell(
    joint: fx.GraphModule,
    inputs: Sequence[tuple[str, Any]],
    outputs: Sequence[Any],
    more: Sequence[Any],
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
        # torch would expect these last; what is on the host is, and all are checked for changes alike
        node.meta.pop("saved_tensor_with_no_vc_check", None)
        found.append(node)
    for value in more:
        node = graph.call_function(_nothing, (call,))
        node.meta = {"val": value}
        found.append(node)
    graph.output(tuple(found))
    return fx.GraphModule(joint, graph)
