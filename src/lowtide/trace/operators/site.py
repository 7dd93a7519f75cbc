"""One operator on its way into the graph of a tile: what there is of its inputs, and nodes for the rest."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import fx

from lowtide.errors import GraphError
from lowtide.graph import Graph, Op, Rect
from lowtide.torch_internals import schema_of
from lowtide.trace.step.builder import Call

__all__ = [
    "HeldPart",
    "InputPart",
    "Site",
    "bind",
    "broadcast",
    "cropped",
    "replaced",
    "signature",
    "with_range",
]

aten = torch.ops.aten


class InputPart(NamedTuple):
    """A node of the tile's graph that holds exactly this box of a tensor of the step."""

    node: fx.Node
    box: Rect


def cropped(target: fx.Graph, part: InputPart, wanted: Rect) -> fx.Node:
    """A node with the wanted box of a part."""
    node = part.node
    for dim, ((lo, hi), (first, end)) in enumerate(zip(part.box, wanted, strict=True)):
        if (first, end) != (lo, hi):
            node = target.call_function(aten.slice.Tensor, (node, dim, first - lo, end - lo))
    return node


@dataclass(frozen=True, slots=True)
class HeldPart:
    """A tensor argument of the operator: the shape of the whole, and the part that is there."""

    position: int
    """Which of the operator's inputs it is."""
    shape: tuple[int, ...]
    part: InputPart | None
    """None where nothing of the tensor is read."""

    @property
    def whole(self) -> Rect:
        """The box of the whole tensor."""
        return Rect.of_shape(self.shape)


@dataclass(frozen=True, slots=True)
class Site:
    """What the operator is called with, what is wanted of it, and the graph that takes the nodes."""

    target: fx.Graph
    call: Call
    op: Op
    graph: Graph
    arguments: Mapping[str, Any]
    """Every argument by its name, defaults included; a HeldPart wherever a tensor goes."""
    wanted: Rect
    output: int
    over: Rect | None
    """The part of the summed axes, where it is not all of them."""
    total: fx.Node | None
    """What a mean is divided by, where the operator does not count it itself."""
    needs: Sequence[Rect | None]
    """For every input the box that the wanted one is made from; None where its value is not read."""
    reach: Sequence[Rect | None]
    """The same, beyond the edges of the tensor where there is padding."""
    channels_last: bool = False
    """Whether images lie in memory with the channels of a pixel side by side."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole output."""
        return shape_of(self.graph, self.op.outputs[self.output])

    @property
    def whole(self) -> Rect:
        """The box of the whole output."""
        return Rect.of_shape(self.shape)

    @property
    def dtype(self) -> torch.dtype:
        """The type of the output."""
        found: torch.dtype = getattr(torch, str(self.graph.tensors[self.op.outputs[self.output]].dtype))
        return found

    @property
    def device(self) -> torch.device:
        """The device of the output."""
        return torch.device(self.graph.tensors[self.op.outputs[self.output]].device)

    def need(self, held: HeldPart) -> Rect:
        """What of an argument is read."""
        need = self.needs[held.position]
        if need is None:
            raise GraphError(f"{self.op.label}: {self.op.kind} reads no value of input {held.position}")
        return need

    def write(self, function: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A node that calls the function."""
        return self.target.call_function(function, args, kwargs)

    def cut(self, held: HeldPart, box: Rect) -> fx.Node:
        """A node with exactly this box of an argument."""
        if held.part is None or not held.part.box.contains(box):
            there = "nothing" if held.part is None else str(held.part.box)
            raise GraphError(
                f"{self.op.label}: {self.op.kind} needs {box} of input {held.position} for {self.wanted} of "
                f"its output, and {there} is there"
            )
        return self.crop(held.part.node, held.part.box, box)

    def crop(self, node: fx.Node, box: Rect, wanted: Rect) -> fx.Node:
        """A node with the wanted box of one that holds ``box``."""
        return cropped(self.target, InputPart(node, box), wanted)

    def pad(self, node: fx.Node, before: Sequence[int], after: Sequence[int], value: Any = 0) -> fx.Node:
        """A node with so many elements of this value added below and above each dimension."""
        if not any(before) and not any(after):
            return node
        last = [k for k, pair in enumerate(zip(before, after, strict=True)) if any(pair)]
        pairs = [(before[k], after[k]) for k in range(len(before) - 1, last[0] - 1, -1)]
        return self.write(aten.constant_pad_nd.default, node, [n for pair in pairs for n in pair], value)

    def filters(self, node: fx.Node) -> fx.Node:
        """Filters of a convolution as they lie in memory for its images: those then lie like them."""
        form = torch.channels_last
        return self.write(aten.clone.default, node, memory_format=form) if self.channels_last else node

    def filled(self, held: HeldPart, box: Rect) -> fx.Node:
        """A node with this box of an argument, zeros for elements that go only into what is not wanted."""
        read = self.needs[held.position]
        need = box if read is None else read.intersect(box)
        if read is None or need.empty:
            return self.full(box.shape, 0)
        below = [lo - first for lo, first in zip(need.lo, box.lo, strict=True)]
        above = [end - hi for hi, end in zip(need.hi, box.hi, strict=True)]
        return self.pad(self.cut(held, need), below, above)

    def full(self, shape: Sequence[int], value: Any, dtype: torch.dtype | None = None) -> fx.Node:
        """A node with this value everywhere."""
        function = aten.full.default
        return self.write(function, list(shape), value, dtype=dtype or self.dtype, device=self.device)

    def again(self, function: Any = None, /, **changed: Any) -> fx.Node:
        """The operator, or one with the same arguments, with some of them changed; tensors are nodes by then.

        Of several results the node is the one that is wanted.
        """
        target = function or self.call.source
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for argument in signature(target):
            value = changed.get(argument.name, self.arguments.get(argument.name))
            if not argument.by_name:
                args.append(value)
            elif value != argument.default:
                kwargs[argument.name] = value
        node = self.write(target, *args, **kwargs)
        return self.write(operator.getitem, node, self.output) if self.call.several else node

    def tensors(self) -> dict[str, HeldPart]:
        """The arguments that are tensors."""
        return {name: value for name, value in self.arguments.items() if isinstance(value, HeldPart)}


def bind(call: Call, op: Op, graph: Graph, parts: Sequence[InputPart | None]) -> dict[str, Any]:
    """Every argument of the call by its name, a HeldPart wherever a tensor goes."""
    positions: dict[fx.Node, int] = {}

    def note(node: fx.Node) -> fx.Node:
        if isinstance(node.meta.get("val"), torch.Tensor):
            positions.setdefault(node, len(positions))
        return node

    fx.map_arg((call.args, dict(call.kwargs)), note)

    def held(value: Any) -> Any:
        if isinstance(value, fx.Node) and value in positions:
            k = positions[value]
            return HeldPart(k, shape_of(graph, op.inputs[k]), parts[k])
        return [held(item) for item in value] if isinstance(value, list | tuple) else value

    found: dict[str, Any] = {}
    for k, argument in enumerate(signature(call.source)):
        if k < len(call.args):
            found[argument.name] = held(call.args[k])
        elif argument.name in call.kwargs:
            found[argument.name] = held(call.kwargs[argument.name])
        else:
            found[argument.name] = argument.default
    return found


class Argument(NamedTuple):
    """An argument of a function of torch's."""

    name: str
    by_name: bool
    """Whether it can be given by its name alone."""
    default: Any


@cache
def signature(target: Any) -> tuple[Argument, ...]:
    """The arguments of a function of torch's."""
    return tuple(
        Argument(one.name, one.kwarg_only, one.default_value if one.has_default_value() else None)
        for one in schema_of(target).arguments
    )


def shape_of(graph: Graph, tensor: int) -> tuple[int, ...]:
    """The shape of a tensor; those that were captured have one."""
    shape = graph.tensors[tensor].shape
    if shape is None:
        raise GraphError(f"tensor {graph.tensors[tensor].id!r} has no shape", tensor=tensor)
    return shape


def replaced(box: Rect, ranges: Mapping[int, tuple[int, int]]) -> Rect:
    """The box with other bounds in some dimensions."""
    pairs = [ranges.get(dim, pair) for dim, pair in enumerate(box)]
    return Rect(tuple(lo for lo, _ in pairs), tuple(hi for _, hi in pairs))


def with_range(box: Rect, dim: int, lo: int, hi: int) -> Rect:
    """The box with other bounds in one dimension."""
    return replaced(box, {dim % box.ndim: (lo, hi)})


def broadcast(shape: Sequence[int], wanted: Rect) -> Rect:
    """What of a tensor of this shape goes into a box of what it is broadcast to: a size of 1 stays."""
    ranges = list(wanted)[wanted.ndim - len(shape) :]
    pairs = [(0, 1) if size == 1 else pair for size, pair in zip(shape, ranges, strict=True)]
    return Rect(tuple(lo for lo, _ in pairs), tuple(hi for _, hi in pairs))
