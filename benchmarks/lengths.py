"""What each new length of a batch takes, from its call to the end of its first step.

    python benchmarks/lengths.py [--layers 12] [--width 128] [--device cpu] [--budget 60%] [--time-limit 5]

A transformer encoder with a loss over tokens is fitted for 64 tokens; ten other lengths follow, each for the first time.
Prints a line each: seconds of the first and of the second step, the budget, the peak that is predicted, and how it was planned.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn

import lowtide

LENGTHS = (48, 56, 40, 60, 33, 57, 62, 44, 36, 50)
TOKENS = 500


class Encoder(nn.Module):
    """Tokens to tokens."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(TOKENS, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, batch_first=True, dropout=0.1)
        self.encoder, self.head = nn.TransformerEncoder(layer, layers), nn.Linear(width, TOKENS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Scores of all tokens."""
        return self.head(self.encoder(self.table(tokens)))


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """The loss of a batch."""
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--budget", default="60%")
    parser.add_argument("--time-limit", type=float, default=5.0)
    chosen = parser.parse_args()
    model = Encoder(chosen.layers, chosen.width).to(chosen.device)

    def batch(length: int) -> torch.Tensor:
        return torch.randint(0, TOKENS, (8, length), device=chosen.device)

    began = time.perf_counter()
    step = lowtide.fit(
        loss_of, model, batch(64), budget=chosen.budget, time_limit=chosen.time_limit, cache=False
    )
    print(f"fit at 64: {time.perf_counter() - began:.2f} s", flush=True)
    for length in LENGTHS:
        seconds = []
        for _ in range(2):
            began = time.perf_counter()
            step(model, batch(length)).backward()
            if chosen.device == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        plan = step.plan
        print(
            f"{length:3d}: first {seconds[0]:6.2f} s, second {seconds[1]:.3f} s; budget {plan.budget_bytes:,}, "
            f"predicted {plan.predicted.peak_bytes:,}; {plan.method}",
            flush=True,
        )


if __name__ == "__main__":
    main()
