"""First values: the same on every device, from a seed, without touching the global random state."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from lowtide.zoo.base import Input

__all__ = ["draw", "he", "materialise"]


def materialise(
    model: nn.Module,
    device: torch.device,
    initialise: Callable[[nn.Module, torch.Generator], None],
    generator: torch.Generator,
) -> nn.Module:
    """The model, made on the meta device, with values on the device it is wanted on."""
    if device.type == "meta":
        return model
    model = model.to_empty(device="cpu")
    with torch.no_grad():
        initialise(model, generator)
    return model.to(device)


def he(model: nn.Module, generator: torch.Generator) -> None:
    """He's normal weights for every layer, no bias, normalisations that change nothing."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            _normal(module, module.weight[0].numel(), generator)
        elif isinstance(module, nn.ConvTranspose2d):
            steps = math.prod(module.stride)
            _normal(module, module.in_channels * module.weight[0, 0].numel() // steps, generator)
        elif isinstance(module, nn.BatchNorm2d):
            module.reset_parameters()
        elif any(True for _ in module.parameters(recurse=False)):
            raise TypeError(f"no first values are known for a {type(module).__name__}")


def _normal(
    module: nn.Conv2d | nn.Linear | nn.ConvTranspose2d, terms: int, generator: torch.Generator
) -> None:
    """Weights that keep the variance through a ReLU, where ``terms`` products make one output."""
    module.weight.normal_(0.0, math.sqrt(2.0 / terms), generator=generator)
    if module.bias is not None:
        module.bias.zero_()


def draw(wanted: Input, device: torch.device, generator: torch.Generator) -> Tensor:
    """One tensor of the batch."""
    if device.type == "meta":
        return torch.empty(wanted.shape, dtype=wanted.dtype, device=device)
    if wanted.classes is None:
        return torch.randn(wanted.shape, dtype=wanted.dtype, generator=generator).to(device)
    labels = torch.randint(wanted.classes, wanted.shape, dtype=wanted.dtype, generator=generator)
    if wanted.ignored:
        labels[torch.rand(wanted.shape, generator=generator) < wanted.ignored] = -1
    return labels.to(device)
