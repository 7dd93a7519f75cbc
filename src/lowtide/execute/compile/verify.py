"""The first step of a plan, compared with eager PyTorch.

Without tiles all bits must be the same. Where eager PyTorch itself gives other bits each time, as kernels
with atomic additions do, where an operator in place writes a part of a tensor, and in tiles, which add up in
another order, values may differ as much as rounding makes eager differ from itself. To see that, it is run
again, in tiles on arguments whose last bits, those of the shortest type that the step computes with, are
changed at random. That also tells how much a gradient may differ that is zero in exact arithmetic and is made
of rounding alone, such as that of the bias of keys in attention. What differs more is held against float64:
it may be eager that rounds more.
"""

from __future__ import annotations

import itertools
import traceback
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lowtide.device_internals import tf32_in_convolutions, tf32_in_products
from lowtide.distributed_internals import is_distributed, local_of, with_local
from lowtide.errors import RunError
from lowtide.execute.compile.bits import same_bits
from lowtide.execute.compile.trial import TrialOutcome, stepped
from lowtide.execute.memory.device import Room
from lowtide.execute.memory.out_of_memory import ran_out
from lowtide.plan.result.plan import Plan
from lowtide.trace.eager.gradients import is_dense
from lowtide.trace.eager.in_place_calls import operator_in_place
from lowtide.trace.step.checkpoints import without_checkpoints
from lowtide.trace.step.joint import Joint, Leaf

__all__ = ["Verification", "in_tf32"]

_TF32 = 2.0**-10
"""A rounding of TF32."""
_PRODUCTS = frozenset({"aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm"})

_RUNS = 8
"""So often eager is run again to see how much it differs from itself."""
_TIMES = 16
"""Values may differ by so many times what eager differs from itself."""
_ROUNDINGS = 16
"""And besides by so many roundings of the largest gradient of all, or of the largest of the values."""

_KEPT = 4
"""What so many steps leave behind must fit beside one of eager, to be compared on the device."""

_PART = 1 << 22
"""So many values are computed with at once."""

_FAR, _FARTHEST = 10_000, 0.05
"""Eager is near to float64 where it differs by no more than so many roundings of the largest gradient, and by
no more than this share of it: what differs more drew other random numbers, or chose another maximum."""

_UNCOMPARED = (
    "the first planned step was not compared with eager PyTorch, which ran out of memory. Pass "
    "verify=False to leave that out, or compare with a smaller batch"
)


@dataclass(frozen=True, slots=True)
class Verification:
    """A step that was captured, and the plan for it."""

    function: fx.GraphModule
    """The step as it was traced from the user's code, which eager PyTorch can run."""
    arguments: Sequence[Any]
    leaves: Sequence[Leaf]
    joint: Joint
    plan: Plan

    @property
    def near(self) -> bool:
        """Whether what is compared can stay on a CUDA device: it has room for that beside a step of eager."""
        if self._device().type != "cuda":
            return False
        kept = [self.joint.values[t] for t in (*self.joint.outputs, *self.joint.gradients) if t is not None]
        taken = self.plan.plain.peak_bytes + _KEPT * sum(value.nbytes for value in kept)
        return taken <= Room(self.arguments).free_bytes()

    def compare(self, planned: TrialOutcome, *, near: bool = False) -> None:
        """Raise a RunError where what the planned step left behind is not what eager leaves.

        What it left is on the host, or ``near``, on the device of the step. Where eager runs out of memory,
        nothing is compared, and a warning says so.
        """
        try:
            eager = self._eager(self.arguments, near=near)
        except Exception as error:
            if not ran_out(error):
                raise
            traceback.clear_frames(error.__traceback__)
            warnings.warn(_UNCOMPARED, stacklevel=2)
            return
        different = [
            k for k, (one, other) in enumerate(_pairs(eager, planned)) if not same_bits(one[1], other[1])
        ]
        if not different:
            return
        tiled = self._fused() or bool(self.plan.decisions.tiles) or self._writes_parts()
        device = self._device()
        values, planned_values = list(_values(eager)), list(_values(planned))
        largest = max((_size(value, device) for _, value in eager.gradients), default=0.0)
        apart = {k: _apart(values[k][1], planned_values[k][1], device) for k in different}
        sizes = {k: _size(values[k][1], device) for k in different}

        def allowed(k: int, spread: Sequence[float]) -> float:
            found = _TIMES * spread[k]
            if tiled or any(spread):  # a kernel that differs from run to run reaches what is behind it
                least = self._coarsest() if tiled else 0.0
                rounding = max(_rounding(values[k][1], planned_values[k][1]), least)
                found += _ROUNDINGS * rounding * max(sizes[k], largest)
            return found

        spread = alike = [0.0] * len(values)
        for spread in itertools.chain([alike], self._spread(eager, changed=tiled, near=near)):
            if all(apart[k] <= allowed(k, spread) for k in different):  # more runs only allow more
                return
        exact: list[tuple[str, torch.Tensor | None]] | None = None
        for k in different:
            if apart[k] <= allowed(k, spread):
                continue
            if exact is None:
                exact = self._exact() if tiled else []
            (name, one), (_, other) = values[k], planned_values[k]
            if not exact or not _as_exact(one, other, exact[k][1], largest, device):
                raise RunError(self._told(eager, k, name, apart[k], allowed(k, spread), sizes[k]))

    def _fused(self) -> bool:
        """Whether kernels may be fused: where none are, images may lie in memory otherwise all the same."""
        by_operator = self.joint.ungrouped
        if by_operator is not None and by_operator.kernels is not None:
            return True
        return any(op.body is not None for op in self.joint.graph.ops)

    def _device(self) -> torch.device:
        """Where values are compared: on the device of the step, which is faster than the host."""
        devices = (local_of(a).device for a in self.arguments if isinstance(a, torch.Tensor))
        return next((one for one in devices if one.type == "cuda"), torch.device("cpu"))

    def _eager(self, arguments: Sequence[Any], *, near: bool = False) -> TrialOutcome:
        return stepped(without_checkpoints(self.function), arguments, self.leaves, self.joint, near=near)

    def _exact(self) -> list[tuple[str, torch.Tensor | None]]:
        """What eager leaves in float64; nothing where it cannot run there, or has no memory for it."""
        try:
            return list(_values(self._eager([_in_double(a) for a in self.arguments])))
        except Exception:
            return []

    def _spread(self, eager: TrialOutcome, *, changed: bool, near: bool) -> Iterator[list[float]]:
        """How much each value of eager differs from run to run: after one run more each time."""
        found = [0.0 for _ in _values(eager)]
        device = self._device()
        generators: dict[torch.device, torch.Generator] = {}
        for _ in range(_RUNS):
            again = (
                self._changed(generators, near=near) if changed else self._eager(self.arguments, near=near)
            )
            if again is None:
                break
            pairs = _pairs(eager, again)
            found = [
                max(most, _apart(a, b, device)) for most, ((_, a), (_, b)) in zip(found, pairs, strict=True)
            ]
            yield found

    def _changed(self, generators: dict[torch.device, torch.Generator], *, near: bool) -> TrialOutcome | None:
        """What eager leaves on changed arguments; None where it takes none, or has no memory for them.

        Where a target of 1 may not become larger, as one that is a probability, the leaves alone are changed.
        """
        coarsest = self._coarsest()
        for kinds in ((True, False), (True,)):
            changed = [
                _changed(a, generators, coarsest) if getattr(a, "requires_grad", None) in kinds else a
                for a in self.arguments
            ]
            try:
                return self._eager(changed, near=near)
            except Exception as error:
                traceback.clear_frames(error.__traceback__)
        return None

    def _writes_parts(self) -> bool:
        """Whether an operator in place writes a part of a tensor: on a dense copy it may round otherwise."""
        return any(
            operator_in_place(call.target) is not None and not is_dense(value.shape, value.stride())
            for call, op in zip(self.joint.calls, self.joint.graph.ops, strict=True)
            for value in [self.joint.values[t] for t in op.inputs[:1]]
        )

    def _coarsest(self) -> float:
        """A rounding of the shortest type that the step computes with, as under autocast or in TF32."""
        kinds = {value.dtype for value in self.joint.values if value.is_floating_point()}
        roundings = [torch.finfo(kind).eps for kind in kinds]
        on_cuda = any(value.device.type == "cuda" for value in self.joint.values)
        if on_cuda and torch.float32 in kinds and in_tf32(op.kind for op in self.joint.graph.ops):
            roundings.append(_TF32)
        return max(roundings, default=0.0)

    def _told(self, eager: TrialOutcome, k: int, name: str, apart: float, allowed: float, size: float) -> str:
        results, gradients = len(eager.results), len(eager.gradients)
        if k < results:
            what = "the loss" if results == 1 else f"{name} of the step"
        elif k < results + gradients:
            module, _, parameter = name.rpartition(".")
            what = f"the gradient of {name!r}" + (
                f" (parameter {parameter!r} of module {module!r})" if module else ""
            )
        else:
            what = f"the buffer {name!r} after the step"
        most = f", {allowed:.3g} would be rounding" if allowed else ""
        return (
            f"the planned step does not give what eager PyTorch gives: {what} differs by {apart:.3g} where "
            f"its largest value is {size:.3g}{most}. This is a fault of Lowtide: please report it with "
            f"torch {torch.__version__}, the model and the plan ({self.plan.method}; "
            f"{'in tiles' if self.plan.decisions.tiles else 'without tiles'}). Until then leave out what "
            "differs, take only='recompute', or verify=False, which does not compare"
        )


def in_tf32(kinds: Iterable[str]) -> bool:
    """Whether operators of these kinds round float32 to TF32 on CUDA, as PyTorch is set."""
    found = set(kinds)
    convolutions = any("convolution" in kind for kind in found)
    products = not found.isdisjoint(_PRODUCTS)
    return (convolutions and tf32_in_convolutions()) or (products and tf32_in_products())


def _values(outcome: TrialOutcome) -> Iterator[tuple[str, torch.Tensor | None]]:
    yield from outcome.results
    yield from outcome.gradients
    yield from outcome.updated


def _pairs(
    one: TrialOutcome, other: TrialOutcome
) -> Iterator[tuple[tuple[str, torch.Tensor | None], tuple[str, torch.Tensor | None]]]:
    return zip(_values(one), _values(other), strict=True)


def _changed(argument: Any, generators: dict[torch.device, torch.Generator], rounding: float) -> Any:
    """A tensor of real numbers, each of them a rounding larger or smaller, or the same.

    Signs are drawn where the tensor is, by a generator for each device.
    """
    if (
        not isinstance(argument, torch.Tensor)
        or not argument.is_floating_point()
        or argument.layout is not torch.strided
    ):
        return argument
    if is_distributed(argument):
        own = _changed(local_of(argument.detach()), generators, rounding)
        return with_local(argument.detach(), own).requires_grad_(argument.requires_grad)
    value = argument.detach()
    device = value.device
    if device not in generators:
        generators[device] = torch.Generator(device).manual_seed(0)
    step = max(rounding, torch.finfo(value.dtype).eps)
    other = torch.empty_like(value)
    for part, whole in zip(_rows(other), _rows(value), strict=True):
        signs = torch.randint(-1, 2, whole.shape, generator=generators[device], device=device)
        part.copy_(whole.double() * (1 + signs.double() * step))
    return other.requires_grad_(argument.requires_grad)


def _as_exact(
    eager: torch.Tensor | None,
    planned: torch.Tensor | None,
    exact: torch.Tensor | None,
    largest: float,
    device: torch.device,
) -> bool:
    """Whether a planned value is as near to float64 as that of eager.

    A long sum rounds as much as its kernel adds up one by one, which changed arguments do not show. What is
    far from float64 in eager, as where other random numbers are drawn there, says nothing.
    """
    if exact is None or eager is None or planned is None:
        return False
    known = _apart(eager, exact, device)
    near = min(_FAR * _rounding(eager, planned), _FARTHEST) * max(_size(exact, device), largest)
    return known <= near and _apart(planned, exact, device) <= _TIMES * known


def _in_double(argument: Any) -> Any:
    if not isinstance(argument, torch.Tensor) or not argument.is_floating_point():
        return argument
    return argument.detach().double().requires_grad_(argument.requires_grad)


def _apart(one: torch.Tensor | None, other: torch.Tensor | None, device: torch.device) -> float:
    """The largest difference; infinite where only one of them is a number."""
    if one is None or other is None:  # no gradient is one of zeros
        given = other if one is None else one
        return 0.0 if given is None else _apart(given, torch.zeros_like(given), device)
    if one.shape != other.shape:
        return float("inf")
    most = 0.0
    for a, b in zip(_parts(one, device), _parts(other, device), strict=True):
        same = (a == b) | (a.isnan() & b.isnan())
        apart = torch.where(same, torch.zeros_like(a), a - b).abs()
        if bool(apart.isnan().any()):
            return float("inf")
        most = max(most, float(apart.max()))
    return most


def _size(value: torch.Tensor | None, device: torch.device) -> float:
    """The largest finite value."""
    most = 0.0
    for part in () if value is None else _parts(value, device):
        sizes = part.abs()
        most = max(most, float(torch.where(sizes.isfinite(), sizes, 0.0).max()))
    return most


def _rounding(one: torch.Tensor | None, other: torch.Tensor | None) -> float:
    kinds = [v.dtype for v in (one, other) if v is not None and (v.is_floating_point() or v.is_complex())]
    return max((torch.finfo(kind).eps for kind in kinds), default=0.0)


def _parts(value: torch.Tensor, device: torch.device) -> Iterator[torch.Tensor]:
    """All values in their order, a part after the other: wide numbers on this device."""
    dense = value if value.layout is torch.strided else value.to_dense()
    wide = torch.complex128 if dense.is_complex() else torch.float64
    flat = dense.reshape(-1)
    for k in range(0, len(flat), _PART):
        yield flat[k : k + _PART].to(device).to(wide)


def _rows(value: torch.Tensor) -> Sequence[torch.Tensor]:
    """Views of the tensor, of about as many values as are computed with at once."""
    if value.dim() == 0 or value.numel() <= _PART:
        return [value]
    rows = max(1, _PART * len(value) // value.numel())
    return [value[k : k + rows] for k in range(0, len(value), rows)]
