"""Steps by fused kernels inside budgets, beside eager PyTorch and torch.compile in one process.

    python benchmarks/fused.py [--device cuda] [--small] [--time-limit 20] [--kernels fused,eager] STEP[/GRAPHS][:BUDGET,...] ...

STEP is llama, gpt2-bf16, gpt2, resnet50 or unet (benchmarks/architectures/as_users_write.py; llama needs `transformers`).
GRAPHS is a word of lowtide.fit, off or auto, for this step in place of --graphs.
Five steps of forward and backward between two synchronisations, after four that do not count. Prints a table, and stores
it as benchmarks/results/fused-DEVICE.md unless --small.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # before torch is imported

import torch

import lowtide
from architectures.as_users_write import CASES
from lowtide.cost.watch import watch_cpu
from lowtide.files import write_atomically
from plain import machine

RESULTS = Path(__file__).parent / "results"
WARM, STEPS = 4, 5


def measured(step: Callable[..., Any], model: Any, batch: Any) -> dict[str, Any]:
    """Milliseconds, peak bytes and gradients of a step."""
    cuda = batch[0].is_cuda

    def once() -> None:
        model.zero_grad(set_to_none=True)
        step(model, *batch).backward()

    for _ in range(WARM):
        once()
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    for _ in range(STEPS):
        once()
    launched = time.perf_counter() - began
    if cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    leaves = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    peak = (
        torch.cuda.max_memory_allocated()
        if cuda
        else watch_cpu(lambda _: once())[1].peak_bytes + sum(leaves.values())
    )
    torch.manual_seed(0)  # dropout draws the same masks in every way
    once()
    gradients = [p.grad.detach().float().cpu() for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    return {
        "ms": 1e3 * seconds / STEPS,
        "host": 1e3 * launched / STEPS,
        "peak": peak,
        "gradients": gradients,
    }


def apart(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest difference of a gradient, as a share of its norm."""
    pairs = zip(one["gradients"], other["gradients"], strict=True)
    return max(float((a - b).norm() / a.norm().clamp_min(1e-30)) for a, b in pairs)


def compiled(loss_of: Callable[..., Any], share: float) -> Callable[..., Any]:
    torch._dynamo.reset()
    found = torch.compile(loss_of, dynamic=False)

    def step(*args: Any) -> Any:
        with torch._functorch.config.patch(activation_memory_budget=share):
            return found(*args)

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--time-limit", type=float, default=20.0)
    parser.add_argument("--kernels", default="fused")
    parser.add_argument("--graphs", default="off", help="a word of lowtide.fit: off or auto")
    parser.add_argument(
        "--half-budget", default="", help="torch.compile with its budget 0.5 too: STEP,... or all"
    )
    parser.add_argument("steps", nargs="+", metavar="STEP[/GRAPHS][:BUDGET,...]")
    chosen = parser.parse_args()
    lines = [
        "| step | way | budget | MiB | ms | host ms | of torch.compile | gradients from eager | planned |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    print("\n".join(lines), flush=True)
    for asked in chosen.steps:
        given, _, budgets = asked.partition(":")
        name, _, graphs = given.partition("/")
        torch.manual_seed(0)
        model, batch, loss_of = CASES[name](chosen.device, chosen.small)
        wanted = argparse.Namespace(**{**vars(chosen), "graphs": graphs or chosen.graphs})
        rows = run(name, model, batch, loss_of, [b for b in budgets.split(",") if b], wanted)
        for one in rows:
            lines.append(one)
            print(one, flush=True)
        del model, batch, loss_of
        gc.collect()
        if chosen.device == "cuda":
            torch.cuda.empty_cache()
    told = ", ".join(f"{key} {value}" for key, value in machine(chosen.device).items())
    text = f"# Fused kernels inside budgets\n\n`{' '.join(['python benchmarks/fused.py', *sys.argv[1:]])}`, {date.today()}; {told}\n\n"
    if not chosen.small:
        write_atomically(RESULTS / f"fused-{chosen.device}.md", (text + "\n".join(lines) + "\n").encode())


def run(name: str, model: Any, batch: Any, loss_of: Any, budgets: list[str], chosen: Any) -> Any:
    """The rows of one step."""
    eager = measured(loss_of, model, batch)

    def row(way: str, budget: str, found: dict[str, Any], planned: str = "") -> str:
        cells = [name, way, budget, f"{found['peak'] / 2**20:,.0f}", f"{found['ms']:.1f}"]
        cells += [f"{found['host']:.1f}", f"{found['ms'] / rival['ms']:.3f}"]
        cells += ["" if found is eager else f"{apart(eager, found):.3f}", planned]
        return "| " + " | ".join(cells) + " |"

    rival = measured(compiled(loss_of, 1.0), model, batch)
    yield row("eager", "", eager)
    yield row("torch.compile", "", rival)
    if chosen.half_budget == "all" or name in chosen.half_budget.split(","):
        yield row("torch.compile, its budget 0.5", "", measured(compiled(loss_of, 0.5), model, batch))
    torch._dynamo.reset()
    for kernels in chosen.kernels.split(","):
        for budget in budgets:
            began = time.perf_counter()
            try:
                step = lowtide.fit(
                    loss_of, model, *batch, budget=budget, time_limit=chosen.time_limit, kernels=kernels,
                    verify=False, graphs=chosen.graphs,
                )  # fmt: skip
            except lowtide.LowtideError as error:
                yield f"| {name} | lowtide {kernels} | {budget} | {str(error).splitlines()[0]} | | | | | |"
                continue
            d, took = step.plan.decisions, time.perf_counter() - began
            told = f"{d.tiles} tiles, {d.recomputed} recomputed, {d.offloaded} offloaded; "
            told += f"{step.plan.method}, predicted {step.plan.predicted.peak_bytes / 2**20:,.0f} MiB, "
            told += f"{1e3 * step.plan.predicted.seconds:.1f} ms; fit {took:.0f} s"
            found = measured(step, model, batch)
            found["peak"] += step.graph_bytes  # memory that PyTorch's allocator does not see
            if chosen.graphs != "off":
                told += "; " + next(x for x in step.explain().splitlines() if x.startswith("graphs"))
            yield row(f"lowtide {kernels}", budget, found, told)
            del step
            torch._dynamo.reset()
            gc.collect()


if __name__ == "__main__":
    main()
