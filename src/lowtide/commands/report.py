"""``lowtide report``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

import click
import msgspec

from lowtide import __version__
from lowtide.commands.common import checked_graph, json_option, print_json, say
from lowtide.cost.device import Device, cache_folder, load_device, read_device
from lowtide.cost.step import Step
from lowtide.documents import encode_document, kind_of, read_document
from lowtide.errors import FileError, LowtideError
from lowtide.files import check_outputs, read_bytes, write_atomically
from lowtide.formats.registry import read_file
from lowtide.graph import Recording
from lowtide.plan.make.sweep import Sweep
from lowtide.plan.result.measured_run import MeasuredRun
from lowtide.plan.result.plan import Plan
from lowtide.plan.result.shard_plan import ShardPlan, valid_shard_plan
from lowtide.plan.result.validate import valid_plan, valid_recording, valid_run
from lowtide.printable import printable
from lowtide.report.page.html import html_page
from lowtide.report.page.make import Given, Source, report_of
from lowtide.report.page.types import Report
from lowtide.units import format_bytes, format_cost

__all__ = ["report"]

_OURS: dict[str, type[msgspec.Struct]] = {
    "plan": Plan, "run": MeasuredRun, "timeline": Recording, "sweep": Sweep, "shards": ShardPlan,
}  # fmt: skip


@click.command(short_help="Write a page on what a step does with memory.")
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option(
    "-o", "--output", default="report.html", metavar="OUT", help="The page, or .json: its data [report.html]."
)
@click.option("--title", default="", help="What stands above the page; default: the name of the first file.")
@click.option(
    "--rivals",
    type=click.FloatRange(min=0.0),
    default=5.0,
    metavar="S",
    help="Seconds for the planners of others on the trade-off curve; 0: none [5].",
)
@json_option
def report(files: tuple[str, ...], output: str, title: str, rivals: float, as_json: bool) -> None:
    """Write a page on what a step does with memory: one file that opens offline.

    A FILE is a step in any format (a graph, a profile), a plan, a sweep, a run that was measured
    (`lowtide run TARGET -o FILE`), a timeline, a step that is split over devices (`lowtide shard TARGET
    --devices N -o FILE`), or a device (`lowtide doctor`). Several of them are shown together; ways to run a
    step are compared.
    """
    check_outputs(output, inputs=list(files))
    given = [Given(_name(file, files), _read(file)) for file in files]
    given += _device_of(given)
    by = f"Lowtide {__version__}"
    made = report_of(given, title=title or _title(given), rival_seconds=rivals, made_by=by)
    if not made.runs and made.tradeoff is None:
        raise FileError("nothing to report on: give a step, a plan, a sweep or a measured run")
    data = encode_document(made) if output.endswith(".json") else html_page(made)
    write_atomically(output, data)
    if as_json:
        print_json(_view(made, output, len(data)))
    else:
        _print(made, output, len(data))


def _title(given: Sequence[Given]) -> str:
    """The step, where its name is known, else the ways to run it."""
    named = [one.value for one in given if isinstance(one.value, MeasuredRun | ShardPlan)]
    targets = list(dict.fromkeys(value.target for value in named if value.target))
    if targets:
        return " and ".join(targets[:3])
    shown = [one.name for one in given if not isinstance(one.value, Device | Sweep | Recording)]
    return " and ".join(shown[:3]) or given[0].name


def _name(file: str, files: Sequence[str]) -> str:
    """A file without its folder and ending, as far as that tells it from the others."""
    stem, *stems = [PurePath(one.removesuffix(".gz")).stem for one in (file, *files)]
    return stem if stems.count(stem) == 1 else file


def _read(file: str) -> Source:
    kind = kind_of(read_bytes(file))
    if kind == "device":
        return read_device(file)
    if kind not in _OURS:
        step = read_file(file).step
        checked_graph(step.graph, file)
        return step
    found: Any = read_document(file, _OURS[kind])
    try:
        return _checked(found)
    except LowtideError as error:
        raise type(error)(f"{printable(file)}: {error}") from None


def _checked(found: Any) -> Source:
    """The same, if what it says is so."""
    if isinstance(found, Plan):
        return valid_plan(found)
    if isinstance(found, MeasuredRun):
        return valid_run(found)
    if isinstance(found, Recording):
        return valid_recording(found)
    if isinstance(found, ShardPlan):
        return valid_shard_plan(found)
    value: Source = found
    return value


def _device_of(given: Sequence[Given]) -> list[Given]:
    """What the device of a profile or a run does at most, where it was measured here and nobody gives it."""
    if any(isinstance(one.value, Device) for one in given):
        return []
    for one in given:
        if isinstance(one.value, Step | MeasuredRun) and one.value.environment is not None:
            try:
                device = load_device(cache_folder(), one.value.environment)
            except LowtideError:
                return []
            return [] if device is None else [Given(device.name, device)]
    return []


def _view(made: Report, output: str, size: int) -> dict[str, Any]:
    """What was written."""
    runs = [
        {
            "name": run.name,
            "budget_bytes": run.budget_bytes,
            "predicted": msgspec.to_builtins(run.predicted),
            "measured": msgspec.to_builtins(run.measured),
            "check": msgspec.to_builtins(run.check),
        }
        for run in made.runs
    ]
    view = {"output": output, "bytes": size, "title": made.title, "runs": runs, "notes": list(made.notes)}
    if made.shards:
        view["shards"] = [
            {"name": one.name, "mesh": one.mesh, "predicted": msgspec.to_builtins(one.split)}
            for one in made.shards
        ]
    return view


def _print(made: Report, output: str, size: int) -> None:
    for run in made.runs:
        origin = made.steps[run.step].origin if run.step < len(made.steps) else ""
        peaks = [
            f"{what} {format_bytes(side.peak_bytes)}"
            + (f" in {format_cost(side.seconds, origin)}" if side.seconds is not None else "")
            for what, side in (("predicted", run.predicted), ("measured", run.measured))
            if side is not None and side.peak_bytes is not None
        ]
        say(f"  {run.name}: {', '.join(peaks) or 'no figures'}")
    for note in made.notes:
        say(f"  {note}")
    say(f"Wrote {printable(output)} ({format_bytes(size)})")
