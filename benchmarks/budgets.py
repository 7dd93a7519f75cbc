"""Steps inside budgets against eager PyTorch and other ways to save memory, in one process.

    python benchmarks/budgets.py [--device cuda] [--repeats 10] [--rivals compile,save_on_cpu] [TARGET=BUDGET[+MEANS] ...]

Prints a table and stores it under benchmarks/results/ as budgets-DEVICE.json and budgets-DEVICE.md.
"""

from __future__ import annotations

import argparse
import gc
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
from lowtide.execute.compare.compare import compare
from lowtide.files import write_atomically
from plain import machine
from rivals import RIVALS, eager

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
    built = _built(target, device)
    row: dict[str, Any] = {"target": built.name, "way": f"lowtide {only}", "budget": budget}
    try:
        started = time.perf_counter()
        plan = fit(built.loss, built.model, *built.batch, budget=budget, only=only, cache=False).plan
        row["fit_seconds"] = time.perf_counter() - started
    except LowtideError as error:
        return row | {"error": str(error).splitlines()[0]}
    torch._dynamo.reset()
    found = compare(
        built.model,
        built.batch,
        built.loss,
        lambda _: plan.program,
        trains=built.trains,
        repeats=repeats,
        in_place=False,  # it runs as it was planned
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


def _built(target: str, device: str) -> Any:
    """A network of the zoo, once nothing of the one before it is left on the device."""
    torch._dynamo.reset()
    gc.collect()
    return zoo.build(target, device=device)


def rival(target: str, name: str, device: str, repeats: int) -> dict[str, Any]:
    """Another way to run the step: its peak and time, beside those of eager."""
    built = _built(target, device)
    plain = _timed(eager(built), built.model, repeats)
    theirs = _timed(RIVALS[name](built), built.model, repeats)
    return {
        "target": built.name,
        "way": name,
        "eager": {"peak_bytes": plain[0], "seconds": plain[1]},
        "measured": {"peak_bytes": theirs[0], "seconds": theirs[1]},
        "ratio": theirs[1] / plain[1],
    }


def _timed(step: Callable[[], None], model: Any, repeats: int) -> tuple[int, float]:
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        step()
    model.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for number in range(repeats + 1):  # the first one is not counted: the device waits for the host there
        model.zero_grad(set_to_none=True)
        step()
        if number == 0:
            start.record()
    end.record()
    torch.cuda.synchronize()
    seconds = start.elapsed_time(end) * 1e-3 / repeats
    model.zero_grad(set_to_none=True)
    return peak, seconds


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
    rows: list[dict[str, Any]] = []

    def add(row: dict[str, Any]) -> None:
        rows.append(row)
        print(table(rows).splitlines()[-1], flush=True)
        _store(rows, chosen)

    for target, budget, only in cases or CASES[chosen.device]:
        add(ours(target, budget, only or "recompute", chosen.device, chosen.repeats))
    for name in filter(None, chosen.rivals.split(",")):
        for target in dict.fromkeys(case[0] for case in cases or CASES[chosen.device]):
            try:
                row = rival(target, name, chosen.device, chosen.repeats)
            except Exception as error:  # a rival that cannot run this network is a result too
                told = f"{type(error).__name__}: {str(error)[:120]}".replace("\n", " ")
                row = {"target": target, "way": name, "budget": "", "error": told}
            add(row)
    print(_store(rows, chosen))


def _store(rows: list[dict[str, Any]], chosen: argparse.Namespace) -> str:
    """Written after every row, so that what fails later does not lose it."""
    about = machine(chosen.device)
    document = {"date": str(date.today()), "machine": about, "repeats": chosen.repeats, "rows": rows}
    where = ", ".join(f"{k} {v}" for k, v in about.items())
    command = " ".join(["python benchmarks/budgets.py", *sys.argv[1:]])
    text = f"# Steps inside budgets\n\n`{command}`, {date.today()}; {where}\n\n{table(rows)}\n"
    name = f"{chosen.name}-{chosen.device}"
    write_atomically(RESULTS / f"{name}.json", json.dumps(document, indent=2).encode() + b"\n")
    write_atomically(RESULTS / f"{name}.md", text.encode())
    return text


if __name__ == "__main__":
    main()
