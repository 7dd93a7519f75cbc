"""What the baselines share: Programs from what is kept, and the cheapest that fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from lowtide.errors import PlanError
from lowtide.graph import RESIDENT_ROLES, Graph
from lowtide.plan.program.instructions import Program, Run
from lowtide.plan.program.simple import forward_count, kept_throughout, makers_of, with_drops
from lowtide.plan.program.simulate import simulate
from lowtide.units import format_bytes

__all__ = ["Baseline", "cheapest", "homes", "keeping", "run_seconds", "segmented", "unrepeatable", "within"]


class Baseline(Protocol):
    """A planner of others: the Program it finds inside the budget, or a PlanError."""

    def __call__(
        self, graph: Graph, seconds: Sequence[float], budget: int, *, workspace_bytes: Sequence[int] = ()
    ) -> Program:
        """Plan for a graph whose operators take so many seconds and workspaces each."""
        ...


def run_seconds(program: Program, seconds: Sequence[float]) -> float:
    """What all runs of a Program take."""
    return sum(seconds[line.op] for line in program.instructions if isinstance(line, Run))


def cheapest(
    graph: Graph,
    seconds: Sequence[float],
    budget: int,
    programs: Iterable[Program],
    *,
    workspace_bytes: Sequence[int] = (),
) -> Program:
    """The fastest of the Programs whose peak is inside the budget; a PlanError if none is."""
    fitting: list[Program] = []
    least: int | None = None
    for program in programs:
        peak = simulate(graph, program, workspace_bytes=workspace_bytes).peak_bytes
        least = peak if least is None else min(least, peak)
        if peak <= budget:
            fitting.append(program)
    if not fitting:
        best = "none was found" if least is None else f"the smallest found takes {format_bytes(least)}"
        raise PlanError(f"no plan inside the budget of {format_bytes(budget)}; {best}")
    return min(fitting, key=lambda program: run_seconds(program, seconds))


def within(
    graph: Graph, budget: int, plan: Callable[[int], Program], *, workspace_bytes: Sequence[int] = ()
) -> Program:
    """What a planner with a coarser count of bytes finds, asked again with less until its plan fits."""
    asked = budget
    for _ in range(6):
        program = plan(asked)
        over = simulate(graph, program, workspace_bytes=workspace_bytes).peak_bytes - budget
        if over <= 0:
            return program
        asked -= over
    raise PlanError(f"no plan inside the budget of {format_bytes(budget)} after 6 attempts")


def homes(graph: Graph, storage: Sequence[int]) -> dict[int, int]:
    """For each storage that forward makes the operator that makes it; leaves have none."""
    found: dict[int, int] = {}
    for k in range(forward_count(graph)):
        op = graph.ops[k]
        for t in op.outputs:
            if storage[t] == t and t not in op.inputs and graph.tensors[t].role not in RESIDENT_ROLES:
                found.setdefault(t, k)
    return found


def unrepeatable(graph: Graph) -> set[int]:
    """Operators that may run only once: around a storage that is written over, values depend on the time."""
    storage = graph.storages()
    leaf = [tensor.role in RESIDENT_ROLES for tensor in graph.tensors]
    changing = {storage[t]: k for k, op in enumerate(graph.ops) for t in op.outputs if t in op.inputs}
    found: set[int] = set()
    for k, op in enumerate(graph.ops):
        touched = {storage[t] for t in (*op.reads, *op.outputs)}
        made = {storage[t] for t in op.outputs}
        past = {s for s in touched if k < changing.get(s, -1) and not leaf[s]}
        if op.once:
            found.add(k)
        if past or set(op.inputs) & set(op.outputs) or any(s in changing and not leaf[s] for s in made):
            found.add(k)
    return found


def keeping(graph: Graph, kept: Iterable[int], segment: Sequence[int] = ()) -> Program:
    """Backward finds these storages as forward left them; the rest is made again where it is first read.

    ``segment`` numbers the operators of forward: what backward reads of a segment is then made at once.
    """
    split, storage = forward_count(graph), graph.storages()
    once = unrepeatable(graph)
    stay = {storage[t] for t in kept_throughout(graph)} | set(kept)
    stay |= {storage[t] for k in once for t in graph.ops[k].outputs}
    producer = {t: k for k in range(split) for t in graph.ops[k].outputs if storage[t] not in stay}
    read = dict.fromkeys(t for op in graph.ops[split:] for t in op.reads if t in producer)
    held: set[int] = set()
    backward: list[int] = []
    for k in range(split, len(graph.ops)):
        wanted = [t for t in graph.ops[k].reads if t in producer and t not in held]
        if wanted and segment:
            numbers = {segment[producer[t]] for t in wanted}
            wanted = [t for t in read if segment[producer[t]] in numbers and t not in held]
        again = makers_of(graph, wanted, producer, held)
        held.update(t for maker in again for t in graph.ops[maker].outputs)
        backward += [*again, k]
    return Program(*with_drops(graph, list(range(split)), backward))


def segmented(graph: Graph, segment: Sequence[int]) -> Program:
    """Kept is what one segment of forward hands to another, and the last segment whole."""
    storage = graph.storages()
    home = homes(graph, storage)
    last = max(segment, default=0)
    kept = {s for s, k in home.items() if segment[k] == last}
    for k, number in enumerate(segment):
        kept |= {storage[t] for t in graph.ops[k].reads if number > segment[home.get(storage[t], k)]}
    return keeping(graph, kept, segment)
