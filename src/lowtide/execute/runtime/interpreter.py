"""Runs a Program: each part is a straight line over a table of tensors."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch

from lowtide.cost.watch import Marker
from lowtide.device_internals import lost_in_fork
from lowtide.errors import RunError
from lowtide.execute.calls.random_state import Drawing, Redraws
from lowtide.execute.calls.views import Views
from lowtide.execute.memory.out_of_memory import in_spite_of
from lowtide.execute.runtime.copies import Form, Transfers, transfers
from lowtide.execute.runtime.fits import refuse_invalid
from lowtide.execute.runtime.frame import Frame
from lowtide.execute.runtime.handover import fetched_by_backward, handed_over, old_values, without_views
from lowtide.execute.runtime.instructions import Line, run_lines
from lowtide.execute.runtime.launch import Launch, Step
from lowtide.execute.runtime.parameter_offload import Traveller, bring_back, everything_away, may_leave
from lowtide.execute.runtime.prepare import prepared, random_again
from lowtide.execute.runtime.snapshot import Snapshot
from lowtide.execute.runtime.tile_loop import Copying, LendsCopies, Turning
from lowtide.execute.runtime.witness import Watched
from lowtide.graph import RESIDENT_ROLES
from lowtide.plan.program.instructions import Drop, Fetch, Program, Run, Send
from lowtide.plan.result.plan import Plan
from lowtide.torch_internals import calls_are_watched, saved_tensors_are_hooked
from lowtide.trace.distributed.wires import Wire
from lowtide.trace.eager.nothing_ran import program_ran
from lowtide.trace.step.joint import Joint

__all__ = ["Interpreter", "Replays"]

_TICKETS = 4096


class Replays(Protocol):
    """Both parts by another way, with the results of the interpreter."""

    def forward(self, arguments: list[Any]) -> list[Any]:
        """As the interpreter's."""

    def backward(self, arguments: list[Any]) -> list[Any]:
        """As the interpreter's."""


class Interpreter:
    """The forward and the backward part of one Program, ready to run.

    Tensors live in a table with a place for each tensor of the graph. A Run fills places, a Drop clears
    them, so that memory is given back at the instruction that says so. A Send copies to the host and a Fetch
    copies back, both beside the computation. Leaves that it sends keep their place in the table: dropping
    one gives back its memory, fetching it takes memory again.
    """

    def __init__(
        self, joint: Joint, program: Program, state: Callable[[], Sequence[torch.Tensor]] = tuple
    ) -> None:
        """A PlanError says that the Program is not valid for the step; none of it is run then."""
        refuse_invalid(joint, program, state())
        self.joint = joint
        self.program = program
        self.leaves = _leaves_sent(joint, program)
        """Leaves that are sent to the host; those beyond the graph are optimiser state."""
        self.state = state
        """Gives the optimiser's state, which the Program counts from the end of the graph's tensors on."""
        self.travellers: list[Traveller] = []
        """Leaves that the latest forward sent to the host."""
        self._under_way: dict[int, Traveller] = {}
        self._alone: dict[int, torch.Tensor] = {}
        """Leaves that may leave, by their identity, for the backward to come."""
        self._away_between = _away_between(program, self.leaves)
        self._states = random_again(joint, program)
        ran = {line.op for line in program.forward if isinstance(line, Run)}
        self.states = tuple(k for k, op in enumerate(self._states) if op in ran)
        """Which of the random states that are kept forward hands to backward."""
        old, self._views = old_values(joint.graph), Views(joint)
        named = handed_over(joint, program, self.leaves, old)
        handover = without_views(joint, program, self._views, named, old)
        self.saved = handover.saved
        self._again = handover.again
        self._for_views = frozenset(self.saved).difference(named)
        """What is handed over for the sake of views alone."""
        self.hosts = fetched_by_backward(program, self.leaves)
        """Tensors that forward leaves on the host for backward."""
        self.copied = old.intersection(self.saved)
        """Buffers and other updated inputs that backward reads: their value before the step is copied."""
        self.marker: Marker | None = None
        """Told before and after each operator runs, while somebody watches."""
        self.plan: Plan | None = None
        """What was promised, where somebody planned: running out of memory in spite of it is said so."""
        self.graphs: Replays | None = None
        """What runs both parts in place of the lines here, where CUDA graphs were asked for."""
        self.apart: list[Any] = []
        """Gradients of the latest backward behind one an input, until somebody takes them."""
        self._passed: Mapping[int, Any] = {}
        """Results that are arguments of the latest forward and no tensors."""
        self._early: tuple[int, ...] = tuple(joint.graph.updated_early)
        self._undisturbed = _before_first_update(joint, program)
        self.watched = Watched()
        self._drawing, self._copying = Drawing(), Copying()
        loops = partial(Turning, watched=self.watched, drawing=self._drawing, copying=self._copying)
        prepares = Program(handover.forward, program.backward, program.bodies)
        self._forward, self._backward = prepared(joint, prepares, self._states, self.leaves, loops)
        self._quick_forward, self._quick_undisturbed = self._launch_forward()
        self._quick_backward = self._launch_backward(named)
        self._transfers = _lanes(joint, program)
        self._wires: Callable[[str], Wire] | None = None
        self._computes = True
        self._forms: dict[int, Form] = {}
        """How the tensors that forward leaves on the host lay in memory."""
        self._sent: dict[int, Any] = {}
        """Tickets of copies to the host that forward started, by address, for the backward to come."""

    def _launch_forward(self) -> tuple[list[Step], int]:
        """Forward when nobody watches, and how many of its calls come before the first update."""
        joint = self.joint
        held = [t for t in (*joint.inputs, *joint.constants) if t is not None]
        leaving = [t for t in (*joint.outputs, *self.saved) if t is not None]
        launch = Launch(joint, self._views, held, leaving)
        for line in self._forward[: self._undisturbed]:
            launch.add(line)
        before = len(launch.steps)
        for line in self._forward[self._undisturbed :]:
            launch.add(line)
        return launch.steps, before

    def _launch_backward(self, named: Sequence[int]) -> list[Step]:
        joint = self.joint
        later = dict(self._again)
        held = [t for t in (*named, *joint.tangents, *joint.constants) if t not in later]
        gradients = [t for t in joint.gradients if t is not None]
        launch = Launch(joint, self._views, held, self._shared(gradients), self._again)
        for line in self._backward:
            launch.add(line)
        launch.give(gradients)
        return launch.steps

    def _shared(self, gradients: Sequence[int]) -> list[int]:
        """Gradients on memory that something else outlives backward on: another gradient, or what came in."""
        joint, storages = self.joint, self.joint.graph.storages()
        came = (*self.saved, *joint.inputs, *joint.tangents, *joint.constants)
        others = {storages[t] for t in came if t is not None}
        users = Counter(storages[t] for t in gradients)
        return [t for t in gradients if users[storages[t]] > 1 or storages[t] in others]

    @property
    def watching(self) -> bool:
        """Whether somebody is told of each operator."""
        return self.marker is not None or self.watched.by(self.joint) is not None

    @contextmanager
    def lent(
        self,
        copies: Transfers | None = None,
        redraws: Redraws | None = None,
        in_turns: LendsCopies | None = None,
        wires: Callable[[str], Wire] | None = None,
        computes: bool = True,
    ) -> Iterator[None]:
        """Inside, others copy, have random operators draw again, or communicate, where they are given.

        Where nothing ``computes``, as while a part is captured, nothing is put back after an error either.
        """
        before, known = (self._transfers, self._drawing.by), set(self._sent)
        self._transfers, self._drawing.by = copies or before[0], redraws or before[1]
        self._copying.by, self._wires, self._computes = in_turns, wires, computes
        try:
            yield
        finally:
            self._transfers, self._drawing.by = before
            self._copying.by, self._wires, self._computes = None, None, True
            if copies is not None:  # tickets mean nothing to others
                self._sent.update(dict.fromkeys(set(self._sent) - known))

    def forward(self, arguments: list[Any]) -> list[Any]:
        """Results of the step, then what backward needs. Empties ``arguments``.

        That is tensors, then bytes on the host, then random states.
        """
        program_ran()
        self._refuse_fork()
        return self.run_forward(arguments) if self.graphs is None else self.graphs.forward(arguments)

    def _refuse_fork(self) -> None:
        """Refuse a step on CUDA in a process that was forked from the one that has it."""
        if lost_in_fork() and _device(self.joint).type == "cuda":
            raise RunError(
                "the step is on a CUDA device, which cannot be used in a process that is forked from one "
                "that uses it; start it by multiprocessing.get_context('spawn'), and call lowtide.fit there"
            )

    def run_forward(self, arguments: list[Any]) -> list[Any]:
        """The same by the lines of the Program."""
        frame, snapshot = self._frame([None] * len(self._states)), Snapshot()
        try:
            return self._forward_in(frame, arguments, snapshot)
        except BaseException as error:
            try:
                _let_go(error, frame)
            finally:
                if self._computes:
                    snapshot.restore()
            self._explain(error, "Parameters, buffers and gradients are as they were before the call")
            raise

    def _forward_in(self, frame: Frame, arguments: list[Any], snapshot: Snapshot) -> list[Any]:
        joint, table = self.joint, frame.table
        for tensor, value in zip(joint.inputs, arguments, strict=True):
            if tensor is not None:
                table[tensor] = value
        self._set_out(frame, arguments)
        self._passed = {result: arguments[place] for result, place in joint.passed.items()}
        arguments.clear()
        before = {t: table[t].clone() for t in self.copied}
        lines: Sequence[Line | Step] = self._quick_forward if frame.quick else self._forward
        between = self._quick_undisturbed if frame.quick else self._undisturbed
        run_lines(lines[:between], frame, self.marker)
        snapshot.take([table[t] for t in self._early])
        run_lines(lines[between:], frame, self.marker)
        frame.settle()  # backward is another call
        plain = {**joint.plain, **joint.objects, **self._passed}
        outputs = [plain.get(k) if t is None else table[t] for k, t in enumerate(joint.outputs)]
        saved = [before.get(t, table[t]) for t in self.saved]
        hosts = [frame.hosts[t] for t in self.hosts]
        self._hand_over(frame, hosts)
        self.travellers = list(frame.travellers.values())
        self._under_way |= {id(one.value): one for one in self.travellers}
        return [*outputs, *saved, *hosts, *(frame.states[k] for k in self.states)]

    def backward(self, arguments: list[Any]) -> list[Any]:
        """Gradients, one an input of the step, from what forward saved and the incoming gradients."""
        self._refuse_fork()
        return self.run_backward(arguments) if self.graphs is None else self.graphs.backward(arguments)

    def run_backward(self, arguments: list[Any]) -> list[Any]:
        """The same by the lines of the Program."""
        kept, sent, states = len(self.saved), len(self.hosts), len(self.states)
        given = list(arguments)
        arguments.clear()
        frame = self._frame(self._all_states(given[kept + sent : kept + sent + states]))
        try:
            return self._backward_in(frame, given)
        except BaseException as error:
            _let_go(error, frame)
            self._explain(error, "Parameters and gradients are as they were before backward")
            raise

    def _all_states(self, handed: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Random states with those that forward has handed over."""
        known: list[torch.Tensor | None] = [None] * len(self._states)
        for k, value in zip(self.states, handed, strict=True):
            known[k] = value
        return known

    def _backward_in(self, frame: Frame, given: list[Any]) -> list[Any]:
        joint = self.joint
        kept, sent, states = len(self.saved), len(self.hosts), len(self.states)
        for tensor, value in zip(self.saved, given[:kept], strict=True):
            frame.table[tensor] = value
        for tensor, host in zip(self.hosts, given[kept : kept + sent], strict=True):
            frame.hosts[tensor] = host
            ticket = self._sent.pop(host.data_ptr(), None)
            frame.sent[tensor] = ticket, self._forms[tensor]
            frame.outgoing[tensor] = ticket
        incoming = [one for one in given[kept + sent + states :] if isinstance(one, torch.Tensor)]
        for tensor, value in zip(joint.tangents, incoming, strict=True):
            frame.table[tensor] = value
        incoming.clear()
        given.clear()
        self._go_on(frame)
        if not frame.quick:
            self._views.restore(frame.table, self._again)
            for tensor in self._for_views:
                frame.table[tensor] = None
        run_lines(self._quick_backward if frame.quick else self._backward, frame, self.marker)
        frame.settle()
        for one in frame.travellers.values():
            one.end()
        gradients = [
            self._passed.get(k, joint.objects.get(k)) if t is None else frame.table[t]
            for k, t in enumerate(joint.gradients, len(joint.outputs))
        ]
        self.apart = gradients[len(joint.inputs) :]
        return gradients[: len(joint.inputs)]

    def _set_out(self, frame: Frame, arguments: Sequence[Any]) -> None:
        """Everything is on the device when a step begins; which leaves may leave it is seen here."""
        bring_back()
        for one in self._under_way.values():
            one.end()
        self._under_way.clear()
        if not self.leaves:
            return
        size = len(self.joint.graph.tensors)
        state = list(self.state())
        frame.table += state
        places = [*self.joint.inputs, *range(size, size + len(state))]
        able = may_leave([*arguments, *state])
        frame.able = frozenset(t for t, alone in zip(places, able, strict=True) if alone and t is not None)
        self._alone = {id(frame.table[t]): frame.table[t] for t in self.leaves & frame.able}

    def _go_on(self, frame: Frame) -> None:
        """Backward finds leaves as forward left them, or back already."""
        if not self.leaves:
            return
        frame.table += self.state()
        values = {t: frame.table[t] for t in self.leaves if t < len(frame.table)}
        known = {t for t, value in values.items() if value is not None}
        frame.able = frozenset(t for t in known if self._alone.pop(id(values[t]), None) is values[t])
        for tensor, value in values.items():
            one = self._under_way.pop(id(value), None)
            if one is not None and one.value is value:
                one.show()
                frame.travellers[tensor] = one
        ours = {id(one): tensor for tensor, one in frame.travellers.items()}
        bring_back([one for one in everything_away() if ours.get(id(one)) not in self._away_between])

    def _hand_over(self, frame: Frame, hosts: Sequence[torch.Tensor]) -> None:
        """Remember what backward must know of copies that are still under way."""
        looked_at = saved_tensors_are_hooked()
        if looked_at:
            bring_back(frame.travellers.values())
        if hosts and looked_at:
            assert self._transfers is not None
            for tensor in self.hosts:  # a copy that has failed is not handed on
                self._transfers.wait(frame.sent[tensor][0])
            self._transfers.settle()  # somebody is going to look at what is saved
        for tensor, host in zip(self.hosts, hosts, strict=True):
            ticket, self._forms[tensor] = frame.sent[tensor]
            self._sent[host.data_ptr()] = ticket
        while len(self._sent) > _TICKETS + len(hosts):  # of steps whose backward never came
            self._sent.pop(next(iter(self._sent)))

    def _frame(self, states: list[torch.Tensor | None]) -> Frame:
        witness = self.watched.by(self.joint)
        quick = self.marker is None and witness is None and not calls_are_watched()
        size = len(self.joint.graph.tensors)
        frame = Frame(size, states, self._drawing, self._transfers, witness, quick, self._wires)
        for tensor, value in self.joint.constants.items():
            frame.table[tensor] = value
        return frame

    def _explain(self, error: BaseException, model: str) -> None:
        """Raise what is to be said about an error of a planned step; ``model``: the state that it is in."""
        if self.plan is not None:
            told = in_spite_of(self.plan, error, _device(self.joint), model)
            if told is not None:
                raise told from error


def _let_go(error: BaseException, frame: Frame) -> None:
    """Whoever keeps an error keeps its frames: they must not keep the tensors of the step."""
    traceback.clear_frames(error.__traceback__)
    frame.clear()


def _device(joint: Joint) -> torch.device:
    """Where the step runs."""
    devices = (value.device for value in joint.values)
    return next((device for device in devices if device.type == "cuda"), torch.device("cpu"))


def _before_first_update(joint: Joint, program: Program) -> int:
    """How many instructions of forward run before one that updates a buffer on its way."""
    for position, line in enumerate(program.forward):
        if isinstance(line, Run) and joint.graph.ops[line.op].updates:
            return position
    return len(program.forward)


def _leaves_sent(joint: Joint, program: Program) -> frozenset[int]:
    tensors = joint.graph.tensors
    sent = {line.tensor for line in program.instructions if isinstance(line, Send)}
    return frozenset(t for t in sent if t >= len(tensors) or tensors[t].role in RESIDENT_ROLES)


def _away_between(program: Program, leaves: frozenset[int]) -> frozenset[int]:
    """Leaves that are away when forward ends."""
    away: set[int] = set()
    for line in program.forward if leaves else ():
        if isinstance(line, Drop):
            away |= leaves.intersection(line.tensors)
        elif isinstance(line, Fetch):
            away.discard(line.tensor)
    return frozenset(away)


def _lanes(joint: Joint, program: Program) -> Transfers | None:
    """Copies beside the computation, where the Program has any."""
    sent = [line.tensor for line in program.instructions if isinstance(line, Send)]
    known = [joint.values[t].device for t in sent if t < len(joint.values)]
    return transfers(known[0] if known else _device(joint)) if sent else None
