"""``lowtide diff``."""

from __future__ import annotations

import click

from lowtide.commands.common import check_kind, console, default_sort, load, print_json, select, table_options
from lowtide.report.compare import compare
from lowtide.report.rows import rows_by_name
from lowtide.report.terminal import print_diff

__all__ = ["diff"]


@click.command(short_help="Compare two profiles.")
@click.argument("a")
@click.argument("b")
@table_options
def diff(
    a: str,
    b: str,
    by: str,
    sort: str | None,
    pattern: str | None,
    kind: str | None,
    limit: int,
    host: bool,
    as_json: bool,
) -> None:
    """Compare two profiles: what got slower or larger from A to B stands first.

    Operators are matched by name, or by type with `--by type`.
    """
    sides = [rows_by_name(load(file).step, host=host) for file in (a, b)]
    check_kind(kind, [row for rows in sides for row in rows])
    sort = sort or default_sort(*sides)
    left, right = (select(rows, by=by, pattern=pattern, kind=kind) for rows in sides)
    changes = compare(left, right, sort)
    shown = changes[:limit] if limit else changes
    if as_json:
        rows = [change.as_json() for change in shown]
        print_json({"a": a, "b": b, "by": by, "sort": sort, "total": len(changes), "rows": rows})
    else:
        print_diff(console(), shown, len(changes), sort)
