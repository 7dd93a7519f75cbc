"""MeasuredRun: a step that was run by eager PyTorch and as a Program, as a file."""

from __future__ import annotations

from typing import Literal

import msgspec

from lowtide.cost.device import Environment
from lowtide.graph import Graph, Recording
from lowtide.plan.program.instructions import Program
from lowtide.plan.result.plan import Plan, Side

__all__ = ["MeasuredRun"]


class MeasuredRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What both ways took, how their results compare, and what was live while the Program ran."""

    target: str
    device: str
    eager: Side | None
    """None where eager PyTorch ran out of memory: nothing is compared then."""
    measured: Side
    predicted_peak_bytes: int
    loss_equal: bool | None
    bitwise: bool | None
    difference: float | None
    """The largest difference of a gradient's element over its largest; None: not finite, or unknown."""
    graph: Graph
    """What ran, with the update that ends the step."""
    program: Program
    recording: Recording
    eager_bytes: tuple[int, ...] = ()
    """What eager PyTorch held from allocation to allocation, thinned; on the CPU alone."""
    plan: Plan | None = None
    """The plan that ran; none for a program that was given."""
    plain: Graph | None = None
    """The step as eager PyTorch runs it, where the program has other operators: tiles, or fused kernels."""
    environment: Environment | None = None
    """Where it ran, as far as that is known."""
    lowtide: Literal["run"] = "run"
    version: Literal[1] = 1
