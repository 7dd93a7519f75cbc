"""A forward graph of ATen operators with its backward, as a captured step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from lowtide.capture.joint import Joint, Leaf, read_joint
from lowtide.capture.kernels import eager_kernels
from lowtide.capture.library import define
from lowtide.capture.refusal import traced
from lowtide.capture.rewrite import as_eager
from lowtide.errors import CaptureError
from lowtide.graph import Role

__all__ = ["Example", "accumulating", "differentiated"]


class Example(NamedTuple):
    """How a tensor that goes in lies in memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    differentiable: bool


def _accumulate(into: torch.Tensor, part: torch.Tensor) -> None:
    into.add_(part)


define("accumulate(Tensor into, Tensor part) -> ()", _accumulate)


class _Found(Exception):  # noqa: N818  it ends the tracing
    def __init__(self, joint: Joint) -> None:
        self.joint = joint


Change = Callable[[fx.GraphModule, int], list[Leaf]]
"""Changes a joint graph with so many results of forward; tells the leaves that it adds."""


def differentiated(
    graph: fx.Graph,
    examples: Sequence[Example],
    leaves: Sequence[Leaf],
    change: Change | None = None,
    *,
    root: nn.Module | None = None,
    mode: FakeTensorMode | None = None,
) -> Joint:
    """Forward and backward of the graph as one step; ``root`` has the modules that it calls.

    A CaptureError says that there is no backward.
    """

    def partition(joint: fx.GraphModule, _: Any, *, num_fwd_outputs: int, **__: Any) -> Any:
        more = change(joint, num_fwd_outputs) if change is not None else []
        raise _Found(read_joint(as_eager(joint), num_fwd_outputs, [*leaves, *more]))

    def forward(*_: Any) -> Any:
        raise CaptureError("a part of the loss depends on nothing that has a gradient")

    mode = mode or FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)
    with tracing(TracingContext(mode)), traced(), eager_kernels(), torch.enable_grad():
        with mode:
            inputs = [_made(one) for one in examples]
        module = fx.GraphModule(root or nn.Module(), graph)
        compiler = aot_autograd(fw_compiler=forward, inference_compiler=forward, partition_fn=partition)
        try:
            compiler(module, inputs)
        except _Found as found:
            return found.joint
    raise AssertionError("AOTAutograd asked for no partition")


def _made(one: Example) -> torch.Tensor:
    made = torch.empty_strided(one.shape, one.stride, dtype=one.dtype, device=one.device)
    return made.requires_grad_(one.differentiable)


def accumulating(leaves: Sequence[Leaf], wanted: Sequence[int]) -> Change:
    """Each gradient is added to one that goes in, as soon as it is made, and not returned.

    Behind the inputs there is one for each of the ``wanted``.
    """

    def change(joint: fx.GraphModule, num_outputs: int) -> list[Leaf]:
        graph = joint.graph
        output = graph.output_node()
        results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
        placeholders = graph.find_nodes(op="placeholder")
        last = placeholders[-1]
        for k in wanted:
            gradient = results[num_outputs + k]
            with graph.inserting_after(last):
                last = graph.placeholder(f"into_{k}")
            if not isinstance(gradient, fx.Node):  # nothing is added to it
                last.meta["val"] = placeholders[k].meta["val"]
                continue
            last.meta["val"] = gradient.meta["val"]
            with graph.inserting_after(gradient):
                node = graph.call_function(torch.ops.lowtide.accumulate.default, (last, gradient))
            node.meta = {"val": None, "partitioner_tag": "is_backward"}
            results[num_outputs + k] = None
        output.args = (tuple(results),)
        joint.recompile()
        return [Leaf(f"gradient of {leaves[k].name}", Role.INPUT) for k in wanted]

    return change
