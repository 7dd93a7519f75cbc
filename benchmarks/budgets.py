"""Steps inside budgets against eager PyTorch and other ways to save memory, in one process.

    python benchmarks/budgets.py [--device cuda] [--repeats 10] [--rivals compile,save_on_cpu] [TARGET=BUDGET[+MEANS] ...]

Prints a table and stores it under benchmarks/results/ as budgets-DEVICE.json and budgets-DEVICE.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch

from lowtide import fit, zoo
from lowtide.errors import LowtideError
from lowtide.execute.compare import compare
from lowtide.files import write_atomically
from plain import machine

RESULTS = Path(__file__).parent / "results"
BOTH = "recompute,offload"
CASES = {
    "cuda": [
        ("resnet50", "4500MiB", BOTH),
        ("resnet50", "2500MiB", BOTH),
        ("gpt2", "8700MiB", BOTH),
        ("gpt2", "7100MiB", BOTH),
        ("unet", "4500MiB", BOTH),
        ("resnet50", "60%", "offload"),
        ("gpt2", "60%", "offload"),
        ("unet", "60%", "offload"),
    ],
    "cpu": [
        ("gpt2:batch=4,layers=6,width=128,heads=4,length=128,vocab=2000", "50%", "recompute"),
        ("gpt2:batch=4,layers=6,width=128,heads=4,length=128,vocab=2000", "50%", BOTH),
    ],
}


def ours(target: str, budget: str, only: str, device: str, repeats: int) -> dict[str, Any]:
    """A step planned for a budget, then run and compared."""
    torch._dynamo.reset()
    built = zoo.build(target, device=device)
    row: dict[str, Any] = {"target": built.name, "way": f"lowtide {only}", "budget": budget}
    try:
        started = time.perf_counter()
        plan = fit(built.loss, built.model, *built.batch, budget=budget, only=only, cache=False).plan
        row["fit_seconds"] = time.perf_counter() - started
    except LowtideError as error:
        return row | {"error": str(error).splitlines()[0]}
    torch._dynamo.reset()
    found = compare(
        built.model, built.batch, built.loss, lambda _: plan.program, trains=built.trains, repeats=repeats
    )
    told = {key: value for key, value in plan.as_json().items() if key not in ("predicted", "plain")}
    return row | told | {
        "plain": {"peak_bytes": plan.plain.peak_bytes, "seconds": plan.plain.seconds},
        "predicted": {"peak_bytes": plan.predicted.peak_bytes, "seconds": plan.predicted.seconds},
        **{k: v for k, v in found.as_json().items() if k not in ("predicted",)},
        "ratio": found.measured.seconds / found.eager.seconds,
        "inside": found.measured.peak_bytes <= plan.budget_bytes,
        "link_bytes_per_second": [plan.link.to_host, plan.link.to_device] if plan.link else [],
        "predicted_over_measured": plan.predicted.peak_bytes / found.measured.peak_bytes,
    }  # fmt: skip


def rival(target: str, name: str, device: str, repeats: int) -> dict[str, Any]:
    """Another way to run the step: its peak and time, beside those of eager."""
    torch._dynamo.reset()
    built = zoo.build(target, device=device)
    eager = _timed(lambda: built.loss(built.model, *built.batch), built.model, repeats)
    theirs = _timed(RIVALS[name](built), built.model, repeats)
    return {
        "target": built.name,
        "way": name,
        "eager": {"peak_bytes": eager[0], "seconds": eager[1]},
        "measured": {"peak_bytes": theirs[0], "seconds": theirs[1]},
        "ratio": theirs[1] / eager[1],
    }


def _timed(step: Callable[[], Any], model: Any, repeats: int) -> tuple[int, float]:
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        step().backward()
    model.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step().backward()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for number in range(repeats + 1):  # the first one is not counted: the device waits for the host there
        model.zero_grad(set_to_none=True)
        step().backward()
        if number == 0:
            start.record()
    end.record()
    torch.cuda.synchronize()
    seconds = start.elapsed_time(end) * 1e-3 / repeats
    model.zero_grad(set_to_none=True)
    return peak, seconds


def _save_on_cpu(built: Any) -> Callable[[], Any]:
    def step() -> Any:
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            return built.loss(built.model, *built.batch)

    return step


def _compiled(share: float) -> Callable[[Any], Callable[[], Any]]:
    def make(built: Any) -> Callable[[], Any]:
        compiled = torch.compile(built.loss, fullgraph=True, dynamic=False)

        def step() -> Any:
            with torch._functorch.config.patch(activation_memory_budget=share):
                return compiled(built.model, *built.batch)

        return step

    return make


def _checkpointed(built: Any) -> Callable[[], Any]:
    """Every block of the network checkpointed by hand."""
    from torch.utils.checkpoint import checkpoint

    blocks = _blocks(built.model)
    if not blocks:
        raise RuntimeError("the network has no blocks to checkpoint")
    for block in blocks:
        forward = block.forward
        block.forward = lambda *args, _forward=forward: checkpoint(_forward, *args, use_reentrant=False)
    return lambda: built.loss(built.model, *built.batch)


def _blocks(model: Any) -> list[Any]:
    lists = [m for m in model.modules() if isinstance(m, (torch.nn.ModuleList, torch.nn.Sequential))]
    return [block for part in lists for block in part.children() if list(block.children())]


RIVALS: dict[str, Callable[[Any], Callable[[], Any]]] = {
    "save_on_cpu": _save_on_cpu,
    "checkpoint": _checkpointed,
    "compile": _compiled(1.0),
    "compile-0.5": _compiled(0.5),
    "compile-0.2": _compiled(0.2),
}


def table(rows: list[dict[str, Any]]) -> str:
    head = (
        "| target | way | budget | predicted MiB | measured MiB | eager MiB | ms | eager ms | ratio | planned | bound |"
        " inside | bitwise |"
    )
    lines = [head, "| --- | --- " + "| ---: " * 9 + "| --- | --- |"]
    for row in rows:
        if "error" in row:
            lines.append(
                f"| `{row['target']}` | {row['way']} | {row['budget']} | {row['error']} |" + " |" * 9
            )
            continue
        mib = [row[k]["peak_bytes"] / 2**20 if k in row else None for k in ("predicted", "measured", "eager")]
        cells = [f"`{row['target']}`", row["way"], row.get("budget", "")]
        cells += ["" if m is None else f"{m:,.1f}" for m in mib]
        cells += [f"{row['measured']['seconds'] * 1e3:.1f}", f"{row['eager']['seconds'] * 1e3:.1f}"]
        cells += [f"{row['ratio']:.3f}"]
        cells += (
            [f"{1 + row['overhead']:.3f}", f"{1 + row['bound']['overhead']:.3f}"]
            if "overhead" in row
            else ["", ""]
        )
        cells += [str(row.get("inside", "")), str(row.get("bitwise", ""))]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--rivals", default="", help=f"comma-separated, of {', '.join(RIVALS)}")
    parser.add_argument("--name", default="budgets")
    parser.add_argument("cases", nargs="*")
    chosen = parser.parse_args()
    cases = [(*case.split("=", 1)[0:1], *case.rsplit("=", 1)[1].partition("+")[::2]) for case in chosen.cases]
    rows = []
    for target, budget, only in cases or CASES[chosen.device]:
        rows.append(ours(target, budget, only or "recompute", chosen.device, chosen.repeats))
        print(table(rows).splitlines()[-1], flush=True)
    for name in filter(None, chosen.rivals.split(",")):
        for target in dict.fromkeys(case[0] for case in cases or CASES[chosen.device]):
            try:
                rows.append(rival(target, name, chosen.device, chosen.repeats))
                print(table(rows).splitlines()[-1], flush=True)
            except Exception as error:  # noqa: PERF203  a rival that cannot run this network is a result too
                told = f"{type(error).__name__}: {str(error)[:120]}".replace("\n", " ")
                rows.append({"target": target, "way": name, "budget": "", "error": told})
                print(table(rows).splitlines()[-1], flush=True)
    about = machine(chosen.device)
    document = {"date": str(date.today()), "machine": about, "repeats": chosen.repeats, "rows": rows}
    where = ", ".join(f"{k} {v}" for k, v in about.items())
    command = " ".join(["python benchmarks/budgets.py", *sys.argv[1:]])
    text = f"# Steps inside budgets\n\n`{command}`, {date.today()}; {where}\n\n{table(rows)}\n"
    write_atomically(
        RESULTS / f"{chosen.name}-{chosen.device}.json", json.dumps(document, indent=2).encode() + b"\n"
    )
    write_atomically(RESULTS / f"{chosen.name}-{chosen.device}.md", text.encode())
    print(text)


if __name__ == "__main__":
    main()
