"""Other ways to run a step in less memory, by what PyTorch has or by hand: each gives a function that runs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import cross_entropy, dropout, linear
from torch.utils.checkpoint import checkpoint

from lowtide.zoo.gpt2 import Decoder

__all__ = ["RIVALS", "eager"]

Step = Callable[[], None]
"""Forward and backward."""


def eager(built: Any) -> Step:
    return lambda: built.loss(built.model, *built.batch).backward()


def _save_on_cpu(built: Any) -> Step:
    def step() -> None:
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            loss = built.loss(built.model, *built.batch)
        loss.backward()

    return step


def _compiled(share: float) -> Callable[[Any], Step]:
    def make(built: Any) -> Step:
        compiled = torch.compile(built.loss, fullgraph=True, dynamic=False)

        def step() -> None:
            with torch._functorch.config.patch(activation_memory_budget=share):
                loss = compiled(built.model, *built.batch)
            loss.backward()

        return step

    return make


def _checkpointed(built: Any) -> Step:
    """Every block of the network checkpointed by hand."""
    lists = [m for m in built.model.modules() if isinstance(m, (torch.nn.ModuleList, torch.nn.Sequential))]
    blocks = [block for part in lists for block in part.children() if list(block.children())]
    if not blocks:
        raise RuntimeError("the network has no blocks to checkpoint")
    for block in blocks:
        forward = block.forward
        block.forward = lambda *args, _forward=forward: checkpoint(_forward, *args, use_reentrant=False)
    return eager(built)


def _micro_batches(built: Any) -> Step:
    """One sample after the other, the mean of their losses: close to the step, other masks of a dropout are drawn."""
    size = built.batch[0].shape[0]

    def step() -> None:
        for k in range(size):
            part = [tensor[k : k + 1] for tensor in built.batch]
            (built.loss(built.model, *part) / size).backward()

    return step


def _chunked(built: Any) -> Step:
    """GPT-2 with checkpointed blocks, and its output layer and loss one sequence after the other."""
    model = built.model
    if not isinstance(model, Decoder):
        raise RuntimeError("written for GPT-2 alone")

    def body(tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = dropout(model.tokens(tokens) + model.positions(places), model.drop, model.training)
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return model.norm(x)

    def step() -> None:
        tokens = built.batch[0]
        last = body(tokens[:, :-1])
        cut = last.detach().requires_grad_()
        for k in range(tokens.shape[0]):
            scores = linear(cut[k], model.tokens.weight)
            (cross_entropy(scores, tokens[k, 1:]) / tokens.shape[0]).backward()
            del scores
        last.backward(cut.grad)

    return step


RIVALS: dict[str, Callable[[Any], Step]] = {
    "save_on_cpu": _save_on_cpu,
    "checkpoint": _checkpointed,
    "compile": _compiled(1.0),
    "compile-0.5": _compiled(0.5),
    "compile-0.2": _compiled(0.2),
    "micro-batches": _micro_batches,
    "chunked": _chunked,
}
