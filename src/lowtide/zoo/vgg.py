"""VGG-19 (Simonyan, Zisserman 2014), without normalisation."""

from __future__ import annotations

from torch import Tensor, nn

from lowtide.zoo.base import Network, Settings, require
from lowtide.zoo.classify import classification_loss, image_keys, images_and_labels
from lowtide.zoo.initial import he

__all__ = ["VGG", "VGG19"]

STAGES = ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4))
"""Channels and convolutions before each pool."""

SHRINK = 1 << len(STAGES)


class VGG(nn.Module):
    """Scores of ``classes`` classes for a colour image of ``size`` pixels a side."""

    def __init__(self, size: int, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for width, convolutions in STAGES:
            for _ in range(convolutions):
                layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
                channels = width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Linear(channels * (size // SHRINK) ** 2, 4096),
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


def _check(settings: Settings) -> None:
    why = "five pools must leave something"
    require("vgg19", "size", settings["size"], lambda size: size >= SHRINK, why)


VGG19 = Network(
    name="vgg19",
    summary="sixteen convolutions and three linear layers with dropout",
    keys=image_keys(64),
    small="batch=2,size=32,classes=10",
    make=lambda settings: VGG(settings["size"], settings["classes"]),
    inputs=images_and_labels,
    loss=classification_loss,
    initialise=he,
    check=_check,
)
