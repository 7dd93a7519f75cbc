"""GPT-2 (Radford and others 2019): a decoder with normalisation first, medium by default."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout, gelu, linear, scaled_dot_product_attention

from lowtide.zoo.base import Input, Key, Network, Settings, require

__all__ = ["GPT2", "Decoder"]

DEVIATION = 0.02
POSITION_DEVIATION = 0.01


class _Attention(nn.Module):
    """Every token looks at those before it, in ``heads`` ways."""

    def __init__(self, width: int, heads: int, drop: float) -> None:
        super().__init__()
        self.heads = heads
        self.drop = drop
        self.split = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.split(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind()
        drop = self.drop if self.training else 0.0
        seen = scaled_dot_product_attention(query, key, value, dropout_p=drop, is_causal=True)
        out: Tensor = self.project(seen.transpose(1, 2).reshape(batch, length, width))
        return out


class _Perceptron(nn.Module):
    """Two linear layers with four times the width between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.widen = nn.Linear(width, 4 * width)
        self.project = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.project(gelu(self.widen(x), approximate="tanh"))
        return out


class _Block(nn.Module):
    """Attention and a perceptron, each added to what came in."""

    def __init__(self, width: int, heads: int, drop: float) -> None:
        super().__init__()
        self.drop = drop
        self.norm1 = nn.LayerNorm(width)
        self.attention = _Attention(width, heads, drop)
        self.norm2 = nn.LayerNorm(width)
        self.perceptron = _Perceptron(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + dropout(self.attention(self.norm1(x)), self.drop, self.training)
        return x + dropout(self.perceptron(self.norm2(x)), self.drop, self.training)


class Decoder(nn.Module):
    """Scores of the next token after each token; the output layer shares the weight of the embedding."""

    def __init__(self, layers: int, width: int, heads: int, length: int, vocab: int, drop: float) -> None:
        super().__init__()
        self.drop = drop
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(_Block(width, heads, drop) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores before the softmax, batch by length by vocabulary."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = dropout(self.tokens(tokens) + self.positions(places), self.drop, self.training)
        for block in self.blocks:
            x = block(x)
        return linear(self.norm(x), self.tokens.weight)


def _loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean cross entropy of every token but the first, given those before it."""
    # Shifting the tokens, of which there is one more than positions, spares a copy of the scores.
    scores: Tensor = model(tokens[:, :-1])
    return cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())


def _initialise(model: nn.Module, generator: torch.Generator) -> None:
    """Normal weights; what is added to the residual stream is scaled by the number of additions."""
    additions = sum(name.endswith("project.weight") for name, _ in model.named_parameters())
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()
        elif parameter.dim() == 1:
            parameter.fill_(1.0)
        elif name.endswith("project.weight"):
            parameter.normal_(0.0, DEVIATION / math.sqrt(additions), generator=generator)
        else:
            deviation = POSITION_DEVIATION if name == "positions.weight" else DEVIATION
            parameter.normal_(0.0, deviation, generator=generator)


def _check(settings: Settings) -> None:
    heads = settings["heads"]
    why = f"{heads} heads must share it evenly"
    require("gpt2", "width", settings["width"], lambda width: width % heads == 0, why)


def _make(settings: Settings) -> nn.Module:
    return Decoder(
        settings["layers"],
        settings["width"],
        settings["heads"],
        settings["length"],
        settings["vocab"],
        settings["dropout"] / 100,
    )


GPT2 = Network(
    name="gpt2",
    summary="GPT-2 medium: 24 pre-normalised blocks, causal attention, tied embedding",
    keys={
        "batch": Key(8),
        "layers": Key(24, most=4096),
        "width": Key(1024),
        "heads": Key(16),
        "length": Key(1024),
        "vocab": Key(50257),
        "dropout": Key(0, least=0, most=99),
    },
    small="batch=2,layers=2,width=32,heads=4,length=16,vocab=64",
    make=_make,
    inputs=lambda s: (Input((s["batch"], s["length"] + 1), classes=s["vocab"], dtype=torch.int64),),
    loss=_loss,
    initialise=_initialise,
    check=_check,
)
