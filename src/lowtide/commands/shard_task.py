"""What ``lowtide shard --run`` asks of its processes."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import msgspec

from lowtide.errors import CaptureError
from lowtide.graph.shards import Shards

if TYPE_CHECKING:
    from lowtide.trace.step.joint import Joint

__all__ = ["ShardTask", "step_of"]


class ShardTask(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What all processes are to do."""

    target: str
    seed: int
    shards: Shards
    graph: str
    """Says which captured step this is for."""
    budget: str
    kernels: str
    time_limit: float
    double: bool
    seconds: float


def step_of(target: str, seed: int, double: bool) -> tuple[Joint, str]:
    """A step, captured, and what identifies it."""
    from lowtide.trace.step.capture import capture
    from lowtide.zoo import build

    built = build(target, seed=seed)
    model, batch = built.model, list(built.batch)
    if double:
        model, batch = model.double(), [x.double() if x.is_floating_point() else x for x in batch]
    if not built.trains:
        raise CaptureError(f"{target} does not train; a step that is split over devices has gradients")
    joint = capture(built.loss, model, *batch).joint
    return joint, hashlib.sha256(msgspec.json.encode(joint.graph)).hexdigest()
