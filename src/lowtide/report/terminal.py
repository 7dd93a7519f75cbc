"""What ``lowtide show``, ``top`` and ``diff`` print for a person. Estimated figures carry a tilde."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lowtide.printable import printable
from lowtide.report.compare import Change
from lowtide.report.curve import draw
from lowtide.report.rows import Row
from lowtide.units import format_bytes, format_count, format_rate, format_seconds

__all__ = ["print_diff", "print_summary", "print_top"]

_NONE = "–"
_NAME_WIDTH = 52


def _shown(value: Any, render: Callable[[Any], str], estimated: bool = False) -> str:
    return _NONE if value is None else ("~" if estimated else "") + render(value)


_TEXT_COLUMNS = frozenset({"operator", "kind", "tensor", "role", "written by"})
_GIVEN_UP = (
    "kind",
    "written by",
    "so far",
    "bytes/s",
    "FLOP/s",
    "workspace",
    "count",
    "role",
    "FLOP",
    "share",
)
"""Columns that go, in this order, where the terminal is too narrow for all of them."""
_LEAST_TEXT = 16
_GAP = 2


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> Table:
    """Numbers stand whole; names are shortened; where that is not enough, columns are left out."""
    rows = [[printable(cell) for cell in row] for row in rows]
    sizes = [max([len(column), *(len(row[k]) for row in rows)]) for k, column in enumerate(columns)]
    least = [min(size, _LEAST_TEXT) if columns[k] in _TEXT_COLUMNS else size for k, size in enumerate(sizes)]
    shown = list(range(len(columns)))
    for name in _GIVEN_UP:
        if sum(least[k] for k in shown) + _GAP * (len(shown) - 1) > width and name in columns:
            shown.remove(columns.index(name))
    table = Table(box=None, pad_edge=False, header_style="bold", show_edge=False)
    for k in shown:
        text = columns[k] in _TEXT_COLUMNS
        table.add_column(
            columns[k],
            justify="left" if text else "right",
            no_wrap=True,
            overflow="ellipsis",
            min_width=least[k],
            max_width=_NAME_WIDTH if text else None,
        )
    for row in rows:
        table.add_row(*(Text(row[k]) for k in shown))
    return table


def _print(console: Console, *parts: str | tuple[str, str], style: str = "", crop: bool = False) -> None:
    """One line of parts, some with a style of their own. Markup and emoji codes in them are plain text."""
    shown = [(printable(p), "") if isinstance(p, str) else (printable(p[0]), p[1]) for p in parts]
    line = Text.assemble(*shown, style=style, no_wrap=crop, overflow="crop" if crop else None)
    console.print(line)


def print_summary(console: Console, path: str, title: str, view: dict[str, Any]) -> None:
    """The whole summary, top to bottom: what it is, the peak, who is live there, what is large or slow."""
    _print(console, (path, "bold"), f": {title}")
    for line in _headline(view):
        _print(console, line)
    if view["curve"]:
        console.print()
        _print_curve(console, view)
    if view["peak"]["live"]:
        _print_live(console, view["peak"])
    for name, key in (("Largest operators", "largest"), ("Slowest operators", "slowest")):
        if view[key]:
            console.print()
            _print(console, (name, "bold"))
            rows = [_row_of(item) for item in view[key][:5]]
            console.print(_rows_table(rows, console.width, shares=False))
    _print_notes(console, view)


def _headline(view: dict[str, Any]) -> Iterable[str]:
    ops = ", ".join(f"{count} {phase}" for phase, count in view["ops"].items())
    kinds = ", ".join(f"{count} {kind}" for kind, count in list(view["kinds"].items())[:6])
    more = len(view["kinds"]) - 6
    yield f"  operators   {ops or 'none'}"
    yield f"  kinds       {kinds}{f' and {more} more kinds' if more > 0 else ''}"
    sizes = ", ".join(
        f"{role} {format_bytes(size)}" for role, size in view["tensors"]["storage_bytes"].items()
    )
    yield f"  tensors     {view['tensors']['count']} ({sizes})"
    peak = view["peak"]
    if peak["bytes"] is not None:
        yield (
            f"  peak        {format_bytes(peak['bytes'])} ({peak['bytes']:,} bytes) at {peak['op']}, "
            f"{peak['phase']} operator {peak['number']}"
        )
    elif view["ops"]:
        yield "  peak        not known: the document does not say who reads what, or in which order"
    if view["after_forward_bytes"] is not None:
        yield f"  kept        {format_bytes(view['after_forward_bytes'])} live between forward and backward"
    yield from _work(view)


def _work(view: dict[str, Any]) -> Iterable[str]:
    seconds = view["seconds"]
    if seconds["device"] is not None:
        parts = [f"device {format_seconds(seconds['device'])}"]
        for key, text in (("wait", "waiting"), ("span", "span"), ("host_span", "host span")):
            if seconds[key] is not None:
                parts.append(f"{text} {format_seconds(seconds[key])}")
        yield f"  time        {', '.join(parts)}"
    if view["flop_by_phase"]:
        tilde = "~" if "flop" in view["estimated"] else ""
        phases = view["flop_by_phase"].items()
        flop = ", ".join(f"{phase} {tilde}{format_count(n, 'FLOP')}" for phase, n in phases)
        yield f"  work        {flop}"
    if view["traffic_bytes"] is not None:
        yield f"  traffic     {format_bytes(view['traffic_bytes'])} read and written by operators"
    addresses = view["addresses"]
    if addresses["touched_bytes"] is not None:
        lost = addresses["fragmentation"]
        yield (
            f"  addresses   {format_bytes(addresses['touched_bytes'])} touched for at most "
            f"{format_bytes(addresses['live_bytes'])} live"
            f"{'' if lost is None else f': {lost:.1%} lost to fragmentation'}"
        )
    yield from _allocator(view["document"].get("allocator"))
    for key, name, text in (
        ("transposes", "layout", "layout conversions, writing"),
        ("host_copies", "copies", "copies between devices, of"),
    ):
        moved = view[key]
        if moved["count"]:
            yield f"  {name:<11} {moved['count']} {text} {format_bytes(moved['bytes'])}"
    tiles = view["tiles"]
    if tiles["count"] is not None:
        differ = f"{tiles['mismatches']} of {tiles['elements']} values differ"
        yield f"  tiles       {tiles['count']}; {differ} from the untiled step"


def _allocator(held: dict[str, Any] | None) -> Iterable[str]:
    """What PyTorch's allocator had taken from the device when a snapshot was written."""
    if held is None:
        return
    reserved, most = held["reserved_bytes"], held["most_reserved_bytes"]
    lost = f" ({1 - held['allocated_bytes'] / reserved:.1%} of it free)" if reserved else ""
    yield (
        f"  reserved    {format_bytes(reserved)} in {held['segments']} segments at the end{lost}, "
        f"{format_bytes(most)} at most"
    )
    for one in held.get("out_of_memory") or ():
        asked, left = format_bytes(one["bytes"]), format_bytes(one["free_on_device"])
        yield f"  failed      an allocation of {asked}; the device had {left} left"


def _print_curve(console: Console, view: dict[str, Any]) -> None:
    values = view["curve"]["bytes"]
    width = max(20, min(console.width - 14, 100))
    lines = draw(values, width)
    top, bottom = format_bytes(max(values)), format_bytes(0)
    for k, line in enumerate(lines):
        scale = top if k == 0 else bottom if k == len(lines) - 1 else ""
        _print(console, f"  {scale:>10} ", (line, "cyan"), crop=True)
    note = (
        f", the largest of {view['curve']['ops_per_point']} operators a column"
        if view["curve"]["thinned"]
        else ""
    )
    _print(console, f"  {'':>10} live bytes by operator, in program order{note}", style="dim")


def _print_live(console: Console, peak: dict[str, Any]) -> None:
    console.print()
    _print(console, ("Live at the peak", "bold"), f" (largest of {peak['live_count']})")
    rows = [
        (one["tensor"], format_bytes(one["bytes"]), one["role"], one["from"] or _NONE) for one in peak["live"]
    ]
    console.print(_table(("tensor", "bytes", "role", "written by"), rows, console.width))


def _print_notes(console: Console, view: dict[str, Any]) -> None:
    if view["repairs"]:
        console.print()
        _print(console, (f"{len(view['repairs'])} repairs", "bold"), " of damaged text")
        for repair in view["repairs"]:
            text = f"  line {repair['line']}: {repair['before']!r} → {repair['after']!r}: {repair['why']}"
            _print(console, text)
    skipped = [note for note in view["notes"] if note["kind"] == "skipped"]
    if skipped:
        console.print()
        _print(console, (f"{len(skipped)} pieces skipped", "bold"), " as noise")
        for note in skipped:
            _print(console, f"  line {note['line']}: {note['before']!r}")
    assumed = [note for note in view["notes"] if note["kind"] == "assumption"]
    if assumed:
        console.print()
        _print(console, ("Assumed", "bold"))
        for note in assumed:
            _print(console, f"  {note['text']}")


def _row_of(item: dict[str, Any]) -> Row:
    fields = {key: item[key] for key in Row.__dataclass_fields__}
    return Row(**(fields | {"estimated": tuple(item["estimated"])}))


def _rows_table(rows: Sequence[Row], width: int, *, shares: bool) -> Table:
    hidden = _hidden(rows, shares)
    lines = [[cell for column, cell in _cells(row).items() if column not in hidden] for row in rows]
    columns = [column for column in _cells(Row("", "", "")) if column not in hidden]
    return _table(columns, lines, width)


def _cells(row: Row) -> dict[str, str]:
    guessed = row.estimated
    return {
        "operator": row.name,
        "kind": row.kind,
        "count": str(row.count),
        "time": _shown(row.seconds, format_seconds, "seconds" in guessed),
        "share": _shown(row.share, "{:.1%}".format),
        "so far": _shown(row.cumulative_share, "{:.1%}".format),
        "FLOP": _shown(row.flop, format_count, "flop" in guessed),
        "FLOP/s": _shown(row.flop_per_second, _flop_rate, "flop" in guessed or "seconds" in guessed),
        "bytes": _shown(row.bytes, format_bytes, "bytes" in guessed),
        "bytes/s": _shown(row.bytes_per_second, _byte_rate, "bytes" in guessed or "seconds" in guessed),
        "workspace": _shown(row.workspace_bytes, format_bytes),
    }


def _flop_rate(value: float) -> str:
    return format_rate(value, "FLOP")


def _byte_rate(value: float) -> str:
    return format_rate(value, "B")


def _hidden(rows: Sequence[Row], shares: bool) -> set[str]:
    """Columns in which no row has anything to say."""
    known = {
        "time": any(row.seconds is not None for row in rows),
        "FLOP": any(row.flop is not None for row in rows),
        "FLOP/s": any(row.flop_per_second is not None for row in rows),
        "bytes/s": any(row.bytes_per_second is not None for row in rows),
        "workspace": any(row.workspace_bytes is not None for row in rows),
        "count": any(row.count > 1 for row in rows),
        "kind": any(row.kind != row.name for row in rows),
        "share": shares and any(row.share is not None for row in rows),
        "so far": shares and any(row.cumulative_share is not None for row in rows),
    }
    return {column for column, present in known.items() if not present}


def print_top(console: Console, rows: Sequence[Row], total: int, sort: str) -> None:
    """The table of ``lowtide top``."""
    if not rows:
        _print(console, "No operator matches.")
        return
    console.print(_rows_table(rows, console.width, shares=True))
    _print_rest(console, total - len(rows))
    _print(console, f"sorted by {sort}; ~ marks figures computed from shapes", style="dim")


def _print_rest(console: Console, left: int) -> None:
    if left > 0:
        _print(console, f"… and {left} more rows; --limit 0 shows all", style="dim")


def print_diff(console: Console, changes: Sequence[Change], total: int, sort: str) -> None:
    """The table of ``lowtide diff``: what got slower or larger stands first."""
    if not changes:
        _print(console, "No operator matches.")
        return
    render: Callable[[Any], str] = {"time": format_seconds, "flop": format_count}.get(sort, format_bytes)
    columns = ("operator", "count A", "count B", f"{sort} A", f"{sort} B", "change", "ratio")
    table = _table(columns, [_change_cells(change, render) for change in changes], console.width)
    for row, change in zip(table.rows, changes, strict=True):
        row.style = "red" if change.change > 0 else "green" if change.change < 0 else None
    console.print(table)
    _print_rest(console, total - len(changes))


def _change_cells(change: Change, render: Callable[[Any], str]) -> tuple[str, ...]:
    sign = "+" if change.change > 0 else "-" if change.change < 0 else ""
    return (
        change.name,
        str(change.count_a),
        str(change.count_b),
        _shown(change.a, render, change.estimated),
        _shown(change.b, render, change.estimated),
        f"{'~' if change.estimated else ''}{sign}{render(abs(change.change))}",
        _shown(change.ratio, "{:.2f}×".format),
    )
