"""The convolutional part of AlexNet (Krizhevsky 2014, one tower), as in the TensorFlow list of seed 003.

The seed's gradient of the last pool is the pool itself: its loss is half the sum of squares. TensorFlow pads
the first convolution by 3 before and 4 after; torch, with 4 on both sides, reads 4 before and 3 after.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import relu

from lowtide.zoo.base import Key, Network, Settings, require
from lowtide.zoo.classify import images
from lowtide.zoo.initial import he

__all__ = ["ALEXNET", "AlexNet"]

LEAST = 59
"""The smallest image of which the last pool leaves one pixel."""


class AlexNet(nn.Module):
    """256 maps of a colour image: five convolutions, two local response normalisations, three pools."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 11, stride=4, padding=4)
        self.lrn1 = _response_norm()
        self.pool1 = nn.MaxPool2d(3, stride=2)
        self.conv2 = nn.Conv2d(64, 192, 5, padding=2)
        self.lrn2 = _response_norm()
        self.pool2 = nn.MaxPool2d(3, stride=2)
        self.conv3 = nn.Conv2d(192, 384, 3, padding=1)
        self.conv4 = nn.Conv2d(384, 256, 3, padding=1)
        self.conv5 = nn.Conv2d(256, 256, 3, padding=1)
        self.pool5 = nn.MaxPool2d(3, stride=2)

    def forward(self, image: Tensor) -> Tensor:
        """The last pool."""
        x = self.pool1(self.lrn1(relu(self.conv1(image))))
        x = self.pool2(self.lrn2(relu(self.conv2(x))))
        x = relu(self.conv3(x))
        x = relu(self.conv4(x))
        x = relu(self.conv5(x))
        out: Tensor = self.pool5(x)
        return out


def _response_norm() -> nn.LocalResponseNorm:
    """Over five channels; torch divides alpha by their number, TensorFlow's 1e-4 counts for each."""
    return nn.LocalResponseNorm(5, alpha=5e-4, beta=0.75, k=2.0)


def _loss(model: nn.Module, image: Tensor) -> Tensor:
    out: Tensor = model(image)
    return out.square().sum() / 2


def _check(settings: Settings) -> None:
    why = "three pools must leave something"
    require("alexnet", "size", settings["size"], lambda size: size >= LEAST, why)


ALEXNET = Network(
    name="alexnet",
    summary="the convolutions of AlexNet with local response normalisation (seed 003)",
    keys={"batch": Key(128), "size": Key(224)},
    small="batch=2,size=67",
    make=lambda _: AlexNet(),
    inputs=images,
    loss=_loss,
    initialise=he,
    check=_check,
)
