"""Attention in one operator: batch and heads are independent of each other."""

from __future__ import annotations

from typing import Any

from lowtide.graph.access.call import Call, Indices, Rule, Shape
from lowtide.graph.access.index import Blocks, Index, Same, Until, Whole
from lowtide.graph.access.relation import Relation

__all__ = ["RULES"]


class _Heads:
    """The arguments that forward and backward have in common: (batch, heads, length, width) each."""

    def __init__(self, call: Call, first: int, causal: int) -> None:
        self.query, self.key, self.value = (call.value(first + k) for k in range(3))
        self.queries, self.keys = call.shape(self.query) or (), call.shape(self.key) or ()
        self.causal = bool(call.value(causal, call.option("is_causal", False)))

    @property
    def plain(self) -> bool:
        """Whether the shapes are those that the rules know."""
        return len(self.queries) == len(self.keys) == 4 and self.queries[1] % self.keys[1] == 0

    def lead(self) -> Indices:
        """Batch and heads of keys and values for those of the output; several heads may share one."""
        shared = self.queries[1] // self.keys[1]
        return Same(0), Same(1) if shared == 1 else Blocks(1, shared, 1)

    def earlier(self) -> Index:
        """The keys that count for a query. Where lengths differ, devices differ in what is masked."""
        return Until(2) if self.causal and self.queries[2] == self.keys[2] else Whole()


def _mask(shape: Shape, output: Shape, last: Index, row: Index) -> Indices:
    """A mask or bias for (batch, heads, query, key), aligned at the end."""
    full: Indices = (Same(0), Same(1), row, last)
    extent = (*output[:2], None, None)
    skip = 4 - len(shape)
    return tuple(
        full[d] if (d >= 2 and n > 1) or n == extent[d] else Whole() for d, n in enumerate(shape, start=skip)
    )


def _forward(bias: int | None, causal: int) -> Rule:
    """The result, the logarithm of its sums, and what the kernel keeps for itself."""

    def rule(call: Call) -> list[Relation] | None:
        heads = _Heads(call, 0, causal)
        if not heads.plain:
            return None
        result, sums, *rest = call.outputs
        mask: Any = call.option("attn_mask") if bias is None else call.value(bias)
        lead, seen = heads.lead(), heads.earlier()
        masked = _mask(call.shape(mask) or (), result, seen, Same(2))
        reads = [
            (heads.query, (Same(0), Same(1), Same(2), Whole())),
            (heads.key, (*lead, seen, Whole())),
            (mask, masked),
        ]
        weighted = [(heads.value, (*lead, seen, Same(3)))]
        kept = call.relation(sums, reads) if sums == result[:3] else call.everything(sums)
        return [call.relation(result, [*reads, *weighted]), kept, *(map(call.everything, rest))]

    return rule


RULES: dict[str, Rule] = {
    "_scaled_dot_product_flash_attention_for_cpu": _forward(None, 4),
    "_scaled_dot_product_flash_attention": _forward(None, 4),
    "_scaled_dot_product_efficient_attention": _forward(3, 6),
    "_scaled_dot_product_cudnn_attention": _forward(3, 6),
}
