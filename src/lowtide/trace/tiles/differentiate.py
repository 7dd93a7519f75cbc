"""A forward graph of ATen operators with its backward, as a captured step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from lowtide.errors import CaptureError
from lowtide.torch_internals import FakeTensorMode, TracingContext, aot_autograd, tracing
from lowtide.trace.eager.gradients import laid_out
from lowtide.trace.eager.kernels import eager_kernels
from lowtide.trace.eager.layouts import Layouts
from lowtide.trace.eager.rewrite import as_eager
from lowtide.trace.groups.decompose import decompose
from lowtide.trace.groups.rewrite import in_groups
from lowtide.trace.refusal import calls_torch, traced
from lowtide.trace.step.joint import Joint, Leaf, read_joint
from lowtide.trace.step.split_convolutions import split_convolutions
from lowtide.trace.tiles.record import recorded

__all__ = ["Change", "Example", "Forward", "differentiated", "evaluated"]


class Example(NamedTuple):
    """How a tensor that goes in lies in memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    differentiable: bool


class _Found(Exception):  # noqa: N818  it ends the tracing
    def __init__(self, joint: Joint) -> None:
        self.joint = joint


Change = Callable[[fx.GraphModule, int], list[Leaf]]
"""Changes a joint graph with so many results of forward; tells the leaves that it adds."""


@dataclass(frozen=True, slots=True)
class Forward:
    """A forward graph of ATen operators: how its inputs lie in memory, and what they are."""

    graph: fx.Graph
    examples: Sequence[Example]
    leaves: Sequence[Leaf]
    layouts: Layouts
    """What is known of how results lie in memory."""
    root: nn.Module = field(default_factory=nn.Module)
    """Has the modules that it calls."""
    mode: FakeTensorMode | None = None
    """The mode of its tensors, where it calls modules that have some; one of its own by default."""
    fused: bool = False
    """Whether its operators, and those of its backward, run in groups."""
    split: bool = False
    """Whether the backward of its convolutions runs in two calls each."""


def differentiated(forward: Forward, change: Change | None = None, *, again: bool = False) -> Joint:
    """Forward and backward of the graph as one step.

    With ``again`` forward runs for backward alone and gives no results. A CaptureError says that there is no
    backward.
    """

    def partition(joint: fx.GraphModule, _: Any, *, num_fwd_outputs: int, **__: Any) -> Any:
        more = change(joint, num_fwd_outputs) if change is not None else []
        count = _for_backward_alone(joint, num_fwd_outputs) if again else num_fwd_outputs
        if forward.split:
            split_convolutions(joint)
        module = _as_it_runs(joint, count, fused=forward.fused, again=again)
        read = read_joint(module, count, [*forward.leaves, *more], again=again)
        raise _Found(replace(read, split=forward.split))

    def refused(*_: Any) -> Any:
        raise CaptureError("a part of the loss depends on nothing that has a gradient")

    return _traced(forward, refused, partition)


def evaluated(forward: Forward) -> Joint:
    """The graph alone as a step."""

    def found(module: fx.GraphModule, _: Any) -> Any:
        results: Any = module.graph.output_node().args[0]
        module = _as_it_runs(module, len(results), fused=forward.fused)
        raise _Found(read_joint(module, len(results), forward.leaves))

    plain = [one._replace(differentiable=False) for one in forward.examples]
    return _traced(replace(forward, examples=plain), found, found)


def _as_it_runs(module: fx.GraphModule, count: int, *, fused: bool, again: bool = False) -> fx.GraphModule:
    """A joint graph with eager's kernels, in groups where its operators are fused."""
    if not fused:
        return as_eager(module)
    decompose(module)
    return in_groups(as_eager(module), count, again=again)


def _traced(forward: Forward, alone: Callable[..., Any], partition: Callable[..., Any]) -> Joint:
    """What one of the two is shown, which raises it: what was recorded, or else traced by AOTAutograd.

    One is for a graph without a backward, the other for one with it.
    """
    with traced(), eager_kernels(forward.layouts), torch.enable_grad():
        try:
            if not _record(forward, alone, partition):
                mode = forward.mode or forward.layouts.mode()
                with tracing(TracingContext(mode)):
                    compiler = aot_autograd(
                        fw_compiler=alone,
                        inference_compiler=alone,
                        partition_fn=partition,
                        keep_inference_input_mutations=True,
                    )
                    compiler(fx.GraphModule(forward.root, forward.graph), _made(forward.examples, mode))
        except _Found as found:
            return found.joint
    raise AssertionError("AOTAutograd asked for no partition")


@calls_torch
def _record(forward: Forward, alone: Callable[..., Any], partition: Callable[..., Any]) -> bool:
    """Show what was recorded; False where it takes AOTAutograd."""
    mode = forward.mode or forward.layouts.mode()
    inputs = _made(forward.examples, mode)
    made = recorded(forward.graph, forward.root, inputs, mode, forward.layouts)
    if made is None:
        return False
    module, count = made
    names = [node.name for node in module.graph.find_nodes(op="placeholder")]
    if any(name.startswith("tangents") for name in names):
        partition(module, None, num_fwd_outputs=count)
    alone(module, None)
    return True


def _made(examples: Sequence[Example], mode: FakeTensorMode) -> list[torch.Tensor]:
    with mode:
        return [
            torch.empty_strided(one.shape, one.stride, dtype=one.dtype, device=one.device).requires_grad_(
                one.differentiable
            )
            for one in examples
        ]


def _for_backward_alone(joint: fx.GraphModule, num_outputs: int) -> int:
    """Take away the results of forward, and what only they need; so many are left.

    Gradients that come in are parts of others, with gaps between their rows: backward was traced without.
    """
    graph = joint.graph
    output = graph.output_node()
    output.args = (tuple(output.args[0])[num_outputs:],)  # type: ignore[arg-type]
    output.meta.pop("desc", None)
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and node.meta.get("val") is not None:
            graph.erase_node(node)
    tangents = [n for n in graph.find_nodes(op="placeholder") if n.name.startswith("tangents") and n.users]
    for node in tangents:
        made = laid_out(graph, node, node.meta["val"].stride())
        node.replace_all_uses_with(made, delete_user_cb=lambda user, made=made: user is not made)
    joint.recompile()
    return 0
