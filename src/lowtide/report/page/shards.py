"""A split step as the page shows it: what each tensor is on the devices, what moves, and their boxes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lowtide.graph import RESIDENT_ROLES, Graph, Op, Phase, Rect, Tensor
from lowtide.plan.result.shard_plan import ShardMove, ShardPlan, SplitFigures
from lowtide.report.page.shard_types import MoveTable, ShardDecisions, ShardNodes, SplitRow
from lowtide.report.page.tables import TablePart, Words
from lowtide.report.page.thin import MOST_BLOCKS, MOST_NODES
from lowtide.report.page.types import Figures, GradientCheck, ShardView
from lowtide.units import format_bytes, format_seconds

__all__ = ["check_of", "shard_view"]


def shard_view(name: str, plan: ShardPlan, part: TablePart, step: int, runs: Sequence[int]) -> ShardView:
    """What is drawn of a split; ``part`` has the rows of the step on one device."""
    words, shares = part.tables.words, plan.measured
    return ShardView(
        name=name,
        step=step,
        runs=tuple(runs),
        mesh=plan.shards.mesh.sizes,
        ranks=plan.ranks,
        largest=plan.largest,
        budget_bytes=plan.budget_bytes,
        one=Figures(plan.one.peak_bytes, plan.one.seconds),
        split=_row(plan.split),
        messages=plan.messages,
        bound_seconds=plan.bound_seconds,
        gap=plan.gap,
        bytes_per_second=plan.bytes_per_second,
        latency=plan.latency,
        compared=tuple(map(_row, plan.others)),
        planned_bytes=tuple(one.planned_bytes for one in shares),
        measured_bytes=tuple(one.peak_bytes for one in shares),
        sent_bytes=tuple(one.wire_bytes for one in shares),
        planned_sent_bytes=tuple(one.planned_wire_bytes for one in shares),
        check=check_of(plan),
        update_difference=_most(one.update_difference for one in shares),
        decisions=_decisions(plan, part),
        moves=_move_table(plan, part),
        nodes=_nodes(plan, words),
    )


def check_of(plan: ShardPlan) -> GradientCheck | None:
    """How loss and gradients compare with those of one device; None where nothing was run."""
    if not plan.measured:
        return None
    most = _most(one.gradient_difference for one in plan.measured)
    loss = _most(one.loss_difference for one in plan.measured)
    return GradientCheck(most == 0 and loss == 0, loss == 0, most)


def _most(values: Iterator[float | None]) -> float | None:
    """The largest; None where one is not finite."""
    known = list(values)
    return None if None in known else max((one for one in known if one is not None), default=None)


def _row(one: SplitFigures) -> SplitRow:
    return SplitRow(one.name, one.seconds, one.peak_bytes, one.plain_bytes, one.wire_bytes, one.fits)


@dataclass(frozen=True, slots=True)
class _OneTensor:
    tensor: int
    decision: str
    cut: str
    part: int
    reason: str
    price: float
    instead: float | None


def _decisions(plan: ShardPlan, part: TablePart) -> ShardDecisions:
    graph, words = plan.graph, part.tables.words
    moved: dict[int, list[ShardMove]] = {}
    for move in plan.moves:
        moved.setdefault(move.tensor, []).append(move)
    rows = [
        _decided(plan, part, t, moved.get(t, ()))
        for t, tensor in enumerate(graph.tensors)
        if tensor.alias is None and tensor.shape is not None and _is_forward(graph, part, t, tensor)
    ]
    kept = sorted(rows, key=lambda one: -graph.tensors[one.tensor].bytes)[:MOST_BLOCKS]
    return ShardDecisions(
        tensor=tuple(part.tensor(one.tensor) for one in kept),
        decision=tuple(words(one.decision) for one in kept),
        cut=tuple(words(one.cut) for one in kept),
        part=tuple(one.part for one in kept),
        reason=tuple(words(one.reason) for one in kept),
        price=tuple(one.price for one in kept),
        instead=tuple(one.instead for one in kept),
        in_all=len(rows),
    )


def _is_forward(graph: Graph, part: TablePart, t: int, tensor: Tensor) -> bool:
    maker = part.makers.get(t)
    if tensor.role in RESIDENT_ROLES or maker is None:
        return tensor.role in RESIDENT_ROLES
    return graph.ops[maker].phase is Phase.FORWARD


def _decided(plan: ShardPlan, part: TablePart, t: int, moves: Sequence[ShardMove]) -> _OneTensor:
    """What a tensor is on the devices."""
    tensor, mesh = plan.graph.tensors[t], plan.shards.mesh
    maker = None if tensor.role in RESIDENT_ROLES else part.makers.get(t)
    cut, box = plan.cut_of(t, maker), plan.box(t, maker, plan.largest)
    share = box.size / max(1, math.prod(tensor.shape or ()))
    own = plan.seconds[maker] if maker is not None and plan.seconds else None
    over = plan.shards.share(maker).over if maker is not None else (None,) * len(cut)
    sums = [axis for axis, one in enumerate(over) if one is not None]
    cuts = [(axis, dim) for axis, dim in enumerate(cut) if dim is not None]
    decision = "sharded" if cuts else "summed" if sums else "replicated"
    said = [f"dimension {dim} over {_axis(mesh.sizes, axis)}" for axis, dim in cuts]
    said += [f"a part of sum {over[axis]} over {_axis(mesh.sizes, axis)}" for axis in sums]
    reason = _why(plan, maker, decision, own, share)
    if moves:
        ways = sorted({f"{one.how} in {one.phase.value}" for one in moves})
        sent = sum(max(one.sent_bytes, default=0) for one in moves)
        reason += f"; {format_bytes(sent)} leave a device for it: {', '.join(ways)}"
    price = sum(one.seconds for one in moves)
    return _OneTensor(t, decision, ", ".join(said), round(tensor.bytes * share), reason, price, own)


def _why(plan: ShardPlan, maker: int | None, decision: str, own: float | None, share: float) -> str:
    count = plan.shards.mesh.devices
    if maker is None:
        if decision == "sharded":
            return f"each of {count} devices holds its part"
        return "every device holds all of it"
    kind = plan.graph.ops[maker].kind.removeprefix("aten.")
    if decision == "replicated":
        return f"every device runs all of {kind}: no cut of it is possible, or none takes less"
    took = f", {format_seconds(own)} on one device" if own else ""
    if decision == "summed":
        return f"each device has a part of what {kind} sums over{took}; parts are added up"
    return f"each device computes {share:.3g} of {kind}{took}"


def _axis(sizes: Sequence[int], axis: int) -> str:
    return f"{sizes[axis]} devices" if len(sizes) == 1 else f"axis {axis} ({sizes[axis]} devices)"


def _move_table(plan: ShardPlan, part: TablePart) -> MoveTable:
    words = part.tables.words
    moves = sorted(plan.moves, key=lambda one: -max(one.sent_bytes, default=0))[:MOST_BLOCKS]
    return MoveTable(
        tensor=tuple(-1 if one.tensor < 0 else part.tensor(one.tensor) for one in moves),
        operator=tuple(-1 if one.operator < 0 else part.operator(one.operator) for one in moves),
        how=tuple(words(one.how) for one in moves),
        phase=tuple(words(one.phase.value) for one in moves),
        axis=tuple(one.axis for one in moves),
        dim=tuple(one.dim for one in moves),
        sent=tuple(one.sent_bytes for one in moves),
        seconds=tuple(one.seconds for one in moves),
        in_all=len(plan.moves),
    )


def _nodes(plan: ShardPlan, words: Words) -> ShardNodes:
    """The nodes of the devices' pictures, each once: forward first, variables beside their operators."""
    graphs = {one.rank: one.graph for one in plan.pictures}
    by_rank = [_boxes(graphs.get(rank)) for rank in plan.ranks]
    rows: dict[str, tuple[Op | Tensor, Op]] = {}
    for graph in graphs.values():
        for node, op in _in_order(graph):
            rows.setdefault(node.id, (node, op))
    kept = list(rows.values())[:MOST_NODES]
    labels = [tuple(node.boxes) for node, _ in kept]
    return ShardNodes(
        name=tuple(words(node.label) for node, _ in kept),
        kind=tuple(words(node.kind if isinstance(node, Op) else "variable") for node, _ in kept),
        module=tuple(words(_home(op)) for _, op in kept),
        phase=tuple(words(op.phase.value) for _, op in kept),
        shape=tuple(_shape(node) for node, _ in kept),
        label=tuple(tuple(map(words, some)) for some in labels),
        box=tuple(
            tuple(tuple(_flat(boxes.get(node.id, {}).get(label)) for boxes in by_rank) for label in some)
            for (node, _), some in zip(kept, labels, strict=True)
        ),
        in_all=len(rows),
    )


def _boxes(graph: Graph | None) -> dict[str, dict[str, Rect | None]]:
    """Those of each node, by its name."""
    nodes: list[Op | Tensor] = [] if graph is None else [*graph.ops, *graph.tensors]
    return {node.id: node.boxes for node in nodes}


def _in_order(graph: Graph) -> Iterator[tuple[Op | Tensor, Op]]:
    """Every node once, with the operator that it stands beside."""
    seen: set[int] = set()

    def fresh(some: Sequence[int]) -> Iterator[Tensor]:
        for t in some:
            if t not in seen:
                seen.add(t)
                yield graph.tensors[t]

    for op in graph.ops:
        yield from ((tensor, op) for tensor in fresh(op.inputs))
        yield op, op
        yield from ((tensor, op) for tensor in fresh(op.outputs))


def _home(op: Op) -> str:
    """The module that the module of a drawn operator is part of; backward stands beside its forward."""
    name = op.label.removesuffix(".set_zero").removesuffix(".grad")
    if op.kind in ("set_zero", "update"):  # named by a variable
        name = name.removeprefix("update_").removesuffix(".grad").rpartition(".")[0]
    return name.rpartition(".")[0]


def _shape(node: Op | Tensor) -> tuple[int, ...]:
    if isinstance(node, Tensor):
        return node.shape or ()
    told = node.attributes.get("result_dim", ())
    whole = isinstance(told, list) and all(isinstance(one, int) and one >= 0 for one in told)
    return tuple(told) if whole else ()


def _flat(box: Rect | None) -> tuple[int, ...] | None:
    return None if box is None else (*box.lo, *box.hi)
