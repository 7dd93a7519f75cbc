"""Views of a step: each can be made at once from any tensor behind it, whatever operators lie between."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import fx

from lowtide.torch_internals import OpOverload, reinterpret
from lowtide.trace.step.builder import Call, kind_of
from lowtide.trace.step.joint import Joint

__all__ = ["Views"]

_NAMES = (
    "view _unsafe_view _reshape_alias t transpose permute expand slice select squeeze unsqueeze unbind split "
    "split_with_sizes alias detach diagonal unfold"
)
_VIEWS = frozenset(f"aten.{name}" for name in _NAMES.split())
"""Operators whose results are sizes, strides and an offset that does not depend on that of their input."""

Make = Callable[[torch.Tensor], torch.Tensor]


class _Origin(NamedTuple):
    """What a view is made from: a tensor, by a result of an operator."""

    source: int
    op: int
    result: int


class Views:
    """The views of a captured step."""

    def __init__(self, joint: Joint) -> None:
        self._joint = joint
        self._origins = {
            tensor: _Origin(joint.graph.ops[op].inputs[0], op, k)
            for op, call in enumerate(joint.calls)
            if _is_view(joint, op, call)
            for k, tensor in enumerate(call.results)
        }
        self.operators = frozenset(origin.op for origin in self._origins.values())
        """Those that make nothing but views."""

    def source(self, tensor: int) -> int | None:
        """What a view is a view of; None of what is no view."""
        origin = self._origins.get(tensor)
        return None if origin is None else origin.source

    def behind(self, tensor: int) -> Iterator[int]:
        """The tensor, what it is a view of, and so on to what is no view."""
        at: int | None = tensor
        while at is not None:
            yield at
            at = self.source(at)

    def owner(self, tensor: int) -> int:
        """The tensor, no view itself, that it is a view of in the end."""
        return list(self.behind(tensor))[-1]

    def by_operators(self, tensor: int, source: int) -> Make:
        """Makes the view of a tensor behind it, operator by operator."""
        calls: list[Make] = []
        while tensor != source:
            origin = self._origins[tensor]
            calls.insert(0, _called(self._joint.calls[origin.op], origin.result))
            tensor = origin.source

        def make(value: torch.Tensor) -> torch.Tensor:
            for call in calls:
                value = call(value)
            return value

        return make

    def restore(self, table: list[Any], again: Iterable[tuple[int, int]]) -> None:
        """Put views into a table that has what each is a view of, operator by operator."""
        for view, source in again:
            table[view] = self.by_operators(view, source)(table[source])

    def at_once(self, tensor: int, source: int) -> Make:
        """Makes the view by itself: autograd does not know it, and it has a version counter of its own.

        Where the source does not lie in memory as it was captured, the operators make it.
        """
        base, made = self._joint.values[source], self._joint.values[tensor]
        known = tuple(map(int, base.stride()))
        size, stride = tuple(map(int, made.shape)), tuple(map(int, made.stride()))
        further = int(made.storage_offset()) - int(base.storage_offset())
        operators = self.by_operators(tensor, source)
        if (size, stride, further) == (tuple(map(int, base.shape)), known, 0):
            return lambda value: value if value.stride() == known else operators(value)

        def make(value: torch.Tensor) -> torch.Tensor:
            if value.stride() != known:
                return operators(value)
            view: torch.Tensor = reinterpret(value, size, stride, further)
            return view

        return make


def _is_view(joint: Joint, op: int, call: Call) -> bool:
    """Whether an operator makes views of its one tensor, which sizes and strides describe in full."""
    if type(call.target) is not OpOverload or kind_of(call.target) not in _VIEWS:
        return False
    inputs = joint.graph.ops[op].inputs
    if len(inputs) != 1 or not call.args or not isinstance(call.args[0], fx.Node) or min(call.results) < 0:
        return False
    like = joint.values[inputs[0]]
    return all(
        joint.graph.tensors[tensor].alias is not None
        and (value.dtype, value.device, value.layout) == (like.dtype, like.device, torch.strided)
        for tensor, value in ((tensor, joint.values[tensor]) for tensor in call.results)
    )


def _called(call: Call, result: int) -> Make:
    """One result of an operator, for its one tensor."""
    target, rest, options = call.target, call.args[1:], dict(call.kwargs)

    def make(value: torch.Tensor) -> torch.Tensor:
        made: Any = target(value, *rest, **options)
        chosen: torch.Tensor = made[result] if call.several else made
        return chosen

    return make
