"""LoRA with PEFT: adapters of a frozen model trained inside 60% of the memory of the step."""

from __future__ import annotations

import torch
from peft import LoraConfig, get_peft_model
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
    adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
    model = get_peft_model(network(), adapters)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    step = loss_of
    if fitted:
        step = lowtide.fit(loss_of, model, batch_of(0), budget="60%", time_limit=1.0)
    losses = []
    for number in range(STEPS):
        torch.manual_seed(number)
        loss = step(model, batch_of(number))
        loss.backward()
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
