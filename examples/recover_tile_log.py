"""Recover the network behind a tile log from its printed numbers, and check the log's gradients.

python examples/recover_tile_log.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

import lowtide
from lowtide.formats.tilelog.recover import recompute, recover

DOCUMENT = next((Path(__file__).parent / "documents").glob("004_*.txt"))


def main() -> None:
    """Print the recovered kernels and how far the recomputed gradients are from the printed ones."""
    step = lowtide.read(DOCUMENT).step
    found = recover(step)
    again = recompute(step, found)
    print(f"input of shape {found.input.shape}")
    for name, kernel in found.kernels.items():
        print(f"kernel of {name}:\n{np.array_str(kernel, precision=4, suppress_small=True)}")
    print(
        f"largest difference to the {again.input_gradient.size} printed gradients: {again.largest_error:.1e}"
    )


if __name__ == "__main__":
    main()
