"""A call of a step that can be taken back, so that it is made again once the step was planned for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import distributed, nn

from lowtide.execute.breaks.forward_record import has_storage
from lowtide.execute.compile.bits import same_bits
from lowtide.execute.compile.trial import random_states
from lowtide.torch_internals import version_of

__all__ = ["Attempt", "DoesNotFit"]

_MOST = 4 * 2**20
"""Bytes that are copied at each call at most. A call that changes more is not taken back."""


class DoesNotFit(BaseException):
    """Ends a call that has met a graph for which the others leave too little memory.

    It is no Exception: code of the user's that goes on after one must not catch it.
    """


class Attempt:
    """What a call changes: buffers that are known to change are copied before it, and random states."""

    def __init__(self, modules: Sequence[nn.Module], batch: Sequence[torch.Tensor]) -> None:
        tensors = [one for module in modules for one in (*module.parameters(), *module.buffers())]
        self._state = list({id(one): one for one in tensors if has_storage(one)}.values())
        """Parameters and buffers."""
        self._devices = {one.device for one in (*self._state, *batch)}
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Tensors that calls change, by their identity, each with its value before the call."""
        self._given: Sequence[torch.Tensor] = ()
        self._versions: list[int] = []
        self._random: Callable[[], None] | None = None
        self._copy(_unsaid(modules))

    def begin(self, given: Sequence[torch.Tensor]) -> None:
        """A call begins, with these tensors among its arguments."""
        self._given = given
        self._versions = [version_of(tensor) for tensor in (*self._state, *given)]
        with torch.no_grad():
            for tensor, copy in self._copies.values():
                copy.copy_(tensor)
        self._random = None if _communicates() else random_states(self._devices)

    def end(self) -> None:
        """The call has ended, and cannot be taken back any more."""
        self._given, self._random = (), None

    def learn(self) -> None:
        """Copy what this call has changed before each further one, if it is not too large."""
        self._copy(one for one in self._changed() if id(one) not in self._copies)

    def _copy(self, tensors: Iterable[torch.Tensor]) -> None:
        more = list(tensors)
        known = [copy for _, copy in self._copies.values()]
        if sum(one.nbytes for one in (*known, *more)) <= _MOST:
            self._copies.update((id(one), (one, one.detach().clone())) for one in more)

    @property
    def possible(self) -> bool:
        """Whether the call that runs can be taken back."""
        return self._random is not None and all(id(one) in self._copies for one in self._changed())

    def take_back(self) -> None:
        """Put everything back that the call has changed."""
        with torch.no_grad():
            for tensor, copy in self._copies.values():
                if not same_bits(tensor, copy):
                    tensor.copy_(copy)
        if self._random is not None:
            self._random()

    def _changed(self) -> list[torch.Tensor]:
        pairs = zip((*self._state, *self._given), self._versions, strict=False)
        return [tensor for tensor, before in pairs if version_of(tensor) != before]


def _unsaid(modules: Sequence[nn.Module]) -> list[torch.Tensor]:
    """Buffers that eager changes without a new version: those of BatchNorm and its kind."""
    found: dict[int, torch.Tensor] = {}
    for one in (part for module in modules for part in module.modules()):
        own = dict(one.named_buffers(recurse=False))
        if "running_mean" in own:
            found |= {id(buffer): buffer for buffer in own.values() if has_storage(buffer)}
    return list(found.values())


def _communicates() -> bool:
    """Whether other processes may wait for this one, as they would not if a call is made twice."""
    return distributed.is_available() and distributed.is_initialized()
