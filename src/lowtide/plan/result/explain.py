"""A plan in words: what it takes, what happens to the large tensors, who is live at the peak."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from lowtide.graph import RESIDENT_ROLES, Graph, Op, Phase, Role, Tensor
from lowtide.plan.program.instructions import Body, Fetch, Loop, Program, Run, Send
from lowtide.plan.program.memory import Memory, allocated_bytes
from lowtide.plan.request import MOVABLE
from lowtide.plan.result.plan import HoldsFor, Plan, by_methods
from lowtide.printable import printable
from lowtide.units import format_bytes, format_cost

__all__ = ["at_peak", "explain", "where"]

_ROWS = 12


def explain(plan: Plan) -> str:
    """The text of ``lowtide plan --explain``, safe to print whatever tensors and files are called."""
    return "\n".join(map(printable, _lines(plan)))


def _lines(plan: Plan) -> Iterator[str]:
    graph = plan.graph
    smallest = format_bytes(plan.smallest_budget_bytes)
    looked_for = plan.smallest_budget_bytes < plan.predicted.peak_bytes
    least = "smallest that works" if looked_for and not plan.decisions.tiles else "this plan needs"
    yield f"budget     {format_bytes(plan.budget_bytes)}; {least} {smallest}"
    yield f"plain      {format_bytes(plan.plain.peak_bytes)} in {format_cost(plan.plain.seconds, plan.cost)}"
    took = f"{format_bytes(plan.predicted.peak_bytes)} in {format_cost(plan.predicted.seconds, plan.cost)}"
    yield f"planned    {took}: {plan.overhead:+.1%} ({plan.method})"
    yield f"bound      {_proof(plan)}"
    d = plan.decisions
    yield (
        f"decisions  {d.kept} storages kept for backward, {d.recomputed} recomputed, {d.offloaded} offloaded "
        f"to the host; {d.in_place} operators in place"
    )
    yield from _tiles(plan)
    if split := sum(map(_splits, (graph, *(body.graph for body in plan.program.bodies)))):
        yield f"split      {split} convolutions run their backward in two calls each, with less workspace"
    if sliced := sum(map(_slices, graph.ops)):
        yield f"slices     {sliced} convolutions run in slices of the batch, with less workspace"
    if plan.disturbed:
        yield f"costs      {plan.disturbed} operators were measured while the machine was busy: plan again"
    if plan.interrupted:
        yield "search     interrupted: the best plan that was found so far"
    elif plan.stopped_by_time and plan.gap > 0:
        yield "search     ended by the time limit: a longer one may find a faster plan"
    if plan.resident_bytes:
        yield f"resident   {format_bytes(plan.resident_bytes)}: {', '.join(_resident(plan))}"
    by = "cost" if _in_units(plan) else "the time it takes"
    yield from _table(f"recomputed, by {by}", _again(plan))
    yield from _table("offloaded to the host", _away(plan))
    rows = at_peak(graph, plan.program, plan.workspace_bytes)
    live = [(format_bytes(size), label, place) for size, label, place in rows]
    yield from _table("live at the peak", live)


def _proof(plan: Plan) -> str:
    """What is proven of the plan, and for which programs."""
    scope = plan.bound.holds_for
    if plan.decisions.tiles:
        return "none: nothing is proven about how fast tiles can be"
    if scope is HoldsFor.NOTHING:
        return "none: the plan does not say which programs its bound holds for; plan again"
    proof = "proven optimal" if plan.gap <= 0 else f"at most {plan.gap:.1%} of the step left to gain"
    least = plan.bound.overhead if abs(plan.bound.overhead) > 5e-4 else 0.0  # no minus before a zero
    return f"{least:+.1%}, {proof} {by_methods(plan.only)}, {scope.words}"


def _tiles(plan: Plan) -> Iterator[str]:
    """The loop that the step is run as, or why there is none."""
    loops = [line for line in plan.program.instructions if isinstance(line, Loop)]
    runs = Counter(line.op for line in loops)
    for line in loops:
        if times := runs.pop(line.op, 0):
            op = plan.graph.ops[line.op]
            shapes = " or ".join(dict.fromkeys(_sizes(tile.over.shape) for tile in line.tiles))
            whole, bodies = _sizes(op.axes), len({tile.body for tile in line.tiles})
            programs = f"{bodies} programs" if bodies > 1 else "one program"
            often = f", {times} times" if times > 1 else ""
            yield f"tiles      {len(line.tiles)} of {whole}, each {shapes}, run by {programs}{often}"
            begins = ", ".join(line.cut) if line.cut else "the inputs"
            ends = f" at {op.source.file}:{op.source.line}" if op.source else ""
            how = "forward again, then backward"
            if op.phase is Phase.FORWARD:
                both = not line.end and any(one.phase is not Phase.FORWARD for one in plan.graph.ops)
                how = "forward and backward of a tile back to back" if both else "forward alone"
            yield f"region     from {begins} to {line.end or 'the loss'}{ends}, {how}"
            yield from _inside(plan.program.bodies[line.tiles[0].body])
    if plan.no_tiles:
        yield f"tiles      none: {plan.no_tiles}"


def _splits(graph: Graph) -> int:
    """How often the gradient of a convolution's input is an operator of its own."""
    return sum(op.phase is Phase.BACKWARD and (_convolves(op) or _slices(op)) for op in graph.ops)


def _slices(op: Op) -> bool:
    """Whether an operator is a convolution in slices of the batch."""
    return op.body is not None and any(map(_convolves, op.body.ops))


def _convolves(op: Op) -> bool:
    return op.kind == "aten.convolution"


def _inside(body: Body) -> Iterator[str]:
    """Loops inside a tile."""
    for line in body.program.forward:
        if isinstance(line, Loop):
            whole = _sizes(body.graph.ops[line.op].axes)
            yield f"inside     {len(line.tiles)} tiles of {whole} to {line.end}"


def _sizes(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape))


def _resident(plan: Plan) -> Iterator[str]:
    """What is on the device whatever is planned, by kind; what may leave is said to."""
    may_leave = {MOVABLE[name] for name in plan.offload}
    for role in sorted(RESIDENT_ROLES, key=list(Role).index):
        own = [t for t in plan.graph.tensors if t.role is role and t.alias is None]
        if size := sum(map(allocated_bytes, own)):
            yield f"{role.value} {format_bytes(size)}" + (" (may leave)" if role in may_leave else "")
    if plan.beside_bytes:
        yield f"outside the step {format_bytes(plan.beside_bytes)}"


def _table(title: str, rows: list[tuple[str, str, str]]) -> Iterator[str]:
    if not rows:
        return
    yield ""
    yield f"{title}:"
    for size, label, place in rows[:_ROWS]:
        yield f"  {size:>12}  {label}{f'  ({place})' if place else ''}"
    if len(rows) > _ROWS:
        yield f"  … and {len(rows) - _ROWS} more"


def where(tensor: Tensor) -> str:
    """The user's line that made a tensor."""
    return f"{tensor.source.file}:{tensor.source.line}" if tensor.source else ""


def _in_units(plan: Plan) -> bool:
    """Whether operators cost units: as unit costs say, or one each where the plan has no costs."""
    return plan.cost == "unit" or not plan.seconds


def _again(plan: Plan) -> list[tuple[str, str, str]]:
    count: dict[int, int] = {}
    spent: dict[int, float] = {}
    for line in plan.program.instructions:
        if isinstance(line, Run):
            if line.op in count:
                own = plan.seconds[line.op] if plan.seconds else 1.0
                spent[line.op] += plan.short.get(line.op, own) if line.short else own
            count[line.op] = count.get(line.op, 0) + 1
            spent.setdefault(line.op, 0.0)
    found = []
    for op, runs in count.items():
        seconds = spent[op]
        if runs > 1 and seconds > 0:
            one = plan.graph.ops[op]
            source = f"{one.source.file}:{one.source.line}" if one.source else ""
            times = "" if runs == 2 else f" × {runs - 1}"
            found.append((seconds, f"{one.kind} {one.label}{times}", source))
    origin = "unit" if _in_units(plan) else plan.cost
    return [(format_cost(s, origin), label, place) for s, label, place in sorted(found, reverse=True)]


def _away(plan: Plan) -> list[tuple[str, str, str]]:
    sent = {line.tensor for line in plan.program.instructions if isinstance(line, Send | Fetch)}
    tensors = sorted((plan.graph.tensors[t] for t in sent), key=lambda t: -t.bytes)
    return [(format_bytes(t.bytes), t.label, where(t)) for t in tensors]


def at_peak(graph: Graph, program: Program, workspace: Sequence[int] = ()) -> list[tuple[int, str, str]]:
    """Who is live at the program's peak besides leaves, largest first: bytes, name, source line."""
    memory = Memory(graph)
    leaves = set(memory.storage_of.values())
    most, found = -1, []
    for line in program.instructions:
        if not isinstance(line, Run):
            memory.move(line)
            continue
        passing = memory.run(line)
        extra = workspace[line.op] if workspace else 0
        if memory.live + passing + extra > most:
            most = memory.live + passing + extra
            found = _live(graph, memory, leaves)
            found += [(extra, f"workspace of {graph.ops[line.op].label}", "")] if extra else []
    return sorted(found, reverse=True)


def _live(graph: Graph, memory: Memory, leaves: set[int]) -> list[tuple[int, str, str]]:
    seen: dict[int, int] = {}
    for tensor, storage in memory.storage_of.items():
        if storage not in leaves:
            seen.setdefault(storage, tensor)
    return [
        (allocated_bytes(graph.tensors[t]), graph.tensors[t].label, where(graph.tensors[t]))
        for t in seen.values()
    ]
