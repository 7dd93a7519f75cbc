"""What the host needs to launch a step, beside eager PyTorch and torch.compile in one process.

    python benchmarks/launching.py [--device cuda] [--half] [--layers 12] [--budget 100%] [--repeats 50]

The step is a GPT-2 so narrow that its kernels take next to nothing, with autocast to bfloat16 by --half. Ways take turns;
the least time of forward and backward counts, from a device that has nothing to do until both calls have returned.
Instructions are those of the Program, drops included; operators those that it runs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

import lowtide
from architectures.as_users_write import Gpt2
from lowtide.plan.program.instructions import Run
from plain import machine


def least(
    ways: dict[str, Callable[..., Any]], model: Any, ids: torch.Tensor, repeats: int
) -> dict[str, float]:
    """Seconds until the calls of a step return; on the CPU those of the processor, which others may use too."""
    clock = time.perf_counter if ids.is_cuda else time.process_time
    found = dict.fromkeys(ways, float("inf"))
    for number in range(repeats + 3):  # those that do not count set up what a first step does
        for name, step in ways.items():
            model.zero_grad(set_to_none=True)
            if ids.is_cuda:
                torch.cuda.synchronize()
            began = clock()
            step(model, ids).backward()
            taken = clock() - began
            found[name] = min(found[name], taken) if number >= 3 else found[name]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--half", action="store_true")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--budget", default="100%")
    parser.add_argument("--repeats", type=int, default=50)
    chosen = parser.parse_args()
    torch.manual_seed(0)
    model = Gpt2(chosen.layers, 32, 2, 8, 32).to(chosen.device)
    ids = torch.randint(0, 32, (1, 8), device=chosen.device)

    def loss_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast(chosen.device, torch.bfloat16, enabled=chosen.half):
            return functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())

    ways: dict[str, Callable[..., Any]] = {
        "eager": loss_of,
        "torch.compile": torch.compile(loss_of, dynamic=False),
    }
    programs = {}
    for kernels in ("eager", "fused"):
        step = lowtide.fit(loss_of, model, ids, budget=chosen.budget, kernels=kernels, time_limit=3.0)
        ways[f"lowtide {kernels}"], programs[f"lowtide {kernels}"] = step, step.plan.program
    seconds = least(ways, model, ids, chosen.repeats)
    told = ", ".join(f"{key} {value}" for key, value in machine(chosen.device).items())
    print(f"{told}\n\n| way | host ms | of eager | instructions | us each | operators | us each |")
    print("| --- " + "| ---: " * 6 + "|")
    for name, taken in seconds.items():
        cells = [name, f"{1e3 * taken:.2f}", f"{taken / seconds['eager']:.2f}"]
        lines = programs[name].instructions if name in programs else ()
        for count in (len(lines), sum(isinstance(line, Run) for line in lines)):
            cells += [str(count), f"{1e6 * taken / count:.2f}"] if count else ["", ""]
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
