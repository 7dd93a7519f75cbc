"""``lowtide run``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import click
from msgspec.structs import replace

from lowtide.commands.before import with_step_before
from lowtide.commands.common import (
    SEED,
    device_option,
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
from lowtide.commands.stages import Stages
from lowtide.documents import encode_document, read_document
from lowtide.errors import PlanError
from lowtide.files import check_outputs, is_file, write_together
from lowtide.graph import Graph
from lowtide.needs import needs_torch
from lowtide.plan.program.instructions import Loop, Program
from lowtide.plan.request import parse_offload
from lowtide.plan.result.plan import Plan
from lowtide.plan.result.validate import valid_program
from lowtide.printable import printable
from lowtide.suggest import did_you_mean
from lowtide.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from lowtide.execute.compare.compare import Comparison
    from lowtide.zoo import Built

__all__ = ["run"]


@click.command()
@click.argument("target")
@click.option(
    "--program",
    default="",
    metavar="NAME|FILE",
    help="What runs the step: plain, recompute-all, or a program in a JSON file [plain].",
)
@click.option("--budget", metavar="BYTES", help="Plan for it first: 8GiB, 40% of the plain peak, or auto.")
@click.option(
    "--only",
    default="",
    metavar="METHODS",
    help="For a budget: recompute, offload, tile, or several: a,b [auto: what fits best].",
)
@offload_option
@kernels_option
@click.option("--save-program", metavar="FILE", help="Write the program that ran.")
@click.option("-o", "--output", metavar="FILE", help="Write all that was measured, for `lowtide report`.")
@click.option("--timeline", metavar="FILE", help="Write what was live at each operator, by storage.")
@device_option
@click.option("--seed", type=SEED, default=0, help="Of the parameters, the batch and the step [0].")
@click.option("--repeats", type=click.IntRange(min=1), default=5, help="Timed steps each way [5].")
@json_option
@target_help
def run(
    target: str,
    program: str,
    budget: str | None,
    only: str,
    offload: str,
    kernels: str,
    save_program: str | None,
    output: str | None,
    timeline: str | None,
    device: str,
    seed: int,
    repeats: int,
    as_json: bool,
) -> None:
    """Run a step in eager PyTorch and as a program, and compare."""
    check_outputs(save_program, output, timeline, inputs=[read_for(target), program])
    leaving = parse_offload(offload)
    for name, given in (("--offload", leaving), ("--only", only)):
        if given and budget is None:
            raise click.UsageError(f"{name} is for plans: give a --budget too, as in --budget 50%")
    refuse_reserved(budget)
    if program and budget is not None:
        raise click.UsageError("give a --budget or a --program, not both")
    with needs_torch("running a step"):
        from lowtide import zoo
        from lowtide.cost.probe import environment
        from lowtide.execute.backend import PROGRAMS
        from lowtide.execute.compare.compare import compare
        from lowtide.execute.fit import fit
        from lowtide.execute.memory.optimizer_state import usual_optimizer

    built = zoo.build(target, device=device, seed=seed)
    if "optimizer" in leaving and built.ending is not None:
        raise click.UsageError(f"{built.name} ends with an update of its own, which has no optimiser state")
    optimizer = usual_optimizer(built.model) if "optimizer" in leaving else None
    plan: Plan | None = None
    with Stages(quiet=as_json) as stages:
        if budget is not None:
            stages.begin("capturing, measuring operators, planning")
            fitted = fit(
                built.loss,
                built.model,
                *built.batch,
                budget=budget,
                only=only or "auto",
                offload=leaving,
                optimizer=optimizer,
                kernels=kernels,
                progress=stages.search,
            )
            plan = fitted.plan
            planner = _planned(plan)
            program = f"inside {format_bytes(plan.budget_bytes)}"
        else:
            program = program or "plain"
            planner = PROGRAMS[program] if program in PROGRAMS else _from_file(program, PROGRAMS)
        found = compare(
            built.model,
            built.batch,
            built.loss,
            planner,
            in_place=program in PROGRAMS,  # a program that is given runs as it is
            trains=built.trains,
            update=built.ending,
            optimizer=optimizer,
            kernels=kernels,
            seed=seed,
            repeats=repeats,
            alone=program not in PROGRAMS,
            progress=stages.begin,
        )
    stored = plan if plan is None or output is None else with_step_before(built, plan)
    whole = found.as_file(built.name, device, stored)
    if output is not None:
        where = environment(device.partition(":")[0])
        whole = replace(whole, environment=where)
    outputs = [(save_program, found.program), (output, whole), (timeline, found.recording)]
    write_together((path, encode_document(value)) for path, value in outputs if path is not None)
    view: dict[str, Any] = {"target": built.name, "program": program, "device": device, **found.as_json()}
    if plan is not None:
        view |= {k: v for k, v in plan.as_json().items() if k != "predicted"}
        view["predicted"]["seconds"] = plan.predicted.seconds
    if as_json:
        print_json(view)
    else:
        _print(built, device, program, plan, found)
        say_written(save_program, output, timeline, report=output)
    if plan is not None:
        found.hold(plan.budget_bytes)


def _print(built: Built, device: str, program: str, plan: Plan | None, found: Comparison) -> None:
    tiles = f", in {plan.decisions.tiles} tiles" if plan is not None and plan.decisions.tiles else ""
    runs = f"{found.runs} runs of {found.operators} operators"
    say(f"{printable(built.name)} on {device}, program {printable(program)}{tiles}: {runs}")
    eager, ours = found.eager, found.measured
    for name, side in (("eager", eager), ("program", ours)):
        if side is None:
            say("  eager     out of memory")
            continue
        host = f"host {format_seconds(side.host_seconds)}"
        say(f"  {name:<9} {format_bytes(side.peak_bytes):>12}  {format_seconds(side.seconds):>12}  {host}")
    say(f"  predicted {format_bytes(found.predicted_peak_bytes):>12}")
    compared = "gradients, buffers and updated parameters" if built.ending else "gradients and buffers"
    say(f"  loss, {compared}: {_verdict(found)}")


def _verdict(found: Comparison) -> str:
    if found.max_rel_grad_diff is None:
        return "not compared, as eager PyTorch ran out of memory"
    return "bitwise equal" if found.bitwise else f"differ by up to {found.max_rel_grad_diff:.1e}"


def _from_file(name: str, known: Iterable[str]) -> Callable[[Graph], Program]:
    """A planner that gives the program in a file; whether it is valid for the step is seen before it runs."""
    if not is_file(name):
        choices = ", ".join(known)
        raise click.BadParameter(
            f"{name!r} is neither one of {choices} nor a file.{did_you_mean(name, known)}",
            param_hint="--program",
        )
    program = valid_program(read_document(name, Program))
    return lambda _: program


def _planned(plan: Plan) -> Callable[[Graph], Program]:
    """A planner that has a plan for the step already."""

    def planner(graph: Graph) -> Program:
        loops = any(isinstance(line, Loop) for line in plan.program.instructions)
        own = loops or plan.program.split  # in tiles, or with split convolutions, a step has other operators
        if not own and plan.graph.ops != graph.ops:
            raise PlanError("the step was captured differently the second time; report this as a bug")
        return plan.program

    return planner
