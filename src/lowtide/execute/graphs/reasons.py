"""Why a step is not replayed as CUDA graphs, in words."""

from __future__ import annotations

import torch

from lowtide.execute.graphs.arena import segments
from lowtide.execute.runtime.interpreter import Interpreter
from lowtide.graph import Role
from lowtide.trace.distributed.collectives import is_collective
from lowtide.trace.step.joint import Joint

__all__ = ["known_before", "of_error"]


def known_before(interpreter: Interpreter) -> str | None:
    """Why a Program cannot be captured, as far as that is known before."""
    if not segments.available():
        return "Lowtide was installed without a C compiler"
    if interpreter.leaves:
        return "parameters or the optimizer's state are offloaded"
    if _updates_batch(interpreter.joint):
        return "it updates a tensor of the batch, of which graphs read a copy"
    if any(is_collective(call.target, of_torch=True) for call in interpreter.joint.calls):
        return "other processes take part in the step"
    saved = any(t not in interpreter.joint.inputs for t in interpreter.saved)
    if not (saved or interpreter.hosts or interpreter.states):
        return "forward leaves nothing for backward"
    return None


def of_error(error: Exception) -> str:
    """What has failed while a part was captured."""
    while error.__cause__ is not None:
        error = error.__cause__  # type: ignore[assignment]
    if isinstance(error, torch.OutOfMemoryError):
        return "the memory that they need does not fit into the budget"
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _updates_batch(joint: Joint) -> bool:
    """Whether an operator writes to an argument that is neither a parameter nor a buffer."""
    graph = joint.graph
    storages, written = graph.storages(), [t for op in graph.ops for t in op.changes]
    touched = {storages[t] for t in (*written, *graph.updated)}
    return any(
        t is not None and graph.tensors[t].role is Role.INPUT and storages[t] in touched for t in joint.inputs
    )
