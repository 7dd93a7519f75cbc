"""``lowtide shard``."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from lowtide.commands.common import SEED, Choice, json_option, kernels_option, print_json, say, target_help
from lowtide.commands.shard_task import ShardTask, step_of
from lowtide.errors import RunError
from lowtide.graph.shards import Shards
from lowtide.needs import needs_torch
from lowtide.plan.budget import parse_budget
from lowtide.plan.make.cheapest import Chosen, cheapest
from lowtide.units import format_bytes

if TYPE_CHECKING:
    from lowtide.trace.step.joint import Joint

__all__ = ["shard"]

_CUTS = {"any": None, "batch": (0,), "channels": (1,), "height": (2,), "width": (3,), "tokens": (1,)}
_MOST = 64
_FREE = 1e18
"""Bytes a second: where somebody says what to cut, all of that is cut, whatever moving it takes."""


@click.command(short_help="Split a step over devices.")
@click.argument("target")
@click.option("--devices", required=True, type=click.IntRange(1, _MOST), metavar="N", help="How many.")
@click.option(
    "--cut",
    type=Choice(list(_CUTS)),
    default="any",
    help="Cut this wherever it can be [any: what is fastest].",
)
@click.option("--budget", default="100%", metavar="BYTES", help="For each device [100% of its plain peak].")
@kernels_option
@click.option("--run", "runs", is_flag=True, help="Start a process a device here, and run the step on them.")
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
    devices: int,
    cut: str,
    budget: str,
    kernels: str,
    runs: bool,
    checks: bool,
    double: bool,
    time_limit: float,
    timeout: float,
    seed: int,
    as_json: bool,
) -> None:
    """Say how a step is split over devices: which dimension of each result, what moves, and what is summed.

    With `--run` every device is a process of this machine, connected by gloo. Each plans its own share inside
    the budget and runs one step; loss and gradients are compared with those of one device.
    """
    parse_budget(budget)
    with needs_torch("capturing a PyTorch step"):
        joint, graph = step_of(target, seed, double)
    shards, found = _split(joint, devices, cut, time_limit)
    view = _view(joint, shards, found)
    if runs or checks:
        task = ShardTask(target, seed, shards, graph, budget, kernels, time_limit, double, timeout)
        view |= _ran(task, devices)
    if as_json:
        print_json(view)
    else:
        say(_text(view))
    limit = 1e-10 if double else 1e-3
    if checks and view["max_rel_grad_diff"] > limit:
        raise RunError(
            f"gradients differ from those of one device by {view['max_rel_grad_diff']:.1e}, and by "
            f"{limit:.0e} at most is expected; report this as a bug, with the target"
        )


def _split(joint: Joint, devices: int, cut: str, time_limit: float) -> tuple[Shards, Chosen]:
    from lowtide.cost.device import cache_folder, load_device, store_device
    from lowtide.cost.estimate import estimate
    from lowtide.cost.probe import environment, measure_device
    from lowtide.trace.shards.ways import ShardWays, WireSpeed

    device = load_device(cache_folder(), environment("cpu"))
    if device is None:
        device = measure_device("cpu")
        store_device(cache_folder(), device)
    seconds = {k: one.seconds.value for k, one in enumerate(estimate(joint.graph, device)) if one.seconds}
    link = WireSpeed() if cut == "any" else WireSpeed(_FREE, 0.0)
    ways = ShardWays(joint, devices, seconds, link, _CUTS[cut])
    found = cheapest(ways.alone, ways.pairs, time_limit)
    return ways.shards(found.choices), found


def _view(joint: Joint, shards: Shards, found: Chosen) -> dict[str, Any]:
    graph = joint.graph
    forward = [k for k, op in enumerate(graph.ops) if op.phase.value == "forward"]
    return {
        "devices": shards.mesh.devices,
        "operators": len(forward),
        "split_operators": len(shards.operators),
        "predicted_seconds": found.cost,
        "bound_seconds": found.bound,
        "parameters": {
            graph.tensors[t].label: cut[0] for t, cut in shards.leaves.items() if cut[0] is not None
        },
        "results": [
            {
                "operator": graph.ops[k].label,
                "kind": graph.ops[k].kind,
                "cut": share.cut[0],
                "summed_over": share.over[0],
            }
            for k, share in sorted(shards.operators.items())
        ],
    }


def _ran(task: ShardTask, devices: int) -> dict[str, Any]:
    from lowtide.execute.shards.compare import ShareMeasured
    from lowtide.execute.shards.ranks import on_ranks

    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder, "task.json")
        told.write_bytes(msgspec.json.encode(task))
        on_ranks("lowtide.commands.shard_rank", [str(told), folder], devices, task.seconds)
        files = [Path(folder, f"{rank}.json").read_bytes() for rank in range(devices)]
    shares = [msgspec.json.decode(one, type=ShareMeasured) for one in files]
    return {
        "max_rel_grad_diff": max(one.gradient_difference for one in shares),
        "loss_difference": max(one.loss_difference for one in shares),
        "bytes_per_rank": [one.peak_bytes for one in shares],
        "planned_bytes_per_rank": [one.planned_bytes for one in shares],
        "resident_bytes_per_rank": [one.resident_bytes for one in shares],
        "wire_bytes": sum(one.wire_bytes for one in shares),
        "budget_bytes": max(one.budget_bytes for one in shares),
    }


def _text(view: dict[str, Any]) -> str:
    lines = [
        f"{view['devices']} devices: {view['split_operators']} of {view['operators']} operators of forward "
        "are split"
    ]
    for one in view["results"]:
        how = f"dimension {one['cut']}" if one["cut"] is not None else f"a part of sum {one['summed_over']}"
        lines.append(f"  {one['operator']:<32.32} {one['kind']:<36.36} {how}")
    for name, dim in view["parameters"].items():
        lines.append(f"  {name:<32.32} {'input or parameter':<36} dimension {dim}")
    if "bytes_per_rank" in view:
        lines.append(f"gradients  within {view['max_rel_grad_diff']:.1e} of one device")
        pairs = zip(view["bytes_per_rank"], view["planned_bytes_per_rank"], strict=True)
        for rank, (peak, planned) in enumerate(pairs):
            lines.append(f"rank {rank:<5} {format_bytes(peak)}, planned {format_bytes(planned)}")
        lines.append(f"wire       {format_bytes(view['wire_bytes'])} in one step, of all devices together")
    return "\n".join(lines)
