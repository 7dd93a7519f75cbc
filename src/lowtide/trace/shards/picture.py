"""``picture``: a step as a device of a mesh runs it, drawn as document 002 draws one.

Operators say which box they compute and read, variables which box is read and written here:

    data                    L0.filter                     L0.filter.grad       update_L0.W
    dist_result=Rect(…)     dist_input=…, dist_filters=…  the same             dist_result=…
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import msgspec

from lowtide.graph import Graph, Op, Phase, Rect, Role, Tensor, validate
from lowtide.graph.shards import Shards
from lowtide.trace.shards.drawn import DrawnGroup, DrawnStep
from lowtide.trace.step.joint import Joint

__all__ = ["picture", "pictures"]

_GRAD = ".grad"


def picture(joint: Joint, shards: Shards, rank: int, names: Mapping[str, str] | None = None) -> Graph:
    """The picture of a device. ``names`` has other names for variables, operators and ports."""
    return _Painter(DrawnStep(joint, shards, rank), names or {}).painted()


def pictures(joint: Joint, shards: Shards, ranks: Iterable[int], names: Mapping[str, str]) -> Graph:
    """Those of several devices side by side, with the device in front of each name."""
    tensors: list[Tensor] = []
    ops: list[Op] = []
    for rank in ranks:
        one, first = picture(joint, shards, rank, names), len(tensors)
        for tensor in one.tensors:
            name = f"{rank}/{tensor.id}"
            base = None if tensor.gradient_of is None else tensor.gradient_of + first
            tensors.append(msgspec.structs.replace(tensor, id=name, name=name, gradient_of=base))
        for op in one.ops:
            name = f"{rank}/{op.id}"
            moved = [tuple(t + first for t in some) for some in (op.inputs, op.outputs)]
            ops.append(msgspec.structs.replace(op, id=name, name=name, inputs=moved[0], outputs=moved[1]))
    return validate(Graph(tuple(tensors), tuple(ops)))


def _kind(name: str) -> str:
    """The last part of a name, without its number."""
    last = name.rpartition(".")[2]
    return last.rstrip("0123456789") or last


class _Painter:
    """Writes nodes and edges."""

    def __init__(self, drawing: DrawnStep, names: Mapping[str, str]) -> None:
        self.drawing, self.names = drawing, names
        self.tensors: list[Tensor] = []
        self.ops: list[Op] = []
        self.place: dict[int, int] = {}
        """Where each tensor of the step is among the variables."""
        self.gradient: dict[int, int] = {}
        """The same for its gradient."""
        self.called: dict[int, str] = {}
        """What it is called, before another name is given."""
        self.port: dict[int, str] = {}
        """Where it leaves the operator that makes it."""

    def painted(self) -> Graph:
        """The graph."""
        groups = self.drawing.groups
        self._data()
        for t in self._parameters():
            self._variable(t, self.drawing.graph.tensors[t].label, None)
        for group in groups:
            self._forward(group)
        cleared: set[int] = set()
        for group in reversed(groups):
            self._backward(group, cleared)
        for t in self._parameters():
            if t in self.gradient:
                self._update(t)
        return validate(Graph(tuple(self.tensors), tuple(self.ops)))

    def _name(self, key: str) -> str:
        return self.names.get(key, key)

    def _parameters(self) -> list[int]:
        """What is there before the step and is read in it, but for the batch."""
        drawing = self.drawing
        some = (t for t in sorted(drawing.read) if t in drawing.leaves)
        return [t for t in some if drawing.graph.tensors[t].role is not Role.INPUT]

    def _variable(self, t: int, name: str, written: Rect | None) -> None:
        """A variable, with its gradient where it has one."""
        drawing, tensor = self.drawing, self.drawing.graph.tensors[t]
        shape = drawing.shape(t)
        nothing = Rect((0,) * len(shape), (0,) * len(shape))
        boxes = {"read_rect": drawing.read.get(t, nothing), "write_rect": written}
        self.called[t], self.place[t] = name, len(self.tensors)
        held = drawing.held(t)
        size = math.prod(held.shape) * drawing.joint.values[t].element_size()
        made = Tensor(self._name(name), size, tensor.role, self._name(name), shape, tensor.dtype, boxes=boxes)
        self.tensors.append(made)
        if drawing.has_gradient(t):
            read = nothing if t in drawing.results and t not in drawing.read_by else held
            self.gradient[t] = len(self.tensors)
            self.tensors.append(
                msgspec.structs.replace(
                    made,
                    id=made.id + _GRAD,
                    name=made.id + _GRAD,
                    role=Role.GRADIENT,
                    gradient_of=self.place[t],
                    boxes={"read_rect": read, "write_rect": held},
                )
            )

    def _add(
        self,
        name: str,
        phase: Phase,
        inputs: list[tuple[str, int]],
        outputs: list[tuple[str, int]],
        boxes: dict[str, Rect | None],
        result: tuple[int, ...] | None,
        kind: str = "",
    ) -> None:
        self.ops.append(
            Op(
                id=self._name(name),
                kind=kind or _kind(name),
                phase=phase,
                name=self._name(name),
                inputs=tuple(t for _, t in inputs),
                outputs=tuple(t for _, t in outputs),
                input_ports=tuple(port for port, _ in inputs),
                output_ports=tuple(port for port, _ in outputs),
                boxes=boxes,
                attributes={} if result is None else {"result_dim": list(result)},
            )
        )

    def _outputs(self, owner: str, some: Iterable[int]) -> list[tuple[str, int]]:
        """Variables for results, with the names of their ports."""
        found = []
        for k, t in enumerate(some):
            name = f"{owner}.output" + (f".{k}" if k else "")
            self._variable(t, name, self.drawing.held(t))
            port = self.names.get(f"{name}->", self._name(name).removeprefix(f"{owner}."))
            self.port[t] = port
            found.append((port, t))
        return found

    def _data(self) -> None:
        """The batch comes from an operator of its own."""
        drawing = self.drawing
        batch = [t for t in drawing.joint.inputs if t is not None and t in drawing.read]
        batch = [t for t in batch if drawing.graph.tensors[t].role is Role.INPUT]
        if batch:
            made = self._outputs("data", batch)
            places = [(port, self.place[t]) for port, t in made]
            boxes: dict[str, Rect | None] = {"dist_result": drawing.held(batch[0])}
            self._add("data", Phase.FORWARD, [], places, boxes, drawing.shape(batch[0]))

    def _inputs(self, group: DrawnGroup) -> list[tuple[str, int]]:
        """What a group reads, with the names of ports; what others make comes first."""
        found: list[tuple[str, int]] = []
        made = [t for t in group.reads if self._is_made(t)]
        for k, t in enumerate(made):
            given = self.names.get(f"{self.called[t]}->{group.name}")
            found.append((given or ("input" if not k else f"input.{k}"), t))
        for t in sorted(t for t in group.reads if not self._is_made(t)):
            last = self.called[t].rpartition(".")[2]
            found.append((self.names.get(f"->{last}", last), t))
        return found

    def _is_made(self, t: int) -> bool:
        return t not in self.drawing.leaves or self.drawing.graph.tensors[t].role is Role.INPUT

    def _forward(self, group: DrawnGroup) -> None:
        drawing = self.drawing
        inputs = [(port, self.place[t]) for port, t in self._inputs(group)]
        outputs = [(port, self.place[t]) for port, t in self._outputs(group.name, group.outputs)]
        boxes: dict[str, Rect | None] = {}
        if group.outputs:
            last = group.outputs[-1]
            boxes, result = self._boxes(group, drawing.held(last)), self._result(group)
        else:  # it changes what is there
            result = drawing.shape(drawing.graph.ops[group.ops[-1]].outputs[0])
        self._add(group.name, Phase.FORWARD, inputs, outputs, boxes, result)

    def _result(self, group: DrawnGroup) -> tuple[int, ...] | None:
        return None if group.kind == "linear" else self.drawing.shape(group.outputs[-1])

    def _boxes(self, group: DrawnGroup, result: Rect) -> dict[str, Rect | None]:
        """What an operator says it reads and computes."""
        made = [box for t, box in group.reads.items() if self._is_made(t)]
        given = [t for t in sorted(group.reads) if not self._is_made(t)]
        if group.kind == "linear" and made:
            return {"read_rect": made[0], "write_rect": result}
        if group.kind == "filter" and made:
            return {"dist_input": made[0], "dist_filters": group.reads[given[0]], "dist_result": result}
        return {"dist_result": result}

    def _backward(self, group: DrawnGroup, cleared: set[int]) -> None:
        """The gradient of a group, behind what clears the gradients that it touches first."""
        drawing, gradient = self.drawing, self.gradient
        deltas = [t for t in group.outputs if t in gradient]
        wanted = [(port, t) for port, t in self._inputs(group) if t in gradient]
        if not deltas or not wanted:
            return
        for t in (*deltas, *(t for _, t in wanted)):
            if t not in cleared:
                cleared.add(t)
                name = self.tensors[gradient[t]].id + ".set_zero"
                self._add(name, Phase.BACKWARD, [], [("output", gradient[t])], {}, None, "set_zero")
        inputs = [("output.delta", gradient[t]) for t in deltas]
        inputs += [(port, self.place[t]) for port, t in self._inputs(group)]
        inputs += [(self.port[t], self.place[t]) for t in group.saved]
        inputs += [("accumulate", gradient[t]) for _, t in wanted]
        outputs = [(f"{port}.delta", gradient[t]) for port, t in wanted]
        last, first = group.outputs[-1], next((t for _, t in wanted if self._is_made(t)), None)
        boxes = self._boxes(group, drawing.held(last))
        if group.kind == "linear" and first is not None:
            boxes = {"read_rect": drawing.held(last), "write_rect": drawing.held(first)}
        elif group.kind != "filter" and first is not None:
            boxes = {"dist_result": drawing.held(first)}
        kind = _kind(group.name) + _GRAD
        self._add(group.name + _GRAD, Phase.BACKWARD, inputs, outputs, boxes, self._result(group), kind)

    def _update(self, t: int) -> None:
        """A parameter changed by its gradient."""
        held, name = self.drawing.held(t), f"update_{self.called[t]}"
        inputs = [("params", self.place[t]), ("gradient", self.gradient[t])]
        boxes: dict[str, Rect | None] = {"dist_result": held}
        shape = self.drawing.shape(t)
        self._add(name, Phase.UPDATE, inputs, [("params", self.place[t])], boxes, shape, "update")
