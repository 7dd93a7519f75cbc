"""``capture(function, *example)``: a step as a Graph, for analysis; nothing is run and nothing is changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import fx, nn

from lowtide.cost import Step
from lowtide.errors import CaptureError, LowtideError
from lowtide.graph.shown import graph_html
from lowtide.torch_internals import ShortenTraceback, TorchDynamoException, aot_autograd
from lowtide.trace.eager.dynamo import adapt_dynamo
from lowtide.trace.eager.gradients import copy_gradients, gradient_strides
from lowtide.trace.eager.is_compiling import Answers
from lowtide.trace.eager.kernels import eager_kernels
from lowtide.trace.eager.rewrite import as_eager
from lowtide.trace.refusal import calls_torch, raise_through, traced, translated
from lowtide.trace.step.ending import Update, read_update
from lowtide.trace.step.joint import Joint, read_joint
from lowtide.trace.step.leaves import leaves_of
from lowtide.trace.step.marks import gradient_marks
from lowtide.trace.step.one_graph import one_graph, with_answers

__all__ = ["Captured", "capture"]


@dataclass(frozen=True, slots=True)
class Captured:
    """A step as data, and how each of its operators is called."""

    step: Step
    joint: Joint
    """Forward and backward."""
    update: Update | None = None

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return graph_html(self.step.graph, title="Captured step")

    def with_update(self, model: nn.Module, update: Callable[[nn.Module], None]) -> Captured:
        """The step with the update that ends it: ``update(model)`` changes parameters by their gradients.

        The model is the one that was captured; it stays as it is.
        """
        read = read_update(self.joint, model, update)
        return Captured(Step(read.graph, format="capture"), self.joint, read)


class _Done(ShortenTraceback):
    """Ends the capture once the graph is there: the function itself never runs."""

    def __init__(self, joint: Joint) -> None:
        super().__init__(first_useful_frame=None)
        self.joint = joint


def capture(function: Callable[..., Any], /, *example: Any, **keywords: Any) -> Captured:
    """The step that ``function(*example, **keywords)`` is: a module, or a function that gives the loss.

    Where an input or parameter wants a gradient, the backward pass belongs to the step: that of the loss, or
    with one incoming gradient for each differentiable result. Parameters, buffers, gradients and the random
    state stay as they are. A CaptureError names the user's line and the way out.
    """
    if not callable(function):
        raise CaptureError(
            f"a step is a module or a function that gives the loss; give one, not a {type(function).__name__}"
        )
    found: list[Joint] = []

    def attempt(answers: Answers) -> None:
        try:
            one_graph(function, partial(_record), answers)(*example, **keywords)
        except _Done as done:
            found.append(done.joint)
        except LowtideError:
            raise
        except TorchDynamoException as error:
            raise translated(error) from error

    with_answers(attempt)
    if found:
        return Captured(Step(found[-1].graph, format="capture"), found[-1])
    name = getattr(function, "__name__", type(function).__name__)
    raise CaptureError(
        f"{name} runs no operator on a tensor: pass the tensors of the step as arguments, or a module that "
        "has them as parameters"
    )


@calls_torch
def _record(module: fx.GraphModule, inputs: list[Any]) -> NoReturn:
    """A backend that reads the joint graph, or that of forward alone, and stops."""
    leaves = leaves_of(module)
    if any(isinstance(value, torch.Tensor) and value.is_meta for value in inputs):
        raise_through(
            CaptureError(
                "the step is on the meta device, where torch does not trace every backward; build it on "
                "cpu or cuda: capture itself runs nothing and allocates nothing"
            )
        )

    def partition(joint: fx.GraphModule, _: Any, *, num_fwd_outputs: int, **__: Any) -> NoReturn:
        copy_gradients(joint, num_fwd_outputs, gradient_strides(inputs))
        raise _Done(read_joint(as_eager(joint), num_fwd_outputs, leaves, gradient_marks(module)))

    def forward_only(graph: fx.GraphModule, _: Any) -> NoReturn:
        results: Any = graph.graph.output_node().args[0]
        raise _Done(read_joint(as_eager(graph), len(results), leaves))

    try:
        with traced(), eager_kernels():
            aot_autograd(
                fw_compiler=forward_only,
                inference_compiler=forward_only,
                partition_fn=partition,
                keep_inference_input_mutations=True,
            )(module, inputs)
    except LowtideError as error:
        raise_through(error)
    raise AssertionError("AOTAutograd asked neither for a partition nor for a forward graph")


adapt_dynamo()
