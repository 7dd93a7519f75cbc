"""``split_step``: the part of a model and of its step that belongs to one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from lowtide.errors import CaptureError
from lowtide.execute.shards.wires import ProcessWire
from lowtide.graph import Rect, Role
from lowtide.graph.shards import Shards
from lowtide.trace.distributed.wires import connect
from lowtide.trace.shards.local import LocalStep, local_step
from lowtide.trace.step.joint import Joint

__all__ = ["SplitStep", "split_step"]


class SplitStep:
    """What one process runs of a step: ``step(model, *parts(batch))`` gives the loss of the whole."""

    def __init__(self, joint: Joint, local: LocalStep, model: nn.Module) -> None:
        self._local, self._graph = local, joint.graph
        self.model = nn.Module()
        """The parts of the model's parameters and buffers that this process holds, under the same names."""
        self._names: list[str | None] = []
        self.boxes: dict[str, Rect] = {}
        """Which part of each."""
        known = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        for place, t in enumerate(joint.inputs):
            assert t is not None
            tensor, box = joint.graph.tensors[t], local.boxes[place]
            if tensor.role is Role.INPUT:
                self._names.append(None)
                continue
            value = known.get(tensor.label)
            if value is None:
                raise CaptureError(f"the model has no parameter or buffer {tensor.label!r}")
            part = value.detach()[box.slices()].clone()
            trained = joint.gradients[place] is not None
            _put(self.model, tensor.label, nn.Parameter(part, trained) if value.requires_grad else part)
            self._names.append(tensor.label)
            self.boxes[tensor.label] = box

    def sum_gradients(self, wires: Sequence[ProcessWire]) -> None:
        """Have gradients added up over the processes that use a parameter for something of their own."""

        def summed(gradient: torch.Tensor, axes: Sequence[int]) -> torch.Tensor:
            found = gradient.contiguous()
            for axis in axes:
                wires[axis].add_up(found)
            return found

        for place, axes in self._local.summed.items():
            name = self._names[place]
            if name is not None:
                hook: Any = _at(self.model, name.split(".")).register_hook
                hook(lambda gradient, axes=axes: summed(gradient, axes))

    @property
    def step(self) -> Callable[..., torch.Tensor]:
        """The loss from the model of this process and its parts of a batch."""
        module = self._local.module
        paths = [None if name is None else tuple(name.split(".")) for name in self._names]

        def step(model: nn.Module, *parts: torch.Tensor) -> torch.Tensor:
            given = iter(parts)
            values = [next(given) if path is None else _at(model, path) for path in paths]
            found: torch.Tensor = module(*values)[0]
            return found

        return step

    def parts(self, batch: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The parts of a batch that this process reads."""
        boxes = [box for box, name in zip(self._local.boxes, self._names, strict=True) if name is None]
        return [value[box.slices()].contiguous() for value, box in zip(batch, boxes, strict=True)]


def split_step(
    joint: Joint, shards: Shards, model: nn.Module, rank: int, wires: Sequence[ProcessWire]
) -> SplitStep:
    """The part of a process; ``wires`` connect it with others, one for each axis of the mesh."""
    names = [f"axis {axis} of {list(shards.mesh.sizes)}" for axis in range(len(wires))]
    for name, wire in zip(names, wires, strict=True):
        connect(name, wire)
    found = SplitStep(joint, local_step(joint, shards, rank, names), model)
    found.sum_gradients(wires)
    return found


def _at(module: Any, path: Sequence[str]) -> Any:
    """What is under a name with dots."""
    for one in path:
        module = getattr(module, one)
    return module


def _put(module: nn.Module, name: str, value: torch.Tensor) -> None:
    """Have a parameter or a buffer under a name with dots."""
    *path, last = name.split(".")
    for one in path:
        if not hasattr(module, one):
            module.add_module(one, nn.Module())
        module = getattr(module, one)
    if isinstance(value, nn.Parameter):
        module.register_parameter(last, value)
    else:
        module.register_buffer(last, value)
