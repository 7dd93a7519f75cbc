"""A causal transformer of Hugging Face inside budgets, beside eager PyTorch in one process.

    python benchmarks/causal_lm.py [--device cuda] [--small] [--time-limit 20] BUDGET ...

The model is a `LlamaForCausalLM` in bfloat16 with random weights: vocabulary 128,256, width 2,048, 16 layers, tied
embeddings, 4 x 2,048 tokens. Nothing says where its loss is: tiles are found from the budget alone. Prints a table and
stores it under benchmarks/results/ as causal-lm-DEVICE.md. Needs `transformers`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, __version__

import lowtide
from lowtide.cost.watch import watch_cpu
from lowtide.files import write_atomically
from plain import machine

RESULTS = Path(__file__).parent / "results"
SIZES = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
}
SMALL = {
    "vocab_size": 4096,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
STEPS = 3


def loss_of(model: Any, ids: torch.Tensor) -> Any:
    """The loss of a batch of tokens."""
    return model(input_ids=ids, labels=ids).loss


def measured(step: Callable[..., Any], model: Any, ids: torch.Tensor) -> dict[str, Any]:
    """Peak, milliseconds, loss and gradients of a step; the first one does not count."""
    seconds = []

    def once() -> Any:
        model.zero_grad(set_to_none=True)
        began = time.perf_counter()
        loss = step(model, ids)
        loss.backward()
        if ids.is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
        return loss

    once()
    if ids.is_cuda:
        torch.cuda.reset_peak_memory_stats()
    loss, seen = (once(), None) if ids.is_cuda else watch_cpu(lambda _: once())
    for _ in range(STEPS - 2):
        loss = once()
    leaves = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    peak = torch.cuda.max_memory_allocated() if seen is None else seen.peak_bytes + sum(leaves.values())
    gradients = {name: p.grad.float().cpu() for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return {
        "peak": peak,
        "ms": 1e3 * sum(seconds[1:]) / len(seconds[1:]),
        "loss": loss.item(),
        "gradients": gradients,
    }


def apart(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest difference of a gradient, as a share of its norm."""
    pairs = [(one["gradients"][name], value) for name, value in other["gradients"].items()]
    return max(float((a - b).norm() / a.norm()) for a, b in pairs)


def row(way: str, budget: str, found: dict[str, Any], eager: dict[str, Any], planning: str = "") -> str:
    cells = [way, budget, f"{found['peak'] / 2**20:,.0f}", f"{found['ms']:.1f}"]
    cells += [f"{found['ms'] / eager['ms']:.3f}", f"{found['loss']:.6f}"]
    cells += ["" if found is eager else f"{apart(eager, found):.3f}", planning]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--small", action="store_true", help="a model that fits on any machine; nothing is stored"
    )
    parser.add_argument("--time-limit", type=float, default=20.0)
    parser.add_argument("budgets", nargs="+", metavar="BUDGET")
    chosen = parser.parse_args()
    torch.manual_seed(0)
    config = LlamaConfig(**(SMALL if chosen.small else SIZES), tie_word_embeddings=True, use_cache=False)
    with torch.device(chosen.device):
        model = LlamaForCausalLM(config).to(torch.bfloat16).train()
    tokens = (4, 128) if chosen.small else (4, 2048)
    ids = torch.randint(0, config.vocab_size, tokens, device=chosen.device)
    lines = [
        "| way | budget | measured MiB | ms | of eager | loss | gradients apart | planned |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    eager = measured(loss_of, model, ids)
    lines.append(row("eager", "", eager, eager))
    print(lines[-1], flush=True)
    for budget in chosen.budgets:
        began = time.perf_counter()
        try:
            step = lowtide.fit(loss_of, model, ids, budget=budget, time_limit=chosen.time_limit, verify=False)
        except lowtide.LowtideError as error:
            lines.append(f"| lowtide | {budget} | {str(error).splitlines()[0]} | | | | | |")
        else:
            d, took = step.plan.decisions, time.perf_counter() - began
            planning = (
                f"{d.tiles} tiles, {d.recomputed} recomputed, {d.offloaded} offloaded; fit {took:.0f} s"
            )
            lines.append(row("lowtide", budget, measured(step, model, ids), eager, planning))
        print(lines[-1], flush=True)
    told = ", ".join(f"{key} {value}" for key, value in machine(chosen.device).items())
    asked = " ".join(["python benchmarks/causal_lm.py", *sys.argv[1:]])
    text = f"# A causal transformer inside budgets\n\n`{asked}`, {date.today()}; {told}, transformers {__version__}\n\n"
    text += "\n".join(lines) + "\n"
    if not chosen.small:
        write_atomically(RESULTS / f"causal-lm-{chosen.device}.md", text.encode())
    print(text)


if __name__ == "__main__":
    main()
