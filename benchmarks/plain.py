"""The unplanned Program against eager PyTorch, in one process: peak, prediction, time.

    python benchmarks/plain.py [--device cuda] [--repeats 20] [TARGET ...]

Prints a table and stores it under benchmarks/results/ as plain-DEVICE.json and plain-DEVICE.md.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from datetime import date
from pathlib import Path
from typing import Any

import torch

from lowtide import __version__, zoo
from lowtide.execute.backend import PROGRAMS
from lowtide.execute.compare.compare import compare
from lowtide.files import write_atomically

RESULTS = Path(__file__).parent / "results"
TARGETS = {
    "cuda": ["unet", "resnet50", "gpt2"],
    "cpu": [zoo.small(name) for name in zoo.names() if name != "densenet161"],
}


def machine(device: str) -> dict[str, Any]:
    """Where the figures come from."""
    told = {"python": platform.python_version(), "torch": torch.__version__, "lowtide": __version__}
    if device == "cuda":
        cudnn = torch.backends.cudnn.version()
        return {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda, "cudnn": cudnn, **told}
    return {"cpu": platform.machine(), "threads": torch.get_num_threads(), **told}


def measured(target: str, device: str, repeats: int) -> dict[str, Any]:
    """One row of the table."""
    torch._dynamo.reset()
    built = zoo.build(target, device=device)
    found = compare(
        built.model, built.batch, built.loss, PROGRAMS["plain"], trains=built.trains, repeats=repeats
    )
    return {"target": built.name, **found.as_json()}


def table(rows: list[dict[str, Any]]) -> str:
    head = "| target | eager MiB | program MiB | predicted/measured | eager ms | program ms | time ratio | bitwise |"
    lines = [head, "| --- " + "| ---: " * 6 + "| --- |"]
    for row in rows:
        eager, ours = row["eager"], row["measured"]
        cells = [
            f"`{row['target']}`",
            f"{eager['peak_bytes'] / 2**20:,.1f}",
            f"{ours['peak_bytes'] / 2**20:,.1f}",
            f"{row['predicted']['peak_bytes'] / ours['peak_bytes']:.5f}",
            f"{eager['seconds'] * 1e3:.2f}",
            f"{ours['seconds'] * 1e3:.2f}",
            f"{ours['seconds'] / eager['seconds']:.3f}",
            "yes" if row["bitwise"] else f"no, {row['max_rel_grad_diff']:.1e}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("targets", nargs="*")
    parser.add_argument("--device", choices=TARGETS, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    rows = []
    for target in options.targets or TARGETS[options.device]:
        rows.append(measured(target, options.device, options.repeats))
        sys.stderr.write(table(rows[-1:]).splitlines()[-1] + "\n")
    where = machine(options.device)
    report = {
        "date": date.today().isoformat(),
        "command": "python benchmarks/plain.py",
        "machine": where,
        "rows": rows,
    }
    told = ", ".join(f"{key} {value}" for key, value in where.items())
    text = f"# The plain program against eager\n\n`{report['command']}`, {report['date']}; {told}\n\n{table(rows)}"
    options.output.mkdir(parents=True, exist_ok=True)
    write_atomically(
        options.output / f"plain-{options.device}.json", json.dumps(report, indent=2).encode() + b"\n"
    )
    write_atomically(options.output / f"plain-{options.device}.md", text.encode())
    print(text)


if __name__ == "__main__":
    main()
