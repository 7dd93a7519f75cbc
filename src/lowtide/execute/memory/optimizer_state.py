"""The state of an optimiser as leaves of a step: nobody reads them there, but they take memory."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import msgspec
import torch
from torch import nn

from lowtide.distributed_internals import local_of
from lowtide.errors import PlanError
from lowtide.graph import Graph, Role, Tensor

__all__ = ["check_optimizer", "layout", "state_of", "usual_optimizer", "with_state"]


def check_optimizer(optimizer: Any, offload: Sequence[str]) -> None:
    """Raise a PlanError where this is no optimiser, or one is missing."""
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        kind = type(optimizer).__name__
        raise PlanError(f"optimizer={kind}: give the torch.optim.Optimizer whose state is on the device")
    if optimizer is None and "optimizer" in offload:
        raise PlanError("offload='optimizer' needs the optimiser itself: pass optimizer=opt")


def state_of(
    optimizer: torch.optim.Optimizer | None, device: torch.device
) -> Callable[[], list[torch.Tensor]]:
    """Gives the tensors of the optimiser's state on a device, always in the same order."""

    def found() -> list[torch.Tensor]:
        if optimizer is None:
            return []
        states = [optimizer.state.get(p, {}) for group in optimizer.param_groups for p in group["params"]]
        values = [value for state in states for value in state.values()]
        return [local_of(v) for v in values if isinstance(v, torch.Tensor) and v.device == device]

    return found


def usual_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW for a model, with its state allocated; the parameters stay as they are, without gradients."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.0)
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return optimizer


def layout(tensors: Sequence[torch.Tensor]) -> Hashable:
    """What a plan depends on of an optimiser's state."""
    return tuple(tensor.numel() * tensor.element_size() for tensor in tensors)


def with_state(graph: Graph, tensors: Sequence[torch.Tensor]) -> Graph:
    """The graph with an optimiser's state behind its own tensors."""
    leaves = tuple(
        Tensor(
            id=f"optimizer state {k}",
            bytes=tensor.numel() * tensor.element_size(),
            role=Role.OPTIMIZER,
            shape=tuple(tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            device=str(tensor.device),
        )
        for k, tensor in enumerate(tensors)
    )
    return msgspec.structs.replace(graph, tensors=graph.tensors + leaves) if leaves else graph
