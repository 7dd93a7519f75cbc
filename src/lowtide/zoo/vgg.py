"""VGG-19 (Simonyan, Zisserman 2014), without normalisation, and the body of VGG-16 for large images."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from lowtide.zoo.base import Input, Key, Network, Settings, require
from lowtide.zoo.classify import classification_loss, image_keys, images, images_and_labels
from lowtide.zoo.initial import he

__all__ = ["VGG", "VGG16_BODY", "VGG19", "VggBody"]

STAGES = ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4))
"""Channels and convolutions before each pool."""

BODY = ((1, 2), (2, 2), (4, 3), (8, 3), (8, 3))
"""Of the body: channels as multiples of its width, and convolutions."""

SHRINK = 1 << len(STAGES)


def _layers(stages: Sequence[tuple[int, int]]) -> nn.Sequential:
    layers: list[nn.Module] = []
    channels = 3
    for width, convolutions in stages:
        for _ in range(convolutions):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
            channels = width
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers)


class VGG(nn.Module):
    """Scores of ``classes`` classes for a colour image of ``size`` pixels a side."""

    def __init__(self, size: int, classes: int) -> None:
        super().__init__()
        self.features = _layers(STAGES)
        self.classifier = nn.Sequential(
            nn.Linear(STAGES[-1][0] * (size // SHRINK) ** 2, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            nn.Linear(4096, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            nn.Linear(4096, classes),
        )

    def forward(self, image: Tensor) -> Tensor:
        """Scores before the softmax."""
        scores: Tensor = self.classifier(self.features(image).flatten(1))
        return scores


class VggBody(nn.Module):
    """The convolutions and pools of VGG-16, and scores for every place of the map that they leave.

    Nothing in it looks at the whole image, so that an image of any size can be cut.
    """

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.features = _layers([(width * channels, convolutions) for channels, convolutions in BODY])
        self.score = nn.Conv2d(width * BODY[-1][0], classes, 1)

    def forward(self, image: Tensor) -> Tensor:
        """Scores before the softmax, of one place for 32 x 32 pixels."""
        scores: Tensor = self.score(self.features(image))
        return scores


def _labelled(settings: Settings) -> tuple[Input, ...]:
    side = settings["size"] // SHRINK
    labels = Input((settings["batch"], side, side), classes=settings["classes"], dtype=torch.int64)
    return (*images(settings), labels)


def _check(name: str) -> Callable[[Settings], None]:
    def check(settings: Settings) -> None:
        why = "five pools must leave something"
        require(name, "size", settings["size"], lambda size: size >= SHRINK, why)

    return check


VGG19 = Network(
    name="vgg19",
    summary="sixteen convolutions and three linear layers with dropout",
    keys=image_keys(64),
    small="batch=2,size=32,classes=10",
    make=lambda settings: VGG(settings["size"], settings["classes"]),
    inputs=images_and_labels,
    loss=classification_loss,
    initialise=he,
    check=_check("vgg19"),
)

VGG16_BODY = Network(
    name="vgg16body",
    summary="thirteen convolutions and five pools of VGG-16, with a label for every place",
    keys={"width": Key(64), "batch": Key(1), "size": Key(1024), "classes": Key(10)},
    small="width=8,size=96",
    make=lambda settings: VggBody(settings["width"], settings["classes"]),
    inputs=_labelled,
    loss=classification_loss,
    initialise=he,
    check=_check("vgg16body"),
)
