"""A large graph in a few groups: operators of one module and phase together, as deep as there is room for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from lowtide.graph import Graph, Op, Phase

__all__ = ["FoldedGroup", "fold", "module_path"]

_IN_MODULE = re.compile(r"\S+ \((?P<module>[^()]+)\)")
_SEPARATOR = re.compile(r"[./]")
_MOST_PARTS = 16
_OUTSIDE = "outside of modules"


@dataclass(frozen=True, slots=True)
class FoldedGroup:
    """Operators that are drawn as one box."""

    title: str
    phase: Phase
    ops: tuple[int, ...]
    """In program order."""


def module_path(op: Op) -> tuple[str, ...]:
    """The modules that an operator is part of, outermost first, as far as its name tells."""
    profiled = _IN_MODULE.fullmatch(op.name)
    if profiled:
        return (profiled["module"],)
    if op.kind.startswith("aten.") and not op.name:
        return ()  # captured: the name is the module's
    parts = tuple(_SEPARATOR.split(op.label)[:_MOST_PARTS])
    return () if parts[0] == op.kind or any(sign in op.label for sign in (" ", "::", "(", "[")) else parts


def fold(graph: Graph, boxes: int) -> list[FoldedGroup]:
    """At most ``boxes`` groups, or one a phase, in the order in which their first operators run."""
    paths = _paths(graph)
    groups: list[FoldedGroup] = []
    for depth in range(1, max(map(len, paths), default=0) + 1):
        found = _at_depth(graph, paths, depth)
        if len(found) > boxes:
            groups = groups or found
            break
        groups = found
    if sum(map(bool, paths)) * 2 < len(paths):  # names that say nothing about most of the operators
        groups = _single(graph)
    return _cut(groups, boxes) if len(groups) > boxes else groups


def _paths(graph: Graph) -> list[tuple[str, ...]]:
    """The path of each operator; one between operators of a module that has none belongs to it too."""
    paths = [module_path(op) for op in graph.ops]
    for phase in Phase:
        own = [k for k, op in enumerate(graph.ops) if op.phase is phase]
        known = [k for k in own if paths[k]]
        following = dict(pairwise(known))
        before = None
        for k in own:
            if paths[k]:
                before = k if k in following else None
            elif before is not None and paths[before][0] == paths[following[before]][0]:
                paths[k] = paths[before]
    return paths


def _single(graph: Graph) -> list[FoldedGroup]:
    return [FoldedGroup(op.label, op.phase, (k,)) for k, op in enumerate(graph.ops)]


def _at_depth(graph: Graph, paths: Sequence[tuple[str, ...]], depth: int) -> list[FoldedGroup]:
    """A group for each phase and each path of at most this depth."""
    found: dict[tuple[Phase, tuple[str, ...]], list[int]] = {}
    for k, op in enumerate(graph.ops):
        found.setdefault((op.phase, paths[k][:depth]), []).append(k)
    return [FoldedGroup(_title(graph, ops, path), phase, tuple(ops)) for (phase, path), ops in found.items()]


def _title(graph: Graph, ops: Sequence[int], path: tuple[str, ...]) -> str:
    if not path:
        return graph.ops[ops[0]].label if len(ops) == 1 else _OUTSIDE
    return ("/" if any("/" in graph.ops[k].label for k in ops) else ".").join(path)


def _cut(groups: Sequence[FoldedGroup], boxes: int) -> list[FoldedGroup]:
    """Groups of one phase that follow each other become one, each phase by its share of the boxes."""
    found = []
    for phase in Phase:
        own = [group for group in groups if group.phase is phase]
        if own:
            share = max(1, boxes * len(own) // len(groups))
            size = -(-len(own) // share)
            found += [_joined(own[k : k + size]) for k in range(0, len(own), size)]
    return sorted(found, key=lambda group: group.ops)


def _joined(groups: Sequence[FoldedGroup]) -> FoldedGroup:
    first, last = groups[0], groups[-1]
    title = first.title if first is last else f"{first.title} … {last.title}"
    return FoldedGroup(title, first.phase, tuple(sorted(k for group in groups for k in group.ops)))
