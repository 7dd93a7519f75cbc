"""A folded graph as a Graphviz picture: modules in rows, forward, backward and update side by side.

    ┌─ L0 ──────┐  saved   ┌─ L0 ──────┐        ┌─ update ─┐
    │ forward   │ ┄┄┄┄┄┄►  │ backward  │ ─────► │          │
    └────┬──────┘          └────▲──────┘        └──────────┘
    ┌────▼ L1 ──┐          ┌────┴ L1 ──┐

Tensors are no boxes: those between two groups are one arrow with their bytes, parameters stand in the box.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from lowtide.cost import Step
from lowtide.formats.base import Written
from lowtide.formats.dot.fold import FoldedGroup, fold
from lowtide.formats.dot.read import quote
from lowtide.formats.dot.write import PHASE_COLOUR, attributes, label
from lowtide.graph import RESIDENT_ROLES, Graph, Phase, Role
from lowtide.units import format_bytes

__all__ = ["BOXES", "write_folded"]

BOXES = 24
"""So many boxes fit a window, with text that can be read."""
_FONT = "Helvetica,Arial,sans-serif"
_WIDTH = 30
"""Characters in a line of a box."""
_MOST_INPUTS = 4
_COLUMNS = 4
"""Of groups between which nothing passes."""
_PALE = "#9a9a9a"


@dataclass(slots=True)
class _Drawing:
    """Groups with what passes between them."""

    graph: Graph
    groups: list[FoldedGroup]
    between: dict[tuple[int, int], set[int]] = field(default_factory=dict)
    """Storages that one group writes and another reads."""
    parameters: dict[int, set[int]] = field(default_factory=dict)
    inputs: dict[int, set[int]] = field(default_factory=dict)
    """By tensor: the groups that read it."""


def write_folded(step: Step, boxes: int = BOXES) -> Written:
    """The graph in at most so many boxes, as a Graphviz file for people; it cannot be read back."""
    graph = step.graph
    groups = fold(graph, boxes)
    drawing = _drawing(graph, groups)
    lines = [
        f"digraph {quote(graph.name or 'step')} {{",
        "  graph" + attributes({"rankdir": "TB", "ranksep": "0.3", "nodesep": "0.35", "newrank": "true"}),
        "  node" + attributes({"fontname": _FONT, "fontsize": "11", "margin": "0.14,0.06", "shape": "box"}),
        "  edge" + attributes({"fontname": _FONT, "fontsize": "9", "color": "#555555", "arrowsize": "0.7"}),
    ]
    lines += [f"  g{k}{attributes(_box(drawing, k))}" for k in range(len(groups))]
    lines += [f"  {line}" for line in (*_inputs(drawing), *_edges(drawing), *_rows(drawing))]
    lines.append("}\n")
    single = sum(len(group.ops) == 1 for group in groups)
    loss = (
        f"{len(graph.ops) - single} operators, which are drawn in {len(groups) - single} groups, "
        f"and {len(graph.tensors)} tensors: --all draws every one"
    )
    return Written("\n".join(lines).encode(), (loss, "a picture: it cannot be read back"))


def _drawing(graph: Graph, groups: list[FoldedGroup]) -> _Drawing:
    drawing = _Drawing(graph, groups)
    storage = graph.storages()
    place = {k: number for number, group in enumerate(groups) for k in group.ops}
    written: dict[int, int] = {}
    if not graph.ordered:
        written = {storage[t]: k for k, op in enumerate(graph.ops) for t in op.outputs}
    for k, op in enumerate(graph.ops):
        for tensor in op.reads:
            owner, reader = storage[tensor], place[k]
            if owner in written:
                if place[written[owner]] != reader:
                    drawing.between.setdefault((place[written[owner]], reader), set()).add(owner)
            elif graph.tensors[owner].role is Role.INPUT:
                drawing.inputs.setdefault(owner, set()).add(reader)
            elif graph.tensors[owner].role in RESIDENT_ROLES:
                drawing.parameters.setdefault(reader, set()).add(owner)
        written |= {storage[t]: k for t in op.outputs}
    return drawing


def _bytes(graph: Graph, storages: Sequence[int] | set[int]) -> str:
    return format_bytes(sum(graph.tensors[t].bytes for t in storages))


def _box(drawing: _Drawing, number: int) -> Mapping[str, str | None]:
    graph, group = drawing.graph, drawing.groups[number]
    lines = [_short(group.title)]
    if len(group.ops) > 1:
        kinds = Counter(graph.ops[k].kind for k in group.ops).most_common()
        said = ", ".join(f"{count} {kind}" if count > 1 else kind for kind, count in kinds[:2])
        more = f" +{len(kinds) - 2}" if len(kinds) > 2 else ""
        lines += [f"{len(group.ops)} operators", _short(said) + more]
    elif graph.ops[group.ops[0]].kind not in group.title:
        lines.append(_short(graph.ops[group.ops[0]].kind))
    own = drawing.parameters.get(number)
    if own:
        lines.append(f"parameters {_bytes(graph, own)}")
    return {"label": label(lines), "style": "rounded,filled", "fillcolor": PHASE_COLOUR[group.phase]}


def _short(text: str) -> str:
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH // 2 - 1]}…{text[-_WIDTH // 2 :]}"


def _inputs(drawing: _Drawing) -> Iterator[str]:
    """A box for each input of the step, or one for all where there are many."""
    graph, inputs = drawing.graph, drawing.inputs
    many = len(inputs) > _MOST_INPUTS
    boxes = {tuple(inputs): set().union(*inputs.values())} if many else {(t,): to for t, to in inputs.items()}
    for number, (tensors, readers) in enumerate(boxes.items()):
        name = f"{len(tensors)} inputs" if many else _short(graph.tensors[tensors[0]].label)
        lines = [name, _bytes(graph, tensors)]
        yield f"i{number}" + attributes(
            {"label": label(lines), "shape": "note", "style": "filled", "fillcolor": "#e2f3f1"}
        )
        for reader in sorted(readers):
            back = drawing.groups[reader].phase is not Phase.FORWARD
            yield f"i{number} -> g{reader}" + attributes(
                {"constraint": "false" if back else None, "color": _PALE if back else None}
            )


def _edges(drawing: _Drawing) -> Iterator[str]:
    graph, groups = drawing.graph, drawing.groups
    fans: Counter[int] = Counter()
    for (source, target), storages in sorted(drawing.between.items()):
        a, b = groups[source].phase, groups[target].phase
        far = 1 + fans[source] // _COLUMNS  # many arrows from one box end in several rows
        fans[source] += 1
        shown = {"label": _bytes(graph, storages), "minlen": str(far) if far > 1 else None}
        if a is b is Phase.FORWARD:
            yield f"g{source} -> g{target}" + attributes(shown)
        elif a is b is Phase.BACKWARD:  # upwards: written the other way round, so that rows stay rows
            yield f"g{target} -> g{source}" + attributes({**shown, "dir": "back"})
        else:
            saved = a is Phase.FORWARD and b is Phase.BACKWARD
            beside = saved and _partner(drawing, target) == source
            yield f"g{source} -> g{target}" + attributes(
                {
                    "label": shown["label"] if beside else None,
                    "constraint": "false",
                    "color": _PALE,
                    "style": "dashed" if a is Phase.FORWARD else None,
                }
            )


def _rows(drawing: _Drawing) -> Iterator[str]:
    """Forward, backward and update of one module stand in one row, in this order."""
    groups = drawing.groups
    rows: dict[int, list[int]] = {}
    place: dict[int, int] = {}
    for k, group in enumerate(groups):
        if group.phase is Phase.BACKWARD:
            place[k] = _partner(drawing, k)
            rows.setdefault(place[k], []).append(k)
    for k, group in enumerate(groups):
        if group.phase is Phase.UPDATE:
            feeds = [a for (a, b) in drawing.between if b == k and a in place]
            if feeds:
                rows.setdefault(place[max(feeds)], []).append(k)
    for first, others in rows.items():
        if first >= 0:
            row = [first, *others]
            yield "{ rank=same; " + "; ".join(f"g{k}" for k in row) + " }"
            yield from (_unseen(a, b) for a, b in pairwise(row))
    joined = {k for ends in drawing.between for k in ends}
    alone = [k for k in range(len(groups)) if k not in joined]
    yield from (_unseen(a, b) for a, b in zip(alone, alone[_COLUMNS:], strict=False))


def _unseen(a: int, b: int) -> str:
    return f"g{a} -> g{b}" + attributes({"style": "invis"})


def _partner(drawing: _Drawing, number: int) -> int:
    """The group of forward that a group of backward belongs to, -1 where none is known."""
    groups = drawing.groups
    title = groups[number].title
    named = [
        k
        for k, one in enumerate(groups)
        if one.phase is Phase.FORWARD and f"{title}.".startswith((f"{one.title}.", f"{one.title}/"))
    ]
    if named:
        return max(named, key=lambda k: len(groups[k].title))
    saved = [
        (sum(drawing.graph.tensors[t].bytes for t in storages), a)
        for (a, b), storages in drawing.between.items()
        if b == number and groups[a].phase is Phase.FORWARD
    ]
    return max(saved)[1] if saved else -1
