"""The arguments of a step on a mesh: its tensors, what tells calls apart, and a model without values."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import nn

from lowtide.graph import Graph, Rect
from lowtide.nested import leaves, mapped

__all__ = [
    "as_whole",
    "call_key",
    "called_with_tensors",
    "graph_digest",
    "model_checksum",
    "no_autocast",
    "random_digest",
    "tensors_in",
]

_MODEL = -1
_KINDS = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor, or the model, goes among the arguments."""

    number: int


def called_with_tensors(
    function: Callable[..., Any], args: Sequence[Any], keywords: Mapping[str, Any]
) -> Callable[..., Any]:
    """The function of the model and of all tensors among the arguments; others are as they are here.

    Torch then names each tensor ``tensors[k]``, whatever the user's function calls it.
    """
    places = iter(range(len(tensors_in(args, keywords))))

    def emptied(value: Any) -> Any:  # torch would find what is in here, under another name
        if isinstance(value, nn.Module):
            return _Place(_MODEL)
        return _Place(next(places)) if isinstance(value, torch.Tensor) else value

    blank, named = mapped(emptied, list(args)), mapped(emptied, dict(keywords))

    def whole(model: nn.Module, *tensors: torch.Tensor) -> Any:
        given = [_filled(value, model, tensors) for value in blank]
        return function(*given, **{name: _filled(named[name], model, tensors) for name in named})

    return whole


def tensors_in(args: Sequence[Any], keywords: Mapping[str, Any]) -> list[torch.Tensor]:
    """In order."""
    return [one for one in leaves([*args, *keywords.values()]) if isinstance(one, torch.Tensor)]


def _filled(value: Any, model: nn.Module, tensors: Sequence[torch.Tensor]) -> Any:
    """An argument with its tensors, as torch can trace it."""
    if isinstance(value, _Place):
        return model if value.number == _MODEL else tensors[value.number]
    if isinstance(value, dict):
        return {key: _filled(value[key], model, tensors) for key in value}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*[_filled(one, model, tensors) for one in value])
    if isinstance(value, tuple | list):
        return type(value)([_filled(one, model, tensors) for one in value])
    return value


def call_key(
    model: nn.Module,
    args: Sequence[Any],
    keywords: Mapping[str, Any],
    others: Mapping[int, torch.Size] | None = None,
) -> tuple[Any, ...]:
    """What calls have in common that run the same step; with ``others`` as shapes of some tensors."""
    count, found = 0, list[Any]()
    for one in leaves([*args, *keywords.values()]):
        if isinstance(one, torch.Tensor):
            found.append(((others or {}).get(count, one.shape), one.dtype, one.device))
            count += 1
        elif not isinstance(one, nn.Module):
            found.append(repr(one))
    modes = (module.training for module in model.modules())
    return (*found, *keywords, *modes, *(p.requires_grad for p in model.parameters()), *_casting())


def _casting() -> list[Any]:
    """What autocast does."""
    on = [kind for kind in _KINDS if torch.is_autocast_enabled(kind)]
    return [(kind, torch.get_autocast_dtype(kind)) for kind in on]


@contextlib.contextmanager
def no_autocast() -> Iterator[None]:
    """Inside, nothing is cast."""
    with contextlib.ExitStack() as stack:
        for kind in _KINDS:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


@contextlib.contextmanager
def as_whole(
    model: nn.Module, boxes: Mapping[str, Rect], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[None]:
    """Inside, parameters and buffers have the shapes of the whole, and no values.

    On the CPU, memory that is not written to takes none.
    """
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    cut = [named[name] for name, box in boxes.items() if box.shape != tuple(shapes[name])]
    whole = [shapes[name] for name, box in boxes.items() if box.shape != tuple(shapes[name])]
    kept = [(value.data, value.grad) for value in cut]
    try:
        for value, shape in zip(cut, whole, strict=True):
            value.grad = None
            value.data = value.data.new_empty(shape)
        yield
    finally:
        for value, (data, gradient) in zip(cut, kept, strict=True):
            value.data = data
            value.grad = gradient


def model_checksum(model: nn.Module) -> str:
    """A few numbers of every parameter and buffer: processes that start from others would drift apart."""
    digest = hashlib.sha256()
    for name, value in sorted({**dict(model.named_parameters()), **dict(model.named_buffers())}.items()):
        flat = value.detach().flatten()
        few = flat[:: max(1, flat.numel() // 64)] if flat.numel() else flat
        digest.update(name.encode())
        digest.update(few.to("cpu", torch.float64).numpy().tobytes())
    return digest.hexdigest()[:16]


def random_digest() -> str:
    """The same where the generator of random numbers is in the same state."""
    return hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()[:16]


def graph_digest(graph: Graph) -> str:
    """The same for the same step, wherever the files of the user's lie."""
    replace = msgspec.structs.replace
    ops = [replace(op, source=None, attributes={}) for op in graph.ops]
    tensors = [replace(tensor, source=None, attributes={}) for tensor in graph.tensors]
    return hashlib.sha256(msgspec.json.encode([ops, tensors, graph.returned])).hexdigest()[:16]
