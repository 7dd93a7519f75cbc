"""Random operators that run again draw the same numbers: the generator's state is put back for them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

__all__ = ["Drawing", "Redraws", "generator_of", "random_state", "replayed"]


class Redraws(Protocol):
    """How random operators that run again draw the numbers of their first run."""

    def before(self, args: Sequence[Any], kwargs: Mapping[str, Any], /) -> Any:
        """Remember where the generator is before the first run; what ``again`` is to be given."""

    def again(
        self, state: Any, args: Sequence[Any], kwargs: Mapping[str, Any], /
    ) -> AbstractContextManager[None]:
        """Inside, the operator draws the same numbers."""


class Drawing:
    """Who has random operators draw again now; shared by all parts of a Program."""

    def __init__(self) -> None:
        self.by: Redraws = _ByState()


class _ByState:
    """The generator's state is kept, and put back."""

    def before(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor:
        return random_state(args, kwargs)

    def again(
        self, state: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> AbstractContextManager[None]:
        return replayed(state, args, kwargs)


def generator_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Generator:
    """The generator that an operator with these arguments draws from."""
    devices = (arg.device for arg in args if isinstance(arg, torch.Tensor))
    device = next(devices, torch.device(kwargs.get("device") or "cpu"))
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator


def random_state(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor:
    """The state before the operator runs, as a tensor on the host."""
    return generator_of(args, kwargs).get_state()


@contextlib.contextmanager
def replayed(state: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Inside, the operator's generator is where it was; outside, it goes on as if nothing had run."""
    generator = generator_of(args, kwargs)
    now = generator.get_state()
    generator.set_state(state)
    try:
        yield
    finally:
        generator.set_state(now)
