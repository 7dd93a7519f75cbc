"""How much of a step on a CUDA device no kernel runs, with and without CUDA graphs, and its time of eager's.

    python benchmarks/gaps.py [--kernels fused] [--graphs off,auto] [--time-limit 10] [--out FILE] [STEP:BUDGET ...]

STEP is one of benchmarks/architectures/as_users_write.py; gpt2-bf16:4150MiB and unet:700MiB by default. Steps run one after
the other, as in training without an optimizer. "busy" is the time of a step in which a kernel or a copy on the device runs, by
torch.profiler. "gaps" is the rest: of the time of the profiled steps, from their first kernel to the end of the last one; and of
the time of a step without a profiler, which slows launches down. Eager runs in the same process.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import lowtide
from architectures.as_users_write import CASES
from lowtide.files import write_atomically
from plain import machine
from reserved import cleared

STEPS = ("gpt2-bf16:4150MiB", "unet:700MiB")
WARM, COUNTED, PROFILED = 6, 10, 4


def covered(spans: list[tuple[float, float]]) -> float:
    """The length of what lies in at least one of the spans."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def gaps(steps: Callable[[int], None]) -> tuple[float, float]:
    """Seconds of a step in which the device does something, and the share of a few steps in which it does not."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        steps(PROFILED)
        torch.cuda.synchronize()
    events = [one for one in seen.events() if one.device_type == DeviceType.CUDA]
    spans = [(one.time_range.start, one.time_range.end) for one in events]
    whole = max(end for _, end in spans) - min(start for start, _ in spans)
    busy = covered(spans)
    return 1e-6 * busy / PROFILED, 1 - busy / whole


def measured(step: Any, model: Any, batch: Any, eager: float | None = None) -> tuple[float, list[str]]:
    """Seconds of a step, and the cells of the table."""

    def several(count: int) -> None:
        for _ in range(count):
            model.zero_grad(set_to_none=True)
            step(model, *batch).backward()

    several(WARM)
    torch.cuda.synchronize()
    began = time.perf_counter()
    several(COUNTED)
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - began) / COUNTED
    busy, profiled = gaps(several)
    cells = [f"{1e3 * seconds:.1f}", f"{seconds / (eager or seconds):.3f}", f"{1e3 * busy:.1f}"]
    return seconds, [*cells, f"{profiled:.2%}", f"{1 - busy / seconds:.2%}"]


def rows(what: str, chosen: Any) -> Any:
    """Of one step and budget: eager, without graphs, with them."""
    name, budget = what.split(":")
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, batch, loss_of = CASES[name]("cuda", False)
    cleared()
    eager, cells = measured(loss_of, model, batch)
    yield [what, "eager", "", *cells, ""]
    for graphs in chosen.graphs.split(","):
        model.zero_grad(set_to_none=True)
        cleared()
        try:
            step = lowtide.fit(
                loss_of, model, *batch, budget=budget, kernels=chosen.kernels, graphs=graphs,
                time_limit=chosen.time_limit, verify=False,
            )  # fmt: skip
        except lowtide.LowtideError as error:
            yield [what, f"graphs {graphs}", str(error).splitlines()[0], *[""] * 6]
            continue
        _, cells = measured(step, model, batch, eager)
        tiles = step.plan.decisions.tiles or 1
        told = next((x for x in step.explain().splitlines() if x.startswith("graphs")), "")
        yield [what, f"graphs {graphs}", str(tiles), *cells, told]
        del step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kernels", default="fused")
    parser.add_argument("--graphs", default="off,auto")
    parser.add_argument("--time-limit", type=float, default=10.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("steps", nargs="*", metavar="STEP:BUDGET")
    chosen = parser.parse_args()
    lines = [
        "| step | | tiles | ms | of eager's time | busy ms | gaps, profiled | gaps | |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    print("\n".join(lines), flush=True)
    told = ", ".join(f"{key} {value}" for key, value in machine("cuda").items())
    command = " ".join(["python benchmarks/gaps.py", *sys.argv[1:]])
    for what in chosen.steps or STEPS:
        for cells in rows(what, chosen):
            lines.append("| " + " | ".join(cells) + " |")
            print(lines[-1], flush=True)
        if chosen.out is not None:
            text = (
                f"# Gaps between kernels\n\n`{command}`, {date.today()}; {told}\n\n" + "\n".join(lines) + "\n"
            )
            write_atomically(chosen.out, text.encode())


if __name__ == "__main__":
    main()
