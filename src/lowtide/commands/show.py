"""``lowtide show``."""

from __future__ import annotations

import click

from lowtide.commands.common import console, json_option, load, print_json
from lowtide.formats.registry import FORMATS
from lowtide.report.summary import summarise
from lowtide.report.terminal import print_summary

__all__ = ["show"]


@click.command()
@click.argument("file")
@json_option
def show(file: str, as_json: bool) -> None:
    """Say what a step is made of and where its memory and time go.

    FILE is a step in any format that `lowtide formats` lists; it is recognised by its contents.
    """
    loaded = load(file)
    view = summarise(loaded.step, loaded.format, FORMATS.get(loaded.step.format, loaded.format))
    if as_json:
        print_json(view)
    else:
        print_summary(console(), file, loaded.format.title, view)
