"""Captures both parts of a step, once they were watched while they ran as always."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch

from lowtide.execute.graphs.arena.errors import CannotCaptureError
from lowtide.execute.graphs.arena.layout import ArenaLayout
from lowtide.execute.graphs.beside.beside import Beside
from lowtide.execute.graphs.beside.wires import Between
from lowtide.execute.graphs.capture.part_capture import Replayable
from lowtide.execute.graphs.captured_step import CapturedStep
from lowtide.execute.graphs.common_memory import CommonMemory
from lowtide.execute.runtime.copies import Form
from lowtide.execute.runtime.interpreter import Interpreter
from lowtide.graph import RESIDENT_ROLES
from lowtide.trace.step.group import Group
from lowtide.trace.step.joint import Joint

__all__ = ["StepCapture", "batch_of"]


class StepCapture:
    """What is known of a step for its capture; the places of what it allocates are found once."""

    def __init__(
        self, interpreter: Interpreter, common: CommonMemory, resident: Collection[int], lost_bytes: int
    ) -> None:
        """``resident`` are parameters and buffers; ``lost_bytes`` is left for the arena to lose."""
        self._interpreter, self._common, self._made = interpreter, common, common.tapes
        self._resident, self._lost_bytes = resident, lost_bytes
        self._groups = list(_groups(interpreter.joint))
        self._large: list[set[int]] = [set(), set()]
        """Operators of forward and of backward that allocate much, by their number."""
        self.beside: Beside | None = None
        self._tangents: list[torch.Tensor] | None = None
        """What backward is given beside what forward has saved, without memory, once that was seen."""
        self._layout: ArenaLayout | None = None
        """Where everything lies, once the step's requests for memory are listed."""

    @property
    def watched(self) -> bool:
        """Whether a whole step was watched."""
        return self._tangents is not None

    def watch(
        self, part: int, run: Callable[[list[Any]], list[Any]], arguments: list[Any], saved: int
    ) -> list[Any]:
        """Run a part as always, and see what it allocates; backward gets what is ``saved`` first."""
        device = _device(arguments)
        sizes = self._made.sizes(device)
        if self.beside is None:
            self._made.watched()
            self.beside = self._made.beside(self._interpreter, device)
        if part == 1:
            self._tangents = [torch.empty_like(one, device="meta") for one in arguments[saved:]]
        with sizes.watching(self._groups), self.beside.watching(part, sizes.aside):
            found = run(arguments)
        self._large[part] = sizes.large
        return found

    def forward(
        self, arguments: Sequence[Any], addresses: dict[int, int], tapes: list[CapturedStep]
    ) -> CapturedStep:
        """Capture forward; what is at one of the ``addresses`` is read there.

        The step is added to the ``tapes``, even where this fails.
        """
        device = _device(arguments)
        given, static = list(arguments), {}
        for k in batch_of(arguments, self._resident):
            if k not in addresses:
                static[k] = given[k] = self._common.copy_for(k, arguments[k]).copy_(arguments[k])
        listed: list[Replayable] = []
        room = self._room(static.values())
        if self._layout is None:
            self._layout, listed = self._listed(given, device, room)
        tape = CapturedStep(self._made.new(device, self._layout, self._common.held, room))
        tape.fixed, tape.static = addresses, static
        batch = batch_of(given, self._resident)
        tape.batch = {given[k].untyped_storage().data_ptr() for k in batch}
        tapes.append(tape)
        self._common.add(tape)
        interpreter = self._interpreter
        tape.forward, results = self._captured(tape, 0, interpreter.run_forward, list(given))
        listed.clear()
        count = len(interpreter.joint.outputs)
        outputs, saved = results[:count], results[count:]
        del results
        ours = {one.untyped_storage().data_ptr() for one in given if isinstance(one, torch.Tensor)}
        for one in outputs:
            if isinstance(one, torch.Tensor) and one.untyped_storage().data_ptr() in ours:
                raise CannotCaptureError("the step returns one of its arguments")
        tape.outputs = [tape.tape.value(one) if isinstance(one, torch.Tensor) else one for one in outputs]
        tape.saved = saved
        tensors = saved[: len(interpreter.saved)]
        tape.where = [(Form.of(one), one.untyped_storage().data_ptr()) for one in tensors]
        tape.others = saved[len(tensors) :]
        return tape

    def backward(self, tape: CapturedStep, tangents: Sequence[torch.Tensor]) -> None:
        """Capture the backward of a captured forward; it gets copies of ``tangents``."""
        interpreter = self._interpreter
        assert tape.saved is not None
        tape.tangents = [torch.empty_like(one) for one in tangents]
        given = [*tape.saved, *tape.tangents]
        tape.saved = None
        graph, results = self._captured(tape, 1, interpreter.run_backward, given)
        if interpreter.apart:
            raise CannotCaptureError("gradients are returned use by use")
        own = {one.untyped_storage().data_ptr() for one in tape.tangents} | tape.batch
        for one in results:
            if one is not None and one.untyped_storage().data_ptr() in own:
                raise CannotCaptureError("a gradient is the gradient of the loss itself")
        tape.gradients = [None if one is None else tape.tape.value(one) for one in results]
        tape.backward = graph
        del results
        tape.tape.settle()

    def _captured(
        self, tape: CapturedStep, part: int, run: Callable[[list[Any]], list[Any]], given: list[Any]
    ) -> tuple[Replayable, list[Any]]:
        assert self.beside is not None
        beside = self.beside
        generators = beside.generators(part)

        def whole(arguments: list[Any], between: Between) -> list[Any]:
            with beside.capturing(part, between, tape.tape.there):
                return run(arguments)

        return tape.tape.captured(whole, given, self._groups, self._large[part], generators)

    def _listed(
        self, given: Sequence[Any], device: torch.device, room: int
    ) -> tuple[ArenaLayout, list[Replayable]]:
        """A place for everything: both parts are captured once for what they ask for alone.

        Hold their graphs until others are captured: PyTorch gives up a pool on the host with its last graph.
        """
        assert self._tangents is not None
        interpreter, count = self._interpreter, len(self._interpreter.joint.outputs)
        listing = self._made.listing(device)
        tape = CapturedStep(listing)
        try:
            forward, results = self._captured(tape, 0, interpreter.run_forward, list(given))
            tape.outputs, saved = results[:count], results[count:]
            del results
            given = [*saved, *(torch.empty_like(one, device=device) for one in self._tangents)]
            del saved
            backward, tape.gradients = self._captured(tape, 1, interpreter.run_backward, given)
            interpreter.apart = []
            return listing.layout(room), [forward, backward]
        finally:
            tape.outputs, tape.gradients = [], []
            listing.close()

    def _room(self, copies: Collection[torch.Tensor]) -> int:
        """Bytes that the budget has for everything but parameters, the batch and its copies."""
        plan = self._interpreter.plan
        assert plan is not None
        leaves = [one for one in plan.graph.tensors if one.role in RESIDENT_ROLES and one.alias is None]
        of_others = self._common.copied_bytes(copies) - sum(one.nbytes for one in copies)
        there = plan.budget_bytes - plan.beside_bytes - sum(one.bytes for one in leaves)
        return there + self._lost_bytes - of_others


def batch_of(arguments: Sequence[Any], resident: Collection[int]) -> Iterator[int]:
    """The tensors among the arguments of forward that are neither parameters nor buffers, by their number."""
    return (k for k, one in enumerate(arguments) if k not in resident and isinstance(one, torch.Tensor))


def _device(arguments: Sequence[Any]) -> torch.device:
    return next(one.device for one in arguments if isinstance(one, torch.Tensor))


def _groups(joint: Joint) -> Iterator[Group]:
    """Groups of a step, those inside of loops too."""
    for call in joint.calls:
        if isinstance(call.target, Group):
            yield call.target
        else:
            bodies: Iterable[Joint] = getattr(call.target, "bodies", ())
            for body in bodies:
                yield from _groups(body)
