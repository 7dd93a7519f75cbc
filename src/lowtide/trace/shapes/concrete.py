"""What was traced with symbols for sizes, made again with the sizes of one call.

Tracing takes longer than anything else that is done for a new shape. A function that was traced with symbols
is good for every shape for which what was asked about sizes while tracing has the same answers. The numbers
are put into what was traced then (``template.py``), and into the fake tensors that say how its tensors lie in
memory.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
    StrictMinMaxConstraint,
)

from lowtide.torch_internals import FakeTensor, FakeTensorMode, ValueRanges, storage_id
from lowtide.trace.step.sizes import SYMBOLS

__all__ = ["Concrete", "NotConcrete", "SymbolicInputs"]

_PLAIN = (bool, int, float, complex, str, bytes, type, Enum, torch.dtype, torch.device, torch.memory_format)


_LARGEST = 1 << 20
"""No size that varies is larger: torch asks whether products of them are as large as numbers can be."""


class NotConcrete(Exception):  # noqa: N818  nothing is wrong, the shape is traced by itself
    """A function, or a shape of it, for which the trace with symbols is no good."""


class SymbolicInputs:
    """Fake tensors with symbols for the sizes that vary, and which tensors are like them."""

    def __init__(
        self, mode: FakeTensorMode, like: Sequence[torch.Tensor], varying: Sequence[frozenset[int]]
    ) -> None:
        """The sizes ``varying`` of tensors ``like`` these are symbols, the others are numbers."""
        environment = mode.shape_env
        assert environment is not None
        self._environment: ShapeEnv = environment
        self.fakes: list[Any] = [_symbolic(mode, one, dims) for one, dims in zip(like, varying, strict=True)]
        self._asked: str | None = None
        """What was asked about sizes, once nothing more is."""

    def sizes(self, arguments: Sequence[torch.Tensor]) -> dict[Any, int]:
        """What the symbols stand for in a call; NotConcrete where it was not traced for one like it."""
        found: dict[Any, int] = {}
        for fake, argument in zip(self.fakes, arguments, strict=True):
            if fake.dim() != argument.dim() or fake.dtype != argument.dtype:
                raise NotConcrete
            symbols: Sequence[Any] = fake.shape
            for symbol, size in zip(symbols, argument.shape, strict=True):
                if not isinstance(symbol, torch.SymInt):
                    fits = symbol == size
                else:
                    expression = symbol.node.expr
                    fits = bool(expression.is_symbol) and found.setdefault(expression, size) == size
                    fits = fits and 1 < size <= _LARGEST
                if not fits:
                    raise NotConcrete
        asked = self._questions() if self._asked is None else self._asked
        if asked and not self._environment.evaluate_guards_expression(asked, list(arguments)):
            raise NotConcrete
        return found

    def nothing_more_is_asked(self) -> None:
        """All that is to be computed with symbols was; NotConcrete where one has a fixed value now."""
        sizes = (size for fake in self.fakes for size in fake.shape)
        if not all(size.node.expr.is_symbol for size in sizes if isinstance(size, torch.SymInt)):
            raise NotConcrete
        self._asked = self._questions()

    def _questions(self) -> str:
        """What was asked about sizes, as an expression that is true where the answers are the same."""
        return self._environment.produce_guards_expression(self.fakes) or ""


def _symbolic(mode: FakeTensorMode, like: torch.Tensor, varying: frozenset[int]) -> torch.Tensor:
    if not varying:
        return mode.from_tensor(like, static_shapes=True)
    kinds = [DimDynamic.DYNAMIC if k in varying else DimDynamic.STATIC for k in range(like.dim())]
    within = StrictMinMaxConstraint(vr=ValueRanges(2, _LARGEST), warn_only=False)
    limits: list[Any] = [within if k in varying else None for k in range(like.dim())]
    context: Any = StatelessSymbolicContext(dynamic_sizes=kinds, constraint_sizes=limits)
    return mode.from_tensor(like, symbolic_context=context)


class Concrete:
    """Numbers for symbols, in everything that a trace consists of."""

    def __init__(self, mode: FakeTensorMode, sizes: Mapping[Any, int]) -> None:
        self._mode, self._sizes = mode, dict(sizes)
        self._numbers: dict[Any, Any] = {}
        self._tensors: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """By the identity of the symbolic one, which is kept: so no other has it."""
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._strides: dict[int, tuple[int, ...]] = {}

    def number(self, value: Any) -> Any:
        """What a symbolic number comes to."""
        if not isinstance(value, SYMBOLS):
            return value
        kind = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}[type(value)]
        expression = value.node.expr
        key = kind, expression
        if key not in self._numbers:
            result = expression.xreplace(self._sizes)
            if getattr(result, "free_symbols", None):
                raise NotConcrete
            self._numbers[key] = kind(result)
        return self._numbers[key]

    def shape(self, symbolic: torch.Tensor) -> tuple[int, ...]:
        """The sizes of a tensor."""
        sizes: Sequence[Any] = symbolic.shape
        found = tuple(map(self.number, sizes))
        varying = (size for size, was in zip(found, sizes, strict=True) if isinstance(was, SYMBOLS))
        if any(size < 2 for size in varying):
            raise NotConcrete  # torch treats such sizes otherwise without asking for them
        return found

    def strides(self, symbolic: torch.Tensor) -> tuple[int, ...] | None:
        """The strides of a tensor that lives as long as this; None where it is not strided."""
        if symbolic.layout is not torch.strided:
            return None
        if id(symbolic) not in self._strides:
            self._strides[id(symbolic)] = tuple(map(self.number, symbolic.stride()))
        return self._strides[id(symbolic)]

    def like(self, value: torch.Tensor) -> torch.Tensor:
        """A tensor with numbers for sizes; one that is not fake has no others."""
        return self.tensor(value) if isinstance(value, FakeTensor) else value

    def tensor(self, fake: torch.Tensor) -> torch.Tensor:
        """A fake tensor with numbers for sizes; views of one storage stay views of one."""
        if id(fake) not in self._tensors:
            self._tensors[id(fake)] = fake, self._made(fake)
        return self._tensors[id(fake)][1]

    def _made(self, fake: torch.Tensor) -> torch.Tensor:
        if type(fake) is not FakeTensor or fake.layout is not torch.strided:
            raise NotConcrete
        place = storage_id(fake)
        if place not in self._storages:
            size = self.number(fake.untyped_storage().nbytes())
            self._storages[place] = torch.empty(size, dtype=torch.uint8, device="meta").untyped_storage()
        shape, stride, offset = self.shape(fake), self.strides(fake), self.number(fake.storage_offset())
        with torch.no_grad():
            plain = torch.empty(0, dtype=fake.dtype, device="meta")
            plain.set_(self._storages[place], offset, shape, stride or ())
        plain.requires_grad_(fake.requires_grad)
        return FakeTensor(self._mode, plain, fake.fake_device)

    def metadata(self, metadata: Any) -> Any:
        """What AOTAutograd knows of the inputs and results of a function."""
        copied = self.value(metadata)
        for one, tangent in zip(copied.subclass_tangent_meta, copied.traced_tangents, strict=False):
            layout = getattr(one, "memory_format", None)
            if layout is not None:  # with symbols it is less exact than with numbers
                one.memory_format = type(layout).from_tensor(tangent)
        return copied

    def value(self, value: Any) -> Any:
        """A value of torch's compiler: containers and records of it are copied, whatever is inside."""
        if value is None or isinstance(value, _PLAIN):
            return value
        if isinstance(value, torch.Tensor):
            return self.like(value)
        if isinstance(value, SYMBOLS):
            return self.number(value)
        if isinstance(value, dict):
            copied = copy.copy(value)  # of whatever kind it is
            copied.clear()
            copied.update((self.value(k), self.value(v)) for k, v in value.items())
            return copied
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(self.value, value))
        if isinstance(value, tuple | list | set | frozenset):
            return type(value)(map(self.value, value))
        return self._record(value)

    def _record(self, value: Any) -> Any:
        """A record of AOTAutograd's, copied; NotConcrete for what nobody here knows."""
        if callable(value) and not hasattr(value, "__dataclass_fields__"):
            return value
        if not type(value).__module__.startswith("torch._functorch"):
            raise NotConcrete
        if type(value).__name__ in ("ViewMetaSequence", "FunctionalTensorMetadataEq"):
            raise NotConcrete  # how views of results are made again is written in C++, with symbols
        copied = copy.copy(value)
        for name, inside in vars(value).items():
            object.__setattr__(copied, name, self.value(inside))
        return copied
