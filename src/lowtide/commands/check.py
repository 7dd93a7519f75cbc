"""``lowtide check``."""

from __future__ import annotations

import click

from lowtide.commands.common import json_option, print_json, say
from lowtide.documents import read_document
from lowtide.errors import PlanError
from lowtide.plan.result.plan import Plan
from lowtide.plan.result.validate import check_plan
from lowtide.printable import printable
from lowtide.units import format_bytes

__all__ = ["check"]


@click.command(short_help="Check that a plan is valid and keeps its promise.")
@click.argument("file", metavar="PLAN")
@json_option
def check(file: str, as_json: bool) -> None:
    """Play a plan instruction by instruction and say whether it is valid and keeps its promise.

    The checker shares no code with the planner: it counts storages, workspaces and copies by itself. What a
    valid plan is, rule by rule, is in docs/valid-programs.md.
    """
    plan = read_document(file, Plan)
    graph = plan.graph
    try:
        found = check_plan(plan)
    except PlanError as error:
        raise PlanError(f"{printable(file)}: {error}", rule=error.rule) from error
    peak = found.peak_bytes + plan.beside_bytes
    view = {
        "file": file,
        "checked": True,
        "budget_bytes": plan.budget_bytes,
        "peak_bytes": peak,
        "promised_peak_bytes": plan.predicted.peak_bytes,
        "runs": found.runs,
        "operators": len(graph.ops),
        "host_bytes": found.host_bytes,
    }
    if as_json:
        print_json(view)
        return
    say(f"{printable(file)}: {found.runs} runs of {len(graph.ops)} operators, every result is there")
    say(f"  peak    {format_bytes(peak)} at instruction {found.peak_at}")
    say(f"  budget  {format_bytes(plan.budget_bytes)}: kept")
