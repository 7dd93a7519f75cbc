"""Steps as users write them, which are not the zoo's: each a model, a batch and a function that gives the loss."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

__all__ = ["CASES"]

Case = tuple[nn.Module, tuple[torch.Tensor, ...], Callable[..., torch.Tensor]]


def llama(device: str, small: bool) -> Case:
    """Hugging Face's Llama in bfloat16, 4 x 2,048 tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
    }  # fmt: skip
    if small:
        sizes |= {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config = LlamaConfig(**sizes, tie_word_embeddings=True, use_cache=False)
    with torch.device(device):
        model = LlamaForCausalLM(config).to(torch.bfloat16).train()
    ids = torch.randint(0, config.vocab_size, (4, 64 if small else 2048), device=device)
    return model, (ids,), lambda model, ids: model(input_ids=ids, labels=ids).loss


class Attention(nn.Module):
    """Causal attention of GPT-2."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.inward, self.outward = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.inward(x).view(batch, length, 3, self.heads, width // self.heads).unbind(2)
        query, key, value = (part.transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.outward(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """A layer of GPT-2."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Gpt2(nn.Module):
    """GPT-2 with a head of its own."""

    def __init__(self, layers: int, width: int, heads: int, length: int, tokens: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(tokens, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, tokens, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def gpt2(half: bool) -> Callable[[str, bool], Case]:
    def build(device: str, small: bool) -> Case:
        layers, width, heads, length, tokens = (2, 64, 4, 64, 512) if small else (24, 1024, 16, 1024, 50257)
        model = Gpt2(layers, width, heads, length, tokens).to(device)
        ids = torch.randint(0, tokens, (8, length), device=device)

        def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
            with torch.autocast(device, torch.bfloat16, enabled=half):
                scores = model(ids)
                return functional.cross_entropy(scores.flatten(0, 1), ids.flatten())

        return model, (ids,), loss_of

    return build


class Bottleneck(nn.Module):
    """A block of ResNet-50."""

    def __init__(self, inward: int, width: int, stride: int, dilation: int = 1) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inward, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(
            width, width, 3, stride=stride, padding=dilation, dilation=dilation, bias=False
        )
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.relu, self.down = nn.ReLU(inplace=True), None
        if stride > 1 or inward != 4 * width:
            self.down = nn.Sequential(
                nn.Conv2d(inward, 4 * width, 1, stride=stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return self.relu(y + (x if self.down is None else self.down(x)))


class ResNet50(nn.Module):
    def __init__(self, depths: tuple[int, ...] = (3, 4, 6, 3), width: int = 64) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        blocks, inward = [], width
        for stage, depth in enumerate(depths):
            for k in range(depth):
                blocks.append(Bottleneck(inward, width * 2**stage, 2 if stage and not k else 1))
                inward = 4 * width * 2**stage
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(inward, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def resnet50(device: str, small: bool) -> Case:
    model = (ResNet50((1, 1), 8) if small else ResNet50()).to(device)
    size = (4, 3, 64, 64) if small else (96, 3, 224, 224)
    images, labels = torch.randn(size, device=device), torch.arange(size[0], device=device)
    return model, (images, labels), lambda model, x, y: functional.cross_entropy(model(x), y)


class PspNet(nn.Module):
    """Scene parsing: a dilated ResNet-101, whose map is pooled at four scales beside itself."""

    def __init__(self, depths: tuple[int, ...] = (3, 4, 23, 3), width: int = 64, classes: int = 150) -> None:
        super().__init__()
        self.stem = ResNet50((), width).stem
        blocks, inward = [], width
        for stage, depth in enumerate(depths):
            for k in range(depth):
                stride = 2 if stage == 1 and not k else 1
                blocks.append(Bottleneck(inward, width * 2**stage, stride, dilation=max(1, 2 ** (stage - 1))))
                inward = 4 * width * 2**stage
        self.blocks = nn.ModuleList(blocks)
        self.auxiliary = nn.Conv2d(inward // 2, classes, 1)
        self.pooled = nn.ModuleList(self._small(inward, inward // 4, 1) for _ in range(4))
        self.last = self._small(2 * inward, inward // 4, 3)
        self.head = nn.Conv2d(inward // 4, classes, 1)

    @staticmethod
    def _small(inward: int, outward: int, size: int) -> nn.Sequential:
        convolution = nn.Conv2d(inward, outward, size, padding=size // 2, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(outward), nn.ReLU(inplace=True))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, middle = self.stem(x), None
        for block in self.blocks:
            if block.conv1.in_channels == self.auxiliary.in_channels:
                middle = x
            x = block(x)
        assert middle is not None
        scales = [x]
        for bins, small in zip((1, 2, 3, 6), self.pooled, strict=True):
            pooled = small(functional.adaptive_avg_pool2d(x, bins))
            scales.append(functional.interpolate(pooled, x.shape[-2:], mode="bilinear", align_corners=False))
        return self.head(self.last(torch.cat(scales, 1))), self.auxiliary(middle)


def pspnet(device: str, small: bool) -> Case:
    model = (PspNet((1, 1, 2, 1), 8, 5) if small else PspNet()).to(device)
    batch, size = (2, 64) if small else (8, 473)
    images = torch.randn(batch, 3, size, size, device=device)
    labels = torch.randint(0, 5, (batch, size, size), device=device)

    def loss_of(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        losses = [
            functional.cross_entropy(
                functional.interpolate(one, labels.shape[-2:], mode="bilinear", align_corners=False), labels
            )
            for one in model(images)
        ]
        return losses[0] + 0.4 * losses[1]

    return model, (images, labels), loss_of


def twice(inward: int, outward: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inward, outward, 3),
        nn.ReLU(inplace=True),
        nn.Conv2d(outward, outward, 3),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    """Of 2015: unpadded convolutions, and skips that are cropped; the last level keeps its channels on the way up."""

    def __init__(self, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        widths = [width * 2**k for k in range(depth + 1)]
        self.down = nn.ModuleList(twice(a, b) for a, b in zip([1, *widths], widths, strict=False))
        rising = [(2 * w, w if w > width else 2 * w) for w in reversed(widths[:-1])]
        self.up = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, stride=2) for a, b in rising)
        self.merge = nn.ModuleList(twice(a // 2 + b, a // 2) for a, b in rising)
        self.dropout, self.head = nn.Dropout(0.5), nn.Conv2d(width, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for k, block in enumerate(self.down):
            x = block(x if not k else functional.max_pool2d(x, 2))
            x = self.dropout(x) if k + 2 >= len(self.down) else x
            skips.append(x)
        x = skips.pop()
        for up, merge in zip(self.up, self.merge, strict=True):
            x, skip = functional.relu(up(x)), skips.pop()
            edge = (skip.shape[-1] - x.shape[-1]) // 2
            x = merge(torch.cat([skip[..., edge : edge + x.shape[-2], edge : edge + x.shape[-1]], x], 1))
        return self.head(x)


def unet(device: str, small: bool) -> Case:
    model = (UNet(8) if small else UNet()).to(device)
    batch, size = (2, 188) if small else (8, 572)
    images = torch.randn(batch, 1, size, size, device=device)
    labels = torch.randint(0, 2, (batch, size - 184, size - 184), device=device)
    return model, (images, labels), lambda model, x, y: functional.cross_entropy(model(x), y)


CASES: dict[str, Callable[[str, bool], Case]] = {
    "llama": llama,
    "gpt2-bf16": gpt2(half=True),
    "gpt2": gpt2(half=False),
    "resnet50": resnet50,
    "unet": unet,
    "pspnet": pspnet,
}
