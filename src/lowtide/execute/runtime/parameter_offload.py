"""Parameters and optimiser state that leave the device in the middle of a step, and come back.

A tensor of the user's stays the object that it is; only its memory is given back and taken again. Between
forward and backward, when other code runs, one that is away has another class: whoever reads it there, or
after a step whose backward never comes, brings everything back first.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from lowtide.execute.runtime.copies import Transfers
from lowtide.torch_internals import DisableTorchFunctionSubclass, is_view, storage_id, version_of
from lowtide.trace.step.joint import Joint

__all__ = ["Guard", "Traveller", "bring_back", "everything_away", "guarded", "may_leave", "pinned_leaves"]

_AWAY: dict[int, Traveller] = {}
"""Everything that is away in this process, by the tensor's identity."""


def may_leave(values: Sequence[Any]) -> list[bool]:
    """Which of these values own all of their memory alone, so that it can be given back and taken again."""
    tensors = [v for v in values if isinstance(v, torch.Tensor) and v.layout is torch.strided]
    users = Counter(storage_id(v) for v in tensors)
    return [_plain(v) and users[storage_id(v)] == 1 for v in values]


def _plain(value: Any) -> bool:
    if type(value) not in (torch.Tensor, nn.Parameter) or value.layout is not torch.strided:
        return False
    if value.is_inference() or is_view(value) or value.storage_offset():
        return False
    storage = value.untyped_storage()
    whole = 0 < storage.nbytes() == value.numel() * value.element_size()
    return whole and storage.resizable() and (value.is_cuda or not storage.is_shared())


def pinned_leaves(joint: Joint, arguments: Sequence[Any], state: Sequence[torch.Tensor]) -> list[int]:
    """Leaves whose memory cannot be given back: it is not theirs alone."""
    size = len(joint.graph.tensors)
    if len(joint.inputs) != len(arguments):  # torch puts some on one storage together, or a mesh beside them
        return [*range(size), *(size + k for k, alone in enumerate(may_leave(state)) if not alone)]
    places = [*joint.inputs, *range(size, size + len(state))]
    able = may_leave([*arguments, *state])
    return [t for t, alone in zip(places, able, strict=True) if t is not None and not alone]


class Traveller:
    """One tensor on its way: a copy on the host, and the memory that it is copied from and to."""

    __slots__ = ("_class", "_coming", "_host", "_lanes", "_sent", "_storage", "_version", "away", "value")

    def __init__(self, value: torch.Tensor, lanes: Transfers) -> None:
        self.value = value
        self.away = False
        self._storage, self._version, self._class = value.untyped_storage(), version_of(value), type(value)
        self._lanes = lanes
        self._host: Any
        self._host, self._sent = lanes.send(value)
        self._coming: Any = None

    def leave(self) -> None:
        """Give the memory back, once the copy has ended; what was changed meanwhile stays."""
        if self.away or version_of(self.value) != self._version:
            return
        self._lanes.wait(self._sent)
        self._lanes.wait(self._coming)
        self._storage.resize_(0)
        self.away = True
        _AWAY[id(self.value)] = self

    def come_back(self) -> Any:
        """Take memory and start the copy; a ticket for it, or None where nothing is to be done."""
        if not self.away:
            return None
        self._storage.resize_(self._host.numel())
        self._coming = self._lanes.fill(self._storage, self._host, self._sent)
        self.away = False
        del _AWAY[id(self.value)]
        self.show()
        return self._coming

    def end(self) -> None:
        """The step is over: the copy on the host is not needed any more, unless the tensor is still away."""
        if not self.away:
            self._host = self._sent = self._coming = None

    def hide(self) -> None:
        """From here on code that reads the tensor brings it back first."""
        if self.away:
            self.value.__class__ = _AwayParameter if self._class is nn.Parameter else _AwayTensor

    def show(self) -> None:
        """The tensor is what it was."""
        self.value.__class__ = self._class


def everything_away() -> list[Traveller]:
    """Whatever is away in this process."""
    return list(_AWAY.values())


def bring_back(travellers: Iterable[Traveller] | None = None) -> None:
    """Everything that is away, or these, is on the device again when this returns."""
    for one in everything_away() if travellers is None else list(travellers):
        lanes = one._lanes  # noqa: SLF001
        lanes.wait(one.come_back())


class Guard:
    """Lives as long as a step may still have a backward; what is away then comes back."""

    def __init__(self, travellers: Sequence[Traveller]) -> None:
        self._travellers = [one for one in travellers if one.away]

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # whoever reads it later tries again
            bring_back(self._travellers)


def guarded(results: Sequence[Any], travellers: Sequence[Traveller]) -> None:
    """Watch over what a forward left away, until the backward of its results has run or never will."""
    if not any(one.away for one in travellers):
        return
    node = _compiled_node([r.grad_fn for r in results if isinstance(r, torch.Tensor) and r.grad_fn])
    if node is None:
        bring_back(travellers)
        return
    node.lowtide_guard = Guard(travellers)
    for one in travellers:
        one.hide()


def _compiled_node(nodes: list[Any]) -> Any:
    """The node of autograd that stands for the step."""
    seen: set[Any] = set()
    while nodes:
        node = nodes.pop(0)
        if type(node).__name__ == "CompiledFunctionBackward":
            return node
        if node not in seen:
            seen.add(node)
            nodes += [one for one, _ in node.next_functions if one is not None]
    return None


def _harmless() -> frozenset[Any]:
    """What may be asked of a tensor whose memory is elsewhere."""
    tensor: Any = torch.Tensor
    properties = (
        "device",
        "dtype",
        "grad_fn",
        "is_cuda",
        "is_leaf",
        "layout",
        "ndim",
        "requires_grad",
        "shape",
    )
    asked: list[Callable[..., Any]] = [getattr(tensor, name).__get__ for name in properties]
    asked += [tensor.grad.__get__, tensor.grad.__set__, tensor.grad.__delete__]
    methods = ("dim", "element_size", "is_floating_point", "nelement", "numel", "size", "stride")
    return frozenset(asked) | {is_view, *(getattr(tensor, name) for name in methods)}


_HARMLESS = _harmless()


def _asked(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any] | None) -> Any:
    if function in _HARMLESS:
        with DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))
    bring_back()
    return function(*args, **(kwargs or {}))


class _AwayTensor(torch.Tensor):
    """A tensor whose memory is given back for a while."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _asked(func, args, kwargs)


class _AwayParameter(nn.Parameter):
    """A parameter whose memory is given back for a while."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _asked(func, args, kwargs)
