"""U-Net (Ronneberger, Fischer, Brox 2015) as in the Chainer training graph of seed 000.

Five levels of two unpadded 3x3 convolutions; on the way up the cropped skip comes first, then what was
brought up. The last upsampling keeps its 2*base channels. Names of layers are those of the seed.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout, max_pool2d, relu

from lowtide.zoo.base import Input, Key, Network, Settings, require
from lowtide.zoo.initial import he

__all__ = ["UNET", "UNet"]

CLASSES = 2
IGNORED = -1
"""The label of pixels that the loss leaves out."""

BORDER = 184
"""How much smaller than the image the map of scores is."""


class UNet(nn.Module):
    """Scores of two classes for the middle of a grey image; ``base`` channels at the first level."""

    def __init__(self, base: int = 64) -> None:
        super().__init__()
        d0, d1, d2, d3, d4 = (base << level for level in range(5))
        self.conv_d0a_b = nn.Conv2d(1, d0, 3)
        self.conv_d0b_c = nn.Conv2d(d0, d0, 3)
        self.conv_d1a_b = nn.Conv2d(d0, d1, 3)
        self.conv_d1b_c = nn.Conv2d(d1, d1, 3)
        self.conv_d2a_b = nn.Conv2d(d1, d2, 3)
        self.conv_d2b_c = nn.Conv2d(d2, d2, 3)
        self.conv_d3a_b = nn.Conv2d(d2, d3, 3)
        self.conv_d3b_c = nn.Conv2d(d3, d3, 3)
        self.conv_d4a_b = nn.Conv2d(d3, d4, 3)
        self.conv_d4b_c = nn.Conv2d(d4, d4, 3)
        self.upconv_d4c_u3a = nn.ConvTranspose2d(d4, d3, 2, stride=2)
        self.conv_u3b_c = nn.Conv2d(d3 + d3, d3, 3)
        self.conv_u3c_d = nn.Conv2d(d3, d3, 3)
        self.upconv_u3d_u2a = nn.ConvTranspose2d(d3, d2, 2, stride=2)
        self.conv_u2b_c = nn.Conv2d(d2 + d2, d2, 3)
        self.conv_u2c_d = nn.Conv2d(d2, d2, 3)
        self.upconv_u2d_u1a = nn.ConvTranspose2d(d2, d1, 2, stride=2)
        self.conv_u1b_c = nn.Conv2d(d1 + d1, d1, 3)
        self.conv_u1c_d = nn.Conv2d(d1, d1, 3)
        self.upconv_u1d_u0a = nn.ConvTranspose2d(d1, d1, 2, stride=2)
        self.conv_u0b_c = nn.Conv2d(d0 + d1, d0, 3)
        self.conv_u0c_d = nn.Conv2d(d0, d0, 3)
        self.conv_u0d_score = nn.Conv2d(d0, CLASSES, 1)

    def forward(self, image: Tensor) -> Tensor:
        """Scores before the softmax."""
        # One line a layer, so that a plan's source lines tell the layers apart.
        x = relu(self.conv_d0a_b(image))
        x = relu(self.conv_d0b_c(x))
        skip0 = x[:, :, 88:-88, 88:-88]
        x = max_pool2d(x, 2)
        x = relu(self.conv_d1a_b(x))
        x = relu(self.conv_d1b_c(x))
        skip1 = x[:, :, 40:-40, 40:-40]
        x = max_pool2d(x, 2)
        x = relu(self.conv_d2a_b(x))
        x = relu(self.conv_d2b_c(x))
        skip2 = x[:, :, 16:-16, 16:-16]
        x = max_pool2d(x, 2)
        x = relu(self.conv_d3a_b(x))
        x = relu(self.conv_d3b_c(x))
        x = dropout(x, 0.5, self.training)
        skip3 = x[:, :, 4:-4, 4:-4]
        x = max_pool2d(x, 2)
        x = relu(self.conv_d4a_b(x))
        x = relu(self.conv_d4b_c(x))
        x = dropout(x, 0.5, self.training)
        x = relu(self.upconv_d4c_u3a(x))
        x = torch.cat((skip3, x), 1)
        x = relu(self.conv_u3b_c(x))
        x = relu(self.conv_u3c_d(x))
        x = relu(self.upconv_u3d_u2a(x))
        x = torch.cat((skip2, x), 1)
        x = relu(self.conv_u2b_c(x))
        x = relu(self.conv_u2c_d(x))
        x = relu(self.upconv_u2d_u1a(x))
        x = torch.cat((skip1, x), 1)
        x = relu(self.conv_u1b_c(x))
        x = relu(self.conv_u1c_d(x))
        x = relu(self.upconv_u1d_u0a(x))
        x = torch.cat((skip0, x), 1)
        x = relu(self.conv_u0b_c(x))
        x = relu(self.conv_u0c_d(x))
        scores: Tensor = self.conv_u0d_score(x)
        return scores


def _loss(model: nn.Module, image: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy over the labelled pixels; labels stay int32 as in the seed until here."""
    return cross_entropy(model(image), labels.long(), ignore_index=IGNORED)


def _works(size: int) -> bool:
    """Whether every map that is pooled has even sides and something is left at the end."""
    return size % 16 == 12 and size > BORDER


def _check(settings: Settings) -> None:
    why = "four unpadded levels must halve evenly and leave something to score"
    require("unet", "size", settings["size"], _works, why)


def _inputs(settings: Settings) -> tuple[Input, ...]:
    batch, size = settings["batch"], settings["size"]
    scored = size - BORDER
    return (
        Input((batch, 1, size, size)),
        Input((batch, scored, scored), classes=CLASSES, dtype=torch.int32, ignored=0.05),
    )


UNET = Network(
    name="unet",
    summary="U-Net without padding, with crops, dropout and ignored labels (seed 000)",
    keys={"base": Key(64), "batch": Key(8), "size": Key(572)},
    small="base=4,batch=1,size=188",
    make=lambda settings: UNet(settings["base"]),
    inputs=_inputs,
    loss=_loss,
    initialise=he,
    check=_check,
)
