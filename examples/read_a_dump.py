"""Read the dump of a training step that Chainer wrote, and plan it for half of its memory: no torch, no GPU.

python examples/read_a_dump.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import lowtide
from lowtide.commands.main import cli
from lowtide.units import format_bytes

DOCUMENT = Path(__file__).parent / "documents" / "000_1953327273121cc3.txt"


def run(*arguments: str) -> None:
    """Run one command line, shown before its output."""
    print(f"\n$ lowtide {' '.join(arguments)}", flush=True)
    cli.main(list(arguments), prog_name="lowtide", standalone_mode=False)


if __name__ == "__main__":
    step = lowtide.read(DOCUMENT).step
    timeline = step.lifetimes()
    live = timeline.live_at(timeline.peak_step)
    at = step.graph.ops[timeline.peak_step].id
    print(f"{len(step.graph.ops)} operators; the peak is {format_bytes(timeline.peak_bytes)} at {at}")
    for life in live[:5]:
        print(f"  {format_bytes(life.bytes):>12}  {step.graph.tensors[life.tensor].label}")
    print(f"  and {len(live) - 5} more")
    with tempfile.TemporaryDirectory() as folder:
        plan = str(Path(folder) / "plan.json")
        # The dump has no times: a convolution counts 10 units, any other operator of forward 1.
        run("plan", str(DOCUMENT), "--cost", "unit", "--budget", "50%", "--time-limit", "3", "-o", plan)
        run("check", plan)
