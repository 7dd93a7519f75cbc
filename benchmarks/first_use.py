"""How long ``fit`` takes the first time, and with a kept plan, beside ``torch.compile(backend="aot_eager")``.

    python benchmarks/first_use.py [--time-limit 2] [--budget 60%] [NAME ...]

``aot_eager`` traces a step and runs eager kernels: it takes what torch's own trace takes, and one step. Each way runs in a
process of its own, in which torch and Lowtide are imported before; names are those of benchmarks/architectures.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch._functorch.aot_autograd

import lowtide
import lowtide.execute.fit
from architectures.hugging_face import CASES
from plain import machine

WAYS = ("aot_eager", "fit")


def seconds(way: str, name: str, budget: str, limit: float) -> list[float]:
    """Of the first use and of the second, in this process."""
    model, batch, loss_of = CASES[name](1)[:3]
    found = []
    for _ in range(2):
        began = time.perf_counter()
        if way == "fit":
            lowtide.fit(loss_of, model, batch, budget=budget, time_limit=limit)
        else:
            torch.compile(loss_of, backend="aot_eager")(model, batch).backward()
        found.append(time.perf_counter() - began)
        torch._dynamo.reset()
    return found


def apart(way: str, name: str, chosen: Any) -> list[float]:
    """The same in a process of its own, without plans or costs that others keep."""
    with tempfile.TemporaryDirectory() as kept:
        line = [sys.executable, __file__, "--way", way, "--budget", chosen.budget]
        line += ["--time-limit", str(chosen.time_limit), name]
        done = subprocess.run(
            line, check=True, capture_output=True, text=True, env={**os.environ, "LOWTIDE_CACHE": kept}
        )
    return list(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", default=["t5", "swin", "segformer", "diffusion-unet"])
    parser.add_argument("--budget", default="60%")
    parser.add_argument("--time-limit", type=float, default=2.0)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.way:
        print(json.dumps(seconds(chosen.way, chosen.names[0], chosen.budget, chosen.time_limit)))
        return
    told = ", ".join(f"{key} {value}" for key, value in machine("cpu").items())
    lines = [f"`python benchmarks/{Path(__file__).name} {' '.join(sys.argv[1:])}`; {told}", ""]
    lines += ["| step | aot_eager s | again | fit s | with a kept plan |", "| --- " + "| ---: " * 4 + "|"]
    print("\n".join(lines))
    for name in chosen.names:
        cells = [f"{taken:.1f}" for way in WAYS for taken in apart(way, name, chosen)]
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
