"""``lowtide plan``."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import click

from lowtide.commands.before import with_step_before
from lowtide.commands.common import (
    Choice,
    checked_graph,
    is_step_file,
    json_option,
    kernels_option,
    offload_option,
    print_json,
    read_for,
    refuse_reserved,
    say,
    say_written,
    target_help,
)
from lowtide.cost import Step
from lowtide.cost.unit import unit_seconds
from lowtide.documents import write_document
from lowtide.errors import InfeasibleError, PlanError
from lowtide.files import check_outputs, is_file
from lowtide.formats.registry import read_file
from lowtide.graph import Graph
from lowtide.needs import needs_torch
from lowtide.nested import leaves
from lowtide.plan.budget import Budget
from lowtide.plan.make.make_plan import make_plan
from lowtide.plan.make.sweep import Point, Sweep, sweep, sweep_by
from lowtide.plan.program.copy_lanes import Link
from lowtide.plan.program.costs import Costs
from lowtide.plan.program.in_place import pointwise
from lowtide.plan.program.short_reruns import short_seconds
from lowtide.plan.request import ORIGINS, DeviceRoom, Limits, PlanRequest, usual_methods
from lowtide.plan.result.plan import Plan, by_methods
from lowtide.printable import printable
from lowtide.units import format_bytes, format_cost

if TYPE_CHECKING:
    from lowtide.zoo import Built

__all__ = ["plan"]


_SMALLEST_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class _Source:
    """What is to be planned, from a file or from a captured step."""

    name: str
    graph: Graph
    costs: Costs
    able: tuple[int, ...] = ()
    room: DeviceRoom = field(default_factory=DeviceRoom)


@click.command(short_help="Find the fastest program inside a budget.")
@click.argument("target", metavar="FILE|TARGET")
@click.option("--budget", metavar="BYTES", help="8GiB, 4500MiB, 40% of the plain peak, or auto.")
@click.option("--sweep", "sweeping", is_flag=True, help="The whole trade-off between memory and time.")
@click.option(
    "--only",
    default=None,
    metavar="METHODS",
    help="recompute, offload, tile, or several with commas [auto; of a file and for a sweep: recompute].",
)
@kernels_option
@offload_option
@click.option(
    "--cost",
    default=None,
    metavar="COST",
    help="measured, estimated, unit, or a FILE with costs [measured, or what the file has].",
)
@click.option(
    "--device", type=Choice(["cpu", "cuda"]), help="For a TARGET; default: cuda where there is one."
)
@click.option(
    "--time-limit", type=click.FloatRange(min=0.1), default=10.0, metavar="S", help="A budget [10]."
)
@click.option("--seed", type=click.IntRange(0, 2**48), default=0, help="Of the search [0].")
@click.option("-o", "--output", metavar="FILE", help="Write the plan, or the sweep.")
@click.option("--fresh", is_flag=True, help="Plan anew what the cache knows.")
@click.option("--explain", is_flag=True, help="What is kept, recomputed, offloaded; who is live at the peak.")
@json_option
@target_help
def plan(
    target: str,
    budget: str | None,
    sweeping: bool,
    only: str | None,
    kernels: str,
    offload: str,
    cost: str | None,
    device: str | None,
    time_limit: float,
    seed: int,
    output: str | None,
    fresh: bool,
    explain: bool,
    as_json: bool,
) -> None:
    """Find the fastest program whose peak stays inside a budget, and prove how good it is.

    FILE is a step in any format that says in which order operators run.
    """
    if budget is not None and sweeping:
        raise click.UsageError("--sweep plans for all budgets: leave out --budget, or leave out --sweep")
    if budget is None and not sweeping:
        raise click.UsageError("give a --budget, as in --budget 8GiB or --budget 50%, or --sweep")
    refuse_reserved(budget)
    check_outputs(output, inputs=[read_for(target), cost])
    chosen = only in (None, "auto")
    methods = _usual(target, sweeping, device) if chosen else str(only)
    request = PlanRequest.of(
        "100%" if budget is None else budget,
        only="auto" if kernels == "fused" and chosen else methods,
        kernels=kernels,
        cost=cost if cost in ORIGINS else "measured",
        time_limit=time_limit,
        seed=seed,
        cache=not fresh,
        progress=None if as_json or sweeping else partial(_progress, cost or ""),
        offload=offload,
        smallest_seconds=0.0 if sweeping else _SMALLEST_SECONDS,
    )

    def in_tiles(request: PlanRequest) -> None:
        with _until_interrupted():
            name, tiled = _in_tiles(target, request, device, whole=output is not None)
        _show(name, tiled, output, explain, as_json)

    if kernels == "fused":
        _refuse_fused(target, cost)
        if sweeping:
            with _until_interrupted():
                name, found = _sweep_fused(target, request, device, lambda text: _say(text, as_json))
            _show_sweep(found, name, output, as_json)
        else:
            in_tiles(request)
        return
    if request.tiles:
        _refuse_tiles(target, sweeping, cost)
        in_tiles(request)
        return
    source = _source(target, cost, device, request)
    if sweeping:
        with _until_interrupted():
            found = sweep(
                source.graph,
                source.costs,
                request,
                source.room,
                able=source.able,
                progress=lambda text: _say(text, as_json),
            )
        if found.interrupted:
            _say("Interrupted: these are the budgets that were planned so far", False)
        _show_sweep(found, source.name, output, as_json)
        return
    try:
        with _until_interrupted():
            made = make_plan(source.graph, source.costs, request, source.room, able=source.able)
    except InfeasibleError:
        if not chosen or is_step_file(target) or cost not in (None, *ORIGINS):
            raise
        in_tiles(replace(request, methods=(*request.methods, "tile")))
    else:
        _show(source.name, made, output, explain, as_json)


def _usual(target: str, sweeping: bool, device: str | None) -> list[str]:
    """Methods where none are asked for: those that keep all bits, as far as they help there."""
    if sweeping or is_step_file(target):
        return ["recompute"]
    with needs_torch("planning a PyTorch step"):
        from lowtide.cost.probe import best_device
    return list(usual_methods(device or best_device()))


def _show(name: str, made: Plan, output: str | None, explain: bool, as_json: bool) -> None:
    if made.interrupted:
        _say("Interrupted: this is the best plan that was found so far", False)
    if made.disturbed and not explain:
        _say(f"{made.disturbed} operators were measured while the machine was busy: plan again", as_json)
    if output is not None:
        write_document(output, made)
    if as_json:
        print_json({"target": name, **made.as_json()})
    elif explain:
        say(made.explain())
    else:
        say("\n".join(made.explain().splitlines()[:5]))
    if not as_json:
        say_written(output, report=output)


@contextlib.contextmanager
def _until_interrupted() -> Iterator[None]:
    """While a search runs: ends the line of its progress; says what an interrupt without a result means."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt("no plan is ready yet, and nothing was written") from None
    finally:
        if sys.stderr.isatty():
            click.echo("", err=True)


def _refuse_tiles(target: str, sweeping: bool, cost: str | None) -> None:
    """Say what tiles cannot be combined with."""
    if sweeping:
        raise click.UsageError("--sweep knows no tiles; give a --budget, or --only recompute,offload")
    if is_step_file(target):
        raise PlanError("tiles are made of a PyTorch step itself, not of a file: give a TARGET")
    if cost not in (None, *ORIGINS):
        raise PlanError(
            f"--cost {printable(cost)}: tiles are new operators; take --cost measured or estimated"
        )


def _refuse_fused(target: str, cost: str | None) -> None:
    """Say what fused kernels cannot be combined with."""
    if is_step_file(target):
        raise PlanError("kernels are fused in a PyTorch step itself, not in a file: give a TARGET")
    if cost not in (None, *ORIGINS):
        raise PlanError(
            f"--cost {printable(cost)}: groups are new operators; take --cost measured or estimated"
        )


def _sweep_fused(
    target: str, request: PlanRequest, device: str | None, progress: Callable[[str], None]
) -> tuple[str, Sweep]:
    """All budgets of a PyTorch step with fused kernels, in tiles or not, and the name of the step."""
    built, request = _built(target, request, device)
    with needs_torch("planning a PyTorch step"):
        from lowtide.execute.fit import fitted

    def make(budget: Budget) -> Plan:
        asked = replace(request, budget=budget)
        return fitted(built.loss, (built.model, *built.batch), asked, verify=False).plan

    return built.name, sweep_by(make, progress=progress)


def _in_tiles(target: str, request: PlanRequest, device: str | None, *, whole: bool) -> tuple[str, Plan]:
    """The plan for a PyTorch step that may be cut into tiles, with the step before it, and its name."""
    built, request = _built(target, request, device)
    with needs_torch("planning a PyTorch step"):
        from lowtide.execute.fit import fitted
    made = fitted(built.loss, (built.model, *built.batch), request).plan
    return built.name, with_step_before(built, made) if whole else made


def _built(target: str, request: PlanRequest, device: str | None) -> tuple[Built, PlanRequest]:
    """The network with its batch, and the request with its optimiser where that may be offloaded."""
    with needs_torch("planning a PyTorch step"):
        from lowtide import zoo
        from lowtide.cost.probe import best_device
        from lowtide.execute.memory.optimizer_state import usual_optimizer

    built = zoo.build(target, device=device or best_device())
    optimizer = usual_optimizer(built.model) if "optimizer" in request.offload else None
    # the smallest budget is looked for once, for the plan that is shown
    return built, replace(request, optimizer=optimizer, smallest_seconds=0.0)


def _source(target: str, cost: str | None, device: str | None, request: PlanRequest) -> _Source:
    """What is planned; a PyTorch step is captured and measured by a plan for all of the memory it takes."""
    if is_step_file(target):
        step, room = read_file(target).step, DeviceRoom(link=_link("cpu", request.methods))
        graph = checked_graph(step.graph, target)
        return _Source(target, graph, _file_costs(step, cost), pointwise(graph), room)
    built, request = _built(target, request, device)
    with needs_torch("planning a PyTorch step"):
        from lowtide.execute.fit import fitted
        from lowtide.execute.memory.device import Room
        from lowtide.execute.memory.optimizer_state import state_of
        from lowtide.execute.planning.step_costs import device_of

    whole = replace(request, budget=Budget(share=1.0), limits=Limits())
    base = fitted(built.loss, (built.model, *built.batch), whole).plan
    origin = request.cost
    costs = Costs(base.seconds, base.workspace_bytes, origin, short=base.short, disturbed=base.disturbed)
    if cost == "unit":
        costs = Costs(tuple(unit_seconds(base.graph)), (), "unit", forward_only=True)
    elif cost is not None and cost != origin:
        costs = _costs_from(cost, len(base.graph.ops))
    held = [*built.model.parameters(), *built.model.buffers(), *leaves(built.batch)]
    held += state_of(request.optimizer, Room(held).device)()
    link = _link(device_of(base.graph), request.methods)
    room = DeviceRoom(base.beside_bytes, Room(held).free_bytes(), link)
    return _Source(built.name, base.graph, costs, base.able, room)


def _link(kind: str, methods: Sequence[str]) -> Link | None:
    """The rates of copies to the host and back, as measured on this machine."""
    if "offload" not in methods:
        return None
    with needs_torch("measuring the link to the host"):
        from lowtide.execute.planning.step_costs import link_of
    return link_of(kind)


def _file_costs(step: Step, cost: str | None) -> Costs:
    graph = step.graph
    if cost == "unit":
        return Costs(tuple(unit_seconds(graph)), (), "unit", forward_only=True)
    if cost == "estimated":
        with needs_torch("estimating costs for this machine"):
            from lowtide.execute.planning.step_costs import costs_of, device_of
        return costs_of(graph, (), device_of(graph), None, "estimated")
    if cost not in (None, "measured"):
        return _costs_from(str(cost), len(graph.ops))
    found = _costs_of_step(step, "imported")
    if found is None:
        raise PlanError(
            "this file has no times; choose --cost unit or --cost estimated, or name a FILE with costs"
        )
    return found


def _costs_from(file: str, operators: int) -> Costs:
    if not is_file(file):
        raise PlanError(f"--cost {printable(file)}: neither measured, estimated, unit nor a file; choose one")
    step = read_file(file).step
    found = _costs_of_step(step, file)
    if found is None or len(found.seconds) != operators:
        raise PlanError(
            f"{printable(file)}: has no times for the {operators} operators of this step; profile this step, "
            "or take --cost estimated"
        )
    return found


def _costs_of_step(step: Step, origin: str) -> Costs | None:
    if not any(cost.seconds for cost in step.costs):
        return None
    seconds = tuple(float(c.seconds.value) if c.seconds else 0.0 for c in step.costs)
    workspace = tuple(int(c.workspace_bytes.value) if c.workspace_bytes else 0 for c in step.costs)
    short = short_seconds(step.graph, step.costs)
    disturbed = sum(c.disturbed for c in step.costs)
    return Costs(seconds, workspace if any(workspace) else (), origin, short=short, disturbed=disturbed)


def _progress(origin: str, seconds: float, best: float | None, bound: float, gap: float | None) -> None:
    if not sys.stderr.isatty():
        return
    found = "no plan yet" if best is None else f"best {format_cost(best, origin)} more"
    share = "" if gap is None else f", gap {gap:.1%}"
    proven = format_cost(bound, origin)
    click.echo(f"\r{seconds:5.1f} s  {found}, bound {proven}{share}   ", err=True, nl=False)


def _say(text: str, quiet: bool) -> None:
    if not quiet:
        say(text, err=True)


def _show_sweep(found: Sweep, name: str, output: str | None, as_json: bool) -> None:
    if output is not None:
        write_document(output, found)
    if as_json:
        print_json({"target": name, **found.as_json()})
        return
    plain = f"{format_bytes(found.plain.peak_bytes)}, {format_cost(found.plain.seconds, found.cost)}"
    say(f"{printable(name)}: plain {plain}")
    say("  budget             peak      overhead     bound       gap  kept  again  away")
    for point in found.points:
        say(_row(point, found))
    floor = f"; none exists below {format_bytes(found.floor_bytes)}" if found.floor_bytes else ""
    say(f"  smallest budget with a known plan: {format_bytes(found.smallest_budget_bytes)}{floor}")
    say(f"  bounds are proven {by_methods(found.only)}, {found.holds_for.words}")
    say_written(output, report=output)


def _row(point: Point, found: Sweep) -> str:
    share = point.budget_bytes / found.plain.peak_bytes
    bar = "█" * round(24 * min(1.0, point.overhead / max(found.most_overhead, 1e-9)))
    d = point.decisions
    return (
        f"  {share:4.0%} {format_bytes(point.budget_bytes):>12}  {format_bytes(point.peak_bytes):>12}  "
        f"{point.overhead:+9.2%}  {point.bound_overhead:+8.2%}  {point.gap:7.2%}  "
        f"{d.kept:4}  {d.recomputed:5}  {d.offloaded:4}  {bar}{f'  {d.tiles} tiles' if d.tiles else ''}"
    )
