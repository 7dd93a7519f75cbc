"""Loops of a plan: where tiles lie, what each body takes, what tiles read of the inputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod

from lowtide.graph import RESIDENT_ROLES, Graph, Role
from lowtide.plan.program.instructions import Loop, Program
from lowtide.plan.program.simulate import inside_bytes
from lowtide.report.page.tables import TablePart
from lowtide.report.page.types import LoopView, PartRead

__all__ = ["loop_views"]


def loop_views(part: TablePart, program: Program) -> tuple[LoopView, ...]:
    """The loops of a program, each once; loops inside of tiles are left to the bodies."""
    seen: dict[int, Loop] = {}
    for line in program.instructions:
        if isinstance(line, Loop):
            seen.setdefault(line.op, line)
    return tuple(_view(part, program, line) for line in seen.values())


def _view(part: TablePart, program: Program, line: Loop) -> LoopView:
    numbers = sorted({tile.body for tile in line.tiles})
    place = {number: k for k, number in enumerate(numbers)}
    bodies = [program.bodies[number] for number in numbers]
    return LoopView(
        operator=part.operator(line.op),
        axes=part.graph.ops[line.op].axes,
        lo=tuple(tuple(tile.over.lo) for tile in line.tiles),
        hi=tuple(tuple(tile.over.hi) for tile in line.tiles),
        body=tuple(place[tile.body] for tile in line.tiles),
        body_bytes=tuple(map(inside_bytes, bodies)),
        body_operators=tuple(len(body.graph.ops) for body in bodies),
        reads=_reads(part.graph, program, line),
    )


def _reads(graph: Graph, program: Program, line: Loop) -> tuple[PartRead, ...]:
    """Inputs of the region as tiles read them, in part or as a whole; weights are always read as a whole."""
    wholes = {graph.tensors[t].label: graph.tensors[t].shape for t in graph.ops[line.op].inputs}
    turns = Counter(tile.body for tile in line.tiles)
    parts: dict[str, list[tuple[int, tuple[int, ...]]]] = {}
    for number, count in turns.items():
        for tensor in program.bodies[number].graph.tensors:
            whole = wholes.get(tensor.label)
            given = tensor.role in RESIDENT_ROLES and tensor.alias is None
            if given and whole and (tensor.shape != whole or tensor.role is Role.INPUT):
                parts.setdefault(tensor.label, []).append((count, tensor.shape or ()))
    found = []
    for name, read in parts.items():
        whole = wholes[name] or ()
        largest = max((shape for _, shape in read), key=prod)
        if len(largest) == len(whole):
            times = sum(count * prod(shape) for count, shape in read) / max(1, prod(whole))
            found.append(PartRead(name, whole, largest, _halo(whole, largest, times, line), round(times, 4)))
    return tuple(sorted(found, key=lambda one: -prod(one.part)))


def _halo(whole: Sequence[int], part: Sequence[int], times: float, line: Loop) -> tuple[int, ...]:
    """By how much a part is longer than its share along the last dimensions, which the tiles cut."""
    none = (0,) * len(whole)
    axes = len(line.tiles[0].over.lo)
    if times <= 1.0 or axes > len(whole):
        return none
    cuts = [len({tile.over.lo[axis] for tile in line.tiles}) for axis in range(axes)]
    lengths = zip(whole[-axes:], part[-axes:], cuts, strict=True)
    return none[axes:] + tuple(max(0, own - -(-length // count)) for length, own, count in lengths)
