"""What ``lowtide shard --run`` asks of its processes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from lowtide.errors import CaptureError, InfeasibleError
from lowtide.graph.shards import Shards
from lowtide.nested import mapped

if TYPE_CHECKING:
    from lowtide.trace.step.joint import Joint
    from lowtide.zoo.base import Built

__all__ = ["REFUSED", "BudgetRefused", "ShardTask", "built_step", "captured_step", "update_of"]


class ShardTask(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What all processes are to do."""

    target: str
    seed: int
    shards: Shards
    graph: str
    """Says which captured step this is for."""
    folder: str
    """Has the values of the model and of the batch, and what one device makes of them."""
    budget: str
    kernels: str
    time_limit: float
    double: bool
    seconds: float
    links: tuple[tuple[float, float], ...] = ()
    """Bytes a second and a delay along each axis; else processes measure how fast they are connected."""


class BudgetRefused(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a process says of a budget that its share does not fit into."""

    rank: int
    said: str
    budget: int
    smallest_budget: int
    floor: int

    def error(self) -> InfeasibleError:
        """The same as an error."""
        return InfeasibleError(
            f"rank {self.rank}: {self.said}",
            budget=self.budget,
            smallest_budget=self.smallest_budget,
            floor=self.floor,
        )


REFUSED = "refused.json"
"""Where in the folder of a task it stands."""


def built_step(target: str, seed: int, double: bool, device: str = "cpu") -> Built:
    """A step, ready to run; in float64 if asked. On the meta device it has no values."""
    from lowtide.zoo import build

    built = build(target, device=device, seed=seed)
    if not built.trains:
        raise CaptureError(f"{target} does not train; give a step with gradients to split over devices")
    if not double:
        return built

    def doubled(x: Any) -> Any:
        return x.double() if getattr(x, "is_floating_point", lambda: False)() else x

    return replace(built, model=built.model.double(), batch=mapped(doubled, built.batch))


def captured_step(built: Built) -> tuple[Joint, str]:
    """The step, captured, and what identifies it."""
    from lowtide.trace.step.capture import capture

    joint = capture(built.loss, built.model, *built.batch).joint
    return joint, hashlib.sha256(msgspec.json.encode(joint.graph)).hexdigest()


def update_of(built: Built) -> Callable[[Any], None]:
    """The update that ends the step: that of the target, or plain gradient descent."""
    from lowtide.zoo.base import RATE, sgd

    return built.ending or (lambda model: sgd(model, RATE))
