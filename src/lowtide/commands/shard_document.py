"""A split step as a file that ``lowtide report`` draws."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from lowtide.commands.shard_draw import drawn_names
from lowtide.errors import InfeasibleError
from lowtide.graph import Phase
from lowtide.plan.budget import Budget, parse_budget
from lowtide.plan.make.make_plan import make_plan, plain_peak
from lowtide.plan.program.costs import Costs
from lowtide.plan.request import PlanRequest
from lowtide.plan.result.plan import Plan, Side
from lowtide.plan.result.shard_plan import DevicePicture, ShardMove, ShardPlan, ShareTaken, SplitFigures

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from lowtide.cost.wire import WireSpeed
    from lowtide.execute.compare.shards import ShareMeasured
    from lowtide.execute.shards.tried import Chooser, ShardChoice, SplitTried
    from lowtide.graph.shards import Mesh
    from lowtide.trace.shards.device_step import DeviceStep

__all__ = ["shard_plan", "taken"]

_SHOWN = 4
"""On more devices some are described: all others are like one of them."""


def shard_plan(
    chooser: Chooser, choice: ShardChoice, target: str, budget: str, links: Sequence[WireSpeed]
) -> ShardPlan:
    """All that is known of a split before it runs; ``links`` are those along the axes of the mesh."""
    from lowtide.trace.shards.device_step import device_step
    from lowtide.trace.shards.picture import picture

    joint, best = chooser.joint, choice.best
    shards, count = best.shards, chooser.devices
    ranks = tuple(range(count)) if count <= _SHOWN else tuple(sorted({0, 1, count // 2, count - 1}))
    steps = [device_step(joint, shards, rank) for rank in ranks]
    sizes = [plain_peak(one.joint.graph, Costs(())) for one in steps]
    largest = ranks[sizes.index(max(sizes))]
    seconds = tuple(chooser.seconds.get(k, 0.0) for k in range(len(joint.graph.ops)))
    names = drawn_names(target)
    return ShardPlan(
        target=target,
        graph=joint.graph,
        seconds=seconds,
        shards=shards,
        ranks=ranks,
        bytes_per_second=links[0].bytes_per_second,
        latency=links[0].latency,
        one=Side(plain_peak(joint.graph, Costs(seconds)), sum(seconds)),
        split=_figures(best),
        messages=best.messages,
        bound_seconds=choice.bound,
        gap=choice.gap,
        budget_bytes=chooser.budget,
        others=tuple(map(_figures, choice.others)),
        moves=tuple(_moves(steps, shards.mesh, links)),
        pictures=tuple(DevicePicture(rank, picture(joint, shards, rank, names)) for rank in ranks),
        largest=largest,
        plan=_plan(device_step(joint, shards, largest, sums=True), chooser, shards.mesh, budget, links),
    )


def taken(share: ShareMeasured) -> ShareTaken:
    """What one process took, as the file has it."""
    apart = (share.gradient_difference, share.update_difference, share.loss_difference)
    gradients, updates, loss = (one if math.isfinite(one) else None for one in apart)
    return ShareTaken(
        share.peak_bytes,
        share.planned_bytes,
        share.resident_bytes,
        share.wire_bytes,
        share.planned_wire_bytes,
        gradients,
        updates,
        loss,
        share.budget_bytes,
    )


def _figures(one: SplitTried) -> SplitFigures:
    return SplitFigures(one.name, one.seconds, one.peak_bytes, one.plain_bytes, one.wire_bytes, one.fits)


def _moves(steps: Sequence[DeviceStep], mesh: Mesh, links: Sequence[WireSpeed]) -> Iterable[ShardMove]:
    """What moves, device by device; what an operator moves of one tensor in one way is one entry."""
    found: dict[tuple[int, int, str, str, int, int], list[int]] = {}
    for place, step in enumerate(steps):
        for one in step.moved:
            key = (one.tensor, one.operator, one.how, one.phase, one.axis, one.dim)
            found.setdefault(key, [0] * len(steps))[place] += one.bytes
    for (tensor, operator, how, phase, axis, dim), sent in found.items():
        link, most = links[axis], max(sent)
        yield ShardMove(
            tensor,
            operator,
            how,  # type: ignore[arg-type]
            Phase(phase),
            axis,
            dim,
            tuple(sent),
            link.seconds(most) if dim >= 0 else link.sum_seconds(most, mesh.sizes[axis]),
        )


def _plan(
    step: DeviceStep, chooser: Chooser, mesh: Mesh, budget: str, links: Sequence[WireSpeed]
) -> Plan | None:
    """The plan of a device inside its budget, by estimated times; None where none is found."""
    from lowtide.cost.estimate import estimate
    from lowtide.cost.wire import WireEnd, wire_seconds
    from lowtide.execute.planning.step_costs import on_their_way

    graph = step.joint.graph
    ends = {
        name: WireEnd(link, place, size)
        for (name, place), size, link in zip(step.wires, mesh.sizes, links, strict=True)
    }
    seconds = tuple(one.seconds.value if one.seconds else 0.0 for one in estimate(graph, chooser.device))
    costs = Costs(
        seconds,
        origin="estimated",
        wire_seconds=wire_seconds(graph, ends),
        on_their_way=on_their_way(graph, ends),
    )
    given = parse_budget(budget)
    if given.bytes is None and given.share is None:
        given = Budget(share=1.0)
    request = PlanRequest.of(given, only="recompute", time_limit=chooser.time_limit, smallest_seconds=0.0)
    try:
        return make_plan(graph, costs, request)
    except InfeasibleError:
        return None
