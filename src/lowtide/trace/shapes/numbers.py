"""Python numbers that a captured function computes with, as tensors: one capture is good for all values.

A step may read a number and go on with it (``x / norm.item()``). Torch would put it into what is traced. Here
the function takes it as a tensor of one element, twice: in float64, and in float32 for calls with tensors of
one element, whose type the number must not raise. Traced with a number that occurs nowhere else, it tells
where that goes: there the tensor takes its place, in operators that compute the same with either.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import fx

from lowtide.dynamo_internals import nothing_logged_of_fakes
from lowtide.errors import CaptureError
from lowtide.graph import Role, Tensor
from lowtide.torch_internals import FakeTensor, tree_leaves
from lowtide.trace.eager.gradients import place_of

__all__ = [
    "as_tensors",
    "free_of",
    "is_number",
    "number_at",
    "number_leaf",
    "numbers_in",
    "put_numbers_in",
    "stand_ins_of",
    "traced_numbers",
    "tried_numbers",
    "whole_number_at",
]

aten = torch.ops.aten

_NAME = "number "

_VALUES: ContextVar[Sequence[float]] = ContextVar("numbers of a function that is traced")

_BY_TENSOR: dict[Any, Any] = {
    aten.add.Tensor: aten.add.Tensor,
    aten.add.Scalar: aten.add.Tensor,
    aten.sub.Tensor: aten.sub.Tensor,
    aten.sub.Scalar: aten.sub.Tensor,
    aten.rsub.Scalar: aten.rsub.Tensor,
    aten.mul.Tensor: aten.mul.Tensor,
    aten.mul.Scalar: aten.mul.Tensor,
    aten.div.Tensor: aten.div.Tensor,
    aten.div.Scalar: aten.div.Tensor,
    aten.gt.Scalar: aten.gt.Tensor,
    aten.ge.Scalar: aten.ge.Tensor,
    aten.lt.Scalar: aten.lt.Tensor,
    aten.le.Scalar: aten.le.Tensor,
    aten.eq.Scalar: aten.eq.Tensor,
    aten.ne.Scalar: aten.ne.Tensor,
}
"""Operators whose second argument may be a number, and what computes the same bits with a tensor."""


def number_at(place: int, wide: torch.Tensor, _: torch.Tensor) -> float:
    """The number of a function at this place, given as tensors; while it is traced, a stand-in."""
    values = _VALUES.get(())
    if values:
        return values[place]
    if isinstance(wide, FakeTensor):
        raise CaptureError("a number that the step reads is not known while it is traced here")
    return float(wide.item())


def whole_number_at(place: int, wide: torch.Tensor, narrow: torch.Tensor) -> int:
    """The same of a number that is an integer."""
    return round(number_at(place, wide, narrow))


def as_tensors(number: float) -> tuple[torch.Tensor, torch.Tensor]:
    """What a function takes for a number."""
    return torch.tensor(number, dtype=torch.float64), torch.tensor(number, dtype=torch.float32)


def _stand_ins(count: int, kind: int = 0, whole: Collection[int] = ()) -> list[float]:
    """Numbers that occur nowhere else, to trace a function with; each ``kind`` has its own.

    Those at the places ``whole`` are integers.
    """
    return [
        715_827_883 + 102_199_481 * kind + 7_919 * k
        if k in whole
        else (2.0 + kind) * (1.3247179572447461 + 0.0754877666246927 * k)
        for k in range(count)
    ]


def stand_ins_of(module: fx.GraphModule, kind: int = 0) -> list[float]:
    """The stand-ins for the numbers of a function."""
    whole = [n.args[0] for n in module.graph.find_nodes(op="call_function", target=whole_number_at)]
    return _stand_ins(max(numbers_in(module), default=-1) + 1, kind, whole)


def is_number(tensor: Tensor) -> bool:
    """Whether a tensor of a graph stands for a number."""
    return tensor.role is Role.INPUT and tensor.name.startswith(_NAME)


def number_leaf(place: int) -> str:
    """What a tensor that stands for a number is called."""
    return f"{_NAME}{place}"


@contextlib.contextmanager
def traced_numbers(values: Sequence[float]) -> Iterator[None]:
    """Inside, functions compute with these numbers."""
    token = _VALUES.set(values)
    try:
        yield
    finally:
        _VALUES.reset(token)


@contextlib.contextmanager
def tried_numbers(values: Sequence[float]) -> Iterator[None]:
    """The same to see whether that works: torch does not log what fails."""
    with traced_numbers(values), nothing_logged_of_fakes():
        yield


def numbers_in(module: fx.GraphModule) -> dict[int, tuple[int, int]]:
    """The places of numbers of a function; with each, which of its inputs are the two tensors."""
    inputs = {node: k for k, node in enumerate(module.graph.find_nodes(op="placeholder"))}
    readers = (number_at, whole_number_at)
    found = [one for of in readers for one in module.graph.find_nodes(op="call_function", target=of)]
    return {node.args[0]: (inputs[node.args[1]], inputs[node.args[2]]) for node in found}


def free_of(
    one: fx.GraphModule, other: fx.GraphModule, first: Sequence[float], second: Sequence[float]
) -> frozenset[int]:
    """Which numbers a traced function takes as they are, in operators that can take a tensor.

    The two are the function with the ``first`` stand-ins and the ``second``. What differs otherwise was
    computed from a number while it was traced: then it is none of them.
    """
    count = len(first)
    nodes = list(one.graph.nodes), list(other.graph.nodes)
    if [(n.op, n.op == "call_function" and n.target) for n in nodes[0]] != [
        (n.op, n.op == "call_function" and n.target) for n in nodes[1]
    ]:
        return frozenset()
    free = set(range(count))
    for a, b in zip(*nodes, strict=True):
        values = _constants(a), _constants(b)
        if len(values[0]) != len(values[1]):
            return frozenset()
        for x, y in zip(*values, strict=True):
            if type(x) is not type(y) or (x != y and not (x != x and y != y)):
                known = [k for k in range(count) if (x, y) == (first[k], second[k])]
                if not known:
                    return frozenset()
                if not _taken_as_tensor(a, x):
                    free -= set(known)
    return frozenset(free)


def put_numbers_in(joint: fx.GraphModule, module: fx.GraphModule) -> None:
    """Have a function that was traced with stand-ins compute with the tensors that it is given for them."""
    numbers = numbers_in(module)
    if not numbers:
        return
    inputs = joint.graph.find_nodes(op="placeholder")
    placed = {
        place_of(node, k): node for k, node in enumerate(inputs) if not node.name.startswith("tangents")
    }
    values = {value: k for k, value in enumerate(stand_ins_of(module))}
    for node in joint.graph.nodes:
        for value in _constants(node):
            if not isinstance(value, int | float) or values.get(value) not in numbers:
                continue
            wide, narrow = numbers[values[value]]
            small = node.args[0].meta["val"].dim() == 0 if _taken_as_tensor(node, value) else None
            tensor = placed.get(narrow if small and node.args[0].meta["val"].dtype is torch.float32 else wide)
            if small is None or tensor is None:
                raise CaptureError("a number that the step reads goes where it was not seen to go")
            node.args = (node.args[0], tensor, *node.args[2:])
            node.target = _BY_TENSOR[node.target]
    joint.graph.lint()


def _constants(node: fx.Node) -> list[Any]:
    """What a node takes beside other nodes, in order."""
    if node.op != "call_function":
        return []
    return [value for value in tree_leaves((node.args, dict(node.kwargs))) if not isinstance(value, fx.Node)]


def _taken_as_tensor(node: fx.Node, number: float) -> bool:
    """Whether an operator takes this number where a tensor may come, and gives the same with it."""
    if node.target not in _BY_TENSOR or len(node.args) < 2 or node.args[1] != number:
        return False
    if _constants(node).count(number) != 1 or not isinstance(node.args[0], fx.Node):
        return False
    value = node.args[0].meta.get("val")
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return False
    return value.dim() > 0 or value.dtype in (torch.float32, torch.float64)
