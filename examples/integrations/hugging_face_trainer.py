"""A model trained by Hugging Face's Trainer inside 60% of its step's memory: the same losses, bit for bit."""

from __future__ import annotations

import tempfile
from typing import ClassVar

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from lowtide.integrations.hugging_face import TrainerMixin

STEPS = 20


class BudgetTrainer(TrainerMixin, Trainer):
    """The Trainer, inside a budget."""

    budget = "60%"
    fit_options: ClassVar = {"time_limit": 1.0}


class Sentences(torch.utils.data.Dataset):
    """Random tokens."""

    def __len__(self) -> int:
        return 8 * STEPS

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 512, (32,), generator=torch.Generator().manual_seed(number))
        return {"input_ids": tokens, "labels": tokens}


def trained(trainer_class: type[Trainer]) -> tuple[Trainer, list[float], list[torch.Tensor]]:
    """The losses that were logged, and the parameters at the end."""
    set_seed(0)
    config = GPT2Config(
        vocab_size=512, n_positions=32, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(config)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=8,
            max_steps=STEPS,
            logging_steps=5,
            use_cpu=True,
            disable_tqdm=True,
            save_strategy="no",
            report_to=[],
        )
        trainer = trainer_class(model=model, args=arguments, train_dataset=Sentences())
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return trainer, losses, [parameter.detach().clone() for parameter in model.parameters()]


if __name__ == "__main__":
    _, losses, expected = trained(Trainer)
    trainer, planned, found = trained(BudgetTrainer)
    print(trainer.fitted.plan.explain().splitlines()[0])
    print("losses    ", losses)
    print("in budget ", planned)
    same = all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
    print(f"parameters after {STEPS} steps are the same, bit for bit: {same}")
