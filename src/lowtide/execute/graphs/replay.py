"""Decides at each call whether a planned step is captured, replayed, or run as always."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from lowtide.device_internals import is_freed
from lowtide.execute.graphs import reasons
from lowtide.execute.graphs.arena.errors import NoRoomError
from lowtide.execute.graphs.capture.part_capture import Replayable
from lowtide.execute.graphs.captured_step import CapturedStep, Pending
from lowtide.execute.graphs.common_memory import CommonMemory
from lowtide.execute.graphs.part import Value
from lowtide.execute.graphs.step_capture import StepCapture, batch_of
from lowtide.execute.graphs.stopwatch import slower
from lowtide.execute.memory.out_of_memory import forget_frames
from lowtide.execute.runtime.interpreter import Interpreter
from lowtide.execute.runtime.snapshot import Snapshot
from lowtide.graph import Role
from lowtide.torch_internals import calls_are_watched, saved_tensors_are_hooked
from lowtide.units import format_bytes

__all__ = ["Replay", "leave_again"]

_WATCHED, _ORDINARY = 1, 2
"""Calls that run as always at first: one that is watched while libraries set up what they keep, and one that
is timed."""
_TAPES = 3
"""Ways in which users hold what a step gives, each with graphs of its own."""
_WORTHWHILE, _PATIENCE = 50, 16
"""Graphs that are given up for others after fewer replays than this are captured so often at most."""
_MADE_WAY = "evaluation, or a step of another shape, needs the memory of its graphs too often"
_LEFT: weakref.WeakSet[Replay] = weakref.WeakSet()
"""Those whose step is gone while its backward may still come."""
_SMALL = 1 << 20
"""Results of so many bytes are copied, so that users may keep them."""


class Replay:
    """Forward and backward of one Program, by graphs where that is possible."""

    def __init__(
        self, interpreter: Interpreter, common: CommonMemory, lost_bytes: int = 0, why_not: str = ""
    ) -> None:
        """``lost_bytes`` is what the plan leaves for the arena to lose; or it says ``why_not``."""
        self._interpreter, self._common, self._made = interpreter, common, common.tapes
        self.reason = reasons.known_before(interpreter) or why_not or None
        """Why the step runs as always, in words; None where it is replayed."""
        self._calls = 0
        self._tapes: list[CapturedStep] = []
        self._faster: bool | None = None
        """Whether the step is faster by graphs, once that is known."""
        joint = interpreter.joint
        leaves = {t: k for k, t in enumerate(joint.inputs) if t is not None}
        self._leaf = [leaves.get(t) if t not in interpreter.copied else None for t in interpreter.saved]
        self._leaf += [None] * (len(interpreter.hosts) + len(interpreter.states))
        """For everything that is saved: the argument that it is, if it is one."""
        self._resident = {
            k
            for k, t in enumerate(joint.inputs)
            if t is not None and joint.graph.tensors[t].role != Role.INPUT
        }
        self._capture = StepCapture(interpreter, common, self._resident, lost_bytes)
        self._always, self._by_graphs = self._made.stopwatch(), self._made.stopwatch()
        self._places: set[tuple[int, ...]] = set()
        """Where the batch lay in all calls; two of the places, if there were several."""
        self._later: str | None = None
        """Why the step is to run as always, once the backward that is still to come has run."""
        self._replays, self._in_vain = 0, 0
        """Replays since graphs were captured, and how often in a row these were too few."""
        self._gave_way = False
        """Whether graphs were given up that will be captured again."""
        self._early = [k for k, t in enumerate(joint.inputs) if t in joint.graph.updated_early]
        """Arguments of forward that it updates on its way: buffers."""
        common.join(self)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # as where the process ends
            self.release(None)

    @property
    def replays(self) -> bool:
        """Whether graphs were captured."""
        return any(one.backward is not None for one in self._tapes)

    @property
    def arena_bytes(self) -> int:
        """Memory behind the addresses of all graphs."""
        return self._made.size

    def explain(self) -> str:
        """What is replayed, or why nothing is, for people."""
        if self.reason is not None:
            return f"graphs     none: {self.reason}"
        if not self.replays and self._gave_way:
            return "graphs     captured at the next step again: evaluation or another shape took their memory"
        if not self.replays:
            return "graphs     captured at the fourth step"
        size, rest = format_bytes(self.arena_bytes), format_bytes(self._made.unplanned_bytes)
        return (
            f"graphs     {self._counted()}, in an arena of {size}; "
            f"small tensors and libraries have {rest} by PyTorch's allocator"
        )

    def _counted(self) -> str:
        """How many graphs both parts are."""
        forward, backward = next(
            (one.forward.graphs, one.backward.graphs) for one in self._tapes if one.forward and one.backward
        )
        if forward == backward == 1:
            return "forward and backward each replay as one CUDA graph"
        return (
            f"forward replays as {forward} and backward as {backward} CUDA graphs, between which processes "
            "communicate"
        )

    def forward(self, arguments: list[Any]) -> list[Any]:
        """As the interpreter's."""
        tape = self._tape(arguments) if self.reason is None else None
        if tape is None:
            return self._as_always(0, self._interpreter.run_forward, arguments)
        values = list(arguments)
        arguments.clear()
        self._made.alone()
        for k, copy in tape.static.items():
            copy.copy_(values[k])
        with self._put_back(tape, values):
            self._replay(0, tape.forward)
        token = torch.zeros(1, dtype=torch.uint8)
        self._common.pending = Pending(is_freed(token), token.data_ptr(), tape)
        outputs = [_kept(one.now()) if isinstance(one, Value) else one for one in tape.outputs]
        return [*outputs, *(token if k is None else values[k] for k in self._leaf)]

    def backward(self, arguments: list[Any]) -> list[Any]:
        """As the interpreter's; by a graph where forward was."""
        tape, kept = self._replayed(arguments), len(self._leaf)
        if tape is None:
            return self._as_always(1, self._interpreter.run_backward, arguments)
        values = list(arguments)
        arguments.clear()
        if any(tape.fixed.get(k, one.data_ptr()) != one.data_ptr() for k, one in self._given(values)):
            return self._backward_as_always(tape, values, None)  # the model was moved since forward
        if tape.backward is None:
            why = None
            try:
                self._capture.backward(tape, values[kept:])
            except Exception as error:  # whatever it is, backward runs as always
                why = _told(error)
            except BaseException:  # Ctrl-C, say
                self.release(None)
                raise
            if why is not None:
                return self._backward_as_always(tape, values, why)
        for copy, value in zip(tape.tangents, values[kept:], strict=True):
            copy.copy_(value)
        try:
            self._replay(1, tape.backward)
            self._interpreter.apart = []
            return [one.now() if isinstance(one, Value) else one for one in tape.gradients]
        finally:
            self._common.pending = None
            if self in _LEFT:
                self.leave()

    def _given(self, values: Sequence[Any]) -> Iterator[tuple[int, torch.Tensor]]:
        """Arguments of forward among those of backward, by their number."""
        return ((k, one) for k, one in zip(self._leaf, values, strict=False) if k is not None)

    def _replayed(self, arguments: Sequence[Any]) -> CapturedStep | None:
        """What has replayed the forward that this is the backward of, if anything."""
        pending = self._common.pending
        if pending is None or not self._is_own(pending) or None not in self._leaf:
            return None
        ours = arguments[self._leaf.index(None)].data_ptr() == pending.token
        return pending.tape if ours else None

    def _is_own(self, pending: Pending) -> bool:
        """Whether it is a forward of this shape."""
        return any(one is pending.tape for one in self._tapes)

    def release(self, reason: str | None) -> None:
        """Give the memory back, and run as always from here on where there is a reason for it."""
        self.reason = self.reason or reason
        given_up, self._tapes = self._tapes, []
        self._common.remove(given_up)

    @contextlib.contextmanager
    def _put_back(self, tape: CapturedStep, values: Sequence[Any]) -> Iterator[None]:
        """Inside, forward is replayed; where a communication of it fails, buffers are what they were."""
        snapshot = Snapshot()
        if tape.forward is not None and tape.forward.graphs > 1:
            snapshot.take([values[k] for k in self._early])
        try:
            yield
        except BaseException:
            snapshot.restore()
            raise

    def leave(self) -> None:
        """Give the memory back, once no backward is to come: nobody begins a step any more."""
        pending = self._common.pending
        if pending is None or not self._is_own(pending) or pending.gone():
            _LEFT.discard(self)
            self.release("the step was given up")
        else:
            _LEFT.add(self)

    def make_way(self) -> None:
        """Give the memory back, as a step that runs as always needs it; graphs are captured again."""
        pending = self._common.pending
        if not self._tapes or (pending is not None and self._is_own(pending) and not pending.gone()):
            return
        self._in_vain = self._in_vain + 1 if self._replays < _WORTHWHILE else 0
        self._replays, self._gave_way = 0, True
        self.release(_MADE_WAY if self._in_vain == _PATIENCE else None)

    def _as_always(self, part: int, run: Callable[[list[Any]], list[Any]], arguments: list[Any]) -> list[Any]:
        """Run as always; at first see which operators allocate much, and how long it takes."""
        plan = self._interpreter.plan
        if part == 0 and plan is not None:
            self._common.make_way(plan.predicted.peak_bytes, plan.budget_bytes)
        if self.reason is not None or self._calls not in (_WATCHED, _ORDINARY):
            return run(arguments)
        if self._calls == _ORDINARY:
            with self._always.timing(part):
                return run(arguments)
        return self._capture.watch(part, run, arguments, len(self._leaf))

    def _replay(self, part: int, graph: Replayable | None) -> None:
        assert graph is not None
        assert self._capture.beside is not None
        self._replays += part == 0
        with self._by_graphs.timing(part):
            self._capture.beside.set_out(part)
            graph.replay()

    def _tape(self, arguments: Sequence[Any]) -> CapturedStep | None:
        """Graphs for this call, captured if need be; None where it runs as always."""
        if not self._may_replay(arguments) or self._waits() or self._slower():
            return None
        addresses = self._fixed(arguments)
        if any(one.fixed != addresses for one in self._tapes):
            self.release(None)  # the model was moved, or the batch
        found = next((one for one in self._tapes if self._common.is_undisturbed(one)), None)
        if found is not None:
            return found
        if len(self._tapes) == _TAPES:
            self.release("what steps give is held in more ways than graphs are captured for")
            return None
        try:
            return self._captured(arguments, addresses)
        except Exception as error:  # whatever it is, the step runs as always
            why = _told(error)
        except BaseException:  # Ctrl-C, say: the next step is captured
            self.release(None)
            raise
        self.release(why)
        return None

    def _captured(self, arguments: Sequence[Any], addresses: dict[int, int]) -> CapturedStep:
        """Capture forward; where there is no room for it beside other shapes, without them."""
        before = len(self._tapes)
        try:
            return self._capture.forward(arguments, addresses, self._tapes)
        except NoRoomError as error:
            if before or not self._common.has_others(self._tapes):
                raise
            forget_frames(error)
        self.release(None)
        self._common.make_way()
        return self._capture.forward(arguments, addresses, self._tapes)

    def _fixed(self, arguments: Sequence[Any]) -> dict[int, int]:
        """Where lies what is read in place: parameters, buffers, and a batch that never moves."""
        if len(self._places) < 2:
            self._places.add(tuple(arguments[k].data_ptr() for k in batch_of(arguments, self._resident)))
        batch = batch_of(arguments, self._resident) if len(self._places) == 1 else ()
        return {k: arguments[k].data_ptr() for k in (*self._resident, *batch)}

    def _may_replay(self, arguments: Sequence[Any]) -> bool:
        """Whether a call like this one could be replayed; the first ones are not."""
        watched = self._interpreter.watching or calls_are_watched() or saved_tensors_are_hooked()
        tensors = [one for one in arguments if isinstance(one, torch.Tensor)]
        elsewhere = any(one.device.type != self._made.device_type for one in tensors)
        if elsewhere:  # a number among them, say
            self.reason = "an argument of the step is on the host"
        if watched or elsewhere or not self._made.possible():
            return False
        if self._calls == _WATCHED and not self._capture.watched:
            return False  # its backward never came: watch this call
        self._calls += 1
        self._fixed(arguments)
        return self._calls > _ORDINARY

    def _waits(self) -> bool:
        """Whether a backward is still to come, whose memory must stay; looks after those that have ended."""
        pending = self._common.pending
        if pending is not None and not pending.gone():
            self._later = "a step begins before the backward of the one before"
            return True
        self._common.pending = None
        if any(one.backward is None for one in self._tapes):  # it never came
            self.release(None)
        if self._later is not None:
            self.release(self._later)
        return self.reason is not None

    def _slower(self) -> bool:
        """Whether graphs have turned out to take longer; they are given up then."""
        if self._faster is None and self._tapes:
            found = slower(self._always.seconds(), self._by_graphs.seconds())
            if found:
                self.release("the step was measured to take longer as graphs")
            self._faster = None if found is None else not found
        return self.reason is not None

    def _backward_as_always(self, tape: CapturedStep, values: Sequence[Any], why: str | None) -> list[Any]:
        """The backward of a forward that was replayed, where it cannot be replayed itself."""
        assert self._capture.beside is not None
        given = {place for place, k in enumerate(self._leaf) if k in tape.fixed}
        saved = [
            values[place] if place in given else tape.tape.again(form, address)
            for place, (form, address) in enumerate(tape.where)
        ]
        saved += map(self._capture.beside.as_saved, tape.others)
        tape.backward, tape.saved = None, None
        found = self._interpreter.run_backward([*saved, *values[len(self._leaf) :]])
        self._common.pending = None
        del saved
        self.release(why)
        return found


def leave_again() -> None:
    """Give back the memory of steps that are gone, and whose backward cannot come any more."""
    for one in list(_LEFT):
        one.leave()


def _kept(value: torch.Tensor) -> torch.Tensor:
    """A result that users may keep: a copy, if it is small."""
    return value.clone() if value.nbytes <= _SMALL else value


def _told(error: Exception) -> str:
    """What has failed, in words; the error holds nothing any more of what ran meanwhile."""
    forget_frames(error)
    return reasons.of_error(error)
