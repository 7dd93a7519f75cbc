"""Steps that are split over processes of this machine, compared with one device.

    python benchmarks/shard_checks.py [--devices 2 3 4 8] [--kinds any cut batch] [--float32] [--name NAME] [TARGET ...]

Each row is `lowtide shard TARGET --devices N --run --check --double`, with gloo. "any" is the planner's own choice by links of
100 GB/s, so that much is split; "cut" cuts one dimension wherever it can be, which this file names for each step; other kinds
are those of --cut. With --float32 both sides compute in float32, and the command refuses differences above 1e-3: ResNet-50 at this
size differs by more, and has to be held against float64 instead. Writes benchmarks/results/NAME.json and .md (shard-checks-cpu).
Peaks are those of the rank that comes nearest to its plan.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from subprocess import PIPE
from typing import Any

import torch

from lowtide.files import write_atomically

RESULTS = Path(__file__).parent / "results"
CUTS = {
    "locallyconnected:batch=8,size=17,channels=8,classes=10": "height",
    "unet:base=2,batch=3,size=188": "height",
    "alexnet:batch=8,size=67": "batch",
    "resnet50:batch=8,size=64,classes=10,width=16": "batch",
    "gpt2:batch=8,layers=2,width=64,heads=8,length=32,vocab=97": "heads",
}
"""Steps, and the dimension that is cut where it is not the planner's choice."""
SECONDS = 600


def checked(target: str, devices: int, kind: str, numbers: list[str]) -> dict[str, Any]:
    """What the command says of a split step; an error where it fails."""
    how = ["--link", "100GB/s,0us"] if kind == "any" else ["--cut", kind]
    words = [target, "--devices", str(devices), *how, "--run", "--check", *numbers, "--time-limit", "2"]
    call = [sys.executable, "-W", "ignore", "-m", "lowtide", "shard", *words, "--json"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    began = time.perf_counter()
    row: dict[str, Any] = {"target": target, "devices": devices, "kind": kind}
    with subprocess.Popen(call, stdout=PIPE, stderr=PIPE, text=True, env=environment) as run:
        try:
            told, error = run.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            run.terminate()  # it ends its processes
            told, error = run.communicate()
            error = f"not ended after {SECONDS} s. {error}"
    row |= {"exit_code": run.returncode, "seconds": time.perf_counter() - began}
    return row | (json.loads(told) if not run.returncode else {"error": error[-400:]})


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    cells = [f"`{row['target']}`", str(row["devices"]), row["kind"]]
    if row["exit_code"]:
        error = " ".join(row["error"].split()).replace("|", "/")
        return "| " + " | ".join([*cells, f"ended with {row['exit_code']}: {error}", *[""] * 6]) + " |"
    pairs = list(zip(row["bytes_per_rank"], row["planned_bytes_per_rank"], strict=True))
    peak, planned = max(pairs, key=lambda pair: pair[0] / pair[1])
    cells += [
        f"{row['split_operators']} of {row['operators']}",
        f"{row['max_rel_grad_diff']:.0e}",
        f"{row['max_rel_update_diff']:.0e}",
        f"{peak:,} of {planned:,}",
        "yes" if all(one <= other for one, other in pairs) else "NO",
        f"{row['wire_bytes']:,}",
        "yes" if row["wire_bytes"] == row["planned_wire_bytes"] else "NO",
    ]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", default=[2, 3, 4, 8])
    parser.add_argument("--kinds", nargs="+", default=["any", "cut"])
    parser.add_argument("--float32", action="store_true")
    parser.add_argument("--name", default="shard-checks-cpu")
    parser.add_argument("targets", nargs="*", metavar="TARGET", default=[])
    chosen = parser.parse_args()
    lines = [
        "| target | processes | split by | split operators | gradients within | updates within | peak of planned bytes "
        "| all inside | bytes sent | as planned |",
        "| --- | ---: | --- | ---: | ---: | ---: | ---: | --- | ---: | --- |",
    ]
    print("\n".join(lines), flush=True)
    rows = []
    where = f"{platform.machine()}, {os.cpu_count()} processors, torch {torch.__version__}"
    words = " ".join(["python benchmarks/shard_checks.py", *sys.argv[1:]])
    for target in chosen.targets or CUTS:
        for kind in chosen.kinds:
            for devices in chosen.devices:
                cut = CUTS[target] if kind == "cut" else kind
                rows.append(checked(target, devices, cut, [] if chosen.float32 else ["--double"]))
                lines.append(line(rows[-1]))
                print(lines[-1], flush=True)
                about = f"Command: `{words}`. {datetime.date.today()}, {where}, one thread a process."
                text = "\n".join(
                    [
                        f"# Split steps beside one device, in {'float32' if chosen.float32 else 'float64'}",
                        "",
                        *lines,
                        "",
                        about,
                        "",
                    ]
                )
                write_atomically(RESULTS / f"{chosen.name}.md", text.encode())
                write_atomically(RESULTS / f"{chosen.name}.json", json.dumps(rows, indent=1).encode() + b"\n")


if __name__ == "__main__":
    main()
