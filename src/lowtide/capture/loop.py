"""A step whose forward and backward run as one loop over tiles, as a captured step of few operators.

before          what tiles need as a whole and no gradient goes through: masks, indices
loop            the loss, and every gradient, for the gradient of the loss that is expected
scale           in backward: the gradients, for the gradient of the loss that has come
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import torch
from torch import fx

from lowtide.capture.builder import Call
from lowtide.capture.joint import Joint
from lowtide.capture.tile import Tile, Tiling, values_read
from lowtide.graph import Graph, Op, Phase, Rect, Role, Tensor, validate

__all__ = ["LOOP", "Region", "StandingIn", "looped"]

LOOP = "lowtide.loop"


@dataclass(frozen=True, slots=True)
class Region:
    """What a loop runs: tiles of a step, and where their parts are among the operator's inputs."""

    tiles: tuple[Tile, ...]
    places: dict[int, int]
    """Of tensors of the step: position in the operator's inputs."""
    total: Callable[..., torch.Tensor] | None
    total_of: tuple[int, ...]
    """Positions of what the weight of all targets is made from."""
    gradients: tuple[tuple[int, torch.Tensor], ...]
    """Tensors of the step that have gradients, and how those lie in memory."""
    came: list[torch.Tensor] = field(default_factory=list)
    """The gradient of the loss that came last. It is expected the next time: where a loss is scaled up so
    that small gradients are not lost in half precision, tiles compute with the scale."""

    def scale(
        self, tangent: torch.Tensor, expected: torch.Tensor, gradients: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """The gradients for the gradient of the loss that has come, in place."""
        torch._foreach_mul_(list(gradients), tangent / expected)
        usable = torch.isfinite(tangent) & (tangent != 0)
        self.came[:] = [torch.where(usable, tangent, torch.ones_like(tangent))]
        return gradients

    @property
    def bodies(self) -> list[Joint]:
        """The steps of tiles, each once."""
        return list({id(tile.joint): tile.joint for tile in self.tiles}.values())


def looped(joint: Joint, boxes: Sequence[Rect]) -> Joint:
    """The step as a loop over these boxes of the axes that its loss is summed over.

    A CaptureError names what cannot be cut.
    """
    tiling = Tiling(joint)
    tiles = tuple(tiling.tiles(boxes))
    return _Writer(tiling, tiles).joint()


class _Writer:
    """The captured step of few operators, with tensors numbered anew."""

    def __init__(self, tiling: Tiling, tiles: tuple[Tile, ...]) -> None:
        self.old, self.tiling, self.tiles = tiling.joint, tiling, tiles
        self.number: dict[int, int] = {}
        self.tensors: list[Tensor] = []
        self.values: list[torch.Tensor] = []
        self.ops: list[Op] = []
        self.calls: list[Call] = []
        self.more = fx.Graph()
        self.made: dict[fx.Node, int] = {}
        """Nodes of tensors that the step itself has not, and their numbers."""
        self.node: dict[int, fx.Node] = {}
        for node, t in self.old.tensor_of.items():
            self.node.setdefault(t, node)

    def joint(self) -> Joint:
        old = self.old
        leaves = [t for t in (*old.inputs, *old.tangents, *old.constants) if t is not None]
        for t in leaves:
            self.add(t)
        self.before()
        gradients = self.loop()
        self.scale([g for g in gradients if g is not None])
        graph = old.graph
        returned = sorted(self.number[t] for t in graph.attributes.get("returned", ()))
        tensor_of = {node: self.number[t] for node, t in old.tensor_of.items() if t in self.number}
        return replace(
            old,
            graph=validate(Graph(tuple(self.tensors), tuple(self.ops), attributes={"returned": returned})),
            calls=tuple(self.calls),
            tensor_of=tensor_of | self.made,
            values=tuple(self.values),
            inputs=tuple(None if t is None else self.number[t] for t in old.inputs),
            tangents=tuple(self.number[t] for t in old.tangents),
            outputs=tuple(None if t is None else self.number[t] for t in old.outputs),
            gradients=tuple(gradients),
            constants={self.number[t]: value for t, value in old.constants.items()},
        )

    def add(self, tensor: int) -> int:
        """A tensor of the step, with the number that it has from now on."""
        if tensor not in self.number:
            one, value = self.old.graph.tensors[tensor], self.old.values[tensor]
            self.number[tensor] = len(self.tensors)
            alias = None if one.alias is None else self.number.get(one.alias)
            size = one.bytes if one.alias is None or alias is not None else value.numel() * value.itemsize
            self.tensors.append(msgspec.structs.replace(one, alias=alias, bytes=size))
            self.values.append(value)
        return self.number[tensor]

    def new(self, name: str, like: int, **fields: Any) -> int:
        """A tensor of the loop's own, like one of the step."""
        one, value = self.old.graph.tensors[like], self.old.values[like]
        size = value.numel() * value.itemsize
        node = self.more.placeholder(f"made_{len(self.made)}")
        node.meta["val"] = value
        self.made[node] = len(self.tensors)
        self.tensors.append(
            msgspec.structs.replace(one, id=name, name="", alias=None, bytes=size, source=None, **fields)
        )
        self.values.append(value)
        return self.made[node]

    def before(self) -> None:
        """Operators whose results tiles need as a whole."""
        wanted = {t for tile in self.tiles for t, _ in tile.given} - self.number.keys()
        total = self.tiling.total
        wanted |= set(total[1] if total else ()) - self.number.keys()
        chosen: list[tuple[Op, Call]] = []
        for op, call in reversed(self.tiling.steps):
            if wanted & set(op.outputs):
                chosen.append((op, call))
                wanted |= set(values_read(self.old.graph, op)) - self.number.keys()
        for op, call in reversed(chosen):
            self.alone(op, call, wanted)

    def alone(self, op: Op, call: Call, wanted: set[int]) -> None:
        """An operator on what it reads; of inputs whose shape alone matters it gets others of that shape."""
        reads = values_read(self.old.graph, op)
        unread = {t: self.old.values[t] for t in op.inputs if t not in reads}
        outputs = [t for t in op.outputs if t in wanted or not unread]
        results = tuple(self.add(t) if t in outputs else -1 for t in call.results)
        target = call.target
        if unread:
            target = StandingIn(call.target, call.args, dict(call.kwargs), self.old.tensor_of, unread)
            nodes = [self.node[t] for t in reads]
            call = Call(target, (nodes,), {}, results, call.several)
        else:
            call = replace(call, results=results)
        self.ops.append(
            msgspec.structs.replace(
                op,
                inputs=tuple(self.number[t] for t in (reads if unread else op.inputs)),
                outputs=tuple(t for t in results if t >= 0),
                attributes={k: v for k, v in op.attributes.items() if not unread or k == "random"},
            )
        )
        self.calls.append(call)

    def loop(self) -> list[int | None]:
        """The loop itself: the loss, which gradient of it was expected, and the gradients. Returns these."""
        old, names = self.old, self.old.graph.tensors
        given = sorted({t for tile in self.tiles for t, _ in tile.given})
        total = self.tiling.total
        given += [t for t in (total[1] if total else ()) if t not in given]
        found: list[int | None] = []
        pairs: list[tuple[int, torch.Tensor]] = []
        loss = self.add(self.tiling.loss)
        expected = self.new("expected", self.tiling.loss)
        for leaf, gradient in zip(old.inputs, old.gradients, strict=True):
            if leaf is None or gradient is None:
                found.append(None)
                continue
            name = f"gradient of {names[leaf].label}"
            fields = {"role": Role.GRADIENT, "gradient_of": self.number[leaf]}
            found.append(self.new(name, gradient, **fields))
            pairs.append((leaf, old.values[gradient]))
        outputs = (loss, expected, *(g for g in found if g is not None))
        region = Region(
            self.tiles,
            {t: k for k, t in enumerate(given)},
            total[0] if total else None,
            tuple(given.index(t) for t in total[1]) if total else (),
            tuple(pairs),
        )
        adds = self.tiling.adds
        self.ops.append(
            Op(
                id="loop",
                kind=LOOP,
                inputs=tuple(self.number[t] for t in given),
                outputs=outputs,
                name=adds.name,
                device=adds.device,
                source=adds.source,
                attributes={"axes": list(self.tiling.axes)},
            )
        )
        nodes = tuple(self.node[t] for t in given)
        self.calls.append(Call(region, nodes, {}, outputs, True))
        return found

    def scale(self, gradients: Sequence[int]) -> None:
        """The gradients times what has come over what was expected."""
        of_tensor = {number: node for node, number in self.made.items()}
        expected = self.ops[-1].outputs[1]
        (tangent,) = self.old.tangents
        self.ops.append(
            Op(
                id="scale",
                kind="lowtide.scale",
                phase=Phase.BACKWARD,
                inputs=(self.number[tangent], expected, *gradients),
                outputs=tuple(gradients),
                device=self.tiling.adds.device,
            )
        )
        nodes = [of_tensor[t] for t in gradients]
        args = (self.node[tangent], of_tensor[expected], nodes)
        region: Region = self.calls[-1].target
        self.calls.append(Call(region.scale, args, {}, tuple(gradients), True))


class StandingIn:
    """An operator called with what it reads; other tensors are memory with nothing in it."""

    def __init__(
        self,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensor_of: Any,
        unread: dict[int, torch.Tensor],
    ) -> None:
        self.target, self.args, self.kwargs = target, args, kwargs
        self.tensor_of, self.unread = tensor_of, unread

    @property
    def passing_bytes(self) -> int:
        """What is allocated besides results that are kept, should each result be as large as an input."""
        return 2 * sum(like.numel() * like.itemsize for like in self.unread.values())

    def __call__(self, values: Sequence[torch.Tensor]) -> Any:
        """What the operator gives for the values that it reads."""
        there = iter(values)
        made = {
            t: torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
            for t, like in self.unread.items()
        }
        seen: dict[fx.Node, torch.Tensor] = {}

        def value(node: fx.Node) -> torch.Tensor:
            t = self.tensor_of[node]
            if t in made:
                return made[t]
            if node not in seen:
                seen[node] = next(there)
            return seen[node]

        args, kwargs = fx.map_arg((self.args, self.kwargs), value)
        return self.target(*args, **kwargs)
