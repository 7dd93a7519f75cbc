"""Results that a step returns beside its loss, such as scores: backward is planned without their gradients.

Autograd hands a gradient of zeros to a captured step for each result that nobody differentiates, as large as
the result. So where a step gives a loss, one number, all others are taken to be looked at alone. Should a
gradient of one come after all, what it adds is computed by running the step again as it is, and from the next
call on the step is planned for all of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from lowtide.execute.compile.aot import Programs, Watch
from lowtide.execute.compile.planned import Planned
from lowtide.execute.compile.trial import untouched

__all__ = ["LossAlone", "PlannedAlone", "beside_loss"]


class _Updates(Exception):  # noqa: N818  it is planned otherwise
    """A step updates something: it cannot run again for a gradient that comes after all."""


def beside_loss(module: fx.GraphModule) -> frozenset[int]:
    """Places of results with a gradient that are no number, where others are."""
    given: Any = module.graph.output_node().args[0]
    values = [one.meta.get("example_value") if isinstance(one, fx.Node) else None for one in given]
    trained = {k: v for k, v in enumerate(values) if isinstance(v, torch.Tensor) and v.requires_grad}
    if all(value.dim() for value in trained.values()):
        return frozenset()
    return frozenset(k for k, value in trained.items() if value.dim())


class PlannedAlone(Planned):
    """A planned function; it ends in _Updates where it updates something."""

    def compiled(self, arguments: Sequence[Any], program: Programs, watch: Watch) -> Callable[..., Any]:
        """The function for the shapes of these arguments, run by a Program."""
        function = super().compiled(arguments, program, watch)
        if any(one.joint.graph.updated for one in self.interpreters):
            raise _Updates
        return function


class LossAlone:
    """A captured step whose backward expects the gradients of numbers alone, until others come."""

    def __init__(
        self,
        module: fx.GraphModule,
        beside: frozenset[int],
        alone: Callable[..., Any],
        compiled: Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]],
    ) -> None:
        """``beside`` are the places of other results, ``alone`` is the step without gradients of theirs.

        ``compiled`` gives the step with all gradients, for arguments like these.
        """
        self._module, self._beside, self._compiled = module, sorted(beside), compiled
        self._alone: Callable[..., Any] | None = alone
        self._whole: Callable[..., Any] | None = None

    def __call__(self, *arguments: Any) -> Any:
        """The results for these arguments."""
        if self._alone is not None:
            devices = {one.device for one in arguments if isinstance(one, torch.Tensor)}
            states = _states(devices) if torch.is_grad_enabled() else {}
            try:
                found = list(self._alone(*arguments))
            except _Updates:
                self._alone = None
            else:
                if torch.is_grad_enabled():
                    self._watch(found, states, arguments)
                return found
        if self._whole is None:
            self._whole = self._compiled(self._module, arguments)
        return self._whole(*arguments)

    def _watch(self, found: list[Any], states: dict[torch.device, bytes], arguments: Sequence[Any]) -> None:
        """Have results beside the loss take gradients too."""
        apply: Any = _Beside.apply
        watched = apply(self, states, len(self._beside), *(found[k] for k in self._beside), *arguments)
        for k, one in zip(self._beside, watched, strict=True):
            found[k] = one

    def again(
        self, states: dict[torch.device, bytes], arguments: Sequence[Any], gradients: Sequence[Any]
    ) -> list[Any]:
        """What these gradients of results beside the loss add to those of the arguments."""
        self._alone = None
        warnings.warn(
            "a gradient of a result beside the loss comes: the step runs once more for it, outside of the "
            "plan. From the next call on it is planned with such gradients",
            stacklevel=2,
        )
        own = [
            one.detach().requires_grad_(one.requires_grad) if isinstance(one, torch.Tensor) else one
            for one in arguments
        ]
        wanted = [k for k, one in enumerate(own) if isinstance(one, torch.Tensor) and one.requires_grad]
        with torch.enable_grad(), untouched([], set(states)):
            _restore(states)
            results = self._module(*own)
            pairs = [(results[k], g) for k, g in zip(self._beside, gradients, strict=True) if g is not None]
            found = torch.autograd.grad(
                [one for one, _ in pairs], [own[k] for k in wanted], [g for _, g in pairs], allow_unused=True
            )
        added: list[Any] = [None] * len(own)
        for k, one in zip(wanted, found, strict=True):
            added[k] = one
        return added


class _Beside(torch.autograd.Function):
    """Results beside the loss as they are, and in backward what their gradients add to those of arguments."""

    @staticmethod
    def forward(ctx: Any, step: LossAlone, states: Any, count: int, *values: Any) -> tuple[Any, ...]:
        """The results, ``count`` of them, then the arguments of the step."""
        ctx.step, ctx.states, ctx.count = step, states, count
        arguments = values[count:]
        ctx.others = [None if isinstance(one, torch.Tensor) else one for one in arguments]
        ctx.save_for_backward(*(one for one in arguments if isinstance(one, torch.Tensor)))
        ctx.set_materialize_grads(False)
        return values[:count]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        """The step as it is, run again and differentiated."""
        saved = iter(ctx.saved_tensors)
        arguments = [next(saved) if one is None else one for one in ctx.others]
        added = ctx.step.again(ctx.states, arguments, gradients)
        return None, None, None, *([None] * ctx.count), *added


def _states(devices: set[torch.device]) -> dict[torch.device, bytes]:
    """Random states, in memory that is not the allocator's."""
    found = {torch.device("cpu"): torch.get_rng_state()}
    found |= {one: torch.cuda.get_rng_state(one) for one in devices if one.type == "cuda"}
    return {one: bytes(state.numpy()) for one, state in found.items()}


def _restore(states: dict[torch.device, bytes]) -> None:
    for device, state in states.items():
        value = torch.frombuffer(bytearray(state), dtype=torch.uint8)
        if device.type == "cuda":
            torch.cuda.set_rng_state(value, device)
        else:
            torch.set_rng_state(value)
