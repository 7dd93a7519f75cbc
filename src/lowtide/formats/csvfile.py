"""Allocations as address planners exchange them: `id,lower,upper,size`, lifetimes half-open.

A row is a buffer that takes `size` bytes for every time t with lower <= t < upper; a column `offset`
says where it was put. The times become operators: one for each time at which a buffer appears or is
used for the last time.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable

from lowtide.cost import Note, NoteKind, Step
from lowtide.errors import ConvertError, FormatError
from lowtide.formats.base import Format, Written
from lowtide.formats.losses import Part, losses_of
from lowtide.formats.text import decode, shorten, whole
from lowtide.graph import MAX_BYTES, RESIDENT_ROLES, Graph, Op, Role, Tensor

__all__ = ["FORMAT", "read", "table", "times_of", "write"]

_COLUMNS = ("id", "lower", "upper", "size")
_OFFSET = "offset"
_HEAD = re.compile(
    rb"(?:\xef\xbb\xbf)?(?:(?:id|lower|upper|size|offset)\s*,\s*){3,4}(?:id|lower|upper|size|offset)\s*\r?(?:\n|$)"
)
_KIND = "time"


def read(data: bytes) -> Step:
    """One operator a time that matters; a buffer is written at `lower` and last read at `upper - 1`."""
    rows = _rows(decode(data, bom=True))
    times = sorted({t for _, lower, upper, _, _ in rows for t in (lower, upper - 1)})
    place = {t: k for k, t in enumerate(times)}
    outputs: list[list[int]] = [[] for _ in times]
    inputs: list[list[int]] = [[] for _ in times]
    tensors = []
    for k, (name, lower, upper, size, offset) in enumerate(rows):
        tensors.append(Tensor(id=name, bytes=size, role=Role.ACTIVATION, address=offset))
        outputs[place[lower]].append(k)
        if upper - 1 > lower:
            inputs[place[upper - 1]].append(k)
    ops = tuple(
        Op(
            id=f"{_KIND} {t}",
            kind=_KIND,
            inputs=tuple(inputs[k]),
            outputs=tuple(outputs[k]),
            attributes={_KIND: t},
        )
        for k, t in enumerate(times)
    )
    note = Note(NoteKind.ASSUMPTION, "each time at which a buffer starts or ends stands for one operator")
    return Step(graph=Graph(tensors=tuple(tensors), ops=ops), format="csv", notes=(note,))


def _rows(text: str) -> list[tuple[str, int, int, int, int | None]]:
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        header = [cell.strip() for cell in next(reader, [])]
        unknown = set(header) - {*_COLUMNS, _OFFSET}
        if not set(_COLUMNS) <= set(header) or unknown or len(set(header)) != len(header):
            raise FormatError(
                f"the columns {shorten(','.join(header))}",
                expected="`id,lower,upper,size`, and `offset` if addresses are known",
                line=1,
            )
        rows = []
        seen: set[str] = set()
        for cells in reader:
            row = _row(header, cells, reader.line_num)
            if row[0] in seen:
                raise FormatError(
                    f"the id {shorten(row[0])} stands twice", expected="one row an id", line=reader.line_num
                )
            seen.add(row[0])
            rows.append(row)
    except csv.Error as error:
        raise FormatError(
            str(error), expected="comma-separated values", line=max(1, reader.line_num)
        ) from None
    return rows


def _row(header: list[str], cells: list[str], line: int) -> tuple[str, int, int, int, int | None]:
    if len(cells) != len(header):
        raise FormatError(f"{len(cells)} fields", expected=f"{len(header)}, one a column", line=line)
    row = dict(zip(header, (cell.strip() for cell in cells), strict=True))
    if not row["id"]:
        raise FormatError("an empty id", expected="a name for the buffer", line=line)
    lower = whole(row["lower"], line, "time", signed=True)
    upper = whole(row["upper"], line, "time", signed=True)
    size = whole(row["size"], line, "size in bytes")
    offset = whole(row[_OFFSET], line, "offset") if row.get(_OFFSET) else None
    if max(-lower, upper) > MAX_BYTES:
        raise FormatError(f"a lifetime from {lower} to {upper}", expected="times up to 2^60", line=line)
    if upper <= lower:
        raise FormatError(f"a lifetime from {lower} to {upper}", expected="lower < upper", line=line)
    if size > MAX_BYTES:
        raise FormatError(f"a buffer of {size} bytes", expected="at most 2^60 bytes", line=line)
    return row["id"], lower, upper, size, offset


def write(step: Step) -> Written:
    """A row for every storage that lives for a part of the step; leaves are left out and said so."""
    if not step.graph.ordered:
        raise ConvertError(
            "lifetimes need to know who reads what; this document does not say it. Capture the step with "
            "`lowtide profile`, or take a file that lists inputs"
        )
    timeline = step.lifetimes()
    times, own = times_of(step)
    tensors = step.graph.tensors
    chosen = [one for one in timeline.lifetimes if tensors[one.tensor].role not in RESIDENT_ROLES]
    addresses = any(tensors[one.tensor].address is not None for one in chosen)
    rows = (
        (
            tensors[one.tensor].id,
            times[one.first],
            times[one.last] + 1,
            one.bytes,
            tensors[one.tensor].address,
        )
        for one in chosen
    )
    data = table(rows, offsets=addresses)
    left = len(timeline.lifetimes) - len(chosen)
    losses = losses_of(step, {Part.ADDRESSES, *((Part.EXTRAS, Part.NOTES, Part.ROLES) if own else ())})
    if left:
        losses += (f"{left} leaves, which take memory for the whole step",)
    if step.graph.ops and not own:
        losses += ("what the operators are: only lifetimes are written",)
    return Written(data, losses)


def times_of(step: Step) -> tuple[list[int], bool]:
    """The time of each operator, and whether it is that of a file of this format; else operators count."""
    own = step.format == "csv" and all(type(op.attributes.get(_KIND)) is int for op in step.graph.ops)
    return [int(op.attributes[_KIND]) if own else k for k, op in enumerate(step.graph.ops)], own


def table(rows: Iterable[tuple[str, int, int, int, int | None]], *, offsets: bool) -> bytes:
    """The file with these rows: id, lower, upper, size, and the offset if asked for."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*_COLUMNS, *([_OFFSET] if offsets else [])])
    writer.writerows(row if offsets else row[:4] for row in rows)
    return text.getvalue().encode()


FORMAT = Format(
    name="csv",
    title="allocations (CSV)",
    recognise=lambda data: _HEAD.match(data) is not None,
    read=read,
    write=write,
)
