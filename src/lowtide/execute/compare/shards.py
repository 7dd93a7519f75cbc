"""One process's share of a step, measured and held against the step on one device."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lowtide.cost.watch import watch_cpu
from lowtide.cost.wire import WireSpeed
from lowtide.execute.compile.user_code import check_loss
from lowtide.execute.fit import fit
from lowtide.execute.shards.meshes import Connected
from lowtide.execute.shards.split import (
    at_path,
    crowded_seconds,
    fill_model,
    named_tensors,
    proven_communications,
    split_step,
)
from lowtide.execute.shards.values import Values, write_values
from lowtide.graph import Rect
from lowtide.graph.shards import Shards
from lowtide.trace.step.joint import Joint

__all__ = ["ShareMeasured", "measure_share", "write_reference"]

Update = Callable[[nn.Module], None]
"""Changes parameters in place, by their gradients."""
_NOTHING = 1e-4
"""A gradient whose norm is so small a part of the largest one's is held against that."""


@dataclass(frozen=True, slots=True)
class ShareMeasured:
    """What one process took, and how far its results are from those of one device."""

    rank: int
    peak_bytes: int
    resident_bytes: int
    wire_bytes: int
    planned_wire_bytes: int
    loss_difference: float
    gradient_difference: float
    """The largest of a gradient, as a share of its norm."""
    update_difference: float
    """The largest of a parameter or buffer behind the update, as a share of its norm."""
    planned_bytes: int
    budget_bytes: int
    planned_seconds: float
    """Of a step, by the plan of this process, on the processors that it shares with others."""
    speeds: tuple[WireSpeed, ...]
    """How fast processes are connected along each axis."""


def write_reference(
    folder: Path, model: nn.Module, batch: Sequence[Any], loss_of: Callable[..., Any], update: Update
) -> None:
    """Run a step with its update on one device; what goes in and comes out is in files of the folder then."""
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    values = {f"before {name}": value.detach().clone() for name, value in state.items()}
    values |= {f"batch {name}": value for name, value in named_tensors(loss_of, model, *batch).items()}
    torch.manual_seed(0)
    values["loss"] = torch.tensor([_trained(loss_of, model, batch)], dtype=torch.float64)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    values |= {f"gradient {name}": gradient.clone() for name, gradient in gradients.items()}
    update(model)
    write_values(folder, values | {f"after {name}": value for name, value in state.items()})


def measure_share(
    joint: Joint,
    shards: Shards,
    model: nn.Module,
    here: Connected,
    folder: Path,
    update: Update,
    **options: Any,
) -> ShareMeasured:
    """Plan with these options of ``fit`` and run the share of this process.

    The values of the model are not read: those of its parts, and what is expected, come from the folder.
    """
    values, distributed = Values(folder), torch.distributed
    split = split_step(joint, shards, here)
    fill_model(model, split.boxes, lambda name, box: values.part(f"before {name}", box))
    parts = [values.part(f"batch {name}", box) for name, _, box in split.inputs]
    step = here.meeting.settled(
        "plan the step", lambda: fit(split.step, model, *parts, verify=False, fullgraph=True, **options)
    )
    talks = proven_communications(step.plan, here, split)
    here.watch.begin([one.label for one in talks])
    torch.manual_seed(0)
    before = sum(wire.sent_bytes for wire in here.wires)
    loss, seen = watch_cpu(lambda _: _trained(step, model, parts))
    sent = sum(wire.sent_bytes for wire in here.wires) - before
    distributed.barrier()
    state = {name: at_path(model, name.split(".")) for name in split.boxes}
    resident = sum(one.nbytes for one in (*state.values(), *parts))
    gradients = _differences(split.boxes, values, {name: one.grad for name, one in state.items()}, "gradient")
    update(model)
    updates = _differences(split.boxes, values, state, "after")
    return ShareMeasured(
        here.rank,
        seen.peak_bytes + resident,
        resident,
        sent,
        sum(one.sent_bytes for one in talks),
        abs(loss - float(values["loss"])),
        max(gradients, default=0.0),
        max(updates, default=0.0),
        step.plan.predicted.peak_bytes,
        step.plan.budget_bytes,
        crowded_seconds(step.plan, here.crowding),
        here.speeds,
    )


def _differences(
    boxes: Mapping[str, Rect], values: Values, found: Mapping[str, torch.Tensor | None], kind: str
) -> list[float]:
    """How far each is from one device, as a share of its norm."""
    expected = {name: values[f"{kind} {name}"] for name in boxes if f"{kind} {name}" in values}
    norms = {name: float(value.double().norm()) for name, value in expected.items()}
    least = _NOTHING * max(norms.values(), default=1.0)
    return [
        _apart(found[name], value[boxes[name].slices()], max(norms[name], least))
        for name, value in expected.items()
    ]


def _trained(step: Callable[..., torch.Tensor], model: nn.Module, batch: Sequence[Any]) -> float:
    """The loss of a step, whose gradients the model has then."""
    loss = step(model, *batch)
    check_loss(loss)
    loss.backward()  # type: ignore[no-untyped-call]
    return float(loss.detach())


def _apart(found: torch.Tensor | None, expected: torch.Tensor, norm: float) -> float:
    """How far a tensor is from the expected one; infinitely far where there is none, or no number."""
    if found is None:
        return math.inf
    difference = float((found.detach().double() - expected.double()).norm()) / (norm or 1.0)
    return math.inf if math.isnan(difference) else difference
