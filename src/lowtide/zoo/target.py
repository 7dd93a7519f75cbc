"""Addresses of steps.

unet                         a network of the zoo, with the sizes of the seeds
unet:base=16,batch=2         the same with some of its keys set
path/to/file.py:function     a function that returns (loss_of, model, batch)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lowtide.files import is_file
from lowtide.suggest import did_you_mean
from lowtide.zoo.alexnet import ALEXNET
from lowtide.zoo.base import Built, Key, Network, Settings, TargetError
from lowtide.zoo.convpool import CONVPOOL
from lowtide.zoo.densenet import DENSENET161
from lowtide.zoo.gpt2 import GPT2
from lowtide.zoo.initial import draw, materialise
from lowtide.zoo.locallyconnected import LOCALLY_CONNECTED
from lowtide.zoo.resnet import RESNET50, RESNET50_INFERENCE, RESNET152
from lowtide.zoo.unet import UNET
from lowtide.zoo.usercode import build_code
from lowtide.zoo.vgg import VGG16_BODY, VGG19

__all__ = [
    "CodeTarget",
    "NetworkTarget",
    "Target",
    "TargetError",
    "build",
    "names",
    "network",
    "parse",
    "small",
]

NETWORKS = {
    one.name: one
    for one in (
        UNET,
        RESNET50,
        RESNET152,
        RESNET50_INFERENCE,
        ALEXNET,
        LOCALLY_CONNECTED,
        CONVPOOL,
        VGG19,
        VGG16_BODY,
        DENSENET161,
        GPT2,
    )
}


@dataclass(frozen=True, slots=True)
class NetworkTarget:
    """A network of the zoo with a value for each of its keys."""

    network: Network
    settings: Settings

    @property
    def name(self) -> str:
        """The shortest address: keys in the network's order, defaults left out."""
        keys = self.network.keys
        said = [f"{key}={self.settings[key]}" for key in keys if self.settings[key] != keys[key].default]
        return ":".join((self.network.name, ",".join(said))) if said else self.network.name

    def build(self, device: torch.device, seed: int) -> Built:
        """The network and a batch on the device."""
        network = self.network
        generator = torch.Generator().manual_seed(seed)
        try:
            with torch.device("meta"):
                model = network.make(self.settings)
            model = materialise(model, device, network.initialise, generator)
            batch = tuple(draw(one, device, generator) for one in network.inputs(self.settings))
        except (RuntimeError, MemoryError) as error:
            reason = str(error).partition("\n")[0]
            raise TargetError(
                f"{self.name} cannot be built on {device}: {reason}; take a smaller one"
            ) from error
        return Built(model, batch, network.loss, self.name, network.trains, network.update, network.drawn)


@dataclass(frozen=True, slots=True)
class CodeTarget:
    """A function of somebody's file."""

    path: str
    function: str

    @property
    def name(self) -> str:
        """The address."""
        return f"{self.path}:{self.function}"

    def build(self, device: torch.device, seed: int) -> Built:
        """What the function returns, on the device."""
        return build_code(self.path, self.function, device, seed)


Target = NetworkTarget | CodeTarget
"""What an address names."""


def names() -> tuple[str, ...]:
    """The networks that an address can name."""
    return tuple(NETWORKS)


def network(name: str) -> Network:
    """What is known about a network: its summary, its keys with defaults, its small settings."""
    if name not in NETWORKS:
        known = ", ".join(NETWORKS)
        file = ", nor such a file" if "." in name and not is_file(name) else ""
        raise TargetError(
            f"there is no network {name!r}{file}.{did_you_mean(name, NETWORKS)} Networks: {known}; "
            "or a function of your own: path/to/file.py:function"
        )
    return NETWORKS[name]


def small(name: str) -> str:
    """An address of this network with sizes for a quick step on the processor."""
    return parse(f"{name}:{network(name).small}" if network(name).small else name).name


def parse(text: str) -> Target:
    """What an address names; a TargetError says what is wrong with it. No file is opened."""
    path, colon, function = text.rpartition(":")
    if path.endswith(".py"):
        if not function.isidentifier():
            raise TargetError(f"{text!r}: {function!r} is no name of a function; write {path}:function")
        return CodeTarget(path, function)
    if text.endswith(".py"):
        raise TargetError(f"{text!r} names no function; write {text}:function")
    name, colon, options = text.partition(":")
    one = network(name)
    settings = {key: value.default for key, value in one.keys.items()}
    if colon:
        settings |= _options(one, options)
    one.check(settings)
    return NetworkTarget(one, settings)


def build(text: str, *, device: str | torch.device = "cpu", seed: int = 0) -> Built:
    """The step that an address names, ready to run.

    Parameters and batch follow from the seed alone, whatever the device, and the global random state stays as
    it is. On the meta device nothing is allocated.
    """
    target = parse(text)
    return target.build(_device(device), seed)


def _device(device: str | torch.device) -> torch.device:
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise TargetError(
            f"the device {str(device)!r} cannot be used here: {reason}; see `lowtide doctor`"
        ) from error


def _options(one: Network, text: str) -> Settings:
    settings: Settings = {}
    for option in text.split(","):
        key, equals, value = option.partition("=")
        if not equals:
            raise TargetError(f"{one.name}: {option!r} is not key=value. {_keys(one)}")
        if key not in one.keys:
            raise TargetError(f"{one.name} has no key {key!r}.{did_you_mean(key, one.keys)} {_keys(one)}")
        if key in settings:
            raise TargetError(f"{one.name}: {key} is set twice; give it once")
        settings[key] = _value(one.name, key, value, one.keys[key])
    return settings


def _value(name: str, key: str, text: str, allowed: Key) -> int:
    digits = text.isascii() and text.isdigit() and len(text) <= len(str(allowed.most))
    if not digits or not allowed.least <= int(text) <= allowed.most:
        wanted = f"a whole number from {allowed.least} to {allowed.most}"
        raise TargetError(f"{name}: {key}={text} is not possible; {key} is {wanted}")
    return int(text)


def _keys(one: Network) -> str:
    return "Keys and defaults: " + ", ".join(f"{key}={value.default}" for key, value in one.keys.items())
