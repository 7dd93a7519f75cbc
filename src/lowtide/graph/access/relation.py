"""Relation: which part of each input an operator reads to write a part of one of its outputs."""

from __future__ import annotations

import msgspec

from lowtide.errors import GraphError
from lowtide.graph.access.index import Index
from lowtide.graph.rect import Rect

__all__ = ["Access", "Relation"]


class Relation(msgspec.Struct, frozen=True):
    """How one output of an operator depends on the inputs.

        domain = shape + sums        Index: range of the domain ──▶ range of one input dimension

    The results over the parts of a summed axis add up to the output: weight gradients over the batch, a
    product over the inner dimension. What is no sum of parts (a maximum, a softmax) is read whole instead.
    """

    shape: tuple[int, ...]
    """The output's shape."""
    inputs: tuple[tuple[Index, ...] | None, ...]
    """For each input of the operator one Index a dimension, or None where its value is not read."""
    input_shapes: tuple[tuple[int, ...], ...]
    sums: tuple[int, ...] = ()
    """Lengths of the axes that are summed over, behind those of the output."""
    scaled: bool = False
    """Whether the sum is divided by one number of the whole: how many elements there are, or their weight."""
    once: tuple[int, ...] = ()
    """Inputs that are added to the sum, not part of it (a bias): they belong to one part alone."""

    def __post_init__(self) -> None:
        for indices, shape in zip(self.inputs, self.input_shapes, strict=True):
            if indices is not None and len(indices) != len(shape):
                raise GraphError(f"a relation has {len(indices)} indices for an input of shape {shape}")

    def needs(self, rect: Rect, over: Rect | None = None) -> tuple[Rect | None, ...]:
        """The part of each input that is read for this part of the output; empty where nothing is.

        ``over`` is the part of the summed axes, all of them unless told.
        """
        return self.inside(self.reach(rect, over))

    def inside(self, reach: tuple[Rect | None, ...]) -> tuple[Rect | None, ...]:
        """What is read, of what an output reaches."""
        return tuple(
            None if part is None else _normal(part.clip(shape))
            for part, shape in zip(reach, self.input_shapes, strict=True)
        )

    def reach(self, rect: Rect, over: Rect | None = None) -> tuple[Rect | None, ...]:
        """The same without regard to where an input ends: what it reaches beyond is padding."""
        over = Rect.of_shape(self.sums) if over is None else over
        if rect.ndim != len(self.shape) or over.ndim != len(self.sums):
            raise GraphError(
                f"a part of an output of shape {self.shape} summed over {self.sums} cannot have "
                f"{rect.ndim} and {over.ndim} dimensions"
            )
        domain = (*rect, *over)
        if rect.empty or over.empty:
            zeros = [(0,) * len(shape) for shape in self.input_shapes]
            return tuple(
                None if indices is None else Rect(zero, zero)
                for indices, zero in zip(self.inputs, zeros, strict=True)
            )
        return tuple(
            None if indices is None else _rect(indices, shape, domain)
            for indices, shape in zip(self.inputs, self.input_shapes, strict=True)
        )


class Access(msgspec.Struct, frozen=True):
    """How every output of an operator depends on its inputs.

    Of an operator that is not ``known`` it is said that everything needs everything.
    """

    known: bool
    relations: tuple[Relation, ...]


def _rect(indices: tuple[Index, ...], shape: tuple[int, ...], domain: tuple[tuple[int, int], ...]) -> Rect:
    ranges = [index.span(domain, length) for index, length in zip(indices, shape, strict=True)]
    return Rect(tuple(lo for lo, _ in ranges), tuple(hi for _, hi in ranges))


def _normal(rect: Rect) -> Rect:
    """Nothing is the same Rect wherever it comes from."""
    zero = (0,) * rect.ndim
    return Rect(zero, zero) if rect.empty else rect
