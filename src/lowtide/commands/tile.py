"""``lowtide tile``."""

from __future__ import annotations

import re
from dataclasses import asdict
from math import prod
from typing import Any

import click

from lowtide.commands.common import (
    Choice,
    checked_graph,
    is_step_file,
    json_option,
    print_json,
    read_for,
    say,
    target_help,
)
from lowtide.errors import TileError
from lowtide.files import check_outputs, write_atomically
from lowtide.formats.registry import read_file
from lowtide.formats.tilelog.tiled import format_tiles, tile_records
from lowtide.graph import Graph
from lowtide.graph.access import check_calls
from lowtide.graph.tiles import Cut, Own, tile_input, tile_output
from lowtide.needs import needs_torch
from lowtide.printable import printable
from lowtide.report.tiles import drawn, table, tiles_view
from lowtide.report.tiles_svg import tiles_svg
from lowtide.suggest import did_you_mean
from lowtide.units import format_seconds

__all__ = ["tile"]

_DIMS = {"batch": 0, "height": -2, "width": -1}
_MOST_TILES = 10_000


def _grid(_: click.Context, __: click.Parameter, text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"[1-9][0-9]{0,5}(x[1-9][0-9]{0,5})*", text, re.ASCII):
        raise click.BadParameter(
            f"{text!r} is no grid; write rows x columns, as in 4x4, or 8 with --dims batch"
        )
    grid = tuple(map(int, text.split("x")))
    if prod(grid) > _MOST_TILES:
        raise click.BadParameter(
            f"{text} would be {prod(grid):,} tiles; at most {_MOST_TILES:,} are possible"
        )
    return grid


def _dims(_: click.Context, __: click.Parameter, text: str) -> tuple[int, ...]:
    found = []
    for word in text.split(","):
        if word not in _DIMS and not re.fullmatch(r"-?[0-9]{1,2}", word, re.ASCII):
            hint = did_you_mean(word, _DIMS)
            raise click.BadParameter(f"{word!r} is no dimension: {', '.join(_DIMS)}, or a number.{hint}")
        found.append(_DIMS[word] if word in _DIMS else int(word))
    return tuple(found)


@click.command(short_help="Say what each tile of a step needs.")
@click.argument("target", metavar="FILE|TARGET")
@click.option("--grid", required=True, callback=_grid, metavar="RxC", help="Rows x columns of tiles, as 4x4.")
@click.option(
    "--own",
    type=Choice(["output", "input"]),
    default="output",
    help="What is cut into disjoint parts: the result in front of the loss, or the gradient of the input "
    "[output].",
)
@click.option(
    "--dims",
    default="height,width",
    callback=_dims,
    metavar="D,D",
    help="Dimensions that are cut: batch, height, width, or numbers [height,width].",
)
@click.option("--until", default="", metavar="NAME", help="The operator whose result is cut [the last].")
@click.option("--records", is_flag=True, help="Print the records of every tile, as a tile log has them.")
@click.option("--run", is_flag=True, help="Run the step in these tiles too, and compare it with the whole.")
@click.option("--svg", metavar="FILE", help="Write a picture of one tile in every tensor.")
@json_option
@target_help
def tile(
    target: str,
    grid: tuple[int, ...],
    own: Own,
    dims: tuple[int, ...],
    until: str,
    records: bool,
    run: bool,
    svg: str | None,
    as_json: bool,
) -> None:
    """Cut a step into tiles and say what each needs: parts, halos, padding, and what is computed twice.

    FILE is a captured step, as `lowtide profile` writes it. Nothing is run, unless `--run` is given.
    """
    if len(grid) != len(dims):
        given = "x".join(map(str, grid))
        raise click.UsageError(
            f"--grid {given} has {len(grid)} numbers for {len(dims)} dimensions; give one for each: "
            "--grid 4x4, or --grid 4 --dims batch"
        )
    if records and (own != "input" or as_json or run):
        raise click.UsageError("--records prints the records of --own input, as text, and runs nothing")
    if svg is not None and len(grid) != 2:
        raise click.UsageError("--svg draws rows and columns: give a grid of two numbers")
    check_outputs(svg, inputs=[read_for(target)])
    name, graph = _graph(target, own)
    cut = Cut(grid, dims)
    tiling = tile_input(graph, cut, until) if own == "input" else tile_output(graph, cut, until)
    if records:
        say(format_tiles(tile_records(graph, tiling)))
        return
    view: dict[str, Any] = tiles_view(name, graph, tiling)
    if run:
        view["run"] = _ran(target, cut, until, own)
    if svg is not None:
        write_atomically(svg, tiles_svg(view).encode())
    if as_json:
        print_json(view)
        return
    say("\n".join((*table(view), *drawn(view))))
    if run:
        say(_told(view["run"]))
    if svg is not None:
        say(f"Wrote {printable(svg)}")


def _ran(target: str, cut: Cut, until: str, own: Own) -> dict[str, Any]:
    """What running the step in tiles shows."""
    if is_step_file(target):
        raise TileError(f"{target}: a file tells what a step does and cannot be run; give its TARGET")
    with needs_torch("running a PyTorch step"):
        from lowtide import zoo
        from lowtide.execute.compare.tiles import run_tiles
    built = zoo.build(target)
    if not built.trains:
        raise TileError(f"{built.name} has no backward pass, and --run compares gradients: leave it out")
    return asdict(run_tiles(built.loss, built.model, built.batch, cut, until=until, own=own))


def _told(run: dict[str, Any]) -> str:
    seconds = format_seconds(run["seconds"]), format_seconds(run["whole_seconds"])
    return (
        f"Run in {run['tiles']} tiles, forward and backward, and as a whole: the loss differs by "
        f"{run['loss_difference']:.1e}, {run['gradients']} gradients by {run['largest_difference']:.1e} of "
        f"their largest element at most; {seconds[0]} a step, the whole {seconds[1]}"
    )


def _graph(target: str, own: str) -> tuple[str, Graph]:
    """The step's graph and its name."""
    if is_step_file(target):
        graph = read_file(target).step.graph
        if not any(op.arguments is not None for op in graph.ops):
            raise TileError(
                f"{printable(target)}: the file does not say with which arguments operators are called, so "
                "nobody knows which parts of their inputs they read; capture the step with `lowtide profile`"
            )
        return target, checked_graph(graph, target, check_calls)
    with needs_torch("capturing a PyTorch step"):
        from lowtide import zoo
        from lowtide.execute.compare.graphs import graph_of
    built = zoo.build(target)
    example = (built.model, *built.batch)
    return built.name, graph_of(built.loss, example, trains=built.trains, input_gradients=own == "input")
