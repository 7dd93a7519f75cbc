"""``lowtide convert``."""

from __future__ import annotations

import click

from lowtide.commands.common import json_option, load, print_json, say
from lowtide.files import check_outputs
from lowtide.formats.registry import format_named, write_file
from lowtide.printable import printable

__all__ = ["convert"]


@click.command(short_help="Write a step in another format.")
@click.argument("file")
@click.option(
    "--to", "target", required=True, metavar="FORMAT", help="A format that `lowtide formats` lists."
)
@click.option("-o", "--output", required=True, metavar="OUT", help="The file to write.")
@click.option(
    "--fold",
    type=click.IntRange(min=3, max=500),
    metavar="N",
    help="Of dot and svg: draw at most N boxes, operators of one module together [svg: 24 if it is large].",
)
@click.option("--all", "whole", is_flag=True, help="Of dot and svg: draw every tensor and operator.")
@json_option
def convert(file: str, target: str, output: str, fold: int | None, whole: bool, as_json: bool) -> None:
    """Write a step in another format, and say what that format cannot hold."""
    if fold is not None and whole:
        raise click.UsageError("--fold draws groups and --all every operator; give one of them")
    format_named(target)
    check_outputs(output, inputs=[file])
    loaded = load(file)
    written = write_file(loaded.step, target, output, boxes="all" if whole else fold)
    if as_json:
        losses = list(written.losses)
        print_json({"from": loaded.format.name, "to": target, "output": output, "losses": losses})
        return
    for loss in written.losses:
        say(f"not held by {target}: {loss}", err=True)
    say(f"Wrote {printable(output)}")
