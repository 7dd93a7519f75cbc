"""``split_step``: the part of a model and of its step that belongs to one process, and what it sends."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol
from weakref import WeakSet

import msgspec
import torch
from torch import nn

from lowtide.cost.wire import WireEnd
from lowtide.errors import CaptureError, RunError
from lowtide.execute.shards.meeting import Meeting
from lowtide.execute.shards.meshes import Connected
from lowtide.graph import Graph, Op, Rect, Role
from lowtide.graph.shards import Shards
from lowtide.plan.check.communication import Communication, check_communication, communications
from lowtide.plan.check.time import seconds_of
from lowtide.plan.result.plan import Plan
from lowtide.trace.distributed.wires import connect
from lowtide.trace.shards.local import OPERATOR, LocalStep, local_step
from lowtide.trace.shards.sums import with_sums
from lowtide.trace.step.joint import Joint
from lowtide.units import format_bytes, format_seconds

__all__ = [
    "LocalPlan",
    "Planner",
    "SplitStep",
    "at_path",
    "copies_of",
    "copy_state",
    "crowded_seconds",
    "cut_model",
    "fill_model",
    "named_tensors",
    "norm_of",
    "proven_communications",
    "refuse_cut",
    "split_in_words",
    "split_step",
]


class LocalPlan(Protocol):
    """A step of one process inside its budget."""

    def __call__(self, *args: Any) -> Any:
        """Run it."""

    def rehearse(self, example: Sequence[Any], keywords: Mapping[str, Any], *, verify: bool = False) -> None:
        """Plan it for arguments like these."""

    @property
    def plan(self) -> Plan:
        """The plan that was made last."""

    @property
    def graph_bytes(self) -> int:
        """Memory that CUDA graphs of the step hold for themselves."""

    def explain_graphs(self) -> list[str]:
        """What is replayed as CUDA graphs, or why nothing is; nothing where they were not asked for."""


Planner = Callable[[Callable[..., Any], Sequence[Any]], LocalPlan]
"""Plans a function for an example of its arguments."""


class SplitStep:
    """What one process runs of a step: ``step(model, *parts)`` gives the result of the whole."""

    def __init__(self, joint: Joint, local: LocalStep, wires: Sequence[str]) -> None:
        self._local = with_sums(local, wires)
        self._names: list[str | None] = []
        self.boxes: dict[str, Rect] = {}
        """Which part of each parameter and buffer this process holds."""
        self.shapes: dict[str, tuple[int, ...]] = {}
        """Those of the whole."""
        for place, t in enumerate(joint.inputs):
            assert t is not None
            tensor = joint.graph.tensors[t]
            if tensor.role is Role.INPUT:
                self._names.append(None)
                continue
            self._names.append(tensor.label)
            self.boxes[tensor.label], self.shapes[tensor.label] = local.boxes[place], tensor.shape or ()
        self.inputs = tuple(
            (joint.graph.tensors[t].label, joint.graph.tensors[t].shape or (), local.boxes[place])
            for place, t in enumerate(joint.inputs)
            if t is not None and self._names[place] is None
        )
        """Tensors of the batch in the order in which the step takes them: name, shape, and the part of it."""

    @cached_property
    def lines(self) -> dict[int, str]:
        """The operator of each line of the code that this process runs, by which captured ones are known."""
        labels = {node.name: node.meta.get(OPERATOR, "") for node in self._local.module.graph.nodes}
        code = enumerate(self._local.module.code.splitlines(), 1)
        named = {line: text.strip().partition(" = ")[0] for line, text in code}
        return {line: labels[name] for line, name in named.items() if labels.get(name)}

    def label(self, graph: Graph, op: Op) -> str:
        """What a communication of the captured step is for, in words."""
        summed = graph.tensors[op.outputs[0]].gradient_of if op.outputs else None
        if summed is not None:
            return f"the gradient of {graph.tensors[summed].label}"
        line = op.source.line if op.source is not None and op.source.file.startswith("<") else 0
        return f"{self.lines.get(line) or op.label} ({op.phase.value})"

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


def split_step(joint: Joint, shards: Shards, here: Connected) -> SplitStep:
    """The part of a process."""
    for name, wire, speed in zip(here.names, here.wires, here.speeds, strict=True):
        connect(name, wire, WireEnd(speed, wire.place, wire.devices))
    return SplitStep(joint, local_step(joint, shards, here.rank, here.names), here.names)


def proven_communications(plan: Plan, here: Connected, split: SplitStep) -> tuple[Communication, ...]:
    """Those of this process, in order; a PlanError on every rank where processes would wait for ever."""
    found = communications(plan.graph, plan.program, here.rank, here.lines, split.label)
    heard = here.meeting.everybody("compare communications", msgspec.json.encode(found))
    check_communication([msgspec.json.decode(one, type=list[Communication]) for one in heard])
    return found


def crowded_seconds(plan: Plan, crowding: float) -> float:
    """What a step takes by a plan where operators take so many times longer: processes share processors."""
    seconds = [one * crowding for one in plan.seconds]
    short = {k: one * crowding for k, one in plan.short.items()}
    return seconds_of(plan.graph, plan.program, seconds, short, plan.link, plan.wire_seconds)


_CUT: WeakSet[nn.Module] = WeakSet()
"""Models whose parameters are parts."""


def refuse_cut(model: nn.Module) -> None:
    """Refuse a model that another step has split."""
    if model in _CUT:
        raise RunError(
            "the model is split by another step: its parameters are parts. Give one function for both to "
            "lowtide.fit, with an argument that says what to compute, or give a model that is whole"
        )


def cut_model(model: nn.Module, boxes: Mapping[str, Rect]) -> None:
    """Leave these parts of a model's parameters and buffers in it, as the same objects."""
    _CUT.add(model)
    gradients = {name: at_path(model, name.split(".")).grad for name in boxes}
    fill_model(model, boxes, lambda name, box: at_path(model, name.split(".")).data[box.slices()].clone())
    for name, gradient in gradients.items():
        if gradient is not None:
            at_path(model, name.split(".")).grad = gradient[boxes[name].slices()].clone()


def fill_model(
    model: nn.Module, boxes: Mapping[str, Rect], part: Callable[[str, Rect], torch.Tensor]
) -> None:
    """Have these parts in place of a model's parameters and buffers, as the same objects."""
    for name, box in boxes.items():
        value = at_path(model, name.split("."))
        value.grad = None
        value.data = part(name, box)


def copy_state(
    model: nn.Module,
    state: Mapping[str, torch.Tensor],
    boxes: Mapping[str, Rect],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    all_of_it: bool,
) -> None:
    """Have this process's parts of the values of a state_dict.

    Buffers that a state_dict leaves out stay as they are, unless ``all_of_it`` is needed.
    """
    saved = model.state_dict().keys()
    for name, value in {**dict(model.named_parameters()), **dict(model.named_buffers())}.items():
        shape = tuple(shapes.get(name, value.shape))
        if name not in state and name not in saved and not all_of_it:
            continue
        if name not in state or tuple(state[name].shape) != shape:
            found = f"has the shape {list(state[name].shape)}" if name in state else "is missing"
            raise RunError(
                f"{name!r} {found} in the state_dict; the model has it with the shape {list(shape)}. "
                "Give the state_dict of the same model"
            )
        box = boxes.get(name, Rect.of_shape(shape))
        value.detach().copy_(state[name][box.slices()])


def named_tensors(function: Callable[..., Any], *args: Any) -> dict[str, torch.Tensor]:
    """The tensors among the arguments of a call, under the names by which a captured step has them."""
    found: dict[str, torch.Tensor] = {}

    def walk(name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found[name] = value
        elif isinstance(value, Mapping):
            for key, one in value.items():
                walk(f"{name}[{key!r}]", one)
        elif isinstance(value, tuple | list):
            for place, one in enumerate(value):
                walk(f"{name}[{place}]", one)

    for name, value in inspect.signature(function).bind(*args).arguments.items():
        walk(name, value)
    return found


def at_path(module: Any, path: Sequence[str]) -> Any:
    """What is under a name with dots."""
    for one in path:
        if not hasattr(module, one):
            raise CaptureError(
                f"the model has no parameter or buffer {'.'.join(path)!r}; give that which was captured"
            )
        module = getattr(module, one)
    return module


def _at(module: Any, path: Sequence[str]) -> Any:
    """The same, as torch traces it."""
    for one in path:
        module = getattr(module, one)
    return module


def copies_of(boxes: Mapping[str, Rect], meeting: Meeting) -> dict[str, int]:
    """How many processes have the same part of each tensor as this one."""
    mine = {name: [list(box.lo), list(box.hi)] for name, box in boxes.items()}
    told = meeting.everybody("count the parts", msgspec.json.encode(mine))
    heard = [msgspec.json.decode(one, type=dict[str, list[list[int]]]) for one in told]
    return {name: sum(one.get(name) == box for one in heard) for name, box in mine.items()}


def norm_of(parts: Mapping[str, torch.Tensor], copies: Mapping[str, int], devices: int) -> torch.Tensor:
    """The norm of tensors of which each process has parts; what several have counts once."""
    device = next((part.device for part in parts.values()), torch.device("cpu"))
    total = torch.zeros((), dtype=torch.float64, device=device)
    for name, part in parts.items():
        total += part.detach().square().sum(dtype=torch.float64).to(device) / copies.get(name, devices)
    torch.distributed.all_reduce(total)
    return total.sqrt()


def split_in_words(
    here: Connected, shards: Shards, talks: Sequence[Communication], seconds: float
) -> list[str]:
    """How much is split, what this process sends in a step of so many seconds, and how fast its links are."""
    sent = sum(one.sent_bytes for one in talks)
    return [
        f"device {here.rank} of {here.mesh.devices}: {len(shards.operators)} operators of forward are split",
        f"sends {format_bytes(sent)} a step in {len(talks)} parts",
        *(f"along axis {k}, {one.devices} devices: {speed.words(one.devices)}, measured"
          for k, (one, speed) in enumerate(zip(here.wires, here.speeds, strict=True)) if one.devices > 1),
        f"a step is predicted to take {format_seconds(seconds)}, with communication",
    ]  # fmt: skip
