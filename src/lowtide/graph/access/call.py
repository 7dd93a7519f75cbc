"""AccessCall: the arguments of one operator as the rules ask for them, and the Relations that they give."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

from lowtide.graph.access.index import Either, Index, Same, Whole
from lowtide.graph.access.relation import Relation
from lowtide.graph.types import Graph, Op

__all__ = ["AccessCall", "Indices", "Reads", "Rule", "Shape", "broadcast", "same", "whole"]

Shape: TypeAlias = tuple[int, ...]
Indices: TypeAlias = tuple[Index, ...]
Reads: TypeAlias = Iterable[tuple[Any, Indices]]
"""Arguments as the call has them, each with how it is read; those that are no tensors do not count."""


class AccessCall:
    """One operator: its arguments by position, shapes of tensors, and the shapes of its outputs."""

    def __init__(self, graph: Graph, op: Op) -> None:
        self.op = op
        self.kind = op.kind.removeprefix("aten.")
        self.shapes: tuple[Shape, ...] = tuple(graph.tensors[t].shape or () for t in op.inputs)
        self._types = tuple(graph.tensors[t].dtype for t in op.inputs)
        self.outputs: tuple[Shape, ...] = tuple(graph.tensors[t].shape or () for t in op.outputs)
        self._values: Sequence[Any] = op.arguments or ()
        self._options: dict[str, Any] = op.options

    def value(self, position: int, default: Any = None) -> Any:
        """An argument by position."""
        return self._values[position] if position < len(self._values) else default

    def option(self, name: str, default: Any = None) -> Any:
        """An argument by name."""
        return self._options.get(name, default)

    def values(self) -> list[Any]:
        """Every argument; lists are taken apart."""
        found: list[Any] = []
        for value in (*self._values, *self._options.values()):
            found += value if isinstance(value, list) else [value]
        return found

    def shape(self, argument: Any) -> Shape | None:
        """The shape of a tensor among the arguments; None for anything else."""
        position = self.position(argument)
        return None if position is None else self.shapes[position]

    def is_mask(self, argument: Any) -> bool:
        """Whether an argument is a tensor of truth values."""
        position = self.position(argument)
        return position is not None and self._types[position] in ("bool", "uint8")

    @staticmethod
    def position(argument: Any) -> int | None:
        """Where a tensor stands among the inputs; None for an argument that is none."""
        return argument["input"] if isinstance(argument, dict) and "input" in argument else None

    def dims(self, argument: Any, rank: int) -> list[int]:
        """Dimensions as they are written, negative ones counted from the end; all where none is named."""
        if argument is None or argument == []:
            return list(range(rank))
        listed = argument if isinstance(argument, list) else [argument]
        return [d % rank for d in listed] if rank else []

    def relation(
        self,
        shape: Shape,
        reads: Reads,
        *,
        sums: Sequence[int] = (),
        scaled: bool = False,
        once: Sequence[Any] = (),
    ) -> Relation:
        """An output that reads these arguments."""
        inputs: list[Indices | None] = [None] * len(self.shapes)
        for argument, indices in reads:
            position = self.position(argument)
            if position is None:
                continue
            before = inputs[position]
            if before is not None and before != indices:
                indices = tuple(map(Either, before, indices))
            inputs[position] = indices
        added = tuple(sorted({k for k in map(self.position, once) if k is not None}))
        return Relation(shape, tuple(inputs), self.shapes, tuple(sums), scaled, added)

    def everything(self, shape: Shape) -> Relation:
        """An output that needs all of every input."""
        return Relation(shape, tuple(map(whole, self.shapes)), self.shapes)


Rule: TypeAlias = Callable[[AccessCall], Sequence[Relation] | None]
"""One Relation an output; None for a call that the rule does not know after all."""


def same(rank: int, first: int = 0) -> Indices:
    """As many axes of the domain, from one on, each read where it is written."""
    return tuple(Same(axis) for axis in range(first, first + rank))


def whole(shape: Sequence[int]) -> Indices:
    """All of an input of this shape."""
    return (Whole(),) * len(shape)


def broadcast(shape: Shape, output: Shape) -> Indices:
    """An input as it is stretched to the output: aligned at the end, dimensions of one element repeated."""
    skip = len(output) - len(shape)
    return tuple(
        Same(axis) if length == output[axis] else Whole() for axis, length in enumerate(shape, start=skip)
    )
