"""``lowtide demo``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lowtide import __version__
from lowtide.commands.common import (
    console,
    device_option,
    json_option,
    print_json,
    read_for,
    say,
    target_help,
)
from lowtide.commands.stages import Stages
from lowtide.errors import FileError, InfeasibleError
from lowtide.files import check_outputs, write_atomically
from lowtide.needs import needs_torch
from lowtide.nested import leaves
from lowtide.plan.make.sweep import sweep
from lowtide.plan.program.costs import Costs
from lowtide.plan.request import DeviceRoom, PlanRequest
from lowtide.printable import printable
from lowtide.report.curve import draw
from lowtide.report.page.html import html_page
from lowtide.report.page.make import Given, report_of
from lowtide.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from lowtide.cost.device import Device
    from lowtide.execute.compare.compare import Comparison
    from lowtide.plan.make.sweep import Sweep
    from lowtide.plan.result.plan import Plan
    from lowtide.zoo import Built

__all__ = ["demo"]

TARGET = "gpt2:layers=12,width=64,heads=4,length=256,vocab=512"
"""Nearly all of its peak are activations, on any processor: no operator has a large workspace."""
ABOUT = "GPT-2 with 12 blocks of width 64, trained on 8 sequences of 256 tokens"
SHARES = ("100%", "50%", "25%")
_POINT_SECONDS = 0.5
"""For a plan of each budget of the trade-off curve."""
_RIVAL_SECONDS = 6.0


@dataclass(frozen=True, slots=True)
class _Case:
    """One way to run the step, as a row of the table."""

    name: str
    budget_bytes: int | None
    predicted_bytes: int | None
    peak_bytes: int
    seconds: float
    result: str
    live_bytes: tuple[int, ...] = ()
    note: str = ""
    eager_seconds: float = 0.0
    """What eager PyTorch took in turns with this case, so that both met the same machine."""

    @property
    def over_eager(self) -> str:
        """The time over that of eager PyTorch, where that is known."""
        return f"{self.seconds / self.eager_seconds:.2f} ×" if self.eager_seconds else "–"


@click.command(short_help="Run a network inside smaller and smaller budgets.")
@click.argument("target", default=TARGET)
@device_option
@click.option("-o", "--output", default=".demo/memory.html", metavar="FILE", help="The page to write.")
@click.option("--repeats", type=click.IntRange(min=1), default=3, help="Timed steps each way [3].")
@json_option
@target_help
def demo(target: str, device: str, output: str, repeats: int, as_json: bool) -> None:
    """Run a network at 100, 50 and 25% of its memory, compare, and write a page.

    Without a TARGET it is a small GPT-2. The network is captured, planned for each budget, run and compared
    with eager PyTorch. Where recomputation is not enough, it is cut into tiles, whose sums differ in the last
    digits. A budget that is too small even so is said to be, and the smallest that works is taken instead.
    """
    with needs_torch("the demo"):
        from lowtide import zoo

    _make_folder(output)
    check_outputs(output, inputs=[read_for(target)])
    built = zoo.build(target, device=device)
    about = _about(built)
    _say(f"{printable(built.name)}: {about}", as_json)
    cases: list[_Case] = []
    views: list[dict[str, Any]] = []
    given: list[Given] = []
    compared: list[tuple[Plan, Comparison]] = []
    with Stages(quiet=as_json) as stages:
        for share in SHARES:
            stages.begin(f"{share} of its memory: capturing, planning, running, comparing")
            plan, note = _planned(built, share, stages)
            found = _compared(built, plan, repeats)
            compared.append((plan, found))
            if not cases:
                cases.append(_eager(found))
            cases.append(_case(share, plan, found, note))
            given.append(Given(cases[-1].name, found.as_file(built.name, device, plan), note))
            views.append({"share": share, "note": note, **plan.as_json(), **found.as_json()})
        stages.begin("other budgets, and the planners of others")
        quiet = min(
            (plan for plan, _ in compared if not plan.decisions.tiles), key=lambda plan: plan.disturbed
        )
        given += [Given("sweep", _swept(quiet)), Given("device", _described(device))]
        _write(built.name, about, given, output, device)
    if as_json:
        print_json({"target": built.name, "about": about, "device": device, "page": output, "runs": views})
    else:
        _print(built.name, about, cases, output)
    for plan, found in compared:
        found.hold(plan.budget_bytes)


def _about(built: Built) -> str:
    """What network it is: in words for our own, else the class of the model; its size and its batch."""
    what = ABOUT if built.name == TARGET else type(built.model).__name__
    parameters = format_count(sum(one.numel() for one in built.model.parameters()))
    shapes = [one.shape for one in leaves(built.batch) if hasattr(one, "shape")]
    batch = ", ".join("x".join(map(str, shape)) or "a number" for shape in shapes) or "no tensors"
    return f"{what}; {parameters} parameters, batch of {batch}"


def _planned(built: Built, share: str, stages: Stages | None = None) -> tuple[Plan, str]:
    from lowtide.execute.fit import fit

    example = (built.model, *built.batch)
    options: dict[str, Any] = {"progress": None if stages is None else stages.search}
    options["verify"] = False  # each plan is compared with eager PyTorch afterwards
    try:
        return fit(built.loss, *example, budget=share, only="recompute", **options).plan, ""
    except InfeasibleError as error:
        smallest = error.smallest_budget
        too_small = f"without tiles no plan needs less than {format_bytes(smallest)}"
    try:
        plan = fit(built.loss, *example, budget=share, only="recompute,tile", **options).plan
        return plan, f"{too_small}: this one runs in {plan.decisions.tiles} tiles"
    except InfeasibleError:
        plan = fit(built.loss, *example, budget=smallest, **options).plan
        return plan, f"{share} is too small: {too_small}"


def _compared(built: Built, plan: Plan, repeats: int) -> Comparison:
    from lowtide.execute.compare.compare import compare

    return compare(
        built.model,
        built.batch,
        built.loss,
        lambda _: plan.program,
        in_place=False,
        trains=built.trains,
        update=built.ending,
        repeats=repeats,
    )


def _swept(plan: Plan) -> Sweep:
    """Plans for all budgets of the same step, each made in little time."""
    costs = Costs(plan.seconds, plan.workspace_bytes, plan.cost, short=plan.short, disturbed=plan.disturbed)
    request = PlanRequest.of("100%", only="recompute", time_limit=_POINT_SECONDS, smallest_seconds=0.0)
    return sweep(plan.graph, costs, request, DeviceRoom(plan.beside_bytes), able=plan.able)


def _described(device: str) -> Device:
    from lowtide.execute.planning.step_costs import described

    return described(device.partition(":")[0])


def _eager(found: Comparison) -> _Case:
    side = found.eager
    assert side is not None
    return _Case("eager PyTorch", None, None, side.peak_bytes, side.seconds, "", eager_seconds=side.seconds)


def _case(share: str, plan: Plan, found: Comparison, note: str) -> _Case:
    return _Case(
        name=f"Lowtide at {share}",
        budget_bytes=plan.budget_bytes,
        predicted_bytes=plan.predicted.peak_bytes,
        peak_bytes=found.measured.peak_bytes,
        seconds=found.measured.seconds,
        result="bitwise equal" if found.bitwise else f"gradients within {found.max_rel_grad_diff:.0e}",
        live_bytes=found.recording.timeline.live_bytes,
        note=note,
        eager_seconds=_eager(found).seconds,
    )


def _write(name: str, about: str, given: list[Given], output: str, device: str) -> None:
    words = f"A training step of {name} ({about}) on {device}, before and inside budgets."
    title = "Lowtide: the same step in less memory"
    made = report_of(
        given,
        title=title,
        about=words,
        target=name,
        rival_seconds=_RIVAL_SECONDS,
        made_by=f"Lowtide {__version__}",
    )
    write_atomically(output, html_page(made))


def _make_folder(output: str) -> None:
    """Before anything is run: what cannot be written is said now."""
    try:
        Path(output).parent.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise FileError(f"{printable(output)}: cannot be written: {reason}; give another -o FILE") from error


def _print(name: str, about: str, cases: list[_Case], output: str) -> None:
    out = console()
    say(f"{printable(name)}: {about}")
    say("  run                    budget     predicted      measured          time  over eager  result")
    for case in cases:
        budget = "–" if case.budget_bytes is None else format_bytes(case.budget_bytes)
        predicted = "–" if case.predicted_bytes is None else format_bytes(case.predicted_bytes)
        say(
            f"  {case.name:<16}  {budget:>12}  {predicted:>12}  {format_bytes(case.peak_bytes):>12}  "
            f"{format_seconds(case.seconds):>12}  {case.over_eager:>10}  {case.result}"
        )
        if case.note:
            say(f"    {case.note}")
    for case in (cases[1], cases[-1]):
        say("")
        say(f"{case.name}: live bytes by operator run")
        height = max(1, round(6 * case.peak_bytes / cases[1].peak_bytes))
        for line in draw(case.live_bytes, width=min(out.width, 110) - 4, height=height):
            say(f"  {line}")
    say(f"\nthe page: {printable(output)}")


def _say(text: str, quiet: bool) -> None:
    if not quiet:
        say(text, err=True)
