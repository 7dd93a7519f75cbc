"""Plans for the shapes of one function: a new shape is planned with what is known from others.

Sizes are put into buckets. Shapes of one bucket share a plan where it fits. A shape of a new bucket takes one
over too, unless a short search finds a faster one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from math import log
from typing import Any

import torch

from lowtide.errors import CaptureError, PlanError
from lowtide.graph import Graph
from lowtide.plan.make.other_sizes import AS_FOR_ANOTHER, alike
from lowtide.plan.result.plan import Plan

__all__ = ["NO_OTHERS", "Bucket", "OtherShapes", "ShapePlans", "parse_bucket", "parse_examples"]

Bucket = int | tuple[int, ...] | None
"""Sizes are rounded up to multiples of a number, or to the next of some; None: found from the sizes."""
_PARTS = 8
"""A bucket that is found ends at an eighth between two powers of two."""
_NEAREST = 2
"""So many of them are tried for a new shape."""
_KEPT = 16
"""Plans that are kept to plan other shapes with."""


def parse_examples(value: Any) -> list[Sequence[Any]]:
    """The arguments of further calls, as users give them."""
    if not isinstance(value, list | tuple) or not all(isinstance(one, list | tuple) for one in value):
        raise CaptureError(
            "examples: give the arguments of each further call in a tuple, such as "
            "examples=[(model, batch), (model, longer_batch)]"
        )
    return list(value)


def parse_bucket(value: Any) -> Bucket:
    """Buckets as users give them; a PlanError says what is wrong."""
    several = isinstance(value, list | tuple)
    sizes = list(value) if isinstance(value, list | tuple) else [] if value is None else [value]
    for size in sizes:
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise PlanError(
                f"bucket={value!r}: sizes are rounded up to multiples of a whole number, such as 64, or to "
                "the next of several, such as (128, 256, 512)"
            )
    if several and not sizes:
        raise PlanError("bucket=(): give the sizes at which buckets end, or leave it out")
    return None if not sizes else tuple(sorted(sizes)) if several else sizes[0]


@dataclass(frozen=True, slots=True)
class OtherShapes:
    """Plans for other shapes of a function, the nearest first."""

    plans: tuple[Plan, ...] = ()
    near: int = 0
    """So many of them, the first ones, are for the same bucket of sizes."""
    planned: bool = False
    """Whether the function was planned before, for whatever shapes."""

    def of(self, graph: Graph) -> list[Plan]:
        """Those whose Programs are Programs of this step."""
        different = {id(plan): plan for plan in self.plans}.values()
        found = (plan for plan in different if alike(plan.graph, graph))
        return list(islice(found, _NEAREST))

    def settled(self, graph: Graph) -> bool:
        """Whether the first of those is for the same bucket of sizes."""
        return any(alike(plan.graph, graph) for plan in self.plans[: self.near])


NO_OTHERS = OtherShapes()


class ShapePlans:
    """The plans for shapes of one function, without tiles and with all leaves on the device.

    The function may run other operators for the same shapes, where it branches on values.
    """

    def __init__(self, bucket: Bucket = None) -> None:
        self._bucket = bucket
        self._made: dict[tuple[tuple[int, ...], tuple[str, ...]], Plan] = {}
        """By sizes, and by what operators there are."""
        self.planned = False
        """Whether a plan was made that is not kept here, as one in tiles."""

    def add(self, arguments: Sequence[Any], plan: Plan) -> None:
        """Keep a plan for the shapes of these arguments; of one that was taken over, the one it came from."""
        if plan.seconds and not plan.offload:
            if plan.method == AS_FOR_ANOTHER:
                plan = next((one for one in self._made.values() if one.program == plan.program), plan)
            self._made[_sizes(arguments), tuple(op.kind for op in plan.graph.ops)] = plan
            while len(self._made) > _KEPT:
                del self._made[next(iter(self._made))]

    def others(self, arguments: Sequence[Any]) -> OtherShapes:
        """Plans that may serve for the shapes of these arguments."""
        sizes = _sizes(arguments)
        here = self._rounded(sizes)

        def nearness(other: tuple[int, ...]) -> tuple[bool, float]:
            return self._rounded(other) != here, _distance(sizes, other)

        known = [one for one in self._made if len(one[0]) == len(sizes)]
        known.sort(key=lambda one: nearness(one[0]))
        near = sum(self._rounded(one[0]) == here for one in known)
        return OtherShapes(tuple(self._made[one] for one in known), near, self.planned or bool(self._made))

    def _rounded(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(_ends(size, self._bucket) for size in sizes)


def _sizes(arguments: Sequence[Any]) -> tuple[int, ...]:
    return tuple(size for one in arguments if isinstance(one, torch.Tensor) for size in one.shape)


def _ends(size: int, bucket: Bucket) -> int:
    """Where the bucket of a size ends."""
    if isinstance(bucket, tuple):
        return next((end for end in bucket if size <= end), size)
    step = bucket if bucket is not None else max(1, (1 << max(0, size - 1).bit_length()) // 2 // _PARTS)
    return -(-size // step) * step


def _distance(one: tuple[int, ...], other: tuple[int, ...]) -> float:
    return sum(abs(log(max(1, a) / max(1, b))) for a, b in zip(one, other, strict=True))
