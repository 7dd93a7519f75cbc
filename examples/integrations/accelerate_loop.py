"""A loop of Hugging Face Accelerate with gradient accumulation, inside 60% of the memory of its step."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

import lowtide

STEPS = 20


def batch_of(number: int) -> dict[str, torch.Tensor]:
    """Random tokens."""
    tokens = torch.randint(0, 512, (8, 32), generator=torch.Generator().manual_seed(number))
    return {"input_ids": tokens, "labels": tokens}


def network() -> LlamaForCausalLM:
    """A small Llama."""
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config)


def loss_of(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss of a batch."""
    return model(**batch).loss


def trained(*, fitted: bool) -> tuple[list[float], list[torch.Tensor]]:
    """The losses of a training loop, and the parameters at the end."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = network()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    step = loss_of
    if fitted:
        step = lowtide.fit(loss_of, model, batch_of(0), budget="60%", time_limit=1.0)
    losses = []
    for number in range(STEPS):
        torch.manual_seed(number)
        with accelerator.accumulate(model):
            loss = step(model, batch_of(number))
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [parameter.detach().clone() for parameter in model.parameters()]


if __name__ == "__main__":
    (losses, expected), (planned, found) = trained(fitted=False), trained(fitted=True)
    print("losses    ", losses[::5])
    print("in budget ", planned[::5])
    same = losses == planned and all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    print(f"losses and parameters of {STEPS} steps are the same, bit for bit: {same}")
