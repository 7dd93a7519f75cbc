"""One process's share of a step, measured and held against the step on one device."""

from __future__ import annotations

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
    budget: str,
    time_limit: float,
) -> ShareMeasured:
    """Plan and run the share of this process; ``whole`` makes the model, its batch and its step anew."""
    distributed: Any = torch.distributed
    model, batch, loss_of = whole()
    wires = [ProcessWire(distributed.group.WORLD)]
    share = split_step(joint, shards, model, rank, wires)
    parts = share.parts(batch)
    del model
    step = fit(
        share.step, share.model, *parts, budget=budget, time_limit=time_limit, verify=False, fullgraph=True
    )
    distributed.barrier()
    plan = step.plan
    before = wires[0].sent_bytes
    torch.manual_seed(0)
    _, seen = watch_cpu(lambda _: step(share.model, *parts).backward())
    sent = wires[0].sent_bytes - before
    resident = sum(one.nbytes for one in (*share.model.parameters(), *share.model.buffers(), *parts))
    found = {name: p.grad for name, p in share.model.named_parameters() if p.grad is not None}
    torch.manual_seed(0)
    with torch.no_grad():
        loss = step(share.model, *parts)
    reference, batch, loss_of = whole()
    torch.manual_seed(0)
    expected = loss_of(reference, *batch)
    expected.backward()  # type: ignore[no-untyped-call]
    norms = {name: float(p.grad.norm()) for name, p in reference.named_parameters() if p.grad is not None}
    least = _NOTHING * max(norms.values(), default=1.0)
    differences = [
        float((found[name] - p.grad[share.boxes[name].slices()]).norm()) / max(norms[name], least)
        for name, p in reference.named_parameters()
        if name in found and p.grad is not None
    ]
    return ShareMeasured(
        rank,
        seen.peak_bytes + resident,
        resident,
        sent,
        abs(float(loss) - float(expected)),
        max(differences, default=0.0),
        plan.predicted.peak_bytes,
        plan.budget_bytes,
    )
