"""Programs that need no search: store everything, make everything again, send everything away."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lowtide.graph import RESIDENT_ROLES, Graph, Op, Phase
from lowtide.plan.program.instructions import Drop, Fetch, Instruction, Program, Run, Send
from lowtide.plan.program.memory import on_host

__all__ = [
    "forward_count",
    "kept_throughout",
    "makers_of",
    "offload_all",
    "only_views",
    "recompute_all",
    "storages_kept",
    "store_all",
    "with_drops",
    "with_update",
]


def store_all(graph: Graph) -> Program:
    """Every operator once, in program order; each tensor is dropped after its last use."""
    order = list(range(len(graph.ops)))
    split = forward_count(graph)
    return Program(*with_drops(graph, order[:split], _with_old_views(graph, order[split:])))


def _with_old_views(graph: Graph, backward: Sequence[int]) -> list[int]:
    """The operators of backward, and before them views of leaves that the step updates.

    Such a leaf is read as it was before the step; a view that forward made of it shows its new value.
    """
    storage, updated = graph.storages(), set(graph.updated)
    views = [k for k, op in enumerate(graph.ops) if op.outputs and only_views(graph, op)]
    maker = {t: k for k in views for t in graph.ops[k].outputs if storage[t] in updated}
    if not maker:
        return list(backward)
    found: list[int] = []
    for k in backward:
        found += [*makers_of(graph, [t for t in graph.ops[k].reads if t in maker], maker, set()), k]
    return list(dict.fromkeys(found))


def only_views(graph: Graph, op: Op) -> bool:
    """Whether all an operator makes are views: a program in which nobody reads them may leave it out."""
    if not op.repeatable:
        return False
    if not op.outputs:
        return not op.reads
    return all(graph.tensors[t].alias is not None and t not in op.inputs for t in op.outputs)


def recompute_all(graph: Graph, *, each_use: bool = False) -> Program:
    """Nothing that forward can make again is kept for backward: it is made where backward first reads it.

    With ``each_use`` it is made again for every backward operator that reads it, from leaves alone: the
    harshest Program there is. Both stand for exactness, not for speed.
    """
    split = forward_count(graph)
    producer = {t: k for k in range(split) for t in graph.ops[k].outputs}
    kept = set(kept_throughout(graph))
    held = kept | {t for op in graph.ops if op.once for t in op.outputs}
    backward: list[int] = []
    for k in range(split, len(graph.ops)):
        wanted = [t for t in graph.ops[k].reads if t in producer and t not in held]
        makers = makers_of(graph, wanted, producer, held)
        if not each_use:
            held.update(t for maker in makers for t in graph.ops[maker].outputs)
        backward += [*makers, k]
    return Program(*with_drops(graph, list(range(split)), backward))


def offload_all(graph: Graph) -> Program:
    """Whatever backward reads of forward lies on the host in between, where no view of it is read there."""
    plain = store_all(graph)
    away = _offloadable(graph)
    last = {t: k for k, op in enumerate(graph.ops) if op.phase is Phase.FORWARD for t in op.reads}
    forward: list[Instruction] = []
    for line in plain.forward:
        forward.append(line)
        if isinstance(line, Run):
            op = graph.ops[line.op]
            forward += [Send(t) for t in op.outputs if t in away]
            gone = tuple(t for t in dict.fromkeys((*op.reads, *op.outputs)) if t in away)
            gone = tuple(t for t in gone if last.get(t, line.op) <= line.op)
            forward += [Drop(gone)] if gone else []
    backward: list[Instruction] = []
    for line in plain.backward:
        if isinstance(line, Run):
            back = [t for t in dict.fromkeys(graph.ops[line.op].reads) if t in away]
            backward += [Fetch(t) for t in back]
            away.difference_update(back)
        backward.append(line)
    return Program(tuple(forward), tuple(backward))


def _offloadable(graph: Graph) -> set[int]:
    """Storages made by forward and read by backward under the name that owns them alone."""
    storage, kept = graph.storages(), set(kept_throughout(graph))
    later = {t for op in graph.ops if op.phase is not Phase.FORWARD for t in op.reads}
    viewed = {storage[t] for t in later if storage[t] != t} | {storage[t] for t in kept}
    made = {t for op in graph.ops if op.phase is Phase.FORWARD for t in op.outputs if t not in op.inputs}
    able = {t for t in made & later if storage[t] == t and t not in viewed and graph.tensors[t].bytes}
    return {t for t in able if not on_host(graph, t)}


def with_update(graph: Graph, program: Program) -> Program:
    """A Program of forward and backward, with the update phase of the graph behind it, each operator once."""
    runs = [k for k, op in enumerate(graph.ops) if op.phase is Phase.UPDATE]
    lines, _ = with_drops(graph, runs, ())
    return Program(program.forward, program.backward + lines)


def kept_throughout(graph: Graph) -> list[int]:
    """Tensors that are never dropped: leaves, what the step returns, and gradients of leaves."""
    returned = set(graph.returned)
    return [
        k
        for k, tensor in enumerate(graph.tensors)
        if tensor.role in RESIDENT_ROLES
        or k in returned
        or (tensor.gradient_of is not None and graph.tensors[tensor.gradient_of].role in RESIDENT_ROLES)
    ]


def storages_kept(graph: Graph) -> set[int]:
    """Storages that stay because a tensor on them does, by the tensor that owns each.

    The owner's own name is held as long as it is read, whether it is made again or not: what is made again
    beside it would be a second copy.
    """
    storage = graph.storages()
    return {storage[t] for t in kept_throughout(graph)}


def forward_count(graph: Graph) -> int:
    """How many operators belong to forward: they come first."""
    return sum(op.phase is Phase.FORWARD for op in graph.ops)


def makers_of(graph: Graph, wanted: Iterable[int], producer: dict[int, int], kept: set[int]) -> list[int]:
    """Forward operators, in order, that make these tensors from what is kept."""
    found: set[int] = set()
    stack = [producer[t] for t in wanted]
    while stack:
        op = stack.pop()
        if op not in found:
            found.add(op)
            stack += [producer[t] for t in graph.ops[op].reads if t in producer and t not in kept]
    return sorted(found)


def with_drops(
    graph: Graph, forward: Sequence[int], backward: Sequence[int]
) -> tuple[tuple[Instruction, ...], tuple[Instruction, ...]]:
    """Runs, with each tensor dropped right after its last use before it is made again, or at all."""
    runs = [*forward, *backward]
    kept = set(kept_throughout(graph))
    staying = storages_kept(graph)
    needed: set[int] = set()
    drops: list[list[int]] = []
    for position in reversed(range(len(runs))):
        op = graph.ops[runs[position]]
        touched = dict.fromkeys((*op.reads, *op.outputs))
        drops.append([t for t in touched if t not in kept and t not in needed])
        needed.difference_update(t for t in op.outputs if t not in op.inputs and t not in staying)
        needed.update(op.reads)
    drops.reverse()
    lines: list[Instruction] = []
    cut = 0
    for position, op_index in enumerate(runs):
        if position == len(forward):
            cut = len(lines)
        lines.append(Run(op_index))
        if drops[position]:
            lines.append(Drop(tuple(drops[position])))
    if len(forward) == len(runs):
        cut = len(lines)
    return tuple(lines[:cut]), tuple(lines[cut:])
