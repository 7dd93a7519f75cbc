"""How results of operators really lie in memory, where torch says otherwise while it traces.

A captured step follows from shapes alone: torch runs it on fake tensors and computes their strides, storages
and views. For some operators these are not what the kernels give (``mse_loss``, ``rrelu``, the backward of
LayerNorm behind a transposition). What follows is then captured wrongly: a ``contiguous()`` is left out, a
mask is drawn in another order, bytes are not counted.

So whatever runs is held against the capture (``execute/runtime/witness.py``). What differs is learned here,
by operator and arguments, and the step is captured again with fake tensors that lie as the real ones do.
"""

from __future__ import annotations

import functools
import math
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from lowtide.distributed_internals import local_of
from lowtide.errors import CaptureError
from lowtide.torch_internals import (
    FakeTensorMode,
    meta_of_grouped_product,
    schema_of,
    set_meta_of_grouped_product,
    storage_id,
    tree_map_only,
)
from lowtide.trace.eager.known_layouts import as_known

__all__ = [
    "Layout",
    "Layouts",
    "as_number",
    "fake_arguments",
    "grouped_products",
    "is_functional_of",
    "layout_of",
    "layouts",
    "layouts_of",
    "learned",
    "look",
    "same_sort",
]

_COPY_STORAGE = frozenset(
    {"copy", "slice_scatter", "select_scatter", "diagonal_scatter", "as_strided_scatter"}
)
"""Operators whose result takes as much memory as there is under their first argument."""
_IGNORED = {"native_batch_norm_backward": (3, 4), "batch_norm_backward": (3, 4)}
"""Positions of arguments that a captured step may leave out, as nobody reads them: running statistics."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How one result lies in memory."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    stride: tuple[int, ...]
    offset: int
    storage_bytes: int
    shared: int | None
    """The tensor whose storage it is on: a position among the arguments and the results before it."""


@dataclass(eq=False, slots=True)
class Layouts:
    """What was learned from real results, for the steps that are captured with it."""

    known: dict[Any, dict[Hashable, tuple[Layout | None, ...]]] = field(default_factory=dict)
    """By operator and arguments: how each result lies."""
    in_place: Any = None
    """The operator in place that is being traced, as its functional form."""

    def learn(
        self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, assumed: Hashable
    ) -> bool:
        """Remember how the real result of an operator lies, which is not as it was captured.

        ``assumed`` is the :func:`look` of the arguments that it was captured with. False: it lies as torch
        says for these arguments, and only they are not as captured.
        """
        key, real = look(operator, args, kwargs), layouts(args, kwargs, result)
        if key != assumed and not schema_of(operator).is_mutable:
            mode = self.mode()
            with mode:
                given, named = tree_map_only(torch.Tensor, mode.from_tensor, (list(args), dict(kwargs)))
                traced = layouts(given, named, operator(*given, **named))
            if traced[: len(real)] == real:  # of one that updates its arguments, more results are traced
                return False
        self.known.setdefault(operator, {})[key] = real
        return True

    @contextmanager
    def laid_out_by(self, in_place: Any) -> Iterator[None]:
        """While the functional form of an operator in place is traced; None: of no other operator."""
        outer, self.in_place = self.in_place, in_place
        try:
            yield
        finally:
            self.in_place = outer

    def mode(self, *, symbolic: bool = False) -> FakeTensorMode:
        """A new mode for capturing a step with fixed sizes, whose fake tensors lie as real ones do.

        With ``symbolic`` sizes may be symbols.
        """
        mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=not symbolic)
        # torch knows modes by their class: what differs is put into this one
        setattr(mode, "dispatch", _Corrected(self, mode))  # noqa: B010
        return mode

    def corrected(self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Any:
        """The fake result of an operator, as a real one lies in memory."""
        found = self.known[operator].get(look(operator, args, kwargs))
        if found is None:
            return result
        several = isinstance(result, tuple | list)
        said = layouts(args, kwargs, result)
        there, made = _tensors((args, kwargs)), list[Any]()
        for k, one in enumerate(result if several else (result,)):
            layout = found[k] if k < len(found) else None
            made.append(_laid_out(one, layout, there) if layout is not None and layout != said[k] else one)
            there += _tensors(made[-1:])
        return _like(result, made) if several else made[0]


_LEARNED: dict[Any, dict[Hashable, tuple[Layout | None, ...]]] = {}
"""What was learned in this process: torch's kernels do the same for every step."""


def learned() -> Layouts:
    """What is known from all steps that ran in this process, and what this one adds."""
    return Layouts(_LEARNED)


def _like(results: Any, made: list[Any]) -> Any:
    """Results in the same sort of tuple; those of some operators have names."""
    named = hasattr(results, "_fields")
    return type(results)(*made) if named else type(results)(made)


def fake_arguments(mode: FakeTensorMode, arguments: Sequence[Any]) -> list[Any]:
    """Arguments as fake tensors of a mode, each with as much memory under it as there really is."""
    return [_faked(mode, a) if isinstance(a, torch.Tensor) else a for a in arguments]


def _faked(mode: FakeTensorMode, argument: torch.Tensor) -> torch.Tensor:
    fake = mode.from_tensor(argument)
    if argument.layout is torch.strided:
        size, memory = local_of(argument).untyped_storage().nbytes(), local_of(fake).untyped_storage()
        if memory.nbytes() < size:  # torch takes what lies behind it for somebody else's
            memory.resize_(size)
    return fake


def layouts_of(values: Sequence[torch.Tensor]) -> Layouts:
    """What the fake tensors of a captured step know, for another capture of parts of it."""
    found = (getattr(getattr(value, "fake_mode", None), "dispatch", None) for value in values)
    return next((one.layouts for one in found if isinstance(one, _Corrected)), Layouts())


def as_number(number: Any) -> int:
    """A size as a number; of a symbol the one that is traced with, without asking torch for it."""
    return int(number.node.hint) if isinstance(number, torch.SymInt) else int(number)


def layouts(args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> tuple[Layout | None, ...]:
    """How the results of an operator lie, fake or real; None for what is no strided tensor."""
    storages = [storage_id(tensor) for tensor in _tensors((args, kwargs))]
    found: list[Layout | None] = []
    for one in result if isinstance(result, tuple | list) else (result,):
        if not isinstance(one, torch.Tensor) or one.layout is not torch.strided:
            found.append(None)
            continue
        own = storage_id(one)
        found.append(layout_of(one, storages.index(own) if own in storages else None))
        storages.append(own)
    return tuple(found)


def layout_of(
    tensor: torch.Tensor, shared: int | None = None, number: Callable[[Any], Any] = as_number
) -> Layout:
    """How a strided tensor lies; a ``number`` stands for each symbol."""
    return Layout(
        tuple(map(number, tensor.shape)),
        tensor.dtype,
        tensor.device,
        tuple(map(number, tensor.stride())),
        number(tensor.storage_offset()),
        number(tensor.untyped_storage().nbytes()),
        shared,
    )


class _Corrected:
    """What a mode says of the result of an operator, corrected by what is known of real ones."""

    __slots__ = ("_inside", "_mode", "_said", "layouts")

    def __init__(self, layouts: Layouts, mode: FakeTensorMode) -> None:
        self.layouts = layouts
        self._mode, self._said = weakref.ref(mode), FakeTensorMode.dispatch
        self._inside = 0
        """How many operators are traced, one by means of the other: only the outermost one runs for real."""

    def __call__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        mode = self._mode()
        assert mode is not None
        self._inside += 1
        try:
            with grouped_products():
                result: Any = self._said(mode, func, types, args, kwargs or {})
            if self._inside > 1:
                return result
            runs = self.layouts.in_place
            if runs is None or not is_functional_of(func, runs):
                runs = func
                with mode:
                    result = as_known(func, args, result)
            elif same_sort(result, args[0]) and result.stride() != args[0].stride():
                with mode:
                    result = torch.empty_like(args[0])
            if runs not in self.layouts.known:
                return result
            with mode:
                return self.layouts.corrected(runs, args, kwargs or {}, result)
        finally:
            self._inside -= 1


_INSIDE = threading.local()


@contextmanager
def grouped_products() -> Iterator[None]:
    """Inside, a product of groups (``grouped_mm``) is traced for each type that its kernels take.

    Fake tensors know it in bfloat16 alone: mixtures of experts in float32 could not be captured.
    """
    _adapt_products()
    before, _INSIDE.now = getattr(_INSIDE, "now", False), True
    try:
        yield
    finally:
        _INSIDE.now = before


@functools.cache
def _adapt_products() -> None:
    known = meta_of_grouped_product()
    if known is not None:
        set_meta_of_grouped_product(_of_any_type(*known))


def _of_any_type(check: Callable[..., Any], result: Callable[..., Any]) -> Callable[..., Any]:
    def checked(a: torch.Tensor, b: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        plain = not args and not any(kwargs.get(name) is not None for name in ("scale_a", "scale_b", "bias"))
        known = a.dtype is torch.bfloat16 or a.dtype is not b.dtype or not a.is_floating_point()
        if known or not plain or not getattr(_INSIDE, "now", False):
            return check(a, b, *args, **kwargs)
        return result(a, b, kwargs.get("offs"), kwargs.get("out_dtype"))

    return checked


def is_functional_of(target: Any, in_place: Any) -> bool:
    """Whether an operator is the functional one of another in place."""
    packet = getattr(target, "overloadpacket", None)
    return packet is not None and f"{packet.__name__}_" == in_place.overloadpacket.__name__


def same_sort(one: Any, other: Any) -> bool:
    """Whether these are strided tensors of the same shape, type and device."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    sorts = [(value.layout, value.shape, value.dtype, value.device) for value in (one, other)]
    return sorts[0] == sorts[1] and one.layout is torch.strided


def _laid_out(like: torch.Tensor, layout: Layout, there: Sequence[torch.Tensor]) -> torch.Tensor:
    """A fake tensor of the same sort that lies in memory as it is said."""
    if any(isinstance(d, torch.SymInt) for d in like.shape):
        return _in_order(like, layout, there)
    if layout.shared is not None:
        base = there[layout.shared]
        if base.dtype != layout.dtype:
            return like
    else:
        count = -(-_as_much(layout.storage_bytes, there) // max(1, layout.dtype.itemsize))
        base = torch.empty(count, dtype=layout.dtype, device=layout.device)
    return torch.as_strided(base, layout.shape, layout.stride, layout.offset)


def _in_order(like: torch.Tensor, layout: Layout, there: Sequence[torch.Tensor]) -> torch.Tensor:
    """A fake tensor with symbols for sizes that lies as a real one does: like one there, or dense."""
    for other in there if layout.shared is None else ():
        known = layouts((), {}, other)[0]
        if known is not None and same_sort(like, other) and replace(known, shared=None) == layout:
            count = other.untyped_storage().nbytes() // max(1, other.itemsize)
            memory = torch.empty(count, dtype=layout.dtype, device=layout.device)
            return torch.as_strided(memory, other.shape, other.stride(), other.storage_offset())
    dense = math.prod(layout.shape) * layout.dtype.itemsize == layout.storage_bytes
    if layout.shared is not None or layout.offset or not dense:
        raise CaptureError("how a result lies in memory is known for one size alone")
    order = sorted(range(like.dim()), key=lambda k: -layout.stride[k])
    found = torch.empty([like.shape[k] for k in order], dtype=layout.dtype, device=layout.device)
    return found.permute([order.index(k) for k in range(like.dim())])


def _as_much(size: int, there: Sequence[torch.Tensor]) -> Any:
    """Bytes of a storage, by symbols where a tensor there has as many of them."""
    storages: list[Any] = [tensor.untyped_storage().nbytes() for tensor in there]
    return next((one for one in storages if isinstance(one, torch.SymInt) and as_number(one) == size), size)


def look(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Hashable:
    """What the layout of an operator's results may depend on."""
    first = _tensors(args)[:1] if operator.overloadpacket.__name__ in _COPY_STORAGE else []
    under = tuple(
        (as_number(one.untyped_storage().nbytes()), as_number(one.storage_offset())) for one in first
    )
    ignored = _IGNORED.get(operator.overloadpacket.__name__, ())
    read = [None if k in ignored else value for k, value in enumerate(args)]
    return _look(read), tuple((name, _look(kwargs[name])) for name in sorted(kwargs)), under


def _look(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        stride = tuple(map(as_number, value.stride())) if value.layout is torch.strided else value.layout
        return tuple(map(as_number, value.shape)), stride, value.dtype, str(value.device)
    if isinstance(value, list | tuple):
        return tuple(map(_look, value))
    if isinstance(value, torch.SymInt):
        return as_number(value)
    return value if isinstance(value, Hashable) else repr(value)


def _tensors(values: Any) -> list[torch.Tensor]:
    """The strided tensors among some values, in order."""
    if isinstance(values, torch.Tensor):
        return [values] if values.layout is torch.strided else []
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, list | tuple):
        return []
    return [tensor for value in values for tensor in _tensors(value)]
