"""A call of a step that can be taken back, so that it is made again once the step was planned for it."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import distributed, nn

from lowtide.execute.breaks.forward_record import has_storage
from lowtide.execute.compile.bits import same_bits
from lowtide.execute.compile.trial import random_states, registered_buffers
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

    def __init__(self, modules: Sequence[nn.Module], batch: Sequence[torch.Tensor] = ()) -> None:
        self._modules = modules
        self._state = _state_of(modules)
        """Parameters and buffers."""
        self._devices = {one.device for one in (*self._state, *batch)}
        self.copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Tensors that calls change, by their identity, each with its value before the call."""
        self._now: Callable[[], Sequence[nn.Module]] = lambda: modules
        self._given: Sequence[torch.Tensor] = ()
        self._versions: list[int] = []
        self._undo: Sequence[Callable[[], None]] = ()
        self.ended = False
        """Whether the call was told to end, to be made again."""
        self.failed = self.stale = False
        """Whether a call has ended in an error, and whether one had other parameters than these."""
        self._copy(_unsaid(modules))

    def begin(
        self, given: Sequence[torch.Tensor], modules: Callable[[], Sequence[nn.Module]] | None = None
    ) -> None:
        """A call begins, with these tensors and ``modules`` among its arguments."""
        self._given, self.ended = given, False
        self._now = modules or (lambda: self._modules)
        self._versions = [version_of(tensor) for tensor in (*self._state, *given)]
        with torch.no_grad():
            for tensor, copy in self.copies.values():
                copy.copy_(tensor)
        if _communicates():
            self._undo = ()
        else:
            self._undo = random_states(self._devices), registered_buffers(self._modules)

    def called(
        self,
        run: Callable[[], Any],
        given: Sequence[torch.Tensor],
        modules: Callable[[], Sequence[nn.Module]],
    ) -> tuple[bool, Any]:
        """Make a call: whether it has come to its end, with its results. Else everything was put back."""
        self.begin(given, modules)
        try:
            with contextlib.suppress(DoesNotFit):
                results = run()
                if not self.ended:  # else code of the user's has caught it
                    return True, results
                del results
            self.take_back()
        except Exception:
            self.failed = True
            raise
        finally:
            self.end()
        return False, None

    def tell_of_errors(self) -> None:
        """Graphs are missing: say so, if code of the user's has raised an error before."""
        if self.failed:
            self.failed = False
            warnings.warn(
                "an error was raised in the step before, and torch may run the code around it as it is from "
                "then on: the step may take more than its budget. Call lowtide.fit again",
                stacklevel=2,
            )

    def end(self) -> None:
        """The call has ended, and cannot be taken back any more."""
        self._given, self._undo, self._now = (), (), lambda: self._modules

    def learn(self, changed: Iterable[torch.Tensor] = (), before: Attempt | None = None) -> None:
        """Copy what a call has changed before each further one, if it is not too large.

        So do what was learned ``before``, if the parameters and buffers are the same.
        """
        known = [] if before is None else [tensor for tensor, _ in before.copies.values()]
        here = {id(one) for one in self._state}
        found = {id(one): one for one in (*known, *changed, *self._changed()) if id(one) in here}
        self._copy(one for key, one in found.items() if key not in self.copies)

    def _copy(self, tensors: Iterable[torch.Tensor]) -> None:
        more = list(tensors)
        known = [copy for _, copy in self.copies.values()]
        if sum(one.nbytes for one in (*known, *more)) <= _MOST:
            self.copies.update((id(one), (one, one.detach().clone())) for one in more)

    @property
    def possible(self) -> bool:
        """Whether the call that runs can be taken back."""
        if not self._undo or any(id(one) not in self.copies for one in self._changed()):
            return False
        known = {id(one) for one in self._state}
        self.stale = not known.issuperset(map(id, _parameters_of(self._now())))  # a copy of the model, say
        return not self.stale

    def take_back(self) -> None:
        """Put everything back that the call has changed."""
        for undo in self._undo:
            undo()
        with torch.no_grad():
            for tensor, copy in self.copies.values():
                if not same_bits(tensor, copy):
                    tensor.copy_(copy)

    def _changed(self) -> list[torch.Tensor]:
        pairs = zip((*self._state, *self._given), self._versions, strict=False)
        return [tensor for tensor, before in pairs if version_of(tensor) != before]


def _state_of(modules: Sequence[nn.Module]) -> list[torch.Tensor]:
    tensors = [one for module in modules for one in (*module.parameters(), *module.buffers())]
    return list({id(one): one for one in tensors if has_storage(one)}.values())


def _parameters_of(modules: Sequence[nn.Module]) -> list[torch.Tensor]:
    return [one for module in modules for one in module.parameters() if has_storage(one)]


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
