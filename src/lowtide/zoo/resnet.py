"""Residual networks of bottlenecks (He, Zhang, Ren, Sun 2015), with the stride on the 3x3 convolution.

The folded form, for inference, has no BatchNorm: each is multiplied into the convolution before it. The bias
of a convolution on a shortcut joins that of the convolution it is added to, as in the profile of seed 001.
Names of layers are torchvision's, so that its weights can be loaded.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from lowtide.zoo.base import Key, Network, Settings, TargetError
from lowtide.zoo.classify import classification_loss, image_keys, images, images_and_labels
from lowtide.zoo.initial import he

__all__ = ["RESNET50", "RESNET50_INFERENCE", "RESNET152", "Bottleneck", "ResNet", "fold"]

EXPANSION = 4
WIDTH = 64
BLOCKS_50 = (3, 4, 6, 3)
BLOCKS_152 = (3, 8, 36, 3)


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1, *, bias: bool) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=bias)


def _norm(channels: int, folded: bool) -> nn.Module:
    return nn.Identity() if folded else nn.BatchNorm2d(channels)


class Bottleneck(nn.Module):
    """Three convolutions around a narrow middle, added to what came in."""

    def __init__(self, inputs: int, width: int, stride: int, *, folded: bool) -> None:
        super().__init__()
        outputs = EXPANSION * width
        self.conv1 = _conv(inputs, width, 1, bias=folded)
        self.bn1 = _norm(width, folded)
        self.conv2 = _conv(width, width, 3, stride, bias=folded)
        self.bn2 = _norm(width, folded)
        self.conv3 = _conv(width, outputs, 1, bias=folded)
        self.bn3 = _norm(outputs, folded)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Sequential | None = None
        if stride != 1 or inputs != outputs:
            shortcut = _conv(inputs, outputs, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, _norm(outputs, folded))

    def forward(self, x: Tensor) -> Tensor:
        """The sum of both ways, after a ReLU."""
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        y += x if self.downsample is None else self.downsample(x)
        out: Tensor = self.relu(y)
        return out


class ResNet(nn.Module):
    """Scores of ``classes`` classes for a colour image; ``blocks`` bottlenecks in each of four stages.

    The first stage has ``width`` channels in the middle of its bottlenecks, each other one twice as many.
    """

    def __init__(
        self, blocks: tuple[int, int, int, int], classes: int, width: int = WIDTH, *, folded: bool = False
    ) -> None:
        super().__init__()
        self.blocks = blocks
        self.width = width
        self.folded = folded
        self.conv1 = _conv(3, width, 7, 2, bias=folded)
        self.bn1 = _norm(width, folded)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = _stage(width, width, blocks[0], 1, folded)
        self.layer2 = _stage(4 * width, 2 * width, blocks[1], 2, folded)
        self.layer3 = _stage(8 * width, 4 * width, blocks[2], 2, folded)
        self.layer4 = _stage(16 * width, 8 * width, blocks[3], 2, folded)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(32 * width, classes)

    def forward(self, image: Tensor) -> Tensor:
        """Scores before the softmax."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(image))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        scores: Tensor = self.fc(self.avgpool(x).flatten(1))
        return scores


def _stage(inputs: int, width: int, blocks: int, stride: int, folded: bool) -> nn.Sequential:
    first = Bottleneck(inputs, width, stride, folded=folded)
    rest = (Bottleneck(EXPANSION * width, width, 1, folded=folded) for _ in range(blocks - 1))
    return nn.Sequential(first, *rest)


def fold(model: ResNet) -> ResNet:
    """The same network for inference, each BatchNorm multiplied into the convolution before it."""
    with torch.device("meta"):
        folded = ResNet(model.blocks, model.fc.out_features, model.width, folded=True)
    folded = folded.to(model.fc.weight.dtype).to_empty(device=model.fc.weight.device)
    with torch.no_grad():
        _fold_into(folded.conv1, model.conv1, model.bn1)
        for new, old in zip(folded.modules(), model.modules(), strict=True):
            if isinstance(new, Bottleneck) and isinstance(old, Bottleneck):
                _fold_block(new, old)
        folded.fc.load_state_dict(model.fc.state_dict())
    return folded.eval().requires_grad_(False)


def _fold_block(new: Bottleneck, old: Bottleneck) -> None:
    _fold_into(new.conv1, old.conv1, old.bn1)
    _fold_into(new.conv2, old.conv2, old.bn2)
    _fold_into(new.conv3, old.conv3, old.bn3)
    if new.downsample is not None and old.downsample is not None and new.conv3.bias is not None:
        conv, norm = old.downsample[0], old.downsample[1]
        weight, bias = _folded(conv, norm)
        new.downsample[0].get_parameter("weight").copy_(weight)
        new.conv3.bias.add_(bias)


def _fold_into(new: nn.Conv2d, old: nn.Conv2d, norm: nn.Module) -> None:
    weight, bias = _folded(old, norm)
    new.weight.copy_(weight)
    if new.bias is not None:
        new.bias.copy_(bias)


def _folded(conv: nn.Module, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """Weight and bias of the two together, in float64."""
    if not isinstance(conv, nn.Conv2d) or not isinstance(norm, nn.BatchNorm2d):
        raise TypeError("only a network with BatchNorm can be folded")
    if norm.running_mean is None or norm.running_var is None:
        raise TypeError("only a BatchNorm that keeps statistics can be folded")
    scale = norm.weight.double() / (norm.running_var.double() + norm.eps).sqrt()
    bias = norm.bias.double() - norm.running_mean.double() * scale
    return conv.weight.double() * scale[:, None, None, None], bias


def _make_folded(settings: Settings) -> nn.Module:
    model = ResNet(BLOCKS_50, settings["classes"], settings["width"], folded=True)
    return model.eval().requires_grad_(False)


def _initialise_folded(model: nn.Module, generator: torch.Generator) -> None:
    """As He, but each sum adds little to what came in: nothing normalises it."""
    he(model, generator)
    for module in model.modules():
        if isinstance(module, Bottleneck):
            module.conv3.weight.mul_(0.25)


def _probabilities(model: nn.Module, image: Tensor) -> Tensor:
    scores: Tensor = model(image)
    return scores.softmax(1)


def _check(name: str, settings: Settings) -> None:
    """The last stage sees a 32nd of the image, and a single value has no variance."""
    size = settings["size"]
    if settings["batch"] == 1 and size <= 32:
        raise TargetError(
            f"{name}: batch=1 with size={size} leaves BatchNorm one value a channel, which has no "
            "variance; use batch=2 or size=33 or more"
        )


def _unchecked(settings: Settings) -> None:
    """Any size gives at least one value."""


def _keys(batch: int) -> dict[str, Key]:
    return image_keys(batch) | {"width": Key(WIDTH, most=1 << 12)}


def _training(name: str, blocks: tuple[int, int, int, int], batch: int) -> Network:
    return Network(
        name=name,
        summary=f"residual network of {sum(blocks)} bottlenecks, training with BatchNorm",
        keys=_keys(batch),
        small="batch=2,size=64,classes=10,width=16",
        make=lambda settings: ResNet(blocks, settings["classes"], settings["width"]),
        inputs=images_and_labels,
        loss=classification_loss,
        initialise=he,
        check=partial(_check, name),
    )


RESNET50 = _training("resnet50", BLOCKS_50, 96)
RESNET152 = _training("resnet152", BLOCKS_152, 32)
RESNET50_INFERENCE = Network(
    name="resnet50-inference",
    summary="resnet50 with BatchNorm folded into the convolutions, forward only (seed 001)",
    keys=_keys(10),
    small="batch=2,size=64,classes=10,width=16",
    make=_make_folded,
    inputs=images,
    loss=_probabilities,
    initialise=_initialise_folded,
    check=_unchecked,
    trains=False,
)
