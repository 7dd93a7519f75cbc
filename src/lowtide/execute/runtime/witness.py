"""Holds what the operators of a step really give against what its capture says of them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from torch import fx

from lowtide.torch_internals import OpOverload, schema_of
from lowtide.trace.eager.layouts import Layout, Layouts, layouts, look
from lowtide.trace.step.joint import Joint

__all__ = ["Watched", "Witness"]


Saw = Callable[[int, Sequence[Any], Mapping[str, Any], Any, bool], None]
"""Told an operator, its arguments, its result, and whether that took over the memory of an argument."""


class _Assumed(NamedTuple):
    """What a capture says, looked up once."""

    joint: Joint
    storages: list[int]
    layouts: dict[int, tuple[Layout | None, ...]]


_SHARED = 0
"""Stands for any tensor that a result shares its storage with."""


class Witness:
    """Watches a step run once, with what its loops run, and learns how results lie in memory."""

    def __init__(self, known: Layouts) -> None:
        self.known = known
        self.learned = 0
        """Results that lie otherwise than tracing says: the step is to be captured again."""
        self.differing = 0
        """Results that lie otherwise than the capture says, themselves or because of what they read."""
        self.about = ""
        """The first of them, in words."""
        self._assumed: dict[int, _Assumed] = {}

    def saw(
        self,
        joint: Joint,
        op: int,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        result: Any,
        in_place: bool,
    ) -> None:
        """Hold the result of an operator against the capture.

        ``in_place`` says that it took over the memory of an argument.
        """
        call = joint.calls[op]
        if not isinstance(call.target, OpOverload):
            return
        if schema_of(call.target).is_mutable and schema_of(call.laid_out_by).is_mutable:
            return  # it gives what it was given
        real, assumed = layouts(args, kwargs, result), self._layouts(joint, op)
        if all(_same(one, other, in_place) for one, other in zip(assumed, real, strict=True)):
            return
        self.differing += 1
        if not self.about:
            one = joint.graph.ops[op]
            self.about = f"{one.label!r} ({one.kind}): {assumed}, in truth {real}"
        if not in_place and self.known.learn(call.laid_out_by, args, kwargs, result, self._look(joint, op)):
            self.learned += 1

    def _layouts(self, joint: Joint, op: int) -> tuple[Layout | None, ...]:
        """How the capture says that the results of an operator lie."""
        if id(joint) not in self._assumed:
            self._assumed[id(joint)] = _Assumed(joint, joint.graph.storages(), {})
        _, storage, known = self._assumed[id(joint)]
        if op not in known:
            results = joint.calls[op].results
            read = {storage[t] for t in joint.graph.ops[op].inputs}
            said = [joint.layout(t) if t >= 0 else None for t in results]
            found: list[Layout | None] = []
            for t, one in zip(results, said, strict=True):
                if one is None:
                    found.append(None)
                    continue
                found.append(replace(one, shared=_SHARED if storage[t] in read else None))
                read.add(storage[t])
            known[op] = tuple(found)
        return known[op]

    def _look(self, joint: Joint, op: int) -> Hashable:
        """What the arguments of an operator were captured like."""
        return look(joint.calls[op].laid_out_by, *_arguments(joint, op))


def _arguments(joint: Joint, op: int) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """The arguments of an operator, with what was captured of each tensor."""

    def value(node: fx.Node) -> Any:
        return joint.values[joint.tensor_of[node]] if node in joint.tensor_of else None

    call = joint.calls[op]
    found: tuple[Sequence[Any], Mapping[str, Any]] = fx.map_arg((call.args, dict(call.kwargs)), value)
    return found


def _same(one: Layout | None, other: Layout | None, in_place: bool) -> bool:
    """Whether a result lies as the capture says; of a view the storage is that of something else."""
    if one is None or other is None:
        return True
    looks = [(layout.shape, layout.dtype, layout.device, layout.stride) for layout in (one, other)]
    if looks[0] != looks[1]:
        return False
    if in_place or (one.shared is not None and other.shared is not None):
        return True
    return (one.offset, one.storage_bytes, one.shared) == (other.offset, other.storage_bytes, other.shared)


class Watched:
    """Who watches a step and its loops, if anybody does."""

    __slots__ = ("witness",)

    def __init__(self, witness: Witness | None = None) -> None:
        self.witness = witness

    def by(self, joint: Joint) -> Saw | None:
        """Who is shown what the operators of one of its captured steps give."""
        return None if self.witness is None else partial(self.witness.saw, joint)
