"""Plans for the shapes that were met, the least used ones dropped; each shape is captured once."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any

import torch
from torch import fx

from lowtide.execute.compile.family import Family, Shapes
from lowtide.execute.compile.traced import traced_alone
from lowtide.graph import Role
from lowtide.torch_internals import TracingContext, storage_id, tracing
from lowtide.trace.eager.layouts import fake_arguments, learned
from lowtide.trace.shapes.numbers import (
    as_tensors,
    free_of,
    number_at,
    number_leaf,
    stand_ins_of,
    tried_numbers,
    whole_number_at,
)
from lowtide.trace.step.joint import Leaf
from lowtide.trace.step.sizes import Fixed, Symbolic, fingerprint

__all__ = ["REMEMBERED", "Remembering", "alive"]

REMEMBERED = 64
"""Shapes whose plans are kept, unless the user says otherwise."""

Compiled = Callable[..., Any]
Compiler = Callable[[fx.GraphModule, Sequence[Leaf], Family], Compiled]

_READERS = number_at, whole_number_at

_ALIVE: weakref.WeakValueDictionary[Hashable, _Held] = weakref.WeakValueDictionary()
"""What somebody still holds. Torch hands over the first shape as it is and the second one as symbols, which
stand for the first again: without this it would be captured twice."""


class _Held:
    """A compiled function that others can find as long as someone has it."""

    __slots__ = ("__weakref__", "function")

    def __init__(self, function: Compiled) -> None:
        self.function = function

    def __call__(self, *arguments: Any) -> Any:
        return self.function(*arguments)


def alive(
    module: fx.GraphModule,
    leaves: Sequence[Leaf],
    arguments: Sequence[Any],
    purpose: Hashable,
    make: Callable[[], Compiled],
) -> Compiled:
    """The compiled function that already does this for such arguments, or the one that ``make`` gives."""
    what = fingerprint(module)
    if what is None:
        return _Held(make())
    key = (what, tuple(leaves), purpose, _look(arguments))
    held = _ALIVE.get(key)
    if held is None:
        held = _ALIVE[key] = _Held(make())
    return held


class Remembering:
    """A captured function with symbols for sizes: compiled for the shapes of each call, once."""

    def __init__(
        self,
        module: fx.GraphModule,
        leaves: Sequence[Leaf],
        compiler: Compiler,
        purpose: Hashable,
        limit: int,
        shapes: Shapes | None = None,
    ) -> None:
        """``shapes`` are all those of the function, also ones that were captured apart."""
        self.limit = limit
        self._symbolic = Symbolic(module)
        self._family = Family(self._symbolic.of_tensors, shapes)
        self._leaves = leaves
        self._compiler = compiler
        self._purpose = purpose
        self._made: OrderedDict[Hashable, tuple[Fixed, Compiled]] = OrderedDict()
        numbers = self._symbolic.floats | self._symbolic.integers
        self._free: frozenset[int] | None = None if numbers else frozenset()
        """Numbers that the function takes as tensors, once that is known: it is compiled once for all."""

    def __call__(self, *arguments: Any) -> tuple[Any, ...]:
        """The results for these arguments."""
        if self._free is None:
            self._free = self._found_free(arguments)
        if self._free:
            return self._with_free_numbers(arguments, sorted(self._free))
        fixed, compiled = self._compiled(_look(arguments, self._symbolic.numbers), arguments)
        return _filled_in(fixed.results, compiled(*(arguments[k] for k in fixed.places)))

    def _with_free_numbers(self, arguments: Sequence[Any], free: Sequence[int]) -> tuple[Any, ...]:
        symbolic = self._symbolic
        values = symbolic.values(arguments)
        others = [_number_key(values[node]) for k, node in enumerate(symbolic.used) if k not in free]
        tensors = [None if k in symbolic.numbers else one for k, one in enumerate(arguments)]
        numbers = [tensor for k in free for tensor in as_tensors(values[symbolic.used[k]])]
        fixed, compiled = self._compiled((_look(tensors), *others), arguments, numbers)
        results = compiled(*(arguments[k] for k in fixed.places), *numbers)
        return _filled_in(symbolic.results(values), results)

    def _compiled(
        self, key: Hashable, arguments: Sequence[Any], numbers: Sequence[torch.Tensor] = ()
    ) -> tuple[Fixed, Compiled]:
        if key not in self._made:
            self._made[key] = self._make(arguments, numbers)
            while len(self._made) > self.limit:
                self._made.popitem(last=False)
        self._made.move_to_end(key)
        return self._made[key]

    def _make(self, arguments: Sequence[Any], numbers: Sequence[torch.Tensor]) -> tuple[Fixed, Compiled]:
        fixed = self._symbolic.at(arguments, self._free or (), _READERS)
        leaves = [self._leaves[k] for k in fixed.places]
        leaves += [Leaf(number_leaf(k // 2), Role.INPUT) for k in range(len(numbers))]
        taken = [*(arguments[k] for k in fixed.places), *numbers]

        def make() -> Compiled:
            return self._compiler(fixed.module, leaves, self._family)

        return fixed, alive(fixed.module, leaves, taken, self._purpose, make)

    def _found_free(self, arguments: Sequence[Any]) -> frozenset[int]:
        """Numbers of the function that may be tensors; where integers are sizes, real numbers alone."""
        symbolic = self._symbolic
        found = self._traced_free(arguments, symbolic.floats | symbolic.integers)
        return found or self._traced_free(arguments, symbolic.floats)

    def _traced_free(self, arguments: Sequence[Any], some: frozenset[int]) -> frozenset[int]:
        """Which of these numbers may be tensors: it is traced twice, with other numbers each time."""
        fixed = self._symbolic.at(arguments, some, _READERS)
        taken = [arguments[k] for k in fixed.places]
        taken += [tensor for _ in some for tensor in as_tensors(1.0)]
        values = [stand_ins_of(fixed.module, kind) for kind in (0, 1)]
        found: list[fx.GraphModule] = []
        for numbers in values if some else ():
            mode = learned().mode()
            try:
                with tracing(TracingContext(mode)), tried_numbers(numbers):
                    one = traced_alone(fixed.module, fake_arguments(mode, taken))
            except Exception:  # torch's own, of any kind: numbers are traced as they are then
                return frozenset()
            if one is None:
                return frozenset()
            found.append(one.capture.graph_module)
        return free_of(found[0], found[1], values[0], values[1]) & some if found else frozenset()


def _filled_in(numbers: Sequence[Any], results: Sequence[Any]) -> tuple[Any, ...]:
    """Results in their order: these numbers, and tensors where there is None."""
    tensors = iter(results)
    return tuple(next(tensors) if number is None else number for number in numbers)


def _look(arguments: Sequence[Any], numbers: Collection[int] = ()) -> Hashable:
    """What a captured graph depends on: how the arguments look, and what holds around the call."""
    devices = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
    storages: dict[int, int] = {}
    looks = []
    for k, argument in enumerate(arguments):
        if not isinstance(argument, torch.Tensor):
            looks.append((type(argument), _number_key(argument)))
        elif k in numbers:
            looks.append((float, _number_key(argument.item())))
        else:
            looks.append(_look_of_tensor(argument, k, storages))
    return (
        tuple(looks),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        tuple((device, torch.get_autocast_dtype(device)) for device in devices),
    )


def _number_key(value: Any) -> Any:
    """What tells a number from others: -0.0 is not 0.0, and NaN is NaN."""
    return repr(value) if isinstance(value, float) else value


def _look_of_tensor(tensor: torch.Tensor, place: int, storages: dict[int, int]) -> tuple[Any, ...]:
    """``storages`` says which argument was the first on each storage."""
    look = (
        tuple(tensor.shape),
        tensor.dtype,
        tensor.device,
        tensor.layout,
        tensor.requires_grad,
        tensor.is_leaf,
    )
    if tensor.layout is not torch.strided:
        return look
    shared_with = storages.setdefault(storage_id(tensor), place)
    return (*look, tensor.stride(), tensor.is_inference(), shared_with)
