"""Which operators tiles run: from a result of forward, or from the gradient of an input, to the inputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lowtide.errors import TileError
from lowtide.graph.access import Access, access
from lowtide.graph.tiles.types import Cut
from lowtide.graph.tiles.walk import ancestors, reads_of
from lowtide.graph.types import RESIDENT_ROLES, Graph, Phase, Role
from lowtide.printable import printable
from lowtide.suggest import did_you_mean

__all__ = [
    "Region",
    "accesses_of",
    "cut_input",
    "ends",
    "gradient_region",
    "named_end",
    "names",
    "output_region",
]


@dataclass(frozen=True, slots=True)
class Region:
    """Operators in program order with their access relations, and the tensor from which the walk starts."""

    tensor: int
    ops: tuple[int, ...]
    accesses: dict[int, Access]
    given: int | None = None


def _floating(graph: Graph, tensor: int) -> bool:
    return (graph.tensors[tensor].dtype or "").startswith(("float", "bfloat"))


def accesses_of(graph: Graph) -> dict[int, Access]:
    """The access relations of all operators of a step."""
    return {k: access(graph, op) for k, op in enumerate(graph.ops)}


def _phase(graph: Graph, phase: Phase) -> tuple[int, ...]:
    return tuple(k for k, op in enumerate(graph.ops) if op.phase is phase)


def ends(graph: Graph, cut: Cut, accesses: Mapping[int, Access]) -> list[int]:
    """Results of forward that lead from an input to what the step returns and have the dimensions of the cut.

    In the order in which they are written; a TileError where there is none. A dimension of one element is
    none, and what has rows and columns has channels or images too.
    """
    ops = _phase(graph, Phase.FORWARD)
    returned = graph.returned or [t for k in ops[-1:] for t in graph.ops[k].outputs]
    leading, _ = ancestors(graph, ops, accesses, returned)
    inputs = {t for t, tensor in enumerate(graph.tensors) if tensor.role is Role.INPUT}
    reached, found = set(inputs), []
    for k in ops:
        for output in graph.ops[k].outputs:
            if not reads_of(graph.ops[k], accesses[k], (output,)) & reached:
                continue
            reached.add(output)
            if output in leading and _floating(graph, output) and _can_hold(graph, output, cut):
                found.append(output)
    if not found:
        raise TileError(
            f"no result of the forward pass can be cut along dimension {' and '.join(map(str, cut.dims))}: "
            "there is none with more than one element along each of them that comes from an input; "
            "choose others (--dims)"
        )
    return found


def _can_hold(graph: Graph, tensor: int, cut: Cut) -> bool:
    shape = graph.tensors[tensor].shape or ()
    enough = len(shape) > len(cut.dims) or (len(cut.dims) == 1 and len(shape) == 1)
    return enough and cut.fits(shape) and all(shape[d] > 1 for d in cut.of(shape))


def named_end(graph: Graph, candidates: Sequence[int], name: str) -> int:
    """The one of these results whose operator has this name; a TileError where there is none."""
    known = {key: end for end, keys in names(graph, candidates).items() for key in keys}
    if name not in known:
        raise TileError(
            f"no operator {name!r} with a result that can be cut.{did_you_mean(name, known)} "
            f"The last ones are {printable(', '.join(list(known)[-4:]))}"
        )
    return known[name]


def names(graph: Graph, tensors: Sequence[int]) -> dict[int, tuple[str, ...]]:
    """What each of these results can be called: the name of its operator, if no other has it, and the id."""
    writers = {t: op for op in graph.ops for t in op.outputs}
    often = Counter(writers[t].name for t in tensors)
    found: dict[int, tuple[str, ...]] = {}
    for tensor in tensors:
        op = writers[tensor]
        found[tensor] = (op.name, op.id) if op.name and often[op.name] == 1 else (op.id,)
    return found


def output_region(graph: Graph, end: int, accesses: Mapping[int, Access]) -> Region:
    """The forward operators that a result is computed by."""
    _, used = ancestors(graph, _phase(graph, Phase.FORWARD), accesses, [end])
    return Region(end, tuple(used), {k: accesses[k] for k in used})


def cut_input(graph: Graph, cut: Cut) -> int:
    """The first input with a gradient and the dimensions of the cut; a TileError where there is none."""
    gradients = {tensor.gradient_of for tensor in graph.tensors}
    for t, tensor in enumerate(graph.tensors):
        if tensor.role is Role.INPUT and t in gradients and _can_hold(graph, t, cut):
            return t
    raise TileError(
        "no input has a gradient and the dimensions of the cut: tiles of an input belong to a training step "
        "whose input is an image of floating-point numbers; cut the output instead"
    )


def gradient_region(graph: Graph, end: int, leaf: int, accesses: Mapping[int, Access]) -> Region:
    """The backward operators between a result of forward and an input, and the forward ones they need."""
    forward, backward = (_phase(graph, phase) for phase in (Phase.FORWARD, Phase.BACKWARD))
    wanted = next(t for t, tensor in enumerate(graph.tensors) if tensor.gradient_of == leaf)
    before, _ = ancestors(graph, forward, accesses, [end])
    leading, way = ancestors(graph, backward, accesses, [wanted])
    given = _gradient_of(
        graph, end, before, [(k, t) for k in way for t in graph.ops[k].outputs if t in leading], accesses
    )
    if given is not None:
        _, done = ancestors(graph, backward, accesses, [given])
        backward = tuple(k for k in backward if k not in set(done))
    _, used = ancestors(graph, (*forward, *backward), accesses, [wanted])
    return Region(wanted, tuple(used), {k: accesses[k] for k in used}, given)


_PASSES = frozenset({"aten.add", "aten.alias", "aten.clone"})
"""Kinds whose backward passes a gradient on as it is."""


def _gradient_of(
    graph: Graph, end: int, before: set[int], made: Sequence[tuple[int, int]], accesses: Mapping[int, Access]
) -> int | None:
    """The gradient of a result: what the operators of backward read that differentiate its operator.

    Where none do, the operator passes its gradient on as it is, to an input that nobody else reads. Where
    operators do not say what they differentiate, the gradient is told from what backward makes on its way to
    an input, operators with results.
    """
    forward, shape = _phase(graph, Phase.FORWARD), graph.tensors[end].shape
    maker = {t: k for k in forward for t in graph.ops[k].outputs}
    readers = Counter(t for k in forward for t in graph.ops[k].inputs)
    own = end
    while own in maker:
        name = graph.ops[maker[own]].id
        group = [op for op in graph.ops if op.differentiates == name]
        if group:
            inner = {t for op in group for t in op.outputs}
            read = {t for op in group for t in op.reads if t not in maker and t not in inner}
            read = {t for t in read if graph.tensors[t].role not in RESIDENT_ROLES}
            come = [t for t in read if graph.tensors[t].shape == shape]
            if len(come) == 1:
                return come[0]
            break
        inputs = graph.ops[maker[own]].inputs if graph.ops[maker[own]].kind in _PASSES else ()
        passed = [t for t in inputs if t in before and readers[t] == 1 and graph.tensors[t].shape == shape]
        own = passed[0] if passed else -1
    front = [k for k in forward if before.intersection(graph.ops[k].outputs)]
    return _guessed(graph, end, front, made, accesses)


def _guessed(
    graph: Graph,
    end: int,
    front: Sequence[int],
    made: Sequence[tuple[int, int]],
    accesses: Mapping[int, Access],
) -> int | None:
    """The gradient of a result, told from what backward reads.

    It is the first value of the result's shape that is computed neither from the result and what is in front
    of it, nor before something that belongs behind it: that reads what is made or read there alone, or has
    the name of an operator there.
    """
    inside = {t for k in front for t in graph.ops[k].outputs}
    behind, later = {end}, list[int]()
    for k in _phase(graph, Phase.FORWARD):
        made_there = {t for t in graph.ops[k].outputs if reads_of(graph.ops[k], accesses[k], (t,)) & behind}
        behind |= made_there
        later += [k] if made_there and k not in front else []
    behind |= {t for k in later for t in graph.ops[k].inputs} - {
        t for k in front for t in graph.ops[k].inputs
    }
    names = {graph.ops[k].name for k in later} - {graph.ops[k].name for k in front} - {""}
    found = None
    for k, output in made:
        reads = reads_of(graph.ops[k], accesses[k], (output,))
        if reads & inside:
            inside.add(output)
            continue
        if reads & behind or graph.ops[k].name in names:
            found = None
        if found is None and graph.tensors[output].shape == graph.tensors[end].shape:
            found = output
    return found
