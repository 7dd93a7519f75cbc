"""Architectures of Hugging Face and timm inside budgets, held against eager PyTorch.

    python benchmarks/other_people.py [--device cuda] [--jobs 2] [--time-limit 5] [--output FILE] [--add] hugging_face|timm [NAME ...]

Each network runs in a process of its own: at 100, 60 and 35% of its plain peak, and at the smallest budget that is known.
Loss, gradients and buffers of a step are compared with eager bit for bit; in tiles gradients as a share of their size.
Prints a table, one row each, and stores it as FILE.md and FILE.json, benchmarks/results/LIBRARY-DEVICE by default.

    python benchmarks/other_people.py page

Writes docs/architectures.md from the tables that are stored.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import date
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # before torch is imported

import torch

import lowtide
from lowtide.cost.watch import watch_cpu
from lowtide.errors import InfeasibleError, LowtideError
from lowtide.files import write_atomically
from plain import machine

RESULTS = Path(__file__).parent / "results"
PAGE = RESULTS.parent.parent / "docs" / "architectures.md"
TABLES = {
    "hugging-face-cpu": "Hugging Face on a CPU",
    "hugging-face-cuda": "Hugging Face on a GPU",
    "timm-cuda": "timm on a GPU",
}
LIBRARIES = {"hugging_face": ("transformers", "diffusers"), "timm": ("timm", "torchvision")}
MODULES = {"hugging_face": "architectures.hugging_face", "timm": "architectures.timm_models"}
BUDGETS = ("100%", "60%", "35%", "smallest")
TIMES = {"cpu": 1, "cuda": 16}
"""The batch, in multiples of the smallest: on a GPU the workspaces of libraries are not to be most of it."""
SECONDS = 540
CLOSE = 1e-3


def moved(value: Any, device: str) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value


def outcome(model: Any, step: Any, batch: Any, state: Any) -> list[torch.Tensor | None]:
    """Loss, gradients and buffers of one step from a state."""
    model.load_state_dict(state)
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    loss = step(model, batch)
    loss.backward()
    found = [loss.detach(), *(p.grad for p in model.parameters()), *model.buffers()]
    return [None if one is None else one.detach().clone() for one in found]


def apart(one: list[torch.Tensor | None], other: list[torch.Tensor | None]) -> float:
    """0 where all bits are equal, else the largest difference as a share of all gradients together."""
    pairs = [(a, b) for a, b in zip(one, other, strict=True) if a is not None and b is not None]
    if all(torch.equal(a, b) for a, b in pairs) and [a is None for a in one] == [b is None for b in other]:
        return 0.0
    pairs = [(a.double(), b.double()) for a, b in pairs if a.is_floating_point()]
    whole = sum(float(a.norm() ** 2) for a, _ in pairs) ** 0.5 / len(pairs) ** 0.5
    return max(float((a - b).norm() / max(float(a.norm()), whole, 1e-30)) for a, b in pairs) or 1e-300


def peak(model: Any, step: Any, batch: Any, device: str) -> int:
    """What a step is measured to take, with parameters, buffers and the batch."""
    model.zero_grad(set_to_none=True)

    def once() -> None:
        step(model, batch).backward()

    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        once()
        torch.cuda.synchronize()
        return int(torch.cuda.max_memory_allocated())
    _, seen = watch_cpu(lambda _: once())
    tensors = [*model.state_dict().values(), *(v for v in batch.values() if isinstance(v, torch.Tensor))]
    leaves = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return int(seen.peak_bytes + sum(leaves.values()))


def one(library: str, name: str, device: str, time_limit: float) -> dict[str, Any]:
    """All budgets of one architecture."""
    torch.manual_seed(0)
    torch.backends.cudnn.deterministic = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    model, batch, loss_of = import_module(MODULES[library]).CASES[name](TIMES[device])
    model = model.train().to(device)
    batch = {key: moved(value, device) for key, value in batch.items()}
    state = {key: value.clone() for key, value in model.state_dict().items()}
    eager = [outcome(model, loss_of, batch, state) for _ in range(4 if device == "cuda" else 1)]
    noise = max(apart(eager[0], other) for other in eager)
    row: dict[str, Any] = {"name": name, "parameters": sum(p.numel() for p in model.parameters())}
    row |= {"eager_differs": noise, "budgets": {}}
    for budget in BUDGETS:
        torch._dynamo.reset()
        model.load_state_dict(state)
        model.zero_grad(set_to_none=True)
        began, asked = time.monotonic(), 1 if budget == "smallest" else budget
        cell: dict[str, Any] = {}
        try:
            try:
                step = lowtide.fit(loss_of, model, batch, budget=asked, time_limit=time_limit)
            except InfeasibleError as error:
                if budget != "smallest":
                    raise
                asked = error.smallest_budget
                step = None
            if step is None:
                step = lowtide.fit(loss_of, model, batch, budget=asked, time_limit=time_limit)
            plan = step.plan
            several = len(step.plans)
            cell["budget"] = step._subgraphs.budget_bytes if step._subgraphs else plan.budget_bytes
            tiles = sum(one.decisions.tiles for one in step.plans)
            cell |= {"graphs": several, "tiles": tiles, "overhead": plan.overhead}
            cell["fit_seconds"] = time.monotonic() - began
            cell["apart"] = apart(eager[0], outcome(model, step, batch, state))
            cell["peak"] = peak(model, step, batch, device)
        except InfeasibleError as error:
            cell |= {"smallest": error.smallest_budget, "floor": error.floor, "asked": error.budget}
        except LowtideError as error:
            cell["error"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        except Exception as error:
            cell["error"] = f"{type(error).__name__}: {error}"[:500]
            traceback.print_exc()
        row["budgets"][budget] = cell
    return row


def told(cell: dict[str, Any], noise: float) -> str:
    """A cell of the table."""
    if "error" in cell:
        return "**" + cell["error"][:80].replace("|", "/") + "**"
    if "smallest" in cell:
        return f"refused, known {cell['smallest'] / 2**20:.2f} MiB"
    tiles = f", {cell['tiles']} tiles" if cell["tiles"] else ""
    tiles += f", {cell['graphs']} graphs" if cell["graphs"] > 1 else ""
    above = "" if cell["peak"] <= cell["budget"] else f" **above: {cell['peak']} in {cell['budget']}**"
    if cell["apart"] == 0:
        return f"equal{tiles}{above}"
    close = cell["apart"] <= (max(CLOSE, 4 * noise) if cell["tiles"] else 4 * noise)
    found = f"{cell['apart']:.0e}{tiles}"
    return (found if close else f"**{found}**") + above


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    cells = [row["name"], f"{row['parameters']:,}"]
    cells += [told(row["budgets"][budget], row["eager_differs"]) for budget in BUDGETS]
    return "| " + " | ".join(cells) + " |"


def in_process(library: str, name: str, device: str, time_limit: float) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", "--device", device, "--time-limit", str(time_limit)]
    try:
        done = subprocess.run(
            [*command, library, name], capture_output=True, text=True, timeout=SECONDS, check=False
        )
        return dict(json.loads(done.stdout.splitlines()[-1]))
    except subprocess.TimeoutExpired:
        error = f"not done after {SECONDS} s"
    except (IndexError, ValueError):
        error = (done.stderr.splitlines() or ["nothing was printed"])[-1]
    cells = {budget: {"error": error} for budget in BUDGETS}
    return {"name": name, "parameters": 0, "eager_differs": 0.0, "budgets": cells}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--time-limit", type=float, default=5.0)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--add", action="store_true", help="put the rows into the table that is there")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("library", choices=[*LIBRARIES, "page"])
    parser.add_argument("names", nargs="*", metavar="NAME")
    chosen = parser.parse_args()
    if chosen.library == "page":
        write_atomically(PAGE, page().encode())
        return
    names = chosen.names or list(import_module(MODULES[chosen.library]).CASES)
    if chosen.one:
        print(json.dumps(one(chosen.library, names[0], chosen.device, chosen.time_limit)))
        return
    output = chosen.output or RESULTS / f"{chosen.library.replace('_', '-')}-{chosen.device}"
    known = json.loads(output.with_suffix(".json").read_text()) if chosen.add else []
    rows = {row["name"]: row for row in known}
    with ThreadPoolExecutor(chosen.jobs) as pool:
        jobs = [
            pool.submit(in_process, chosen.library, name, chosen.device, chosen.time_limit) for name in names
        ]
        for job in as_completed(jobs):
            row = job.result()
            rows[row["name"]] = row
            print(line(row), flush=True)
            store(output, rows, chosen.library, chosen.device)  # what is there stays, if it is stopped


def page() -> str:
    """The page of all tables."""
    parts = [
        "# Architectures of other people\n\nNetworks of Hugging Face and timm with random weights and small sizes, as their "
        "authors wrote them, in `lowtide.fit` at 100, 60 and 35% of the plain peak and at the smallest budget that is known. "
        "`equal`: loss, gradients and buffers are those of eager PyTorch bit for bit. A number is the largest difference of a "
        "gradient, as a share of its size: in tiles, or where eager differs from itself as much. `refused`: the budget is "
        "below the smallest one that is known, which is named. Written by `python benchmarks/other_people.py page` from "
        "the tables in benchmarks/results/."
    ]
    for name, title in TABLES.items():
        lines = (RESULTS / f"{name}.md").read_text().splitlines()
        parts.append("\n".join([f"## {title}", *lines[1:]]))
    return "\n\n".join(parts) + "\n"


def store(output: Path, rows: dict[str, dict[str, Any]], library: str, device: str) -> None:
    """Write the table as it is by now."""
    libraries = ", ".join(f"{name} {version(name)}" for name in LIBRARIES[library])
    where = ", ".join(f"{key} {value}" for key, value in machine(device).items())
    asked = " ".join(["python benchmarks/other_people.py", *sys.argv[1:]])
    text = (
        f"# {len(rows)} architectures inside budgets\n\n`{asked}`, {date.today()}; {where}, {libraries}\n\n"
    )
    head = ["architecture", "parameters", *BUDGETS]
    lines = ["| " + " | ".join(head) + " |", "| --- | ---: " + "| --- " * len(BUDGETS) + "|"]
    lines += [line(row) for row in rows.values()]
    write_atomically(output.with_suffix(".md"), (text + "\n".join(lines) + "\n").encode())
    write_atomically(output.with_suffix(".json"), json.dumps(list(rows.values()), indent=1).encode())


if __name__ == "__main__":
    main()
