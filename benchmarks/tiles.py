"""Planning with tiles as choices, on captured steps of the zoo: does all of it stay inside its time limit?

    python benchmarks/tiles.py [TARGET ...] [--shares 0.7,0.5] [--means recompute,tile] [--time-limit 10]

Costs are estimated for the device of planner.py, and nothing is run. Without shares: 70, 50, 35 and 25% of the plain
peak, and 15% where 25% has no plan without tiles. A step that cannot be cut at all has one row, with the reason. Prints
rows as they come and stores them under benchmarks/results/ as planner-tiles.json and planner-tiles.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from contextlib import ExitStack
from datetime import date
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import torch

from large_image import Clock
from lowtide import __version__, zoo
from lowtide.errors import CaptureError, InfeasibleError, LowtideError
from lowtide.execute.compile import planned
from lowtide.execute.compile.trial import Rehearsal
from lowtide.execute.memory import host
from lowtide.execute.memory.device import Room
from lowtide.execute.planning import step_costs
from lowtide.files import write_atomically
from lowtide.plan.request import PlanRequest
from lowtide.plan.result.plan import Plan
from lowtide.trace.eager.layouts import learned
from lowtide.trace.step.capture import capture
from lowtide.trace.step.joint import Joint
from planner import H200, LINK, RESULTS, SHARES, ZOO

TARGETS = [*ZOO, *(name for name in zoo.names() if name not in {one.partition(":")[0] for one in ZOO})]
MEANS = ["recompute,tile", "recompute,offload,tile"]
LEAST = 0.15
"""The share for what no plan without tiles reaches."""
RATES = {"to_device_bytes_per_second": LINK.to_device, "from_device_bytes_per_second": LINK.to_host}
DEVICE = msgspec.structs.replace(H200, handover_seconds=LINK.handover, **RATES)
SOURCES = Path(planned.__file__).parents[2]
HOST = 1 << 40
"""Bytes of a host that has room for all that is sent there."""
PARTS = {
    "searched": "searched",
    "captured": "tiles captured",
    "tiles": "tiles",
    "whole": "whole step planned",
}
COLUMNS = (
    *("step", "means", "budget", "tiles", "peak of budget", "overhead", "without tiles", "in tiles"),
    *("ways tried", "tiles: searched s", "captured s", "all s", "whole: searched s", "everything s", "how"),
)


class Watch(Clock):
    """Seconds, calls and the last result or error of parts of the planning, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = {}
        self.last: dict[str, Any] = {}

    def timed(self, name: str, function: Any) -> Any:
        timed = super().timed(name, function)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] = self.calls.get(name, 0) + 1
            try:
                self.last[name] = timed(*args, **kwargs)
            except LowtideError as error:
                self.last[name] = error
                raise
            return self.last[name]

        return call


def short(text: str) -> str:
    """The first line, without the folder that the sources are in."""
    return text.partition("\n")[0].replace(f"{SOURCES}/", "")


def case(joint: Joint, name: str, share: float, means: str, limit: float) -> dict[str, Any]:
    """One step at one budget, planned as ``fit`` does it, from the captured step on."""
    asked: dict[str, Any] = {"only": means, "cost": "estimated", "time_limit": limit, "cache": False}
    request = PlanRequest.of(f"{share:.2%}", **asked)
    first = Rehearsal(now=True)
    planner = planned.Planned(None, (), None, learned(), request, None, first)  # type: ignore[arg-type]
    watch = Watch()
    row: dict[str, Any] = {"step": name, "operators": len(joint.graph.ops), "means": means, "share": share}
    began = time.perf_counter()
    with watch.watching(), patch.object(planned, "in_tiles", watch.timed("tiles", planned.in_tiles)):
        try:
            plan = planner._best(joint, None, Room(()), (), (), ())
            row |= {"found": True, "tiles": plan.decisions.tiles, "overhead": plan.overhead}
            row |= {"peak": plan.predicted.peak_bytes / plan.budget_bytes, "method": plan.method}
            row |= {"solve_seconds": plan.solve_seconds, "no_tiles": short(plan.no_tiles)}
        except InfeasibleError as error:
            row |= {"found": False, "tiles": 0, "why": str(error).splitlines()[-1]}
    row["seconds"] = time.perf_counter() - began
    whole, tiled = watch.last["whole step planned"], watch.last.get("tiles")
    row["without"] = whole.overhead if isinstance(whole, Plan) else None
    row["in_tiles"] = tiled.overhead if isinstance(tiled, Plan) else None
    row["refused"] = short(str(tiled)) if isinstance(tiled, CaptureError) else ""
    row["ways"] = watch.calls.get("searched", 0)
    return row | {f"{key}_seconds": watch.seconds.get(part, 0.0) for key, part in PARTS.items()}


def cells(row: dict[str, Any]) -> list[str]:
    """A row as text."""
    share = {key: f"{value:.1%}" for key, value in row.items() if isinstance(value, float)}
    shown = [f"`{row['step']}`", row["means"].removesuffix(",tile"), f"{row['share']:.0%}"]
    shown += [str(row["tiles"] or "none") if row["found"] else "no plan"]
    shown += [share.get("peak", ""), share.get("overhead", ""), share.get("without", "no plan")]
    shown += [share.get("in_tiles", ""), str(row["ways"])]
    shown += [f"{row[key]:.1f}" for key in (*(f"{part}_seconds" for part in PARTS), "seconds")]
    return [*shown, row["refused"] or row.get("why") or row["no_tiles"] or row["method"]]


def told(rows: list[dict[str, Any]], limit: float) -> str:
    """The table, what took longest, and all above the limit: capturing tiles, and searching with and without."""
    lines = [f"| {' | '.join(COLUMNS)} |", "| --- | --- " + "| ---: " * 12 + "| --- |"]
    lines += ["| " + " | ".join(cells(row)) + " |" for row in rows]
    names = [f"{row['step']} at {row['share']:.0%}, {row['means']}" for row in rows]
    spent = [row["seconds"] for row in rows]
    longest = max(range(len(rows)), key=spent.__getitem__)
    pairs = zip(names, spent, strict=True)
    above = "; ".join(f"{name} {seconds:.1f} s" for name, seconds in pairs if seconds > limit)
    lines += ["", f"Longest, everything: {spent[longest]:.1f} s ({names[longest]})."]
    lines += [f"Above {limit:g} s: {above or 'none'}."]
    return "\n".join(lines) + "\n"


def store(rows: list[dict[str, Any]], options: argparse.Namespace) -> str:
    """Written after every row, so that what fails later does not lose it."""
    about = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    about += f", torch {torch.__version__}, lowtide {__version__}; costs estimated for {DEVICE.name}"
    command = " ".join(["python benchmarks/tiles.py", *sys.argv[1:]])
    report = {"date": date.today().isoformat(), "command": command, "machine": about, "rows": rows}
    text = f"# Planner: tiles\n\n`{command}`, {report['date']}; {about}\n\n{told(rows, options.time_limit)}"
    options.output.mkdir(parents=True, exist_ok=True)
    write_atomically(options.output / "planner-tiles.json", json.dumps(report, indent=1).encode() + b"\n")
    write_atomically(options.output / "planner-tiles.md", text.encode())
    return text


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("targets", nargs="*", help="steps of the zoo, or of files; default: the whole zoo")
    parser.add_argument("--shares", help="of the plain peak, with commas")
    parser.add_argument("--means", action="append", help="may be given more than once")
    parser.add_argument("--time-limit", type=float, default=10.0)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    shares = [float(one) for one in options.shares.split(",")] if options.shares else [*SHARES, LEAST]
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())  # nothing that was measured here counts
        stack.enter_context(patch.dict(os.environ, LOWTIDE_CACHE=folder))
        stack.enter_context(patch.object(step_costs, "_described", lambda _: DEVICE))
        stack.enter_context(patch.object(Room, "free_bytes", lambda _: DEVICE.memory_bytes))
        stack.enter_context(patch.object(host, "available_bytes", lambda: HOST))
        for target in options.targets or TARGETS:
            torch._dynamo.reset()
            built = zoo.build(target)
            joint = capture(built.loss, built.model, *built.batch).joint
            refused = False
            for means in options.means or MEANS:
                for share in sorted(shares, reverse=True):
                    reached = not options.shares and share == LEAST and rows[-1]["without"] is not None
                    if refused or reached:
                        break
                    rows.append(case(joint, target, share, means, options.time_limit))
                    refused = bool(rows[-1]["refused"])  # at any smaller budget, by any means
                    print(" | ".join(cells(rows[-1])), flush=True)
                    text = store(rows, options)
    print("\n" + text)


if __name__ == "__main__":
    main()
