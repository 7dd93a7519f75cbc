"""What may be cut, by name."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CUT_KINDS", "CutKind"]


@dataclass(frozen=True, slots=True)
class CutKind:
    """What may be cut."""

    dims: tuple[int, ...] | None = None
    """Dimensions of results, parameters and inputs; all of them where nobody says."""
    heads: bool = False
    """Instead: heads, and features of what has none."""
    parameters: str = ""
    """``whole``: none is cut; ``cut``: all that can be, by their first dimension that is long enough."""
    inner: bool = False
    """Whether sums over inner dimensions of products and convolutions may be cut."""

    def allows(self, dim: int, rank: int) -> bool:
        """Whether a dimension of a tensor of so many dimensions may be cut."""
        if self.heads:
            return dim in {4: (1, 2), 5: (2, 3)}.get(rank, (rank - 1,))
        return self.dims is None or dim in self.dims


CUT_KINDS = {
    "any": CutKind(inner=True),
    "batch": CutKind((0,)),
    "channels": CutKind((1,)),
    "height": CutKind((2,)),
    "width": CutKind((3,)),
    "tokens": CutKind((1,)),
    "features": CutKind((2,)),
    "heads": CutKind(heads=True, inner=True),
    "inner": CutKind((), inner=True),
    "data parallel": CutKind((0,), parameters="whole"),
    "fully sharded": CutKind((0,), parameters="cut"),
}
"""What may be cut, by name."""
