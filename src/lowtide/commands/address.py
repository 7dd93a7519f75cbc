"""``lowtide address``."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import click
import msgspec

from lowtide.commands.common import json_option, print_json, say
from lowtide.cost import Step
from lowtide.documents import encode_document, kind_of, read_document
from lowtide.errors import ConvertError, GraphError, PlanError
from lowtide.files import check_outputs, read_bytes, write_together
from lowtide.formats import megengine
from lowtide.formats.csvfile import table, times_of
from lowtide.formats.megengine.arena import arena_for
from lowtide.formats.registry import read_file
from lowtide.graph import Graph
from lowtide.plan.address.allocations import graph_allocations, program_allocations
from lowtide.plan.address.names import names_of
from lowtide.plan.address.place import TIME_LIMIT, place
from lowtide.plan.address.reorder import OrderedStep, place_in_any_order
from lowtide.plan.address.types import AddressPlan, Allocation, EventClock, Purpose
from lowtide.plan.check.addresses import check_addresses, check_storages
from lowtide.plan.program.memory import CUDA_BLOCK_BYTES
from lowtide.plan.request import Limits
from lowtide.plan.result.plan import Plan
from lowtide.plan.result.reordered import reordered
from lowtide.plan.result.validate import check_plan
from lowtide.printable import printable
from lowtide.report.addresses import told_addresses
from lowtide.report.addresses_svg import addresses_svg

__all__ = ["address"]

_AT_ONCE = 0.5
"""Seconds without progress."""
_HOST_ALIGNMENT = 64
"""What torch aligns memory on the host to."""


@dataclass(frozen=True, slots=True)
class _Source:
    """What is to be placed: a step in program order, or the Program of a plan."""

    name: str
    graph: Graph
    allocations: Sequence[Allocation]
    alignment: int
    step: Step | None = None
    plan: Plan | None = None
    moved: int | None = None
    """Instructions that run elsewhere than in the file; None where no other order was looked for."""
    other_bytes: int | None = None
    """The arena of the order in the file."""


@click.command(short_help="Find an address for every allocation.")
@click.argument("file", metavar="FILE|PLAN|CSV")
@click.option("--csv", "table_file", metavar="OUT", help="Write the addresses as id,lower,upper,size,offset.")
@click.option("--svg", metavar="OUT", help="Write a picture: time to the right, memory upwards.")
@click.option("--megengine", "profile", metavar="OUT", help="Write the step as a profile with addresses.")
@click.option(
    "-o", "--output", metavar="OUT", help="Write the addresses as JSON, for programs that run them."
)
@click.option(
    "--align",
    type=click.IntRange(1, 1 << 30),
    metavar="BYTES",
    help="Offsets are multiples of it [512 on a GPU, 64 on a host, 1 of a CSV].",
)
@click.option(
    "--reorder",
    metavar="OUT",
    help="Change the order of a PLAN's independent instructions where that takes less, and write that plan.",
)
@click.option("--pinned", is_flag=True, help="Rows of a CSV that have an offset keep it.")
@click.option(
    "--time-limit",
    type=click.FloatRange(min=0.0, max=3600.0),
    default=TIME_LIMIT,
    metavar="S",
    help=f"Of the search [{TIME_LIMIT:.0f}].",
)
@json_option
def address(
    file: str,
    table_file: str | None,
    svg: str | None,
    profile: str | None,
    output: str | None,
    align: int | None,
    reorder: str | None,
    pinned: bool,
    time_limit: float,
    as_json: bool,
) -> None:
    """Put all memory of a step into one arena, and say how much of it is wasted.

    FILE is a step in any format that says in which order operators run; PLAN is what `lowtide plan -o` has
    written; CSV has the columns id,lower,upper,size. Parameters and inputs are not part of the arena. The
    result is checked by code that shares nothing with what finds it.
    """
    check_outputs(table_file, svg, profile, output, reorder, inputs=[file])
    limits = Limits(time_limit)
    source = _read(file, align, pinned)
    if profile is not None and source.step is None:
        raise ConvertError(
            f"{printable(file)}: a MegEngine profile runs every operator once, and a plan may run it again; "
            "write a plan with --csv or -o"
        )
    if reorder is not None and source.plan is None:
        raise click.UsageError(
            "--reorder is for plans; make one with `lowtide plan FILE --budget ... -o PLAN`"
        )
    progress = None if as_json or not sys.stderr.isatty() else _Progress()
    if reorder is not None:
        found, source = _in_any_order(source, limits.time_limit, progress)
    else:
        found = place(
            source.allocations,
            alignment=source.alignment,
            clock=EventClock.INSTRUCTION if source.plan is not None else EventClock.OPERATOR,
            time_limit=limits.time_limit,
            progress=progress,
        )
    if progress is not None:
        progress.clear()
    _check(found, source)
    wanted = {"csv": table_file, "svg": svg, "megengine": profile, "json": output, "plan": reorder}
    files = _files(found, source, wanted)
    write_together(files)
    if as_json:
        print_json(_view(found, source))
        return
    say("\n".join(told_addresses(_view(found, source))))
    for name, _ in files:
        say(f"Wrote {printable(name)}")


def _in_any_order(
    source: _Source, time_limit: float, progress: Callable[[str], None] | None
) -> tuple[AddressPlan, _Source]:
    """Addresses for the order that takes least, and the plan in that order."""
    plan = source.plan
    assert plan is not None
    step = OrderedStep(
        plan.graph, plan.program, plan.workspace_bytes, plan.seconds, plan.short, plan.link, plan.wire_seconds
    )
    found = place_in_any_order(step, alignment=source.alignment, time_limit=time_limit, progress=progress)
    new = reordered(plan, found.program) if found.moved else plan
    return found.addresses, dataclasses.replace(
        source,
        allocations=found.addresses.allocations,
        plan=new,
        moved=found.moved,
        other_bytes=found.given_bytes,
    )


def _read(file: str, align: int | None, pinned: bool) -> _Source:
    if kind_of(read_bytes(file)) == "plan":
        if pinned:
            raise click.UsageError("--pinned keeps the offsets of a CSV; a plan has none")
        plan = read_document(file, Plan)
        check_plan(plan)
        alignment = align or _alignment(plan.graph)
        found = program_allocations(plan.graph, plan.program, plan.workspace_bytes, alignment=alignment)
        return _Source(file, plan.graph, found, alignment, plan=plan)
    step = read_file(file).step
    table = step.format == "csv"
    if pinned and not table:
        raise click.UsageError("--pinned keeps the offsets of a CSV; other files have addresses of their own")
    costs = [int(c.workspace_bytes.value) if c.workspace_bytes else 0 for c in step.costs]
    try:
        found = graph_allocations(step.graph, costs, times=_times(step))
    except GraphError as error:
        raise PlanError(f"{printable(file)}: {error}") from None
    if pinned:
        found = [
            msgspec.structs.replace(one, pinned=step.graph.tensors[one.tensors[0]].address) for one in found
        ]
    return _Source(file, step.graph, found, align or (1 if table else _alignment(step.graph)), step=step)


def _times(step: Step) -> list[int] | None:
    """Times of a CSV, counted from its first."""
    times, own = times_of(step)
    return [one - times[0] for one in times] if own else None


def _alignment(graph: Graph) -> int:
    devices = {tensor.device for tensor in graph.tensors}
    gpu = any(device.startswith(("cuda", "gpu")) for device in devices)
    return CUDA_BLOCK_BYTES if gpu else _HOST_ALIGNMENT


def _check(found: AddressPlan, source: _Source) -> None:
    """A result that the checker refuses is a fault of ours, and is not shown."""
    check_addresses(found.allocations, arena_bytes=found.arena_bytes, alignment=found.alignment)
    plan = source.plan
    if plan is not None:
        check_storages(
            found.allocations,
            plan.graph,
            plan.program,
            workspace_bytes=plan.workspace_bytes,
            offload=plan.offload,
            able=plan.able,
        )


def _view(found: AddressPlan, source: _Source) -> dict[str, Any]:
    plan = source.plan
    moved = {one.tensors: one.bytes for one in found.allocations if one.use is Purpose.LEAF}
    total = None if plan is None else plan.resident_bytes - sum(moved.values()) + found.arena_bytes
    return {
        "target": source.name,
        "arena_bytes": found.arena_bytes,
        "live_bytes": found.live_bytes,
        "efficiency": found.efficiency,
        "greedy_bytes": found.greedy_bytes,
        "given_bytes": _given(source),
        "allocations": len(found.allocations),
        "events": found.events,
        "clock": found.clock.value,
        "alignment": found.alignment,
        "method": found.method,
        "optimal": found.optimal,
        "total_bytes": total,
        "budget_bytes": None if plan is None else plan.budget_bytes,
        "moved": source.moved,
        "in_given_order_bytes": source.other_bytes,
        "solve_seconds": found.solve_seconds,
        "checked": True,
    }


def _given(source: _Source) -> int | None:
    """How many bytes the addresses of the file span, where it has one for all; holes are left out."""
    if source.step is None:
        return None
    tensors = source.graph.tensors
    owners = [tensors[one.tensors[0]] for one in source.allocations if one.tensors and one.bytes]
    if not owners or any(one.address is None for one in owners):
        return None
    touched, end = 0, -1
    for start, stop in sorted((one.address or 0, (one.address or 0) + one.bytes) for one in owners):
        touched += max(0, stop - max(start, end))
        end = max(end, stop)
    return touched


def _files(found: AddressPlan, source: _Source, wanted: dict[str, str | None]) -> list[tuple[str, bytes]]:
    made: list[tuple[str, bytes]] = []
    program = None if source.plan is None else source.plan.program
    names = names_of(found.allocations, source.graph, program)
    if wanted["csv"] is not None:
        made.append((wanted["csv"], _table(found, source, names)))
    if wanted["svg"] is not None:
        rows = [
            {"id": name, **{key: getattr(one, key) for key in _ROW}, "use": one.use.value}
            for one, name in zip(found.allocations, names, strict=True)
        ]
        made.append((wanted["svg"], addresses_svg(_view(found, source), rows).encode()))
    if wanted["megengine"] is not None and source.step is not None:
        offsets = {one.tensors[0]: one.offset for one in found.allocations if one.tensors and one.bytes}
        arena = arena_for(source.step, offsets, found.arena_bytes)
        made.append((wanted["megengine"], megengine.write(source.step, arena).data))
    if wanted["json"] is not None:
        made.append((wanted["json"], encode_document(found)))
    if wanted["plan"] is not None and source.plan is not None:
        made.append((wanted["plan"], encode_document(source.plan)))
    return made


_ROW = ("birth", "death", "bytes", "offset")


def _table(found: AddressPlan, source: _Source, names: Sequence[str]) -> bytes:
    """Rows in the order of the file, where they come from one of this format."""
    times, own = ([], False) if source.step is None else times_of(source.step)
    first = times[0] if own and times else 0
    rows = [
        (name, one.birth + first, one.death + first, one.bytes, one.offset)
        for one, name in zip(found.allocations, names, strict=True)
    ]
    if own:
        order = [one.tensors[0] for one in found.allocations]
        rows = [row for _, row in sorted(zip(order, rows, strict=True))]
    return table(rows, offsets=True)


class _Progress:
    """A line on standard error that the next one is written over; none of what is done at once."""

    def __init__(self) -> None:
        self.began, self.shown = time.perf_counter(), False

    def __call__(self, text: str) -> None:
        seconds = time.perf_counter() - self.began
        if seconds > _AT_ONCE:
            self._write(f"{seconds:5.1f} s  {text}")

    def clear(self) -> None:
        """End with an empty line."""
        if self.shown:
            self._write("")

    def _write(self, text: str) -> None:
        self.shown = True
        click.echo(f"\r{text:<70}\r", err=True, nl=False)
