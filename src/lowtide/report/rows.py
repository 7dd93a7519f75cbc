"""Operators as rows of a table: time, FLOP, bytes, workspace, and the shares of the whole."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from lowtide.cost import Cost, Figure, Origin, Step
from lowtide.graph import Op, Role

__all__ = ["SORT_KEYS", "Row", "grouped", "ranked", "rows_by_name"]

SORT_KEYS = {"time": "seconds", "flop": "flop", "bytes": "bytes", "workspace": "workspace_bytes"}
"""What a user may sort by, and the field it stands for."""


@dataclass(frozen=True, slots=True)
class Row:
    """One operator, or all operators of one kind. None is "not known"."""

    name: str
    kind: str
    phase: str
    count: int = 1
    seconds: float | None = None
    flop: int | None = None
    bytes: int | None = None
    workspace_bytes: int | None = None
    estimated: tuple[str, ...] = ()
    """Which of the fields were computed from shapes, neither measured nor read from the file."""
    share: float | None = None
    cumulative_share: float | None = None
    source: str | None = None
    host: bool = False
    """The time is that of issuing the operator: no rate follows from it."""

    @property
    def flop_per_second(self) -> float | None:
        """Achieved rate, where both are known."""
        return self._rate(self.flop)

    @property
    def bytes_per_second(self) -> float | None:
        """Achieved rate, where both are known."""
        return self._rate(self.bytes)

    def _rate(self, amount: int | None) -> float | None:
        if not amount or not self.seconds or self.host:
            return None
        rate = amount / self.seconds
        return rate if math.isfinite(rate) else None

    def as_json(self) -> dict[str, Any]:
        """All fields and the achieved rates."""
        return asdict(self) | {
            "estimated": list(self.estimated),
            "flop_per_second": self.flop_per_second,
            "bytes_per_second": self.bytes_per_second,
        }


def rows_by_name(step: Step, *, host: bool = False) -> list[Row]:
    """A row an operator in program order; times are those of the device, or of the host's threads."""
    seconds = _seconds(step, host)
    return [
        _row(step, op, step.costs[k] if step.costs else Cost(), seconds.get(k), host)
        for k, op in enumerate(step.graph.ops)
    ]


def _seconds(step: Step, host: bool) -> dict[int, float]:
    found: dict[int, float] = {}
    for span in step.spans:
        if span.host is host:
            found[span.op] = found.get(span.op, 0.0) + (span.end - span.start if host else span.running)
    if not host:
        for k, cost in enumerate(step.costs):
            if cost.seconds is None:
                continue
            if k not in found or cost.seconds.origin is Origin.MEASURED:
                # the median of several calls; a span is one call, with whatever watched it
                found[k] = float(cost.seconds.value)
    return found


def _row(step: Step, op: Op, cost: Cost, seconds: float | None, host: bool) -> Row:
    tensors = step.graph.tensors
    estimated = [
        name
        for name, figure in (("seconds", cost.seconds), ("flop", cost.flop), ("bytes", cost.bytes_moved))
        if figure is not None and figure.origin is Origin.ESTIMATED
    ]
    moved = _value(cost.bytes_moved)
    if moved is None:
        moved = sum(tensors[t].bytes for t in (*op.reads, *op.outputs))
        estimated.append("bytes")
    workspace = sum(tensors[t].bytes for t in op.outputs if tensors[t].role is Role.WORKSPACE)
    known = _value(cost.workspace_bytes)
    return Row(
        name=op.label,
        kind=op.kind,
        phase=op.phase.value,
        seconds=seconds,
        flop=_value(cost.flop),
        bytes=moved,
        workspace_bytes=workspace + (known or 0) if workspace or known is not None else None,
        estimated=tuple(estimated),
        source=f"{op.source.file}:{op.source.line}" if op.source else None,
        host=host,
    )


def _value(figure: Figure | None) -> int | None:
    return None if figure is None else int(figure.value)


def grouped(rows: Iterable[Row]) -> list[Row]:
    """One row a kind, in the order in which the kinds first appear; a figure is known if any row knows it."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.kind, []).append(row)
    return [_joined(kind, members) for kind, members in groups.items()]


def _joined(kind: str, members: Sequence[Row]) -> Row:
    phases = dict.fromkeys(row.phase for row in members)
    workspaces = [row.workspace_bytes for row in members if row.workspace_bytes is not None]
    return Row(
        name=kind,
        kind=kind,
        phase=", ".join(phases),
        count=len(members),
        seconds=_total([row.seconds for row in members]),
        flop=_total([row.flop for row in members]),
        bytes=_total([row.bytes for row in members]),
        # workspaces of different operators do not add up: they are never live together
        workspace_bytes=max(workspaces) if workspaces else None,
        estimated=tuple(dict.fromkeys(name for row in members for name in row.estimated)),
        host=members[0].host,
    )


def _total(values: Sequence[Any]) -> Any:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def ranked(rows: Iterable[Row], sort: str) -> list[Row]:
    """Largest first by one of SORT_KEYS, with each row's share of the sum and the share so far."""
    field = SORT_KEYS[sort]
    ordered = sorted(rows, key=lambda row: (-(getattr(row, field) or 0), row.name))
    total = sum(getattr(row, field) or 0 for row in ordered)
    if not total or sort == "workspace":  # workspaces are never live together: there is no whole to share
        return ordered
    shared, so_far = [], 0.0
    for row in ordered:
        so_far += getattr(row, field) or 0
        shared.append(
            replace(row, share=(getattr(row, field) or 0) / total, cumulative_share=min(1.0, so_far / total))
        )
    return shared
