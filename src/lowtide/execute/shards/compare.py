"""One process's share of a step, measured and held against the step on one device."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lowtide.cost.watch import watch_cpu
from lowtide.execute.fit import fit
from lowtide.execute.shards.split import split_step
from lowtide.execute.shards.wires import ProcessWire
from lowtide.graph.shards import Shards
from lowtide.trace.step.joint import Joint

__all__ = ["ShareMeasured", "measure_share"]

_NOTHING = 1e-4
"""A gradient whose norm is so small a part of the largest one's is held against that."""


@dataclass(frozen=True, slots=True)
class ShareMeasured:
    """What one process took, and how far its results are from those of one device."""

    rank: int
    peak_bytes: int
    resident_bytes: int
    wire_bytes: int
    loss_difference: float
    gradient_difference: float
    """The largest of a gradient, as a share of its norm."""
    planned_bytes: int
    budget_bytes: int


def measure_share(
    joint: Joint,
    shards: Shards,
    whole: Callable[[], tuple[nn.Module, Sequence[Any], Callable[..., torch.Tensor]]],
    rank: int,
    **options: Any,
) -> ShareMeasured:
    """Plan with these options of ``fit`` and run the share of this process.

    ``whole`` makes the model, its batch and its step anew.
    """
    distributed: Any = torch.distributed
    model, batch, loss_of = whole()
    wires = [ProcessWire(distributed.group.WORLD)]
    share = split_step(joint, shards, model, rank, wires)
    parts = share.parts(batch)
    del model
    step = fit(share.step, share.model, *parts, verify=False, fullgraph=True, **options)
    distributed.barrier()
    plan = step.plan
    before = wires[0].sent_bytes
    torch.manual_seed(0)
    loss, seen = watch_cpu(lambda _: _trained(step, share.model, parts))
    sent = wires[0].sent_bytes - before
    resident = sum(one.nbytes for one in (*share.model.parameters(), *share.model.buffers(), *parts))
    reference, batch, loss_of = whole()
    torch.manual_seed(0)
    expected = _trained(loss_of, reference, batch)
    found, boxes = dict(share.model.named_parameters()), share.boxes
    wanted = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    least = _NOTHING * max((float(gradient.norm()) for gradient in wanted.values()), default=1.0)
    differences = [
        _apart(found[name].grad, gradient[boxes[name].slices()], max(float(gradient.norm()), least))
        for name, gradient in wanted.items()
    ]
    return ShareMeasured(
        rank,
        seen.peak_bytes + resident,
        resident,
        sent,
        abs(loss - expected),
        max(differences, default=0.0),
        plan.predicted.peak_bytes,
        plan.budget_bytes,
    )


def _trained(step: Callable[..., torch.Tensor], model: nn.Module, batch: Sequence[Any]) -> float:
    """The loss of a step, whose gradients the model has then."""
    loss = step(model, *batch)
    loss.backward()  # type: ignore[no-untyped-call]
    return float(loss.detach())


def _apart(found: torch.Tensor | None, expected: torch.Tensor, norm: float) -> float:
    """How far a gradient is from the expected one; infinitely far where there is none, or no number."""
    difference = math.inf if found is None else float((found - expected).norm()) / norm
    return math.inf if math.isnan(difference) else difference
