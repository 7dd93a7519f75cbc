"""``lowtide convert``."""

from __future__ import annotations

import click

from lowtide.commands.common import json_option, print_json, say
from lowtide.files import check_outputs
from lowtide.formats.registry import format_named, read_file, write_file
from lowtide.printable import printable

__all__ = ["convert"]


@click.command(short_help="Write a step in another format.")
@click.argument("file")
@click.option(
    "--to", "target", required=True, metavar="FORMAT", help="A format that `lowtide formats` lists."
)
@click.option("-o", "--output", required=True, metavar="OUT", help="The file to write.")
@json_option
def convert(file: str, target: str, output: str, as_json: bool) -> None:
    """Write a step in another format, and say what that format cannot hold."""
    format_named(target)
    check_outputs(output, inputs=[file])
    loaded = read_file(file)
    written = write_file(loaded.step, target, output)
    if as_json:
        losses = list(written.losses)
        print_json({"from": loaded.format.name, "to": target, "output": output, "losses": losses})
        return
    for loss in written.losses:
        say(f"not held by {target}: {loss}", err=True)
    say(f"Wrote {printable(output)}")
