"""Decides at each call whether a planned step is captured, replayed, or run as always."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from lowtide.device_internals import is_freed
from lowtide.execute.graphs import reasons
from lowtide.execute.graphs.arena.errors import CannotCaptureError
from lowtide.execute.graphs.arena.layout import ArenaLayout
from lowtide.execute.graphs.beside import Beside
from lowtide.execute.graphs.captured_step import CapturedStep, Pending, undisturbed
from lowtide.execute.graphs.part import Replayable, Tapes, Value
from lowtide.execute.graphs.stopwatch import slower
from lowtide.execute.runtime.copies import Form
from lowtide.execute.runtime.interpreter import Interpreter
from lowtide.graph import RESIDENT_ROLES, Role
from lowtide.torch_internals import calls_are_watched, saved_tensors_are_hooked
from lowtide.trace.step.group import Group
from lowtide.trace.step.joint import Joint
from lowtide.units import format_bytes

__all__ = ["Replay", "replayed"]

_WATCHED, _ORDINARY = 1, 2
"""Calls that run as always at first: one that is watched while libraries set up what they keep, and one that
is timed."""
_TAPES = 3
"""Ways in which users hold what a step gives, each with graphs of its own."""
_SMALL = 1 << 20
"""Results of so many bytes are copied, so that users may keep them."""


class Replay:
    """Forward and backward of one Program, by graphs where that is possible."""

    def __init__(self, interpreter: Interpreter, tapes: Tapes, lost_bytes: int = 0) -> None:
        """``lost_bytes`` is what the plan leaves for the arena to lose."""
        self._interpreter, self._made, self._lost_bytes = interpreter, tapes, lost_bytes
        self.reason = reasons.known_before(interpreter)
        """Why the step runs as always, in words; None where it is replayed."""
        self._calls = 0
        self._tapes: list[CapturedStep] = []
        self._faster: bool | None = None
        """Whether the step is faster by graphs, once that is known."""
        self._pending: Pending | None = None
        """The latest forward, while its backward may still come."""
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
        self._groups = list(_groups(joint))
        self._large: list[set[int]] = [set(), set()]
        """Operators of forward and of backward that allocate much, by their number."""
        self._beside: Beside | None = None
        self._tangents: list[torch.Tensor] | None = None
        """What backward is given beside what forward has saved, without memory, once that was seen."""
        self._layout: ArenaLayout | None = None
        """Where everything lies, once the step's requests for memory are listed."""
        self._always, self._by_graphs = tapes.stopwatch(), tapes.stopwatch()
        self._places: set[tuple[int, ...]] = set()
        """Where the batch lay in all calls; two of the places, if there were several."""
        self._later: str | None = None
        """Why the step is to run as always, once the backward that is still to come has run."""

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
        if not self.replays:
            return "graphs     captured at the fourth step"
        size, rest = format_bytes(self.arena_bytes), format_bytes(self._made.unplanned_bytes)
        return (
            f"graphs     forward and backward each replay as one CUDA graph, in an arena of {size}; "
            f"small tensors and libraries have {rest} by PyTorch's allocator"
        )

    def forward(self, arguments: list[Any]) -> list[Any]:
        """As the interpreter's."""
        tape = self._tape(arguments) if self.reason is None else None
        if tape is None:
            return self._as_always(0, self._interpreter.run_forward, arguments)
        values = list(arguments)
        arguments.clear()
        for k, copy in tape.static.items():
            copy.copy_(values[k])
        self._replay(0, tape.forward)
        token = torch.zeros(1, dtype=torch.uint8)
        self._pending = Pending(is_freed(token), token.data_ptr(), tape)
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
                self._capture_backward(tape, values)
            except Exception as error:  # whatever it is, backward runs as always
                why = _let_go(error)
            except BaseException:  # Ctrl-C, say
                self.release(None)
                raise
            if why is not None:
                return self._backward_as_always(tape, values, why)
        for copy, value in zip(tape.tangents, values[kept:], strict=True):
            copy.copy_(value)
        self._replay(1, tape.backward)
        self._pending = None
        self._interpreter.apart = []
        return [one.now() if isinstance(one, Value) else one for one in tape.gradients]

    def _given(self, values: Sequence[Any]) -> Iterator[tuple[int, torch.Tensor]]:
        """Arguments of forward among those of backward, by their number."""
        return ((k, one) for k, one in zip(self._leaf, values, strict=False) if k is not None)

    def _replayed(self, arguments: Sequence[Any]) -> CapturedStep | None:
        """What has replayed the forward that this is the backward of, if anything."""
        if self._pending is None or None not in self._leaf:
            return None
        ours = arguments[self._leaf.index(None)].data_ptr() == self._pending.token
        return self._pending.tape if ours else None

    def release(self, reason: str | None) -> None:
        """Give the memory back, and run as always from here on where there is a reason for it."""
        self.reason = self.reason or reason
        for tape in self._tapes:
            tape.forward = tape.backward = None
            tape.tape.close()
        self._tapes.clear()
        self._pending = None
        self._made.forget()

    def _as_always(self, part: int, run: Callable[[list[Any]], list[Any]], arguments: list[Any]) -> list[Any]:
        """Run as always; at first see which operators allocate much, and how long it takes."""
        if self.reason is not None or self._calls not in (_WATCHED, _ORDINARY):
            return run(arguments)
        if self._calls == _ORDINARY:
            with self._always.timing(part):
                return run(arguments)
        device = _device(arguments)
        sizes = self._made.sizes(device)
        if self._beside is None:
            self._made.watched()
            self._beside = self._made.beside(self._interpreter, device)
        if part == 1:
            tangents = arguments[len(self._leaf) :]
            self._tangents = [torch.empty_like(one, device="meta") for one in tangents]
        with sizes.watching(self._groups), self._beside.watching(part):
            found = run(arguments)
        self._large[part] = sizes.large
        return found

    def _replay(self, part: int, graph: Replayable | None) -> None:
        assert graph is not None
        assert self._beside is not None
        with self._by_graphs.timing(part):
            self._beside.set_out(part)
            graph.replay()

    def _tape(self, arguments: Sequence[Any]) -> CapturedStep | None:
        """Graphs for this call, captured if need be; None where it runs as always."""
        if not self._may_replay(arguments) or self._waits() or self._slower():
            return None
        addresses = self._fixed(arguments)
        if any(one.fixed != addresses for one in self._tapes):
            self.release(None)  # the model was moved, or the batch
        found = next(
            (k for k in range(len(self._tapes)) if undisturbed([t.tape for t in self._tapes], k)), None
        )
        if found is not None:
            return self._tapes[found]
        if len(self._tapes) == _TAPES:
            self.release("what steps give is held in more ways than graphs are captured for")
            return None
        try:
            return self._capture_forward(arguments, addresses)
        except Exception as error:  # whatever it is, the step runs as always
            why = _let_go(error)
        except BaseException:  # Ctrl-C, say: the next step is captured
            self.release(None)
            raise
        self.release(why)
        return None

    def _fixed(self, arguments: Sequence[Any]) -> dict[int, int]:
        """Where lies what is read in place: parameters, buffers, and a batch that never moves."""
        if len(self._places) < 2:
            self._places.add(tuple(arguments[k].data_ptr() for k in self._batch(arguments)))
        batch = self._batch(arguments) if len(self._places) == 1 else ()
        return {k: arguments[k].data_ptr() for k in (*self._resident, *batch)}

    def _batch(self, arguments: Sequence[Any]) -> Iterator[int]:
        """The tensors of the batch, by argument."""
        return (
            k for k, one in enumerate(arguments) if k not in self._resident and isinstance(one, torch.Tensor)
        )

    def _may_replay(self, arguments: Sequence[Any]) -> bool:
        """Whether a call like this one could be replayed; the first ones are not."""
        watched = self._interpreter.watching or calls_are_watched() or saved_tensors_are_hooked()
        tensors = [one for one in arguments if isinstance(one, torch.Tensor)]
        elsewhere = any(one.device.type != self._made.device_type for one in tensors)
        if elsewhere:  # a number among them, say
            self.reason = "an argument of the step is on the host"
        if watched or elsewhere or not self._made.possible():
            return False
        if self._calls == _WATCHED and self._tangents is None:
            return False  # its backward never came: watch this call
        self._calls += 1
        self._fixed(arguments)
        return self._calls > _ORDINARY

    def _waits(self) -> bool:
        """Whether a backward is still to come, whose memory must stay; looks after those that have ended."""
        if self._pending is not None:
            if not self._pending.gone():
                self._later = "a step begins before the backward of the one before"
                return True
            if self._pending.tape.backward is None:  # it never came
                self.release(None)
            self._pending = None
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

    def _captured(
        self, tape: CapturedStep, part: int, run: Callable[[list[Any]], list[Any]], given: list[Any]
    ) -> tuple[Replayable, list[Any]]:
        assert self._beside is not None
        beside = self._beside
        generators = beside.generators(part)

        def whole(arguments: list[Any]) -> list[Any]:
            with beside.capturing(part):
                return run(arguments)

        return tape.tape.captured(whole, given, self._groups, self._large[part], generators)

    def _listed(self, given: Sequence[Any], device: torch.device) -> tuple[ArenaLayout, list[Replayable]]:
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
            return listing.layout(), [forward, backward]
        finally:
            tape.outputs, tape.gradients = [], []
            listing.close()

    def _capture_forward(self, arguments: Sequence[Any], addresses: dict[int, int]) -> CapturedStep:
        device = _device(arguments)
        given, static = list(arguments), {}
        for k in self._batch(arguments):
            if k not in addresses:
                value = arguments[k]
                copy = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
                static[k] = given[k] = copy.copy_(value)
        listed: list[Replayable] = []
        if self._layout is None:
            self._layout, listed = self._listed(given, device)
        held = {p for tape in self._tapes for one in tape.tape.storages if one.held for p in one.pages}
        tape = CapturedStep(self._made.new(device, self._layout, held, self._room()))
        tape.fixed, tape.static = addresses, static
        batch = (
            one for k, one in enumerate(given) if isinstance(one, torch.Tensor) and k not in self._resident
        )
        tape.batch = {one.untyped_storage().data_ptr() for one in batch}
        self._tapes.append(tape)
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

    def _capture_backward(self, tape: CapturedStep, values: Sequence[Any]) -> None:
        interpreter, kept = self._interpreter, len(self._leaf)
        assert tape.saved is not None
        tape.tangents = [torch.empty_like(one) for one in values[kept:]]
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

    def _backward_as_always(self, tape: CapturedStep, values: Sequence[Any], why: str | None) -> list[Any]:
        """The backward of a forward that was replayed, where it cannot be replayed itself."""
        assert self._beside is not None
        given = {place for place, k in enumerate(self._leaf) if k in tape.fixed}
        saved = [
            values[place] if place in given else tape.tape.again(form, address)
            for place, (form, address) in enumerate(tape.where)
        ]
        saved += map(self._beside.as_saved, tape.others)
        tape.backward, tape.saved = None, None
        found = self._interpreter.run_backward([*saved, *values[len(self._leaf) :]])
        self._pending = None
        del saved
        self.release(why)
        return found

    def _room(self) -> int:
        """Bytes that the budget has for everything but parameters and the batch."""
        plan = self._interpreter.plan
        assert plan is not None
        leaves = [one for one in plan.graph.tensors if one.role in RESIDENT_ROLES and one.alias is None]
        return plan.budget_bytes - plan.beside_bytes - sum(one.bytes for one in leaves) + self._lost_bytes


def replayed(interpreter: Interpreter, how: str, lost_bytes: int) -> Replay | None:
    """What replays a step on CUDA, where that is asked for."""
    wanted = how != "off" and any(value.device.type == "cuda" for value in interpreter.joint.values)
    return Replay(interpreter, Tapes(), lost_bytes) if wanted else None


def _kept(value: torch.Tensor) -> torch.Tensor:
    """A result that users may keep: a copy, if it is small."""
    return value.clone() if value.nbytes <= _SMALL else value


def _let_go(error: Exception) -> str:
    """What has failed, in words; the error holds nothing any more of what ran meanwhile."""
    one: BaseException | None = error
    while one is not None:
        traceback.clear_frames(one.__traceback__)
        one = one.__cause__ or one.__context__
    return reasons.of_error(error)


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
