"""What a picture of a split step has: groups of operators, and the tensors that pass between them.

The operators of one module that run one after the other are one node. Views between modules are no nodes: who
reads one reads what is viewed. Nor is what keeps results in buffers behind all modules.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from lowtide.graph import RESIDENT_ROLES, Op, Phase, Rect, Role
from lowtide.graph.access import access
from lowtide.graph.shards import Shards, box_of, replicated
from lowtide.trace.operators import differentiable_tensors
from lowtide.trace.shards.batch_norm import BATCH_NORMS
from lowtide.trace.step.joint import Joint

__all__ = ["DrawnGroup", "DrawnStep"]

_FILTERS = frozenset({"aten.convolution", "aten.baddbmm"})
_PRODUCTS = frozenset({"aten.mm", "aten.addmm", "aten.linear"})


@dataclass(slots=True)
class DrawnGroup:
    """Operators that are drawn as one, in program order."""

    name: str
    ops: list[int]
    reads: dict[int, Rect] = field(default_factory=dict)
    """What the device reads of tensors from outside, in the order in which it does."""
    outputs: list[int] = field(default_factory=list)
    """What others read, or the user."""
    saved: list[int] = field(default_factory=list)
    """Those of them that its own backward reads."""
    kind: str = ""
    """``filter``, ``linear``, or nothing of which more is said."""


class DrawnStep:
    """The nodes of the picture of one device."""

    def __init__(self, joint: Joint, shards: Shards, rank: int) -> None:
        self.joint, self.graph, self.shards, self.rank = joint, joint.graph, shards, rank
        self.differentiable = differentiable_tensors(joint)
        ops = self.graph.ops
        self.leaves = {t for t, one in enumerate(self.graph.tensors) if one.role in RESIDENT_ROLES}
        self.maker = {t: k for k, op in enumerate(ops) for t in op.outputs if t not in self.leaves}
        self.groups = self._groups()
        self.group_of = {k: n for n, group in enumerate(self.groups) for k in group.ops}
        self.read_by: dict[int, list[int]] = {}
        """By tensor: the groups that read it."""
        self.read: dict[int, Rect] = {}
        """By tensor: all that the device reads of it."""
        for n, group in enumerate(self.groups):
            for k in group.ops:
                for t, box in self._outside(n, k):
                    group.reads[t] = group.reads[t].hull(box) if t in group.reads else box
            for t, box in group.reads.items():
                self.read_by.setdefault(t, []).append(n)
                self._note(t, box)
        self.results = [self._base(t, self._whole(t))[0] for t in joint.outputs if t is not None]
        for t in self.results:
            self._note(t, self._whole(t))
        for t in sorted(self.read, key=lambda one: (self.maker.get(one, -1), one)):
            if t in self.maker:
                self.groups[self.group_of[self.maker[t]]].outputs.append(t)
        self._note_saved()
        for group in self.groups:
            group.kind = self._kind(group)

    def held(self, t: int) -> Rect:
        """What the device holds of a tensor."""
        if t in self.leaves:
            cut = self.shards.leaves.get(t, replicated(self.shards.mesh))
        else:
            cut = self.shards.share(self.maker[t]).cut
        return box_of(self.shape(t), cut, self.shards.mesh, self.rank)

    def shape(self, t: int) -> tuple[int, ...]:
        """Of the whole tensor."""
        return self.graph.tensors[t].shape or ()

    def has_gradient(self, t: int) -> bool:
        """Whether one is drawn: gradients go through it, to what others read of it."""
        if t not in self.differentiable:
            return False
        readers = [op for n in self.read_by.get(t, ()) for op in map(self._op, self.groups[n].ops)]
        passed = any(self.differentiable.intersection(op.outputs) for op in readers)
        return passed or t in self.results

    def _op(self, k: int) -> Op:
        return self.graph.ops[k]

    def _whole(self, t: int) -> Rect:
        return Rect.of_shape(self.shape(t))

    def _note(self, t: int, box: Rect) -> None:
        self.read[t] = self.read[t].hull(box) if t in self.read else box

    def _groups(self) -> list[DrawnGroup]:
        """Runs of operators of one module, but for those that are views alone."""
        runs: list[DrawnGroup] = []
        for k, op in enumerate(self.graph.ops):
            if op.phase is not Phase.FORWARD or (op.changes and not op.name):
                continue  # what keeps results in buffers is of no module
            if runs and op.name and runs[-1].name == op.name:
                runs[-1].ops.append(k)
            else:
                runs.append(DrawnGroup(op.name or op.id, [k]))
        drawn = [one for one in runs if not all(self._is_view(self._op(k)) for k in one.ops)]
        known: dict[str, int] = {}
        for group in drawn:
            times = known[group.name] = known.get(group.name, 0) + 1
            group.name += f"#{times}" if times > 1 else ""
        return drawn

    def _note_saved(self) -> None:
        """What the backward of each group reads of its results."""
        storage = self.graph.storages()
        numbers = {self._op(k).id: n for n, group in enumerate(self.groups) for k in group.ops}
        read: dict[int, set[int]] = {}
        for op in self.graph.ops:
            if op.differentiates in numbers:
                read.setdefault(numbers[op.differentiates], set()).update(storage[t] for t in op.reads)
        for n, group in enumerate(self.groups):
            group.saved = [t for t in group.outputs if storage[t] in read.get(n, ())]

    def _is_view(self, op: Op) -> bool:
        tensors = self.graph.tensors
        return not op.changes and all(tensors[t].alias is not None for t in op.outputs)

    def _kind(self, group: DrawnGroup) -> str:
        kinds = {self._op(k).kind for k in group.ops}
        trained = any(self.graph.tensors[t].role is Role.PARAMETER for t in group.reads)
        if trained and kinds & _FILTERS:
            return "filter"
        return "linear" if trained and kinds & _PRODUCTS else ""

    def _outside(self, number: int, k: int) -> Iterator[tuple[int, Rect]]:
        """What an operator of a group reads of tensors that the group does not make."""
        for t, box in self._needs(k):
            made = self.maker.get(t)
            if made is None or self.group_of.get(made) != number:
                base, part = self._base(t, box)
                if not part.empty and self.group_of.get(self.maker.get(base, -1)) != number:
                    yield base, part

    def _base(self, t: int, box: Rect) -> tuple[int, Rect]:
        """The tensor that views between groups lead to, and the part of it."""
        while t in self.maker and self.maker[t] not in self.group_of:
            op = self._op(self.maker[t])
            need = access(self.graph, op).relations[op.outputs.index(t)].needs(box)[0]
            t, box = op.inputs[0], self._whole(op.inputs[0]) if need is None else need
        return t, box

    def _needs(self, number: int) -> list[tuple[int, Rect]]:
        """What the device reads for its part of the results of an operator."""
        op, share, mesh = self._op(number), self.shards.share(number), self.shards.mesh
        if op.kind in BATCH_NORMS and any(dim is not None for dim in share.cut):
            first = box_of(self.shape(op.outputs[0]), share.cut, mesh, self.rank)
            channels = Rect(first.lo[1:2], first.hi[1:2])
            return [(t, first if k == 0 else channels) for k, t in enumerate(op.inputs)]
        found: list[tuple[int, Rect]] = []
        for relation in access(self.graph, op).relations[:1] or ():
            over = None
            if any(one is not None for one in share.over):
                over = box_of(relation.sums, share.over, mesh, self.rank)
            needs = relation.needs(box_of(relation.shape, share.computed, mesh, self.rank), over)
            found += [(t, box) for t, box in zip(op.inputs, needs, strict=True) if box is not None]
        return found
