"""Gradients of what goes into and comes out of a graph, where it is one of several of a step.

Autograd adds up the gradients of a tensor one by one, as the backward of each place that uses it runs. A
graph that uses a tensor in several places adds up theirs by itself. Where others use the tensor too, that is
another order than in eager, with other last bits: such a graph gives the gradient of each use apart.

AOTAutograd takes it for granted that the gradient of a result has the strides of the result, and copies one
that has others. Here a graph is traced with the strides in which gradients arrive.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.autograd.graph import Node, get_gradient_edge

from lowtide.torch_internals import part_of_compiler, set_part_of_compiler
from lowtide.trace.eager.library import define

__all__ = ["Arriving", "Boundary", "edges_into", "return_uses", "silenced", "traced_with", "uses_apart"]


@dataclass(frozen=True, slots=True)
class Arriving:
    """Shape and strides in which a gradient has arrived."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def at(self, shape: Sequence[int]) -> tuple[int, ...] | None:
        """Strides for a shape: of another one, those of a dense tensor with its axes in the same order."""
        if tuple(shape) == self.shape:
            return self.strides
        if len(shape) != len(self.shape):
            return None
        found, step = [0] * len(shape), 1
        for axis in sorted(range(len(shape)), key=lambda k: (self.strides[k], -k)):
            found[axis], step = step, step * int(shape[axis])
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Boundary:
    """How gradients pass the boundary of a graph."""

    apart: frozenset[int] = frozenset()
    """Inputs for which backward returns the gradient of each use."""
    arriving: Mapping[int, Arriving] = field(default_factory=dict)
    """How incoming gradients arrive, by their place, where they do not lie as the results do."""
    incoming: int = 0
    """How many gradients come in."""
    silent: frozenset[int] = frozenset()
    """Results that have a gradient, which never comes."""


def _use(gradient: torch.Tensor, place: int) -> torch.Tensor:  # noqa: ARG001
    """Marks the gradient of one use of an input while a graph is traced; it never runs."""
    return gradient.new_empty_strided(gradient.shape, gradient.stride())


define("use(Tensor gradient, int place) -> Tensor", _use)


def silenced(module: fx.GraphModule, results: Collection[int]) -> fx.GraphModule:
    """The function, whose results at these places are detached: backward expects no gradients of theirs."""
    if not results:
        return module
    graph = fx.Graph()
    given: Any = graph.graph_copy(module.graph, {})
    found = [graph.call_method("detach", (one,)) if k in results else one for k, one in enumerate(given)]
    graph.output(tuple(found))
    return fx.GraphModule(module, graph)


@contextlib.contextmanager
def traced_with(boundary: Boundary | None) -> Iterator[None]:
    """Inside, AOTAutograd traces a graph with this boundary, and the gradient of each use has a mark."""
    if boundary is None:
        yield
        return
    with _uses_marked(), _arriving(boundary):
        yield


@contextlib.contextmanager
def _uses_marked() -> Iterator[None]:
    """Inside, backward marks gradients on their way to an input that has several of them."""
    gradients, here, inside = torch.autograd.grad, threading.get_ident(), False

    def marked(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        others = isinstance(outputs, torch.Tensor) or isinstance(
            inputs, torch.Tensor
        )  # AOTAutograd has lists
        if (
            others or inside or threading.get_ident() != here
        ):  # torch calls it again for subclasses of tensors
            return gradients(outputs, inputs, *args, **kwargs)
        inside = True
        try:
            _mark(outputs, inputs)
            return gradients(outputs, inputs, *args, **kwargs)
        finally:
            inside = False

    setattr(torch.autograd, "grad", marked)  # noqa: B010
    try:
        yield
    finally:
        setattr(torch.autograd, "grad", gradients)  # noqa: B010


def _mark(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
    wanted = {_edge(one): place for place, one in enumerate(inputs)}
    edges = [(node, k, wanted[to]) for node, k, to in edges_into(outputs, wanted)]
    uses = Counter(place for _, _, place in edges)
    ways: dict[Node, list[tuple[int, int]]] = {}
    for node, k, place in edges:
        if uses[place] > 1:
            ways.setdefault(node, []).append((k, place))
    for node, ends in ways.items():
        node.register_hook(_marking(ends))


def _marking(ends: Sequence[tuple[int, int]]) -> Callable[..., Any]:
    """What marks some of the gradients that a node of backward gives."""

    def hook(found: tuple[torch.Tensor | None, ...], _: Any) -> tuple[torch.Tensor | None, ...]:
        given = list(found)
        for k, place in ends:
            one = given[k]
            if one is not None and one.layout is torch.strided:
                given[k] = torch.ops.lowtide.use(one, place)
        return tuple(given)

    return hook


def _edge(tensor: torch.Tensor) -> tuple[Node, int]:
    edge = get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def edges_into(
    outputs: Sequence[torch.Tensor], wanted: Mapping[tuple[Node, int], Any]
) -> list[tuple[Node, int, tuple[Node, int]]]:
    """Which nodes of backward give gradients to these edges: the node, which of its gradients, and the edge.

    ``outputs`` are what backward begins with.
    """
    found: list[tuple[Node, int, tuple[Node, int]]] = []
    stack = [one.grad_fn for one in outputs if one.grad_fn is not None]
    seen: set[Node] = set()
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        for k, (after, number) in enumerate(node.next_functions):
            if after is None:
                continue
            if (after, number) in wanted:
                found.append((node, k, (after, number)))
            stack.append(after)
    return found


@contextlib.contextmanager
def _arriving(boundary: Boundary) -> Iterator[None]:
    """Inside, incoming gradients are traced in the strides in which they arrive."""
    usual = part_of_compiler("incoming")
    if usual is None or not boundary.arriving:
        yield
        return
    count = 0

    def laid_out(value: Any) -> Any:
        nonlocal count
        found = usual(value)
        place, count = count % boundary.incoming, count + 1
        known = boundary.arriving.get(place)
        strides = known.at(value.shape) if known is not None and isinstance(value, torch.Tensor) else None
        return found if strides is None else (value.new_empty_strided(value.shape, strides), *found[1:])

    set_part_of_compiler("incoming", laid_out)
    try:
        yield
    finally:
        set_part_of_compiler("incoming", usual)


def uses_apart(joint: fx.GraphModule, num_outputs: int) -> dict[int, list[fx.Node]]:
    """Inputs that are used several times, with the gradient of each use in the order in which they are added.

    Removes the marks. The first ``num_outputs`` results of the joint module are those of forward.
    """
    marks = joint.graph.find_nodes(op="call_function", target=torch.ops.lowtide.use.default)
    count = Counter(mark.args[1] for mark in marks)
    results: Any = joint.graph.output_node().args[0]
    found: dict[int, list[fx.Node]] = {}
    for place, (node, given) in enumerate(
        zip(results[num_outputs:], joint.graph.find_nodes(op="placeholder"), strict=False)
    ):
        added = _added_up(node)
        inputs = {one.args[1] for one in added}
        if len(inputs) == 1 and count[added[0].args[1]] == len(added) and _is_input(given, place):
            found[place] = [one.args[0] for one in added]  # type: ignore[misc]
    for mark in marks:
        mark.replace_all_uses_with(mark.args[0])
        joint.graph.erase_node(mark)
    return found


def _added_up(node: Any) -> list[fx.Node]:
    """The marks whose sum this is, from the first to the last; none where it is another sum."""
    found: list[fx.Node] = []
    while isinstance(node, fx.Node) and node.target is torch.ops.aten.add.Tensor and not node.kwargs:
        first, last = node.args
        if not _is_mark(last):
            return []
        found.append(last)  # type: ignore[arg-type]
        node = first
    return [node, *reversed(found)] if found and _is_mark(node) else []


def _is_mark(value: Any) -> bool:
    return isinstance(value, fx.Node) and value.target is torch.ops.lowtide.use.default


def _is_input(node: fx.Node, place: int) -> bool:
    """Whether an input of the graph is the one at this place of the function."""
    told = node.meta.get("desc")
    return told is None or getattr(told, "idx", None) == place


def return_uses(joint: fx.GraphModule, num_outputs: int, uses: Mapping[int, Sequence[fx.Node]]) -> list[int]:
    """Have backward return the gradient of each use of these inputs: the first in its place, others behind.

    Says which inputs those behind are for.
    """
    graph, output = joint.graph, joint.graph.output_node()
    results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    places: list[int] = []
    sums: list[tuple[Any, int]] = []
    for place, (first, *others) in sorted(uses.items()):
        sums.append((results[num_outputs + place], len(others)))
        results[num_outputs + place] = first
        results += others
        places += [place] * len(others)
    output.args = (tuple(results),)
    for total, count in sums:
        one = total
        for _ in range(count):
            if one.users:
                break
            before = one.args[0]
            graph.erase_node(one)
            one = before
    joint.recompile()
    return places
