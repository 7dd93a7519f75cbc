"""DenseNet-161 (Huang, Liu, van der Maaten, Weinberger 2016): a layer reads all before it in its block."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d, relu

from lowtide.zoo.base import Key, Network, Settings, TargetError, require
from lowtide.zoo.classify import classification_loss, image_keys, images_and_labels
from lowtide.zoo.initial import he

__all__ = ["DENSENET161", "DenseNet"]

GROWTH = 48
BLOCKS = (6, 12, 36, 24)

LEAST = 29
"""The smallest image of which the last block gets one pixel."""

LEAST_ALONE = 61
"""The smallest image of which it gets two by two; fewer leave BatchNorm a single value in a batch of one."""


class _Layer(nn.Module):
    """``growth`` new maps from all the maps so far, by way of four times as many."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, 4 * growth, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(4 * growth)
        self.conv2 = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(relu(self.norm1(x), inplace=True))
        out: Tensor = self.conv2(relu(self.norm2(x), inplace=True))
        return out


class _Block(nn.Module):
    """Layers of which each reads the block's input and the maps of all layers before it."""

    def __init__(self, inputs: int, layers: int, growth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(inputs + k * growth, growth) for k in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        maps = [x]
        for layer in self.layers:
            maps.append(layer(torch.cat(maps, 1)))
        return torch.cat(maps, 1)


class _Transition(nn.Module):
    """Half as many maps of half the height and width."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(inputs)
        self.conv = nn.Conv2d(inputs, inputs // 2, 1, bias=False)
        self.pool = nn.AvgPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.pool(self.conv(relu(self.norm(x), inplace=True)))
        return out


class DenseNet(nn.Module):
    """Scores of ``classes`` classes for a colour image; a block has at most ``layers`` layers."""

    def __init__(self, classes: int, growth: int = GROWTH, layers: int = max(BLOCKS)) -> None:
        super().__init__()
        channels = 2 * growth
        self.conv = nn.Conv2d(3, channels, 7, stride=2, padding=3, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        stages: list[nn.Module] = []
        for published in BLOCKS:
            if stages:
                stages.append(_Transition(channels))
                channels //= 2
            depth = min(published, layers)
            stages.append(_Block(channels, depth, growth))
            channels += depth * growth
        self.stages = nn.Sequential(*stages)
        self.last_norm = nn.BatchNorm2d(channels)
        self.scores = nn.Linear(channels, classes)

    def forward(self, image: Tensor) -> Tensor:
        """Scores before the softmax."""
        x = self.pool(relu(self.norm(self.conv(image)), inplace=True))
        x = relu(self.last_norm(self.stages(x)), inplace=True)
        scores: Tensor = self.scores(adaptive_avg_pool2d(x, 1).flatten(1))
        return scores


def _check(settings: Settings) -> None:
    batch, size = settings["batch"], settings["size"]
    require(
        "densenet161", "size", size, lambda value: value >= LEAST, "three transitions must leave something"
    )
    if batch == 1 and size < LEAST_ALONE:
        raise TargetError(
            f"densenet161: batch=1 with size={size} leaves BatchNorm one value a channel, which has no "
            f"variance; use batch=2 or size={LEAST_ALONE} or more"
        )


DENSENET161 = Network(
    name="densenet161",
    summary="densely connected network, where concatenations and BatchNorm fill the memory",
    keys=image_keys(32) | {"growth": Key(GROWTH, most=1 << 12), "layers": Key(max(BLOCKS), most=max(BLOCKS))},
    small="batch=2,size=64,classes=10,growth=24,layers=12",
    make=lambda settings: DenseNet(settings["classes"], settings["growth"], settings["layers"]),
    inputs=images_and_labels,
    loss=classification_loss,
    initialise=he,
    check=_check,
)
