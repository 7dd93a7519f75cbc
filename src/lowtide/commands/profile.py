"""``lowtide profile``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lowtide.commands.common import (
    Choice,
    json_option,
    kernels_option,
    print_json,
    read_for,
    say,
    target_help,
)
from lowtide.cost import Step
from lowtide.cost.cache import CostCache, open_cache
from lowtide.cost.device import cache_folder, load_device, store_device
from lowtide.errors import FileError
from lowtide.files import check_outputs
from lowtide.formats.registry import write_file
from lowtide.needs import needs_torch
from lowtide.printable import printable
from lowtide.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from lowtide.execute.compare.profile import Profile
    from lowtide.zoo import Built

__all__ = ["profile"]


@click.command(short_help="Capture a step and measure its operators.")
@click.argument("target")
@click.option("-o", "--output", required=True, metavar="OUT", help="The file to write.")
@click.option("--device", type=Choice(["cpu", "cuda"]), help="Default: cuda where there is one.")
@click.option(
    "--cost",
    type=Choice(["measured", "estimated"]),
    default="measured",
    show_default=True,
    help="Run every operator, or compute costs from shapes and from what the device does at most.",
)
@click.option(
    "--time-limit",
    type=click.FloatRange(min=0),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="No operator is repeated after this; the step itself still runs to its end.",
)
@kernels_option
@click.option("--fresh", is_flag=True, help="Measure again what the cache knows.")
@json_option
@target_help
def profile(
    target: str,
    output: str,
    device: str | None,
    cost: str,
    time_limit: float,
    kernels: str,
    fresh: bool,
    as_json: bool,
) -> None:
    """Capture a training step, measure its operators, and write the step with all figures.

    What was measured before on this device with these versions is taken from a cache.
    """
    check_outputs(output, inputs=[read_for(target)])
    if kernels == "fused" and cost != "measured":
        raise click.UsageError("fused kernels are compiled and measured: leave out --cost")
    with needs_torch("profiling"):
        from lowtide.cost.probe import best_device
        from lowtide.zoo import build
    device = device or best_device()
    built = build(target, device=device)
    if cost == "measured":
        made = _measured(built, device, time_limit, kernels, fresh)
    else:
        made = _estimated(built, device)
    write_file(made.step, "native", output)
    view = _view(made, built.name, output, device, cost)
    if as_json:
        print_json(view)
    else:
        _print(view)


def _measured(built: Built, device: str, time_limit: float, kernels: str, fresh: bool) -> Profile:
    from lowtide.cost.probe import environment
    from lowtide.execute.compare.profile import Measuring, measured_profile

    where = environment(device)
    folder = cache_folder()
    cache = open_cache(folder, where)
    if cache.problem:
        say(cache.problem, err=True)
    if fresh:
        cache = CostCache(cache.path, where, {})
    example = (built.model, *built.batch)
    options: dict[str, Any] = {
        "trains": built.trains,
        "update": built.ending,
        "kernels": kernels,
    }
    try:
        with _progress(built.name) as progress:
            measuring = Measuring(cache, time_limit, progress)
            return measured_profile(built.loss, example, where, measuring=measuring, **options)
    finally:
        try:
            cache.save()
        except FileError as error:
            say(f"measurements are not kept: {error}", err=True)


def _estimated(built: Built, kind: str) -> Profile:
    from lowtide.cost.probe import environment, measure_device
    from lowtide.execute.compare.profile import estimated_profile

    folder = cache_folder()
    device = load_device(folder, environment(kind))
    if device is None:
        device = measure_device(kind)
        try:
            store_device(folder, device)
        except FileError as error:
            say(f"the device description is not kept: {error}", err=True)
    example = (built.model, *built.batch)
    return estimated_profile(built.loss, example, device, trains=built.trains, update=built.ending)


@contextlib.contextmanager
def _progress(name: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on standard error while operators are measured, gone when done; none where nobody looks."""
    err = Console(stderr=True)
    about = TextColumn("{task.description}", markup=False)
    columns = (about, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task(f"measuring {printable(name)}", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _view(made: Profile, target: str, output: str, device: str, cost: str) -> dict[str, Any]:
    step, measured = made.step, made.measured
    environment = step.environment
    assert environment is not None
    spans = [span for span in step.spans if not span.host]
    return {
        "target": target,
        "output": output,
        "device": device,
        "device_name": environment.name,
        "versions": environment.versions,
        "cost": cost,
        "operators": len(step.graph.ops),
        "signatures": measured.signatures if measured else None,
        "from_cache": measured.from_cache if measured else None,
        "timed_once": measured.once if measured else None,
        "disturbed": measured.disturbed if measured else None,
        "seconds": _total(step, "seconds"),
        "step_seconds": max(s.end for s in spans) - min(s.start for s in spans) if spans else None,
        "alone_seconds": None if made.launching is None else made.launching.step_seconds,
        "host_seconds": None if made.launching is None else made.launching.host_seconds,
        "flop": _total(step, "flop"),
        "bytes_moved": _total(step, "bytes_moved"),
        "workspace_bytes": max(
            (c.workspace_bytes.value for c in step.costs if c.workspace_bytes), default=None
        ),
        "peak_bytes": step.lifetimes().peak_bytes,
    }


def _total(step: Step, name: str) -> Any:
    figures = [getattr(cost, name) for cost in step.costs]
    return sum(figure.value for figure in figures if figure is not None)


def _print(view: dict[str, Any]) -> None:
    torch = view["versions"]["torch"]
    say(f"{printable(view['target'])} on {view['device']} ({view['device_name']}, torch {torch})")
    mark = "~" if view["cost"] == "estimated" else ""
    if view["cost"] == "measured":
        once = f", {view['timed_once']} timed on a single run" if view["timed_once"] else ""
        kinds = f"{view['signatures']} different"
        cached = f"{view['from_cache']} from the cache"
        say(f"  operators   {view['operators']}, {kinds}; {cached}{once}")
    else:
        say(f"  operators   {view['operators']}, estimated from shapes")
    if view["disturbed"]:
        say(f"  disturbed   {view['disturbed']} measured while the machine was busy: not kept, run it again")
    step = view["step_seconds"]
    whole = "" if step is None else f"; one step took {format_seconds(step)}"
    say(f"  time        {mark}{format_seconds(view['seconds'])} in operators{whole}")
    if view["host_seconds"] is not None:
        share = f"{view['host_seconds'] / view['alone_seconds']:.0%}"
        alone = f"{format_seconds(view['alone_seconds'])} when nobody watches"
        say(f"  host        {format_seconds(view['host_seconds'])} to launch a step, {share} of {alone}")
    say(f"  work        {format_count(view['flop'], 'FLOP')}, {format_bytes(view['bytes_moved'])} moved")
    workspace = view["workspace_bytes"]
    largest = "" if workspace is None else f", largest workspace {format_bytes(workspace)}"
    say(f"  memory      peak {format_bytes(view['peak_bytes'])} in program order{largest}")
    output = printable(view["output"])
    say(f"Wrote {output}")
    say(f"Next: lowtide top {output}")
