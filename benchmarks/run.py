"""All benchmarks, one after the other: every table and picture under benchmarks/results/.

    python benchmarks/run.py [PART ...]

Without names all parts that this machine can run; those on a GPU only where there is one.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
RIVALS = "save_on_cpu,checkpoint,compile,compile-0.5,compile-0.2"
IN_TILES = ["unet=1335MiB+auto", "unet=700MiB+auto", "gpt2=3646MiB+auto"]
PARTS: dict[str, list[list[str]]] = {
    "scale": [["scale.py"]],
    "plain": [["plain.py"]],
    "optimal": [["planner.py", "small"], ["planner.py", "medium"]],
    "document": [["planner.py", "document"]],
    "zoo": [["planner.py", "zoo"]],
    "blocks": [["planner.py", "blocks"]],
    "addresses": [["addresses.py", "document"], ["addresses.py", "zoo"], ["addresses.py", "scale"]],
    "tiles": [["tiles.py"]],
    "exact": [["exact.py"]],
    "budgets": [["budgets.py", "--rivals", RIVALS]],
    "tiled": [["budgets.py", "--name", "tiles", "--rivals", "micro-batches,chunked", *IN_TILES]],
    "curves": [["curves.py", "--name", "cuda", "unet", "resnet50", "gpt2"]],
    "image": [["large_image.py"]],
}
GPU = {"budgets", "curves", "image", "tiled"}


def main() -> None:
    """Run what was asked for; the exit code is 1 if any part failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    chosen = parser.parse_args()
    unknown = sorted(set(chosen.parts) - set(PARTS))
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; parts are {', '.join(PARTS)}")
    import torch

    parts = chosen.parts or [part for part in PARTS if torch.cuda.is_available() or part not in GPU]
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", **os.environ}
    failed = []
    for part in parts:
        for command in PARTS[part]:
            started = time.monotonic()
            sys.stderr.write(f"== {part}: {' '.join(command)}\n")
            done = subprocess.run([sys.executable, *command], cwd=HERE, env=environment, check=False)
            sys.stderr.write(f"== {part}: exit {done.returncode}, {time.monotonic() - started:.0f} s\n")
            failed += [part] if done.returncode else []
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
