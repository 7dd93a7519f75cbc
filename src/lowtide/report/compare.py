"""Two profiles side by side."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from lowtide.report.rows import SORT_KEYS, Row

__all__ = ["Change", "compare"]


@dataclass(frozen=True, slots=True)
class Change:
    """One operator or kind in both profiles; a side that lacks it has None and a count of zero."""

    name: str
    count_a: int
    count_b: int
    a: float | None
    b: float | None

    @property
    def change(self) -> float:
        """How much more B takes than A."""
        return (self.b or 0) - (self.a or 0)

    @property
    def ratio(self) -> float | None:
        """B over A, where both are known and A is not zero."""
        return self.b / self.a if self.a and self.b is not None else None

    def as_json(self) -> dict[str, Any]:
        """All fields, the change and the ratio."""
        return asdict(self) | {"change": self.change, "ratio": self.ratio}


def compare(a: Iterable[Row], b: Iterable[Row], sort: str) -> list[Change]:
    """Rows joined by name, what grew most first, what shrank most last."""
    field = SORT_KEYS[sort]
    left, right = _by_name(a, field), _by_name(b, field)
    changes = []
    for name in dict.fromkeys([*left, *right]):
        (count_a, value_a), (count_b, value_b) = left.get(name, (0, None)), right.get(name, (0, None))
        changes.append(Change(name, count_a, count_b, value_a, value_b))
    return sorted(changes, key=lambda change: (-change.change, change.name))


def _by_name(rows: Iterable[Row], field: str) -> dict[str, tuple[int, float | None]]:
    """Operators of one name are taken together."""
    found: dict[str, tuple[int, float | None]] = {}
    for row in rows:
        count, value = found.get(row.name, (0, None))
        new = getattr(row, field)
        found[row.name] = (count + row.count, value if new is None else (value or 0) + new)
    return found
