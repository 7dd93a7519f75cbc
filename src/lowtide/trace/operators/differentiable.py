"""Which tensors of forward gradients go through."""

from __future__ import annotations

from lowtide.graph import Phase
from lowtide.trace.step.joint import Joint

__all__ = ["differentiable_tensors"]


def differentiable_tensors(joint: Joint) -> set[int]:
    """Those that depend on an input with a gradient, unless gradients are stopped on the way."""
    pairs = zip(joint.inputs, joint.gradients, strict=False)
    found = {t for t, g in pairs if t is not None and g is not None}
    for op in joint.graph.ops:
        if op.phase is Phase.FORWARD and found.intersection(op.inputs):
            made = (t for t in op.outputs if t not in joint.stopped or joint.overwritten.get(t) in found)
            found |= {t for t in made if joint.values[t].is_floating_point() or joint.values[t].is_complex()}
    return found
