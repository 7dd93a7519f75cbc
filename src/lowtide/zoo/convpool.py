"""Two convolutions, each with a pool behind it: the chain that the log of seed 004 runs in tiles."""

from __future__ import annotations

from torch import Tensor, nn

from lowtide.zoo.base import Input, Key, Network, Settings, require
from lowtide.zoo.initial import he

__all__ = ["CONVPOOL", "ConvPool"]


class ConvPool(nn.Module):
    """3x3 convolution, 2x2 pool, twice; ``channels`` throughout, no bias."""

    def __init__(self, channels: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.pool1 = nn.MaxPool2d(2)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.pool2 = nn.MaxPool2d(2)

    def forward(self, image: Tensor) -> Tensor:
        """A quarter of the image's height and width."""
        x = self.pool1(self.conv1(image))
        out: Tensor = self.pool2(self.conv2(x))
        return out


def _loss(model: nn.Module, image: Tensor) -> Tensor:
    out: Tensor = model(image)
    return out.sum()


def _check(settings: Settings) -> None:
    why = "two pools must leave something"
    require("convpool", "size", settings["size"], lambda size: size >= 4, why)


def _inputs(settings: Settings) -> tuple[Input, ...]:
    return (Input((settings["batch"], settings["channels"], settings["size"], settings["size"])),)


CONVPOOL = Network(
    name="convpool",
    summary="two 3x3 convolutions with pools, small enough to check by hand (seed 004)",
    keys={"batch": Key(1), "size": Key(16), "channels": Key(1)},
    small="",
    make=lambda settings: ConvPool(settings["channels"]),
    inputs=_inputs,
    loss=_loss,
    initialise=he,
    check=_check,
)
