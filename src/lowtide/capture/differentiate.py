"""A forward graph of ATen operators with its backward, which adds to gradients that are there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from lowtide.capture.joint import Joint, Leaf, read_joint
from lowtide.capture.kernels import eager_kernels
from lowtide.capture.refusal import traced
from lowtide.capture.rewrite import as_eager
from lowtide.graph import Role

__all__ = ["Example", "differentiated"]


class Example(NamedTuple):
    """How a tensor that goes in lies in memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    differentiable: bool


def _accumulate(into: torch.Tensor, part: torch.Tensor) -> None:
    into.add_(part)


_LIBRARY = torch.library.Library("lowtide", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("accumulate(Tensor into, Tensor part) -> ()")  # type: ignore[no-untyped-call]
_LIBRARY.impl("accumulate", _accumulate, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]


class _Found(Exception):  # noqa: N818
    def __init__(self, joint: Joint) -> None:
        self.joint = joint


def differentiated(
    graph: fx.Graph, examples: Sequence[Example], leaves: Sequence[Leaf], wanted: Sequence[int]
) -> Joint:
    """Forward and backward of the graph as one step.

    Behind its inputs there is one for each of the ``wanted``: the gradient that backward adds its own to, as
    soon as that is made. Backward returns nothing itself.
    """
    more = [Leaf(f"gradient of {leaves[k].name}", Role.INPUT) for k in wanted]

    def partition(joint: fx.GraphModule, _: Any, *, num_fwd_outputs: int, **__: Any) -> Any:
        accumulating(joint, num_fwd_outputs, len(examples), wanted)
        raise _Found(read_joint(as_eager(joint), num_fwd_outputs, [*leaves, *more]))

    def forward(module: fx.GraphModule, _: Any) -> Any:
        raise AssertionError(f"a graph without gradients: {module.graph}")

    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)
    with tracing(TracingContext(mode)), traced(), eager_kernels(), torch.enable_grad():
        with mode:
            inputs = [
                torch.empty_strided(one.shape, one.stride, dtype=one.dtype, device=one.device).requires_grad_(
                    one.differentiable
                )
                for one in examples
            ]
        module = fx.GraphModule(torch.nn.Module(), graph)
        try:
            aot_autograd(fw_compiler=forward, inference_compiler=forward, partition_fn=partition)(
                module, inputs
            )
        except _Found as found:
            return found.joint
    raise AssertionError("AOTAutograd asked for no partition")


def accumulating(joint: fx.GraphModule, num_outputs: int, num_inputs: int, wanted: Sequence[int]) -> None:
    """Add each gradient to one that goes in, as soon as it is made, instead of returning it."""
    graph = joint.graph
    output = graph.output_node()
    results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    placeholders = graph.find_nodes(op="placeholder")
    last = placeholders[-1]
    for k in wanted:
        gradient = results[num_outputs + k]
        with graph.inserting_after(last):
            last = graph.placeholder(f"into_{k}")
        if not isinstance(gradient, fx.Node):  # this tile adds nothing to it
            last.meta["val"] = placeholders[k].meta["val"]
            continue
        last.meta["val"] = gradient.meta["val"]
        with graph.inserting_after(gradient):
            node = graph.call_function(torch.ops.lowtide.accumulate.default, (last, gradient))
        node.meta = {"val": None, "partitioner_tag": "is_backward"}
        results[num_outputs + k] = None
    assert len(placeholders) == num_inputs + 1
    output.args = (tuple(results),)
    joint.recompile()
