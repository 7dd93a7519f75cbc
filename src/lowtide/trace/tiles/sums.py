"""Where a loss is a sum: of what boxes of its axes add, times constants, besides other terms.

    loss = 0.9 * sum over rows + 0.1 * sum over the same rows        one region: a tile adds to both
    loss = sum over rows + weight decay                              a region, and the rest of the step

A region ends at the loss where all of it is sums over axes of the same lengths. Elsewhere it ends at the part
of the loss that most is made for; what the loss makes of that part is outside, and differentiated there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from lowtide.errors import CaptureError
from lowtide.graph import Op
from lowtide.graph.access import Relation
from lowtide.trace.operators import MASKED, values_read
from lowtide.trace.step.builder import Call
from lowtide.trace.step.joint import Joint

__all__ = ["Sums", "depends", "is_weighted", "line_of"]

_LINEAR = frozenset(
    f"aten.{name}" for name in ("view", "clone", "neg", "_unsafe_view", "squeeze", "unsqueeze")
)
_TERMS = frozenset({"aten.add", "aten.sub"})
_DETACHES = "aten.detach"


class Sums:
    """The part of a loss that tiles add up to; a CaptureError says why there is none."""

    def __init__(
        self,
        joint: Joint,
        forward: Sequence[tuple[Op, Call]],
        relations: Mapping[int, Relation],
        leaves: frozenset[int],
    ) -> None:
        self._joint, self._graph, self._relations = joint, joint.graph, relations
        self._forward = forward
        self._maker = {t: op for op, _ in forward for t in op.outputs}
        self._leaves = leaves
        self.result, self.ops = self._found(self._loss())

    def carries(self, tensor: int) -> bool:
        """Whether a gradient goes through a tensor to something that wants one."""
        if not self._joint.values[tensor].is_floating_point():
            return False
        return depends(self._joint, self._forward, [tensor], self._leaves)

    def _loss(self) -> int:
        loss = self._joint.main_result
        if loss is None:
            raise CaptureError("only a step that gives one result can run in tiles: return the loss alone")
        shape = self._graph.tensors[loss].shape
        if shape not in ((), (1,)):
            raise CaptureError(f"the step gives a result of shape {shape}, not a loss")
        return loss

    def _found(self, loss: int) -> tuple[int, tuple[Op, ...]]:
        """The loss itself, or the part of it that most bytes are made for; and its sums."""
        found: list[tuple[int, tuple[Op, ...]]] = []
        refused: CaptureError | None = None
        stack, seen = [loss], {loss}
        while stack:
            tensor = stack.pop()
            try:
                found.append((tensor, self._sums(tensor)))
            except CaptureError as error:
                refused = refused or error
                op = self._maker.get(tensor)
                parts = [t for t in (op.inputs if op is not None else ()) if self._is_part(t)]
                stack += [t for t in parts if t not in seen]
                seen.update(parts)
        if not found:
            assert refused is not None
            raise refused
        return max(found, key=lambda one: self._made_for(one[0]))

    def _is_part(self, tensor: int) -> bool:
        return self._graph.tensors[tensor].shape in ((), (1,)) and self.carries(tensor)

    def _sums(self, tensor: int) -> tuple[Op, ...]:
        """From a tensor back over what is linear in it, to the sums themselves."""
        op = self._maker.get(tensor)
        if op is None:
            raise CaptureError("the loss is no sum over a batch, rows or an image")
        if self._relations[tensor].sums:
            return (op,)
        if op.kind in _TERMS and len(op.inputs) == 2:
            both = *self._sums(op.inputs[0]), *self._sums(op.inputs[1])
            ops = tuple({one.id: one for one in both}.values())
            axes = {self._relations[one.outputs[0]].sums for one in ops}
            if len(axes) > 1 or sum(is_weighted(one, self._relations) for one in ops) > 1:
                raise CaptureError(f"{line_of(op)}: its terms are sums over different axes")
            return ops
        if not self._linear(op):
            raise CaptureError(f"{line_of(op)}: the loss is no sum over parts behind {op.kind}")
        return self._sums(op.inputs[0])

    def _linear(self, op: Op) -> bool:
        """Whether the result for a sum is the sum of the results: its first input times or over a constant.

        A tensor that has no gradient is a constant too: how many places count, say.
        """
        if op.kind in _LINEAR:
            return True
        if op.kind == "aten._to_copy":
            before, after = (self._joint.values[t] for t in (op.inputs[0], op.outputs[0]))
            return after.is_floating_point() and before.device == after.device
        if op.kind not in ("aten.mul", "aten.div") or op.options:
            return False
        given = op.arguments or (None, None)
        if len(op.inputs) == 1:
            return isinstance(given[1], int | float)
        return op.inputs[0] != op.inputs[1] and not self.carries(op.inputs[1])

    def _made_for(self, tensor: int) -> int:
        """Bytes of all tensors that a part of the loss is made from."""
        stack, seen = [tensor], {tensor}
        while stack:
            op = self._maker.get(stack.pop())
            new = set(op.inputs if op is not None else ()) - seen
            stack += new
            seen |= new
        return sum(self._graph.tensors[t].bytes for t in seen if t in self._maker)


def is_weighted(op: Op, relations: Mapping[int, Relation]) -> bool:
    """Whether a loss is divided by the weight of all targets."""
    return op.kind.startswith("aten.nll_loss") and relations[op.outputs[0]].scaled


def depends(
    joint: Joint, steps: Sequence[tuple[Op, Call]], tensors: Collection[int], leaves: Collection[int]
) -> bool:
    """Whether any of these tensors depends on one of the leaves, with a gradient that goes there."""
    maker = {t: one for one, _ in steps for t in one.outputs}
    stack, seen = list(tensors), set(tensors)
    while stack:
        t = stack.pop()
        if t in leaves:
            return True
        if t in joint.overwritten:
            stack += {joint.overwritten[t]} - seen
            seen.add(joint.overwritten[t])
        elif t in maker and t not in joint.stopped and maker[t].kind != _DETACHES:
            dropped = maker[t].kind == MASKED and t == maker[t].outputs[0]
            new = set(maker[t].inputs) if dropped else values_read(joint.graph, maker[t])
            stack += new - seen
            seen |= new
    return False


def line_of(op: Op) -> str:
    """The user's line that an operator is from, or what it is called."""
    return f"{op.source.file}:{op.source.line}" if op.source else op.label
