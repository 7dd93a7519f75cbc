"""The first call of a model, run as it is: some set up what later calls find there.

Hooks are installed, modules are imported, tables are built, often under a lock: code that torch cannot trace,
and that no other call runs. What a second call changes as well is no set-up but part of each step, and is put
back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lowtide.execute.compile.bits import same_bits
from lowtide.execute.compile.sharded import unsynchronised
from lowtide.execute.compile.trial import untouched
from lowtide.torch_internals import TorchDispatchMode, schema_of, storage_id, tree_leaves
from lowtide.trace.distributed.stand_ins import nothing_sent

__all__ = ["run_once"]


def run_once(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    modules: Sequence[nn.Module],
) -> bool:
    """Whether forward of a step ran, without gradients; what it has set up stays.

    Where it has changed something, it runs again: what changes again belongs to each step and is put back, as
    are the batch and random states. Where it fails, all is put back: the step as it is fails as well, or
    needs gradients, and whoever captures it says so.
    """
    inside = [one for module in modules for one in module.modules()]
    buffers = [buffer for module in modules for buffer in module.buffers()]
    parameters = [parameter for module in modules for parameter in module.parameters()]
    batch = _tensors((args, kwargs))
    devices = {tensor.device for tensor in (*buffers, *batch, *parameters)}
    with contextlib.suppress(Exception), untouched([one for one in batch if _has_value(one)], devices):
        writes, names = _Writes(buffers), _Names(inside)
        watch: Any = writes
        try:
            for _ in range(2):
                with torch.no_grad(), watch, nothing_sent(), unsynchronised(modules):
                    function(*args, **kwargs)
                if not writes.next_call() | names.next_call():
                    break
        except BaseException:
            writes.put_back(every=True)
            names.put_back(every=True)
            raise
        writes.put_back()
        names.put_back()
        return True
    return False


class _Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the values of tensors that operators write on, unless the call itself has made them.

    ``tensors`` may be written on by operators that do not say so, as BatchNorm's does.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._before: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}
        self._after: dict[Any, torch.Tensor] = {}
        """The values behind the first call."""
        self._made: set[int] = set()
        """Storages that this call has made."""
        self._written: set[Any] = set()
        """What operators of this call have written on."""
        for tensor in tensors:
            self._keep(tensor)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch compile what is called inside."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """One operator."""
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # it calls operators on the tensors inside, which come here again
        named = kwargs or {}
        schema = schema_of(func)
        for k, argument in enumerate(schema.arguments if schema is not None and schema.is_mutable else ()):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in _tensors(args[k] if k < len(args) else named.get(argument.name)):
                    self._written.add(self._keep(tensor))
        result = func(*args, **named)
        given = {storage_id(one) for one in _tensors((args, named)) if _has_value(one)}
        self._made |= {storage_id(one) for one in _tensors(result) if _has_value(one)} - given
        return result

    def _keep(self, tensor: torch.Tensor) -> Any:
        if not _has_value(tensor) or storage_id(tensor) in self._made:
            return None
        key = storage_id(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
        if key not in self._before:
            own = tensor.detach()
            self._before[key] = own, own.clone()
        return key

    def next_call(self) -> bool:
        """Whether anything is not what it was; at the end of the first call."""
        if self._after:
            return True
        self._made.clear()
        self._written.clear()
        self._after = {key: own.clone() for key, (own, _) in self._before.items()}
        return any(not same_bits(self._after[key], value) for key, (_, value) in self._before.items())

    def put_back(self, *, every: bool = False) -> None:
        """What each call changes, or all that has changed."""
        for key, (own, value) in reversed(self._before.items()):
            after = None if every or key in self._written else self._after.get(key)
            if not same_bits(own, after) and not same_bits(own, value):
                own.copy_(value)


class _Names:
    """What modules are bound to by the names of their attributes, parameters and buffers."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._spaces: list[MutableMapping[str, Any]] = [
            space for one in modules for space in (vars(one), vars(one)["_parameters"], vars(one)["_buffers"])
        ]
        self._before = [dict(space) for space in self._spaces]
        self._after: list[dict[str, Any]] = []
        """The same behind the first call."""

    def next_call(self) -> bool:
        """Whether any name is bound to something else; at the end of the first call."""
        if not self._after:
            self._after = [dict(space) for space in self._spaces]
        pairs = zip(self._before, self._after, strict=True)
        return any(before.keys() != now.keys() or _others(before, now) for before, now in pairs)

    def put_back(self, *, every: bool = False) -> None:
        """What each call binds anew, where there was something before; or every name."""
        for k, (space, before) in enumerate(zip(self._spaces, self._before, strict=True)):
            if every:
                space.clear()
                space.update(before)
            elif self._after:
                again = _others(self._after[k], space)
                space.update({name: before[name] for name in again if before.get(name) is not None})


def _others(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Names that are bound to something else now."""
    return [name for name, value in before.items() if name in now and now[name] is not value]


def _tensors(values: Any) -> list[torch.Tensor]:
    return [one for one in tree_leaves(values) if isinstance(one, torch.Tensor)]


def _has_value(tensor: torch.Tensor) -> bool:
    """Whether this is a strided tensor with memory."""
    return not is_lazy(tensor) and tensor.layout is torch.strided and tensor.device.type != "meta"
