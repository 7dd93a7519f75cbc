"""Which operators have a form that writes over their first argument, bit for bit the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from lowtide.plan.check.rules import Rule, broken
from lowtide.plan.program.instructions import Run
from lowtide.trace.eager.gradients import is_dense
from lowtide.trace.eager.in_place_calls import operator_in_place
from lowtide.trace.step.group import Group
from lowtide.trace.step.joint import Joint

__all__ = ["able_in_place", "in_place_variant", "refuse_in_place"]


_OTHERS = {torch.ops.aten.mul.Scalar: torch.ops.aten.mul_.Tensor}
"""Those whose own form in place rounds otherwise: ``mul_.Scalar`` rounds a number to half precision first."""


def able_in_place(joint: Joint) -> frozenset[int]:
    """Pointwise operators whose result has the shape, type and layout of their first argument."""
    return frozenset(k for k in range(len(joint.calls)) if _able(joint, k))


def refuse_in_place(joint: Joint, line: Run) -> None:
    """Raise a PlanError if an operator is to run in place and has no such form, whatever a plan says."""
    op = joint.graph.ops[line.op]
    if line.in_place is not None and (line.in_place != 0 or not _able(joint, line.op)):
        raise broken(
            Rule.FORMS,
            f"{op.label!r} cannot write over its input {line.in_place}: it has no such form; take in_place "
            "out of the program",
        )


def _able(joint: Joint, op: int) -> bool:
    call = joint.calls[op]
    pointwise = torch.Tag.pointwise in getattr(call.target, "tags", ())
    known = pointwise or operator_in_place(call.target) is not None
    if not isinstance(call.target, Group) and (call.several or not known):
        return False
    if in_place_variant(call.target) is None:
        return False
    if not call.args or not isinstance(call.args[0], fx.Node):
        return False
    inputs = joint.graph.ops[op].inputs
    if not inputs or inputs[0] != joint.tensor_of.get(call.args[0]):
        return False
    before, after = joint.layout(inputs[0]), joint.layout(call.results[0])
    if before is None or after is None:
        return False
    same = (before.shape, before.dtype, before.stride, before.device) == (
        after.shape,
        after.dtype,
        after.stride,
        after.device,
    )
    return same and is_dense(before.shape, before.stride)


def in_place_variant(target: Any) -> Any:
    """The operator that writes its result over its first argument, or None."""
    if isinstance(target, Group):
        return target.over_first if target.replaces else None
    if operator_in_place(target) is not None:
        return operator_in_place(target)
    if target in _OTHERS:
        return _OTHERS[target]
    packet = getattr(target, "overloadpacket", None)
    if packet is None or getattr(target, "namespace", "") != "aten":
        return None
    overload = str(target).rpartition(".")[2]
    return getattr(getattr(torch.ops.aten, f"{packet.__name__}_", None), overload, None)
