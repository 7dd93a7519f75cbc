"""``lowtide convert``."""

from __future__ import annotations

from pathlib import Path

import click

from lowtide.commands.common import json_option, print_json
from lowtide.formats.registry import format_named, read_file, write_file

__all__ = ["convert"]


@click.command()
@click.argument("file", type=click.Path())
@click.option(
    "--to", "target", required=True, metavar="FORMAT", help="A format that `lowtide formats` lists."
)
@click.option("-o", "--output", required=True, type=click.Path(), metavar="OUT", help="The file to write.")
@json_option
def convert(file: str, target: str, output: str, as_json: bool) -> None:
    """Write a step in another format, and say what that format cannot hold."""
    format_named(target)
    if Path(output).exists() and Path(file).exists() and Path(output).samefile(file):
        raise click.BadParameter(f"{output} is the file that is read; name another", param_hint="-o")
    loaded = read_file(file)
    written = write_file(loaded.step, target, output)
    if as_json:
        losses = list(written.losses)
        print_json({"from": loaded.format.name, "to": target, "output": output, "losses": losses})
        return
    for loss in written.losses:
        click.echo(f"not held by {target}: {loss}", err=True)
    click.echo(f"Wrote {output}")
