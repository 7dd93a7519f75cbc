"""One step that is run for what it shows and leaves no trace."""

from __future__ import annotations

import contextlib
import ctypes
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from lowtide.distributed_internals import is_distributed, local_of, with_local
from lowtide.execute.compile.bits import same_bits
from lowtide.plan.result.plan import Plan
from lowtide.torch_internals import autocast_disabled, storage_id
from lowtide.trace.distributed.stand_ins import alone
from lowtide.trace.step.joint import Joint, Leaf

__all__ = [
    "Rehearsal",
    "Rehearsed",
    "TrialOutcome",
    "no_trace",
    "random_states",
    "registered_buffers",
    "stepped",
    "untouched",
]


class Rehearsed(Exception):  # noqa: N818  it is no error
    """Ends a call that was made to plan: nothing of the user's own code behind the step runs."""


@dataclass(slots=True)
class Rehearsal:
    """Whether a function is called to plan it, what is asked of its first step then, and what came of it."""

    now: bool = False
    verify: bool = False
    """Whether that is compared with eager PyTorch."""
    plan: Plan | None = None
    """The plan that was made last."""

    def planned(self, plan: Plan) -> None:
        """A plan was made."""
        self.plan = plan


@dataclass(frozen=True, slots=True, eq=False)
class TrialOutcome:
    """What a step leaves behind, each with a name: results, gradients, updated buffers."""

    results: list[tuple[str, torch.Tensor | None]]
    gradients: list[tuple[str, torch.Tensor | None]]
    updated: list[tuple[str, torch.Tensor | None]]


def stepped(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    leaves: Sequence[Leaf],
    joint: Joint,
    *,
    kept: bool = True,
    near: bool = False,
) -> TrialOutcome:
    """Forward, and backward of everything that has one.

    Hooks of the arguments do not run, and no other process is waited for; what the step updates and random
    states are put back. What it leaves behind is copied where it is ``kept``: to the host, or ``near``, where
    it is.
    """
    own = _without_hooks(arguments)
    with alone((call.target for call in joint.calls), own), no_trace(own, leaves, joint) as changing:
        given = [(r, k) for k, r in enumerate(function(*own)) if isinstance(r, torch.Tensor)]
        results = [r for r, _ in given]
        outputs: list[tuple[Any, int]] = [(r, k) for r, k in given if r.requires_grad]
        wanted = [(a, name) for a, name in _named(own, leaves) if a.requires_grad]
        found: Sequence[torch.Tensor | None] = [None] * len(wanted)
        if outputs and wanted:
            like = dict(zip(joint.tangents_of, (joint.values[t] for t in joint.tangents), strict=False))
            incoming = [_incoming(output, like.get(k)) for output, k in outputs]
            if not kept:  # nobody holds results of a step while their backward runs
                outputs = [(get_gradient_edge(output), k) for output, k in outputs]
                del given, results
            with autocast_disabled():  # as where backward is called behind a step under autocast
                found = torch.autograd.grad(
                    [r for r, _ in outputs], [a for a, _ in wanted], incoming, allow_unused=True
                )
        if not kept:
            return TrialOutcome([], [], [])
        return TrialOutcome(
            [(f"result {k}", _copied(result, near)) for k, result in enumerate(results)],
            [(name, _copied(gradient, near)) for (_, name), gradient in zip(wanted, found, strict=True)],
            [(name, _copied(a, near)) for a, name in changing],
        )


@contextlib.contextmanager
def no_trace(
    arguments: Sequence[Any], leaves: Sequence[Leaf], joint: Joint
) -> Iterator[list[tuple[torch.Tensor, str]]]:
    """Afterwards arguments that the step updates, which this gives with their names, are what they were.

    So are random states.
    """
    updates = {joint.graph.tensors[t].name for t in joint.graph.updated}
    named = _named(arguments, leaves)
    users = _users(arguments)
    together = bool(updates) and len(joint.inputs) != len(
        arguments
    )  # torch puts those on one storage together
    changing = [(a, name) for a, name in named if name in updates or (together and users[_storage(a)] > 1)]
    with untouched([a for a, _ in changing], [a.device for a, _ in named]):
        yield changing


@contextlib.contextmanager
def untouched(changing: Sequence[torch.Tensor], devices: Iterable[torch.device]) -> Iterator[None]:
    """Afterwards these tensors hold what they held, and so do the generators of the host and the devices.

    Those of Python and NumPy are among them.
    """
    before = [(tensor, tensor.detach().clone()) for tensor in changing]
    put_back = random_states(devices)
    try:
        yield
    finally:
        put_back()
        with torch.no_grad():
            for tensor, value in before:
                if not same_bits(tensor, value):  # BatchNorm in eager changes buffers and does not say so
                    tensor.copy_(value)


def registered_buffers(parts: Iterable[nn.Module]) -> Callable[[], None]:
    """Remember which tensors are buffers of these modules alone; gives what puts them there again."""
    known = [(part, buffers) for part in parts if (buffers := dict(part.named_buffers(recurse=False)))]

    def put_back() -> None:
        for part, buffers in known:
            for name, buffer in buffers.items():
                if getattr(part, name, None) is not buffer:
                    setattr(part, name, buffer)

    return put_back


def random_states(devices: Iterable[torch.device]) -> Callable[[], None]:
    """Remember the states of all generators, of Python and NumPy too; gives what restores them."""
    numpy = getattr(sys.modules.get("numpy"), "random", None)
    python, array = random.getstate(), None if numpy is None else numpy.get_state()
    state = torch.get_rng_state()
    host = ctypes.string_at(state.data_ptr(), state.nbytes)  # no tensor: nobody counts it
    drawing = sorted({device for device in devices if device.type == "cuda"}, key=str)
    cuda = [torch.cuda.get_rng_state(device) for device in drawing]

    def put_back() -> None:
        random.setstate(python)
        if numpy is not None:
            numpy.set_state(array)
        torch.set_rng_state(torch.frombuffer(bytearray(host), dtype=torch.uint8))
        for device, state in zip(drawing, cuda, strict=True):
            torch.cuda.set_rng_state(state, device)

    return put_back


def _incoming(output: torch.Tensor, like: torch.Tensor | None) -> torch.Tensor:
    """The gradient that comes in: 1 for a loss, else numbers whose sums round, as real ones do.

    It has the strides of the one that was captured, ``like``.
    """
    if output.numel() <= 1:
        return torch.ones_like(output)
    if is_distributed(output):
        return with_local(output, _incoming(local_of(output), like))
    numbers = torch.arange(output.numel(), device=output.device, dtype=torch.float32)
    numbers = numbers.sin_().view(output.shape)
    strides = torch.empty_like(output, device="meta").stride()
    if like is not None and like.shape == output.shape:
        strides = like.stride()
    if output.dtype is torch.float32 and numbers.stride() == strides:
        return numbers
    return output.new_empty_strided(output.shape, strides).copy_(numbers)


def _named(arguments: Sequence[Any], leaves: Sequence[Leaf]) -> list[tuple[torch.Tensor, str]]:
    pairs = zip(arguments, leaves, strict=False)
    return [(a, leaf.name) for a, leaf in pairs if isinstance(a, torch.Tensor)]


def _without_hooks(arguments: Sequence[Any]) -> list[Any]:
    """Tensors on the same memory, without hooks; those that share theirs stay what they are to each other."""
    users = _users(arguments)

    def alone(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or users[_storage(value)] > 1:
            return value
        return value.detach().requires_grad_() if value.requires_grad else value.detach()

    return [alone(a) for a in arguments]


def _users(values: Sequence[Any]) -> Counter[int]:
    """How many of these values are on each storage."""
    return Counter(_storage(value) for value in values if isinstance(value, torch.Tensor))


def _storage(tensor: torch.Tensor) -> int:
    """What tells storages apart; a tensor that has none has its own."""
    return storage_id(tensor) if tensor.layout is torch.strided else id(tensor)


def _copied(tensor: torch.Tensor | None, near: bool) -> torch.Tensor | None:
    if tensor is None:
        return None
    own = local_of(tensor.detach())
    return own.to(own.device if near else "cpu", copy=True)
