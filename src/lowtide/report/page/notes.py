"""What a Report does not show in full, in words."""

from __future__ import annotations

import math
from collections.abc import Iterator

from lowtide.report.page.types import Report, RunView, ShardView
from lowtide.units import format_bytes

__all__ = ["notes_of"]


def notes_of(report: Report) -> Iterator[str]:
    """One line for each table that is thinned."""
    for step in report.steps:
        rows = len(step.operators.name)
        if step.operators_in_all > rows:
            yield f"{step.name}: {rows:,} of {step.operators_in_all:,} operators have a row"
    for run in report.runs:
        yield from _of_run(run)
    for split in report.shards:
        yield from _of_shards(split)


def _of_run(run: RunView) -> Iterator[str]:
    moments, blocks, table = run.moments, run.blocks, run.decisions
    if moments.in_all > len(moments.live):
        yield (
            f"{run.name}: {len(moments.live):,} of {moments.in_all:,} runs of operators are drawn, the "
            "largest and the smallest of neighbours; the peak is among them"
        )
    if blocks.in_all > len(blocks.bytes):
        yield (
            f"{run.name}: the {len(blocks.bytes):,} largest of {blocks.in_all:,} blocks are listed; none "
            f"of the others is larger than {format_bytes(blocks.bytes_left_out)}"
        )
    if table is not None and table.in_all > len(table.tensor):
        rows = len(table.tensor)
        yield f"{run.name}: decisions are listed for the {rows:,} largest of {table.in_all:,} tensors"
    for lane in run.lanes:
        if lane.in_all > len(lane.row):
            rows = len(lane.row)
            yield f"{run.name}: the {rows:,} longest of {lane.in_all:,} spans of {lane.name} are drawn"


def _of_shards(split: ShardView) -> Iterator[str]:
    listed = (
        (len(split.nodes.name), split.nodes.in_all, "nodes of the devices' pictures", "those of forward"),
        (len(split.moves.how), split.moves.in_all, "moves", "the largest"),
        (len(split.decisions.tensor), split.decisions.in_all, "tensors", "the largest"),
    )
    for rows, in_all, what, which in listed:
        if in_all > rows:
            yield f"{split.name}: {rows:,} of {in_all:,} {what} are listed, {which} first"
    devices = math.prod(split.mesh)
    if len(split.ranks) < devices:
        told = ", ".join(map(str, split.ranks))
        yield f"{split.name}: devices {told} of {devices} are shown; the others are like one of them"
