"""``lowtide top``."""

from __future__ import annotations

import click

from lowtide.commands.common import check_kind, console, default_sort, load, print_json, select, table_options
from lowtide.report.rows import ranked, rows_by_name
from lowtide.report.terminal import print_top

__all__ = ["top"]


@click.command(short_help="List the operators that take the most.")
@click.argument("file")
@table_options
def top(
    file: str,
    by: str,
    sort: str | None,
    pattern: str | None,
    kind: str | None,
    limit: int,
    host: bool,
    as_json: bool,
) -> None:
    """List the operators of a step that take the most time, FLOP, bytes or workspace.

    Shares are of the operators that are listed; rates are figures over the operator's own time.
    """
    rows = rows_by_name(load(file).step, host=host)
    check_kind(kind, rows)
    rows = select(rows, by=by, pattern=pattern, kind=kind)
    sort = sort or default_sort(rows)
    rows = ranked(rows, sort)
    shown = rows[:limit] if limit else rows
    if as_json:
        print_json(
            {"file": file, "by": by, "sort": sort, "total": len(rows), "rows": [r.as_json() for r in shown]}
        )
    else:
        print_top(console(), shown, len(rows), sort)
