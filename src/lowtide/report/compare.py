"""Two profiles side by side."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
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
    estimated: bool = False
    """Whether either side was computed from shapes."""

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
    nobody = _Side()
    changes = []
    for name in dict.fromkeys([*left, *right]):
        one, other = left.get(name, nobody), right.get(name, nobody)
        estimated = one.estimated or other.estimated
        changes.append(Change(name, one.count, other.count, one.value, other.value, estimated))
    return sorted(changes, key=lambda change: (-change.change, change.name))


@dataclass(slots=True)
class _Side:
    """Operators of one name in one profile, taken together."""

    count: int = 0
    value: float | None = None
    estimated: bool = False


def _by_name(rows: Iterable[Row], field: str) -> dict[str, _Side]:
    # workspaces of different operators are never live together: the largest counts, not the sum
    join: Callable[[float, float], float] = max if field == "workspace_bytes" else operator.add
    found: dict[str, _Side] = {}
    for row in rows:
        side = found.setdefault(row.name, _Side())
        side.count += row.count
        side.estimated = side.estimated or field in row.estimated
        new = getattr(row, field)
        if new is not None:
            side.value = new if side.value is None else join(side.value, new)
    return found
