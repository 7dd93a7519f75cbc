"""``MeshStep``: a step that the processes of a mesh run together, called as the user's function."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import msgspec
import torch
from torch import nn

from lowtide.errors import CaptureError, RunError
from lowtide.execute.compile.user_code import modules_in
from lowtide.execute.shards.arguments import (
    as_whole,
    call_key,
    called_with_tensors,
    graph_digest,
    model_checksum,
    no_autocast,
    random_digest,
    tensors_in,
)
from lowtide.execute.shards.choose import choose_shards, smallest_budget
from lowtide.execute.shards.meshes import Connected, connected
from lowtide.execute.shards.split import (
    LocalPlan,
    Planner,
    SplitStep,
    copies_of,
    copy_state,
    crowded_seconds,
    cut_model,
    norm_of,
    proven_communications,
    refuse_cut,
    split_in_words,
    split_step,
)
from lowtide.graph import Rect, Role
from lowtide.graph.shards import Cut, Shards, replicated
from lowtide.plan.check.communication import Communication
from lowtide.plan.result.plan import Plan
from lowtide.trace.step.capture import capture
from lowtide.trace.step.joint import Joint

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


__all__ = ["MeshLike", "MeshStep", "Planner", "fit_on_mesh"]

MeshLike: TypeAlias = "int | Sequence[int] | DeviceMesh"
"""A number of devices, numbers along each axis, or torch's own."""


@dataclass(slots=True)
class _Way:
    """A step for some shapes, and for a model in training or in evaluation."""

    split: SplitStep
    shards: Shards
    order: tuple[int, ...]
    """Which tensor of the arguments each input of the step is."""
    local: LocalPlan | None = None
    plans: dict[bool, Plan] = field(default_factory=dict)
    """With gradients, and without."""
    talks: dict[bool, tuple[Communication, ...]] = field(default_factory=dict)


class MeshStep:
    """A step on several devices: each process holds its parts of the parameters, and plans inside its budget.

    It is called as the function that it was made from, by all processes alike, and gives the same on all of
    them. Tensors of a batch are given whole; ``with_parts`` takes the parts that this process reads.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        here: Connected,
        planner: Planner,
        time_limit: float,
        budget_bytes: int | None,
    ) -> None:
        self.function, self.here, self._planner = function, here, planner
        self._time_limit, self._budget_bytes = time_limit, budget_bytes
        self._ways: dict[Any, _Way] = {}
        self._by_parts: dict[Any, _Way] = {}
        """The same by the shapes of the parts that this process reads."""
        self._last: tuple[_Way, bool] | None = None
        self._empty = False
        """Whether parameters have no values yet, as the model was made on the meta device."""
        self.boxes: dict[str, Rect] = {}
        """The part of each parameter and buffer of the model that this process holds."""
        self._cuts: dict[str, Cut] = {}
        """Which dimension of each of them the axes of the mesh cut."""
        self._copies: dict[str, int] | None = None
        """How many processes have each part of this one, once that was asked."""
        self.shapes: dict[str, tuple[int, ...]] = {}
        """Shapes of the whole."""

    def prepare(self, example: Sequence[Any], keywords: Mapping[str, Any]) -> None:
        """Split and plan the step for arguments like these, on all processes together."""
        model = self._model(example, keywords)
        way = self._way(model, example, keywords)
        self._planned(way, model, self._parts(way, example, keywords))

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        """What the function gives for these arguments; call ``backward`` on the loss as always."""
        model = self._model(args, keywords)
        if self._empty:
            raise RunError(
                "the model was made on the meta device, and has no values yet; call `step.load(folder, "
                "model)` first, with a checkpoint, or `step.load_state(model, state_dict)`"
            )
        return self._run(self._way(model, args, keywords), model, args, keywords)

    def with_parts(self, *args: Any, **keywords: Any) -> Any:
        """The same for tensors of the batch of which each process gives the part that it reads, or all.

        The step was made for such a batch, or called with one, before.
        """
        model = self._model(args, keywords)
        way = self._by_parts.get(call_key(model, args, keywords))
        if way is None:
            raise RunError(
                "the tensors are not the parts of a batch that the step was made for. `step.inputs` says "
                "which part each is; give such a batch to lowtide.fit, whole, or call the step with it once"
            )
        return self._run(way, model, args, keywords)

    def _run(self, way: _Way, model: nn.Module, args: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        parts = self._parts(way, args, keywords)
        self._planned(way, model, parts)
        assert way.local is not None
        self.here.watch.begin([one.label for one in way.talks[torch.is_grad_enabled()]])
        with no_autocast():
            return way.local(model, *parts)

    def __reduce__(self) -> NoReturn:
        raise RunError(
            "a fitted step cannot be pickled or copied: it holds compiled code and connections of this "
            "process. Save its state (`step.save(folder, model)`), and call lowtide.fit again"
        )

    @property
    def plan(self) -> Plan:
        """The plan of this process that was made or run last."""
        way, gradients = self._shown
        return way.plans[gradients]

    @property
    def plans(self) -> list[Plan]:
        """The same, as a list."""
        return [self.plan]

    @property
    def shards(self) -> Shards:
        """How the step is split."""
        return self._shown[0].shards

    @property
    def inputs(self) -> tuple[tuple[tuple[int, ...], Rect], ...]:
        """Of each tensor of the batch, as it comes among the arguments: its shape, and the part read here."""
        way, _ = self._shown
        known = {k: (whole, box) for k, (_, whole, box) in zip(way.order, way.split.inputs, strict=True)}
        return tuple(known[k] for k in sorted(known))

    @property
    def communications(self) -> tuple[Communication, ...]:
        """What this process sends and receives in a step, in order."""
        way, gradients = self._shown
        return way.talks[gradients]

    @property
    def planned_wire_bytes(self) -> int:
        """What this process sends to others in a step."""
        return sum(one.sent_bytes for one in self.communications)

    @property
    def sent_bytes(self) -> int:
        """What it has sent so far."""
        return sum(wire.sent_bytes for wire in self.here.wires)

    @property
    def graph_bytes(self) -> int:
        """Memory that CUDA graphs of the step hold for themselves, on this device."""
        return sum(way.local.graph_bytes for way in self._ways.values() if way.local is not None)

    @property
    def predicted_seconds(self) -> float:
        """Of a step: by the plan of this process, with communication, on the processors that it shares."""
        return crowded_seconds(self.plan, self.here.crowding)

    def save(
        self,
        folder: str | os.PathLike[str],
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        **extra: Any,
    ) -> None:
        """Put the state of the model and of its optimizer into a folder, by all processes together.

        It is a checkpoint of torch.distributed.checkpoint; ``extra`` are numbers and texts beside it.
        """
        from lowtide.execute.shards.saved import checkpoint

        parts = checkpoint.model_parts(model, self.boxes, self.shapes)
        groups = [] if optimizer is None else checkpoint.optimizer_groups(optimizer)
        if optimizer is not None:
            parts |= checkpoint.optimizer_parts(optimizer, parts)
        checkpoint.save_checkpoint(Path(folder), parts, self.here.meeting, groups, extra)

    def load(
        self,
        folder: str | os.PathLike[str],
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> dict[str, Any]:
        """Have the state that was saved last, on any number of devices; gives what was saved beside it."""
        from lowtide.execute.shards.saved import checkpoint

        state = checkpoint.model_parts(model, self.boxes, self.shapes)
        found = checkpoint.load_checkpoint(Path(folder), state, self.here.meeting, optimizer)
        torch.set_rng_state(state[checkpoint.RANDOM].tensor)
        self._empty = False
        return found

    def load_state(self, model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
        """Have the values of a state_dict of the whole model, of which each process copies its parts.

        ``torch.load(file, mmap=True)`` gives one that is read from the file where it is copied.
        """

        read = partial(copy_state, model, state, self.boxes, self.shapes, all_of_it=self._empty)
        self.here.meeting.settled("load values", read)
        self._empty = False

    def clip_grad_norm_(self, model: nn.Module, max_norm: float) -> torch.Tensor:
        """As ``torch.nn.utils.clip_grad_norm_``, with the norm of the gradients of the whole model."""
        if self._copies is None:
            self._copies = copies_of(self.boxes, self.here.meeting)
        named = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        norm = norm_of(named, self._copies, self.here.mesh.devices)
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for gradient in named.values():
            gradient.detach().mul_(scale.to(gradient.dtype))
        return norm

    def explain(self) -> str:
        """How the step is split, what this process sends, and its plan in words."""
        cut = [name for name, box in self.boxes.items() if box.shape != self.shapes[name]]
        told = split_in_words(self.here, self.shards, self.communications, self.predicted_seconds)
        told[0] += f", and {len(cut)} of {len(self.boxes)} parameters and buffers"
        local = self._shown[0].local
        return "\n".join([*told, self.plan.explain(), *(local.explain_graphs() if local else ())])

    @property
    def _shown(self) -> tuple[_Way, bool]:
        if self._last is None:
            raise RunError("the step has not been planned yet: call it once")
        return self._last

    def _model(self, args: Sequence[Any], keywords: Mapping[str, Any]) -> nn.Module:
        found = modules_in(self.function, *args, *keywords.values())
        if len(found) != 1:
            raise CaptureError(
                f"a step on a mesh has one module, whose parameters are split; this one has {len(found)}. "
                "Put them into one, and pass it as an argument"
            )
        return found[0]

    def _parts(self, way: _Way, args: Sequence[Any], keywords: Mapping[str, Any]) -> list[torch.Tensor]:
        """What this process reads of the arguments."""
        given = tensors_in(args, keywords)
        found = []
        for place, (_, whole, box) in zip(way.order, way.split.inputs, strict=True):
            value = given[place]
            cut = value if tuple(value.shape) != tuple(whole) else value[box.slices()]
            found.append(cut.contiguous())
        return found

    def _way(self, model: nn.Module, args: Sequence[Any], keywords: Mapping[str, Any]) -> _Way:
        """The step for arguments like these."""
        key = call_key(model, args, keywords)
        way = self._ways.get(key)
        if way is None:
            way = self._made(model, args, keywords)
            self._ways[key] = self._by_parts[key] = way
            known = zip(way.order, way.split.inputs, strict=True)
            parts = {place: torch.Size(box.shape) for place, (_, _, box) in known}
            self._by_parts[call_key(model, args, keywords, parts)] = way
        return way

    def _made(self, model: nn.Module, args: Sequence[Any], keywords: Mapping[str, Any]) -> _Way:
        """Captured, split, and known to be the same for all."""
        meeting = self.here.meeting
        if not self.boxes:
            meeting.settled("look at the model", partial(refuse_cut, model))
        if not self.boxes and any(value.is_meta for value in model.parameters()):
            model.to_empty(device="cpu")  # what nobody writes to takes no memory
            self._empty = True
        joint = meeting.settled("capture the step", lambda: self._captured(model, args, keywords))
        said = {"the captured step": graph_digest(joint.graph)}
        if not self.boxes and not self._empty:
            said["values of parameters"] = model_checksum(model)
        if any(op.random for op in joint.graph.ops):
            said["the state of the generator of random numbers"] = random_digest()
        advice = "Give all processes the same model, batch and torch.manual_seed"
        meeting.agree("compare what was captured", said, advice)
        shards = self._shards(joint)
        split = meeting.settled("split the step", lambda: split_step(joint, shards, self.here))
        if not self.boxes:
            cut_model(model, split.boxes)
        for t, cut in shards.leaves.items():
            self._cuts.setdefault(joint.graph.tensors[t].label, cut)
        self.boxes, self.shapes = split.boxes | self.boxes, split.shapes | self.shapes
        order = tuple(int(name.removeprefix("tensors[").removesuffix("]")) for name, _, _ in split.inputs)
        return _Way(split, shards, order)

    def _captured(self, model: nn.Module, args: Sequence[Any], keywords: Mapping[str, Any]) -> Joint:
        function, tensors = self.function, tensors_in(args, keywords)
        if any(tensor.requires_grad for tensor in tensors):
            raise CaptureError(
                "a step on a mesh gives gradients of parameters alone; pass a batch that requires none"
            )

        whole = called_with_tensors(function, args, keywords)
        with torch.enable_grad(), as_whole(model, self.boxes, self.shapes):
            joint = capture(whole, model, *tensors).joint
        if len(joint.outputs) != 1 or joint.outputs[0] is None:
            raise CaptureError("a step on a mesh gives one tensor, as the loss; return that alone")
        return joint

    def _shards(self, joint: Joint) -> Shards:
        """The same on all: the first process chooses."""
        here, meeting = self.here, self.here.meeting
        held: dict[int, Cut] = {}
        for t in joint.inputs:
            if t is not None and joint.graph.tensors[t].role is not Role.INPUT and self.boxes:
                name = joint.graph.tensors[t].label
                held[t] = self._cuts.get(name, replicated(here.mesh))  # no step before has read it

        budget = smallest_budget(self._budget_bytes, meeting)

        def chosen() -> bytes:
            if here.rank:
                return b""
            limit = self._time_limit
            found = choose_shards(joint, here.mesh, limit, held=held, budget_bytes=budget, links=here.speeds)
            return msgspec.json.encode(found[0])

        told = meeting.everybody("split the step", meeting.settled("choose how to split", chosen))[0]
        shards = msgspec.json.decode(told, type=Shards)
        fingerprint = {"the plan of shards": hashlib.sha256(msgspec.json.encode(shards)).hexdigest()[:16]}
        meeting.agree("compare plans", fingerprint, "Use the same version of lowtide everywhere")
        return shards

    def _planned(self, way: _Way, model: nn.Module, parts: Sequence[torch.Tensor]) -> None:
        """Have a plan, with gradients where they are switched on, that all can run together."""
        gradients, here = torch.is_grad_enabled(), self.here
        self._last = way, gradients
        if gradients in way.plans:
            return

        def plan() -> Plan:
            if way.local is None:
                way.local = self._planner(way.split.step, [model, *parts])
            else:
                way.local.rehearse([model, *parts], {})
            return way.local.plan

        with no_autocast():  # what was captured has its casts
            found = here.meeting.settled("plan the step", plan)
        way.talks[gradients] = proven_communications(found, here, way.split)
        way.plans[gradients] = found


def fit_on_mesh(
    mesh: MeshLike,
    function: Callable[..., Any],
    examples: Sequence[Sequence[Any]],
    keywords: Mapping[str, Any],
    planner: Planner,
    time_limit: float,
    budget_bytes: int | None = None,
) -> MeshStep:
    """The step on a mesh, ready for arguments like each of the examples."""
    step = MeshStep(function, connected(mesh), planner, time_limit, budget_bytes)
    for example in examples:
        step.prepare(example, keywords)
    return step
