"""Fit a Hugging Face model into half of its memory: a small GPT-2 with random weights; nothing is downloaded.

pip install transformers
python examples/hugging_face.py
"""

from __future__ import annotations

import sys

try:
    from transformers import GPT2Config, GPT2LMHeadModel
except ImportError:
    print("this example needs transformers: pip install transformers", file=sys.stderr)
    sys.exit(2)

import torch
from torch.nn.functional import cross_entropy

import lowtide
from lowtide.units import format_bytes


def loss_of(model: GPT2LMHeadModel, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss from the scores: where a model computes it itself, it may log, which torch cannot capture."""
    scores = model(batch["input_ids"], use_cache=False).logits
    return cross_entropy(scores[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


if __name__ == "__main__":
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": 64, "vocab_size": 256}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    tokens = torch.randint(256, (8, 64))
    batch = {"input_ids": tokens, "labels": tokens}
    step = lowtide.fit(loss_of, model, batch, budget="50%", time_limit=2)
    peaks = format_bytes(step.plan.plain.peak_bytes), format_bytes(step.plan.predicted.peak_bytes)
    print(f"the plain step takes {peaks[0]}, the planned one {peaks[1]}, {step.plan.overhead:+.1%} time")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for number in range(3):
        loss = step(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {number}: loss {loss.item():.4f}")
