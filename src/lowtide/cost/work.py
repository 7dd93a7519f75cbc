"""What an operator has to do, told from shapes: floating-point operations, and bytes read and written.

A multiplication and an addition are two operations. Products of matrices, convolutions and attention are
counted as their definition has them (padding is multiplied like any value, a causal mask saves nothing); of
everything else one operation an element is said, which is a convention and marked as one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from lowtide.graph import ACCUMULATE, DENSE, Graph, Op

__all__ = ["bytes_moved", "flop", "is_view", "touched_bytes", "traffic"]

Shape = tuple[int, ...]


def _kinds(names: str) -> frozenset[str]:
    return frozenset(f"aten.{name}" for name in names.split())


_UNDECLARED_VIEWS = _kinds("_unsafe_view _reshape_alias lift_fresh")
"""Kinds whose schema does not say that the result shares the storage of the input."""

_FACTORIES = _kinds(
    "arange empty empty_like empty_strided eye fill full full_like linspace new_empty new_empty_strided "
    "new_full new_ones new_zeros ones ones_like rand rand_like randint randn randn_like randperm "
    "scalar_tensor tril_indices triu_indices zeros zeros_like"
)
"""Kinds that write without reading the values of their inputs."""

_GATHERS = _kinds("embedding index index_select gather")
"""Kinds that read no more of their first input than they write."""

_MOVES = (
    _FACTORIES
    | _GATHERS
    | _kinds(
        "_to_copy as_strided_copy as_strided_scatter cat clone constant_pad_nd copy copy_ flip index_put "
        "masked_fill repeat roll scatter select_backward select_scatter slice_backward slice_scatter "
        "split_with_sizes_copy stack tril triu view_copy where"
    )
    | {DENSE}
)
"""Kinds that compute nothing."""

_REDUCTIONS = _kinds(
    "all amax amin any argmax argmin embedding_dense_backward linalg_vector_norm logsumexp max mean min norm "
    "prod std std_mean sum var var_mean"
)
"""Kinds that do an operation for each element that they read."""

_ITEM_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "float16": 2, "bfloat16": 2,
    "int16": 2, "uint16": 2, "float32": 4, "int32": 4, "uint32": 4, "float64": 8, "int64": 8, "uint64": 8,
    "complex64": 8, "complex128": 16,
}  # fmt: skip


def is_view(graph: Graph, op: Op) -> bool:
    """Whether all that the operator gives are views of what it was given: it moves nothing."""
    if op.kind in _UNDECLARED_VIEWS:
        return True
    fresh = [t for t in op.outputs if graph.tensors[t].alias is None or t in op.inputs]
    return bool(op.outputs) and not fresh


def flop(graph: Graph, op: Op) -> tuple[int, bool]:
    """Floating-point operations of a call, and whether that is a count (True) or a convention (False)."""
    formula = _formula(op.kind)
    if formula is not None:
        count = formula(_Arguments(graph, op))
        if count is not None:
            return count, True
    if op.kind in _MOVES or is_view(graph, op) or not op.outputs:
        return 0, False
    tensor = op.inputs[0] if op.kind in _REDUCTIONS and op.inputs else op.outputs[0]
    return prod(graph.tensors[tensor].shape or ()), False


def bytes_moved(graph: Graph, op: Op) -> int:
    """Bytes that a call reads and writes if each value goes over the memory bus once."""
    if is_view(graph, op):
        return 0
    strides = op.strides or [None] * len(op.inputs)
    read = {t: _bytes(graph, t, strides[k]) for k, t in enumerate(op.inputs) if k not in op.shape_only}
    written = [t for t in op.outputs if graph.tensors[t].alias is None or t in op.inputs]
    return traffic(op.kind, list(read.values()), [_bytes(graph, t, None) for t in written])


def touched_bytes(shape: Sequence[int], strides: Sequence[int] | None, item_bytes: int) -> int:
    """Bytes behind a tensor; along a dimension with stride zero all elements are one."""
    if 0 in shape:
        return 0
    return item_bytes * prod(d for k, d in enumerate(shape) if strides is None or strides[k] != 0)


def traffic(kind: str, read: Sequence[int], written: Sequence[int]) -> int:
    """The sum, less what operators of this kind do not read."""
    out = sum(written)
    if kind in _FACTORIES:
        return out
    if kind in _GATHERS and read:
        return min(read[0], out) + sum(read[1:]) + out
    return sum(read) + out


def _bytes(graph: Graph, tensor: int, strides: Sequence[int] | None) -> int:
    one = graph.tensors[tensor]
    size = _ITEM_BYTES.get(one.dtype or "")
    if one.shape is None or size is None:
        return one.bytes
    return touched_bytes(one.shape, strides, size)


class _Arguments:
    """The arguments of a call by position: shapes of tensors, values of the rest."""

    def __init__(self, graph: Graph, op: Op) -> None:
        self._graph, self._op = graph, op
        self._values: Sequence[Any] = op.arguments or ()

    def shape(self, position: int) -> Shape:
        """The shape of a tensor; of nothing, where there is none."""
        value = self.value(position)
        if not isinstance(value, dict) or "input" not in value:
            return ()
        return self._graph.tensors[self._op.inputs[value["input"]]].shape or ()

    def value(self, position: int) -> Any:
        return self._values[position] if position < len(self._values) else None

    def result(self) -> Shape:
        """The shape of the first result."""
        return self._graph.tensors[self._op.outputs[0]].shape or () if self._op.outputs else ()


def _formula(kind: str) -> Callable[[_Arguments], int | None] | None:
    if kind.startswith("aten._scaled_dot_product_"):
        return _attention_backward if kind.endswith("_backward") else _attention
    return _FORMULAS.get(kind)


def _product(first: int) -> Callable[[_Arguments], int | None]:
    """(…, m, k) times (…, k, n), the factors standing at this position and the next."""

    def count(call: _Arguments) -> int | None:
        left, right = call.shape(first), call.shape(first + 1)
        return 2 * prod(left) * right[-1] if len(left) >= 2 and len(left) == len(right) else None

    return count


def _convolution(call: _Arguments) -> int | None:
    """Every weight meets every place of the output, or of the input where it is transposed."""
    image, weight = call.shape(0), call.shape(1)
    places = image if call.value(6) is True else call.result()
    if len(weight) < 3 or len(places) != len(weight) or len(image) != len(weight):
        return None
    return 2 * image[0] * prod(places[2:]) * prod(weight)


def _convolution_backward(call: _Arguments) -> int | None:
    """As much as forward for the gradient of the input, and again for that of the weight."""
    gradient, image, weight, mask = call.shape(0), call.shape(1), call.shape(2), call.value(10)
    places = image if call.value(7) is True else gradient
    if len(weight) < 3 or not len(places) == len(image) == len(weight) or not isinstance(mask, list):
        return None
    return 2 * image[0] * prod(places[2:]) * prod(weight) * sum(map(bool, mask[:2]))


def _attention(call: _Arguments) -> int | None:
    """Scores from queries and keys, then values weighted by them."""
    query, key, value = (call.shape(k) for k in range(3))
    if not len(query) == len(key) == len(value) == 4:
        return None
    return 2 * prod(query[:3]) * key[2] * (query[3] + value[3])


def _attention_backward(call: _Arguments) -> int | None:
    """Scores again, their gradient, and the gradients of query, key and value."""
    query, key, value = (call.shape(k) for k in range(1, 4))
    if not len(query) == len(key) == len(value) == 4:
        return None
    return 2 * prod(query[:3]) * key[2] * (3 * query[3] + 2 * value[3])


_FORMULAS: dict[str, Callable[[_Arguments], int | None]] = {
    "aten.mm": _product(0),
    "aten.bmm": _product(0),
    "aten.addmm": _product(1),
    "aten.baddbmm": _product(1),
    "aten._scaled_mm": _product(0),
    ACCUMULATE: _product(1),
    "aten.convolution": _convolution,
    "aten.convolution_backward": _convolution_backward,
}
