"""``lowtide shard``."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from lowtide.commands.common import (
    SEED,
    Choice,
    json_option,
    kernels_option,
    print_json,
    read_for,
    refuse_reserved,
    say,
    target_help,
)
from lowtide.commands.shard_document import shard_plan, taken
from lowtide.commands.shard_draw import check_drawing, draw_shards
from lowtide.commands.shard_links import measured_links
from lowtide.commands.shard_simulate import LINK, MESH, simulated_text, simulated_view
from lowtide.commands.shard_task import (
    REFUSED,
    BudgetRefused,
    ShardTask,
    built_step,
    captured_step,
    update_of,
)
from lowtide.commands.shard_view import split_text, split_view
from lowtide.cost.wire import WireSpeed
from lowtide.documents import write_document
from lowtide.errors import RunError
from lowtide.files import check_outputs
from lowtide.needs import needs_torch
from lowtide.plan.budget import parse_budget
from lowtide.printable import printable
from lowtide.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from lowtide.execute.compare.shards import ShareMeasured
    from lowtide.execute.shards.tried import Chooser, ShardChoice
    from lowtide.trace.step.joint import Joint
    from lowtide.zoo.base import Built

__all__ = ["shard"]

_CUTS = ("any", "batch", "channels", "height", "width", "tokens", "features", "heads", "inner")
_MOST = 64
_SIMULATED = 1024


@click.command(short_help="Split a step over devices.")
@click.argument("target")
@click.option("--devices", type=click.IntRange(1, _SIMULATED), metavar="N", help="How many, along one axis.")
@click.option("--mesh", type=MESH, metavar="NxM", help="How many along each axis of a mesh, instead.")
@click.option(
    "--cut",
    type=Choice(_CUTS),
    default="any",
    help="Cut this wherever it can be [any: what is fastest].",
)
@click.option("--budget", default="100%", metavar="BYTES", help="For each device [100% of its plain peak].")
@click.option("--compare", "compares", is_flag=True, help="Say what other ways to split it take.")
@click.option("--simulate", is_flag=True, help="Predict a step on up to 1,024 devices, axis by axis.")
@click.option(
    "--link",
    "links",
    type=LINK,
    multiple=True,
    metavar="B/s,us",
    help="How fast devices are connected; once an axis, or once [--run: as measured; else 1GB/s,50us].",
)
@click.option("--draw", metavar="FILE", help="Write a picture: .svg, .dot or .json.")
@click.option("--device", type=click.IntRange(0), metavar="K", help="Draw this device alone [all of them].")
@kernels_option
@click.option("--run", "runs", is_flag=True, help="Start a process a device here, and run the step on them.")
@click.option("-o", "--output", metavar="FILE", help="Write all of this, for `lowtide report`.")
@click.option("--check", "checks", is_flag=True, help="Fail if results are not those of one device.")
@click.option("--double", is_flag=True, help="Run in float64, where results must agree to 1e-10.")
@click.option(
    "--time-limit",
    type=click.FloatRange(min=0.1),
    default=10.0,
    metavar="S",
    help="Seconds to plan in, each time [10].",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=1.0),
    default=600.0,
    metavar="S",
    help="Seconds after which processes are ended [600].",
)
@click.option("--seed", type=SEED, default=0, help="Of the parameters, the batch and the step [0].")
@json_option
@target_help
def shard(
    target: str,
    devices: int | None,
    mesh: tuple[int, ...] | None,
    cut: str,
    budget: str,
    compares: bool,
    simulate: bool,
    links: tuple[tuple[float, float], ...],
    draw: str | None,
    device: int | None,
    kernels: str,
    runs: bool,
    output: str | None,
    checks: bool,
    double: bool,
    time_limit: float,
    timeout: float,
    seed: int,
    as_json: bool,
) -> None:
    """Say how a step is split over devices: which dimension of each result, what moves, and what is summed.

    With `--run` every device is a process of this machine, connected by gloo. Each plans its own share inside
    the budget and runs one step; loss, gradients and updated parameters are compared with
    those of one device.
    """
    refuse_reserved(budget)
    runs = runs or checks
    if simulate and (runs or compares or draw is not None or output is not None):
        raise click.UsageError("--simulate runs, draws, compares and writes nothing; leave one of them out")
    sizes = _sizes(devices, mesh, _SIMULATED if simulate else _MOST)
    devices = prod(sizes)
    check_drawing(draw, device, devices)
    check_outputs(draw, output, inputs=[read_for(target)])
    with needs_torch("capturing a PyTorch step"):
        said = _along_axes(links, sizes, simulate=simulate and mesh is None)
        wires = [WireSpeed(*one) for one in said] if links else [WireSpeed()] * len(said)
        built = built_step(target, seed, double)
        joint, graph = captured_step(built)
    if simulate:
        from lowtide.execute.planning.step_costs import described

        view = simulated_view(joint, sizes, cut, described("cpu"), wires, time_limit)
        if as_json:
            print_json(view)
        else:
            say(simulated_text(view))
        return
    if runs and not links and cut == "any" and devices > 1:
        wires = list(measured_links(sizes, timeout))
    chooser = _chooser(joint, devices, budget, time_limit, wires[0], forced=cut != "any")
    choice = _choice(chooser, sizes, wires, cut, compares)
    shards = choice.best.shards
    view = split_view(joint, choice)
    if draw is not None:
        draw_shards(joint, shards, device, target, draw)
    shares: list[ShareMeasured] = []
    if runs:
        with tempfile.TemporaryDirectory() as folder:
            task = ShardTask(
                target,
                seed,
                shards,
                graph,
                folder,
                budget,
                kernels,
                time_limit,
                double,
                timeout,
                said if links else (),
            )
            shares = _ran(task, built)
        view |= _measured_view(shares)
    if output is not None:
        made = shard_plan(chooser, choice, target, budget, wires)
        write_document(output, msgspec.structs.replace(made, measured=tuple(map(taken, shares))))
    if as_json:
        print_json(view)
    else:
        _say(view, draw, output)
    if checks:
        _check(view, 1e-10 if double else 1e-3)


def _say(view: dict[str, Any], draw: str | None, output: str | None) -> None:
    say(split_text(view) + ("\n" + _text(view) if "bytes_per_rank" in view else ""))
    if draw is not None:
        say(f"Wrote {printable(draw)}")
    if output is not None:
        say(f"Wrote {printable(output)}; lowtide report {printable(output)} draws it")


def _check(view: dict[str, Any], limit: float) -> None:
    """Fail where results are not those of one device, or bytes not those of the plan."""
    for key, what in (("max_rel_grad_diff", "gradients"), ("max_rel_update_diff", "updated parameters")):
        if view[key] > limit:
            raise RunError(
                f"{what} differ from those of one device by {view[key]:.1e}, and by {limit:.0e} at most is "
                "expected; report this as a bug, with the target"
            )
    if view["wire_bytes"] != view["planned_wire_bytes"]:
        raise RunError(
            f"{view['wire_bytes']} bytes were sent, and {view['planned_wire_bytes']} were planned; report "
            "this as a bug, with the target"
        )


def _sizes(devices: int | None, mesh: tuple[int, ...] | None, most: int) -> tuple[int, ...]:
    """How many devices are along each axis."""
    if (devices is None) == (mesh is None):
        raise click.UsageError("say how many devices there are: --devices 4, or --mesh 2x2")
    sizes = mesh or (devices or 1,)
    if prod(sizes) > most == _MOST:
        raise click.UsageError(f"more than {_MOST} devices are simulated; give --simulate")
    if prod(sizes) > most:
        raise click.UsageError(f"a mesh has {most} devices at most; this one has {prod(sizes)}")
    return sizes


def _along_axes(
    links: Sequence[tuple[float, float]], sizes: Sequence[int], *, simulate: bool
) -> tuple[tuple[float, float], ...]:
    """What is said of the links along each axis; of a number of devices that is simulated, axes are made."""
    from lowtide.execute.shards.axes import axes_of

    count = len(axes_of(sizes[0]) if simulate else sizes)
    if len(links) not in (0, 1, count):
        raise click.UsageError(
            f"{len(links)} links are given for {count} axes of the mesh; give --link once for each, in "
            "their order, or once for all"
        )
    some = links or ((0.0, 0.0),)
    return tuple(some) if len(some) == count else tuple(some) * count


def _chooser(
    joint: Joint, devices: int, budget: str, time_limit: float, link: WireSpeed, *, forced: bool
) -> Chooser:
    from lowtide.execute.planning.step_costs import described
    from lowtide.execute.shards.tried import Chooser

    size = parse_budget(budget).bytes
    return Chooser(joint, devices, described("cpu"), link, size, time_limit, forced=forced)


def _choice(
    chooser: Chooser, sizes: Sequence[int], links: Sequence[WireSpeed], cut: str, compares: bool
) -> ShardChoice:
    from lowtide.execute.shards.choose import choose_on_mesh
    from lowtide.execute.shards.tried import choose
    from lowtide.graph.shards import Mesh

    if len(sizes) > 1:
        return choose_on_mesh(chooser, Mesh(tuple(sizes)), links, cut, compare=compares)
    return choose(chooser, cut, compare=compares)


def _ran(task: ShardTask, built: Built) -> list[ShareMeasured]:
    """What each process took."""
    from lowtide.execute.compare.shards import ShareMeasured, write_reference
    from lowtide.execute.shards.ranks import on_ranks

    write_reference(Path(task.folder), built.model, built.batch, built.loss, update_of(built))
    told, devices = Path(task.folder, "task.json"), task.shards.mesh.devices
    told.write_bytes(msgspec.json.encode(task))
    try:
        on_ranks("lowtide.commands.shard_rank", [str(told), task.folder], devices, task.seconds)
    except RunError:
        refused = Path(task.folder, REFUSED)
        if not refused.exists():
            raise
        raise msgspec.json.decode(refused.read_bytes(), type=BudgetRefused).error() from None
    files = [Path(task.folder, f"{rank}.json").read_bytes() for rank in range(devices)]
    return [msgspec.json.decode(one, type=ShareMeasured) for one in files]


def _measured_view(shares: Sequence[ShareMeasured]) -> dict[str, Any]:
    return {
        "max_rel_grad_diff": max(one.gradient_difference for one in shares),
        "max_rel_update_diff": max(one.update_difference for one in shares),
        "loss_difference": max(one.loss_difference for one in shares),
        "bytes_per_rank": [one.peak_bytes for one in shares],
        "planned_bytes_per_rank": [one.planned_bytes for one in shares],
        "resident_bytes_per_rank": [one.resident_bytes for one in shares],
        "wire_bytes": sum(one.wire_bytes for one in shares),
        "wire_bytes_per_rank": [one.wire_bytes for one in shares],
        "planned_wire_bytes": sum(one.planned_wire_bytes for one in shares),
        "budget_bytes": max(one.budget_bytes for one in shares),
        "planned_seconds_per_rank": [one.planned_seconds for one in shares],
        "links": [msgspec.to_builtins(one) for one in shares[0].speeds],
    }


def _text(view: dict[str, Any]) -> str:
    lines = [f"gradients  within {view['max_rel_grad_diff']:.1e} of one device"]
    lines.append(f"updates    within {view['max_rel_update_diff']:.1e} of one device")
    pairs = zip(view["bytes_per_rank"], view["planned_bytes_per_rank"], strict=True)
    for rank, (peak, planned) in enumerate(pairs):
        lines.append(f"rank {rank:<5} {format_bytes(peak)}, planned {format_bytes(planned)}")
    sent, planned = (format_bytes(view[key]) for key in ("wire_bytes", "planned_wire_bytes"))
    lines.append(f"wire       {sent} in one step, of all devices together, planned {planned}")
    sizes = view.get("mesh") or [view["devices"]]
    for axis, (size, one) in enumerate(zip(sizes, view["links"], strict=True)):
        along = f"along axis {axis}, " if len(sizes) > 1 else ""
        lines.append(f"link       {along}{WireSpeed(**one).words(size)}")
    longest = max(view["planned_seconds_per_rank"])
    lines.append(f"predicted  {format_seconds(longest)} a step by the plans of devices, with communication")
    return "\n".join(lines)
