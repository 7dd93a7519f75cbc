"""Attention in one operator, forward and backward: batch and heads are independent of each other.

Given what forward keeps (its result and the logarithm of its sums), the gradient of a query is a sum over
keys, and the gradients of a key and its value are sums over queries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from lowtide.graph.access.call import AccessCall, Indices, Rule, Shape, whole
from lowtide.graph.access.index import BlockIndex, Index, Same, Until, Whole
from lowtide.graph.access.relation import Relation

__all__ = ["RULES"]


class _Places(NamedTuple):
    """Where arguments stand; None for one that the operator does not have."""

    causal: int
    bias: int | None
    result: int = 0
    sums: int = 0
    mask: int | None = None
    more: tuple[int, ...] = ()


class _Heads:
    """The arguments that forward and backward have in common: (batch, heads, length, width) each."""

    def __init__(self, call: AccessCall, first: int, places: _Places) -> None:
        self.call = call
        self.query, self.key, self.value = (call.value(first + k) for k in range(3))
        self.queries, self.keys = call.shape(self.query) or (), call.shape(self.key) or ()
        self.causal = bool(call.value(places.causal, False))
        self.bias = call.option("attn_mask") if places.bias is None else call.value(places.bias)

    @property
    def plain(self) -> bool:
        """Whether the shapes are those that the rules know."""
        return len(self.queries) == len(self.keys) == 4 and self.queries[1] % self.keys[1] == 0

    @property
    def shared(self) -> int:
        """How many heads of queries use one of keys."""
        return self.queries[1] // self.keys[1]

    def of_keys(self) -> Indices:
        """Batch and heads of keys and values for those of queries."""
        return Same(0), Same(1) if self.shared == 1 else BlockIndex(1, self.shared, 1)

    def of_queries(self) -> Indices:
        """Batch and heads of queries for those of keys and values."""
        return Same(0), Same(1) if self.shared == 1 else BlockIndex(1, 1, self.shared)

    def seen(self) -> Index:
        """The keys that count for a query. Where lengths differ, devices differ in what is masked."""
        return Until(2) if self.causal and self.queries[2] == self.keys[2] else Whole()

    def biased(self, heads: Indices, row: Index, column: Index) -> tuple[Any, Indices]:
        """A mask or bias, aligned at the end with (batch, heads, query, key), repeated where it has one."""
        full = (*heads, row, column)
        extent = (*self.queries[:3], self.keys[2])
        shape = self.call.shape(self.bias) or ()
        skip = 4 - len(shape)
        return self.bias, tuple(
            full[d] if n == extent[d] else Whole() for d, n in enumerate(shape, start=skip)
        )


def _forward(places: _Places) -> Rule:
    """The result, the logarithm of its sums, and what the kernel keeps for itself."""

    def rule(call: AccessCall) -> list[Relation] | None:
        heads = _Heads(call, 0, places)
        if not heads.plain:
            return None
        result, sums, *rest = call.outputs
        lead, seen = heads.of_keys(), heads.seen()
        reads = [
            (heads.query, (Same(0), Same(1), Same(2), Whole())),
            (heads.key, (*lead, seen, Whole())),
            heads.biased((Same(0), Same(1)), Same(2), seen),
        ]
        weighted = (heads.value, (*lead, seen, Same(3)))
        kept = call.relation(sums, reads) if sums[:2] == result[:2] else call.everything(sums)
        return [call.relation(result, [*reads, weighted]), kept, *map(call.everything, rest)]

    return rule


def _backward(places: _Places) -> Rule:
    """Gradients of queries, keys and values, and of the bias where that is asked for."""

    def rule(call: AccessCall) -> list[Relation] | None:
        heads = _Heads(call, 1, places)
        if not heads.plain:
            return None
        one = _Gradients(heads, places)
        asked = [True] * 3 if places.mask is None else call.value(places.mask)
        parts: list[Callable[[Shape], Relation]] = [
            p for p, a in zip((one.of_query, one.of_key, one.of_value, one.of_bias), asked, strict=False) if a
        ]
        return [part(shape) for part, shape in zip(parts, call.outputs, strict=True)]

    return rule


class _Gradients:
    """The relations of a backward call. The axis of the sum is the fifth."""

    def __init__(self, heads: _Heads, places: _Places) -> None:
        self.heads, call = heads, heads.call
        self.call = call
        self.gradient, self.result, self.sums = (call.value(k) for k in (0, places.result, places.sums))
        self.more = [(call.value(k), whole(call.shape(call.value(k)) or ())) for k in places.more]

    def _rows(self, lead: Indices, row: Index, values: list[Any]) -> list[tuple[Any, Indices]]:
        """Tensors that have a row for each query."""
        return [(value, (*lead, row, *whole((self.call.shape(value) or (0,) * 3)[3:]))) for value in values]

    def of_query(self, shape: Shape) -> Relation:
        """A sum over keys."""
        heads = self.heads
        rows = self._rows((Same(0), Same(1)), Same(2), [self.gradient, heads.query, self.result, self.sums])
        keys = [(value, (*heads.of_keys(), Same(4), Whole())) for value in (heads.key, heads.value)]
        bias = heads.biased((Same(0), Same(1)), Same(2), Same(4))
        return self.call.relation(shape, [*rows, *keys, bias, *self.more], sums=heads.keys[2:3])

    def of_key(self, shape: Shape) -> Relation:
        """A sum over queries."""
        heads, lead = self.heads, self.heads.of_queries()
        rows = self._rows(lead, Same(4), [self.gradient, heads.query, self.result, self.sums])
        keys = [(value, (Same(0), Same(1), Same(2), Whole())) for value in (heads.key, heads.value)]
        bias = heads.biased(lead, Same(4), Same(2))
        return self.call.relation(shape, [*rows, *keys, bias, *self.more], sums=heads.queries[2:3])

    def of_value(self, shape: Shape) -> Relation:
        """A sum over queries; the result of forward does not count."""
        heads, lead = self.heads, self.heads.of_queries()
        rows = self._rows(lead, Same(4), [heads.query, self.sums])
        gradient = (self.gradient, (*lead, Same(4), Same(3)))
        keys = (heads.key, (Same(0), Same(1), Same(2), Whole()))
        bias = heads.biased(lead, Same(4), Same(2))
        return self.call.relation(shape, [*rows, gradient, keys, bias, *self.more], sums=heads.queries[2:3])

    def of_bias(self, shape: Shape) -> Relation:
        """Row by row and column by column, unless the bias was repeated."""
        heads, call = self.heads, self.call
        if shape != (*heads.queries[:3], heads.keys[2]):
            return call.everything(shape)
        rows = self._rows((Same(0), Same(1)), Same(2), [self.gradient, heads.query, self.result, self.sums])
        keys = [(value, (*heads.of_keys(), Same(3), Whole())) for value in (heads.key, heads.value)]
        bias = heads.biased((Same(0), Same(1)), Same(2), Same(3))
        return call.relation(shape, [*rows, *keys, bias, *self.more])


_PREFIX = "_scaled_dot_product"

RULES: dict[str, Rule] = {
    f"{_PREFIX}_flash_attention_for_cpu": _forward(_Places(4, None)),
    f"{_PREFIX}_flash_attention": _forward(_Places(4, None)),
    f"{_PREFIX}_efficient_attention": _forward(_Places(6, 3)),
    f"{_PREFIX}_cudnn_attention": _forward(_Places(6, 3)),
    f"{_PREFIX}_flash_attention_for_cpu_backward": _backward(_Places(7, None, 4, 5)),
    f"{_PREFIX}_flash_attention_backward": _backward(_Places(11, None, 4, 5, None, (6, 7, 12, 13))),
    f"{_PREFIX}_efficient_attention_backward": _backward(_Places(11, 4, 5, 6, 10, (7, 8))),
    f"{_PREFIX}_cudnn_attention_backward": _backward(_Places(14, 8, 4, 5, None, (6, 7, 9, 10))),
}
