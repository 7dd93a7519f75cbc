"""``lowtide formats``."""

from __future__ import annotations

import click

from lowtide.commands.common import json_option, print_json, say
from lowtide.formats.registry import FORMATS

__all__ = ["formats"]


@click.command()
@json_option
def formats(as_json: bool) -> None:
    """List the formats that are read and written."""
    rows = [
        {"name": f.name, "title": f.title, "reads": f.read is not None, "writes": f.write is not None}
        for f in FORMATS.values()
    ]
    if as_json:
        print_json(rows)
        return
    for row in rows:
        verbs = " and ".join(verb for verb in ("reads", "writes") if row[verb])
        say(f"{row['name']:<11} {verbs:<17} {row['title']}")
