"""Three of TRL's trainers inside budgets: SFT, DPO and a reward model; nothing is fetched.

TRL's trainers count and log in ``compute_loss``, so the mixin fits the model's forward alone. With SFT and
DPO that forward ends in TRL's own LM head, whose buffer (128 KiB a token) is most of this small step.
"""

from __future__ import annotations

import copy
import tempfile
from typing import ClassVar

import torch
from datasets import Dataset, disable_progress_bars
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    Trainer,
    set_seed,
)
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

from lowtide.integrations.hugging_face import TrainerMixin

STEPS, ROWS, WORDS = 20, 4, 97
OPTIONS = {"time_limit": 1.0}
CONFIG = LlamaConfig(
    vocab_size=WORDS + 3,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=1,
    num_labels=1,
)


class BudgetSFT(TrainerMixin, SFTTrainer):
    """Supervised fine-tuning, inside a budget."""

    budget = "32MiB"
    fit_options: ClassVar = OPTIONS


class BudgetDPO(TrainerMixin, DPOTrainer):
    """Preferences, inside a budget."""

    budget = "40MiB"
    fit_options: ClassVar = OPTIONS


class BudgetReward(TrainerMixin, RewardTrainer):
    """A reward model, inside a budget."""

    budget = "70%"
    fit_options: ClassVar = OPTIONS


def tokenizer() -> PreTrainedTokenizerFast:
    """One token for each word."""
    names = ["<pad>", "<end>", "<unknown>", *(f"w{k}" for k in range(WORDS))]
    words = Tokenizer(models.WordLevel({name: k for k, name in enumerate(names)}, unk_token="<unknown>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<end>", unk_token="<unknown>"
    )


def sentences(seed: int, words: int, before: str = "") -> list[str]:
    """Random words, one sentence for each row of training."""
    chosen = torch.randint(0, WORDS, (STEPS * ROWS, words), generator=torch.Generator().manual_seed(seed))
    return [before + " ".join(f"w{k}" for k in row) for row in chosen.tolist()]


def trained(trainer_class: type[Trainer]) -> tuple[Trainer, list[dict[str, float]], list[torch.Tensor]]:
    """What was logged at every step, and the parameters at the end."""
    set_seed(0)
    pairs = {"prompt": sentences(0, 8), "chosen": sentences(1, 8, " "), "rejected": sentences(2, 8, " ")}
    common = {
        "per_device_train_batch_size": ROWS,
        "max_steps": STEPS,
        "logging_steps": 1,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "save_strategy": "no",
        "report_to": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        if issubclass(trainer_class, RewardTrainer):
            model = LlamaForSequenceClassification(CONFIG)
            arguments, data = RewardConfig(folder, **common), Dataset.from_dict(pairs)
            more = {}
        elif issubclass(trainer_class, DPOTrainer):
            model = LlamaForCausalLM(CONFIG)
            arguments, data = DPOConfig(folder, **common), Dataset.from_dict(pairs)
            more = {"ref_model": copy.deepcopy(model)}
        else:
            model = LlamaForCausalLM(CONFIG)
            arguments = SFTConfig(folder, max_length=24, **common)
            data, more = Dataset.from_dict({"text": sentences(3, 24)}), {}
        trainer = trainer_class(
            model=model, args=arguments, train_dataset=data, processing_class=tokenizer(), **more
        )
        trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    return trainer, logged, [parameter.detach().clone() for parameter in model.parameters()]


if __name__ == "__main__":
    disable_progress_bars()
    every = True
    for plain, ours in ((SFTTrainer, BudgetSFT), (DPOTrainer, BudgetDPO), (RewardTrainer, BudgetReward)):
        _, expected, parameters = trained(plain)
        trainer, found, planned = trained(ours)
        print("\n".join(trainer.fitted.explain().splitlines()[:2]))
        same = all(torch.equal(one, other) for one, other in zip(parameters, planned, strict=True))
        every = every and same and expected == found and len(found) == STEPS
        print(f"{plain.__name__}: {same and expected == found}")
    print(f"logs and parameters of {STEPS} steps are the same, bit for bit: {every}")
