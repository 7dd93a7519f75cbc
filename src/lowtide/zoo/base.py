"""What every network of the zoo says about itself, and what it is built into."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.errors import LowtideError

__all__ = ["MOST", "Built", "Input", "Key", "Network", "Settings", "TargetError", "require", "sgd"]

Settings = dict[str, int]
"""A value for every key of a network."""

MOST = 1 << 24
"""The largest value of a key; beyond it element counts would leave 64 bits."""

RATE = 0.01
"""The learning rate of steps that end with an update."""

_SEARCH = 4096
"""How far around an impossible value the nearest possible ones are looked for."""


class TargetError(LowtideError):
    """An address that names no step: an unknown network or key, an impossible size, a broken file."""


@dataclass(frozen=True, slots=True)
class Key:
    """One whole number that can be set in an address."""

    default: int
    least: int = 1
    most: int = MOST


@dataclass(frozen=True, slots=True)
class Input:
    """One tensor of the batch: standard normal values, or whole numbers below ``classes``."""

    shape: tuple[int, ...]
    classes: int | None = None
    dtype: torch.dtype = torch.float32
    ignored: float = 0.0
    """The share of labels that are -1, which the loss leaves out."""


@dataclass(frozen=True, slots=True)
class Network:
    """A network that an address can name."""

    name: str
    summary: str
    """One line for a list of networks."""
    keys: dict[str, Key]
    small: str
    """Settings, as in an address, with which a step takes about a second on two processor cores."""
    make: Callable[[Settings], nn.Module]
    inputs: Callable[[Settings], tuple[Input, ...]]
    loss: Callable[..., Tensor]
    initialise: Callable[[nn.Module, torch.Generator], None]
    check: Callable[[Settings], None]
    """Raises TargetError where the settings contradict each other."""
    trains: bool = True
    update: Callable[[nn.Module, float], None] | None = None
    drawn: Mapping[str, str] = field(default_factory=dict)
    """How a picture of its step calls what a drawing would call otherwise."""


@dataclass(frozen=True, slots=True, eq=False)
class Built:
    """A step that is ready to run: ``loss(model, *batch)``."""

    model: nn.Module
    batch: tuple[Any, ...]
    loss: Callable[..., Tensor]
    """Gives the scalar loss; where ``trains`` is False, the output of the network instead."""
    name: str
    """The normalised address: one spelling for one step."""
    trains: bool = True
    """Whether a backward pass belongs to the step."""
    update: Callable[[nn.Module, float], None] | None = None
    """Where the step ends with one: changes the parameters in place, given the learning rate."""
    drawn: Mapping[str, str] = field(default_factory=dict)
    """How a picture of the step calls what a drawing would call otherwise."""

    @property
    def ending(self) -> Callable[[nn.Module], None] | None:
        """The update with the learning rate that the zoo uses, where the step ends with one."""
        update = self.update
        return None if update is None else lambda model: update(model, RATE)

    def step(self) -> Tensor:
        """What ``loss`` gives for the model and the batch; the backward pass is the caller's."""
        return self.loss(self.model, *self.batch)


def require(network: str, key: str, value: int, works: Callable[[int], bool], why: str) -> None:
    """Raise a TargetError that names the nearest values that work, unless this one does."""
    if works(value):
        return
    below = next((v for v in range(value - 1, max(0, value - _SEARCH), -1) if works(v)), None)
    above = next((v for v in range(value + 1, min(MOST, value + _SEARCH) + 1) if works(v)), None)
    near = " or ".join(f"{key}={v}" for v in (below, above) if v is not None)
    advice = f"; the nearest that {'work' if ' or ' in near else 'works'}: {near}" if near else ""
    raise TargetError(f"{network}: {key}={value} is impossible, {why}{advice}")


def sgd(model: nn.Module, rate: float) -> None:
    """Take ``rate`` times its gradient off every parameter that has one, in place."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.add_(parameter.grad, alpha=-rate)
