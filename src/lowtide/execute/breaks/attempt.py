"""A call of a step that can be taken back, so that it is made again once the step was planned for it."""

from __future__ import annotations

import warnings
import weakref
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
    """What a call changes: buffers that are known to change are copied before it, and random states.

    It keeps no model alive.
    """

    def __init__(self, modules: Sequence[nn.Module], batch: Sequence[torch.Tensor] = ()) -> None:
        parts = [part for module in modules for part in module.modules()]
        tensors = [one for module in modules for one in (*module.parameters(), *module.buffers())]
        state = {id(one): one for one in tensors if has_storage(one)}
        self._state = {key: weakref.ref(one) for key, one in state.items()}
        """Parameters and buffers, by their identity."""
        self._parts = [weakref.ref(part) for part in parts if any(True for _ in part.buffers(recurse=False))]
        """Modules with buffers of their own."""
        self._devices = {one.device for one in (*state.values(), *batch)}
        self.copies: dict[int, torch.Tensor] = {}
        """The values before the call of tensors that calls change, by the identity of these."""
        self._modules: Callable[[], Sequence[nn.Module]] = tuple
        self._before: list[tuple[torch.Tensor, int]] = []
        """What the call may change, each with its version."""
        self._undo: Sequence[Callable[[], None]] = ()
        self.ended = False
        """Whether the call was told to end, to be made again."""
        self.failed = self.stale = False
        """Whether a call has ended in an error, and whether one had other parameters than these."""
        self._copy(one for part in parts for one in _unsaid(part))

    def begin(
        self, given: Sequence[torch.Tensor], modules: Callable[[], Sequence[nn.Module]] = tuple
    ) -> None:
        """A call begins, with these tensors and ``modules`` among its arguments."""
        self._modules, self.ended = modules, False
        state = [one for reference in self._state.values() if (one := reference()) is not None]
        self._before = [(one, version_of(one)) for one in (*state, *given) if not one.is_inference()]
        with torch.no_grad():
            for tensor, copy in self.copied():
                copy.copy_(tensor)
        self._undo = ()
        if not _communicates():
            parts = [part for reference in self._parts if (part := reference()) is not None]
            self._undo = random_states(self._devices), registered_buffers(parts)

    def called(
        self,
        run: Callable[[], Any],
        given: Sequence[torch.Tensor],
        modules: Callable[[], Sequence[nn.Module]],
    ) -> tuple[bool, Any]:
        """Make a call: whether it has come to its end, with its results. Else everything was put back."""
        self.begin(given, modules)
        try:
            results = run()
            if not self.ended:
                return True, results
            del results  # code of the user's has caught what ended the call
            self.take_back()
        except DoesNotFit:
            self.take_back()
        except Exception:
            if not self.ended:
                self.failed = True
                raise
            self.take_back()  # it has made another error of it
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
        self._before, self._undo, self._modules = [], (), tuple

    def learn(self, changed: Iterable[torch.Tensor] = (), before: Attempt | None = None) -> None:
        """Copy what a call has changed before each further one, if it is not too large.

        So do what was learned ``before``, if the parameters and buffers are the same.
        """
        known = [] if before is None else [tensor for tensor, _ in before.copied()]
        self._copy((*known, *changed, *self._changed()))

    def _copy(self, tensors: Iterable[torch.Tensor]) -> None:
        new = [one for one in tensors if id(one) in self._state and id(one) not in self.copies]
        if sum(one.nbytes for one in (*self.copies.values(), *new)) <= _MOST:
            self.copies.update((id(one), one.detach().clone()) for one in new)

    def copied(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Tensors that calls change and their values before the call."""
        pairs = [(self._state[key](), copy) for key, copy in self.copies.items()]
        return [(tensor, copy) for tensor, copy in pairs if tensor is not None]

    def can_be_taken_back(self) -> bool:
        """Whether the call that runs can be: all that it has changed was copied."""
        if not self._undo or any(id(one) not in self.copies for one in self._changed()):
            return False
        parameters = [one for module in self._modules() for one in module.parameters() if has_storage(one)]
        self.stale = any(id(one) not in self._state for one in parameters)  # a copy of the model, say
        return not self.stale

    def take_back(self) -> None:
        """Put everything back that the call has changed."""
        for undo in self._undo:
            undo()
        with torch.no_grad():
            for tensor, copy in self.copied():
                if not same_bits(tensor, copy):
                    tensor.copy_(copy)

    def _changed(self) -> list[torch.Tensor]:
        return [tensor for tensor, before in self._before if version_of(tensor) != before]


def _unsaid(module: nn.Module) -> list[torch.Tensor]:
    """Buffers that eager changes without a new version: those of BatchNorm and its kind."""
    own = dict(module.named_buffers(recurse=False))
    return [one for one in own.values() if has_storage(one)] if "running_mean" in own else []


def _communicates() -> bool:
    """Whether other processes may wait for this one, as they would not if a call is made twice."""
    return distributed.is_available() and distributed.is_initialized()
