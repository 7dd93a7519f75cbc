"""What a captured part does beside its operators: copies to the host, and random numbers drawn again.

Copies write to and read from the same memory of the host in every replay. A random operator that runs again
draws from a generator of its own, which is put where that of the first run was before the part is replayed.
Where that was, counted from the beginning of the part, is seen in a step that runs as always.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from lowtide.execute.calls.random_state import generator_of, random_state, replayed
from lowtide.execute.graphs.arena.errors import CannotCaptureError
from lowtide.execute.runtime.copies import CudaTransfers, Form
from lowtide.execute.runtime.interpreter import Interpreter
from lowtide.plan.program.instructions import Instruction, Send

__all__ = ["Beside"]


class _Drawn(NamedTuple):
    """A place in the numbers of a generator: a part of the step, and the offset from its beginning."""

    part: int
    offset: int


class _Seen:
    """Notes where random operators draw from, in a step that runs as always."""

    def __init__(self) -> None:
        self.firsts: list[list[_Drawn]] = [[], []]
        """Of each operator that will run again, by the part of its first run, in order."""
        self.reruns: list[list[_Drawn]] = [[], []]
        """The place that each of the later runs wants, by part, in order."""
        self.on_host = False
        self._known: dict[bytes, _Drawn] = {}
        self._part = self._start = 0

    def begin(self, part: int, offset: int) -> None:
        """A part begins, with the device's generator there."""
        self._part, self._start = part, offset
        self.firsts[part].clear()
        self.reruns[part].clear()
        if part == 0:
            self._known.clear()

    def before(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor:
        """Remember the state, and where that is."""
        generator, state = generator_of(args, kwargs), random_state(args, kwargs)
        if generator.device.type == "cpu":
            self.on_host = True
        else:
            drawn = _Drawn(self._part, generator.get_offset() - self._start)
            self.firsts[self._part].append(drawn)
            self._known.setdefault(state.numpy().tobytes(), drawn)
        return state

    @contextmanager
    def again(self, state: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[None]:
        """Remember which state was wanted."""
        drawn = self._known.get(state.numpy().tobytes())
        if drawn is not None:
            self.reruns[self._part].append(drawn)
        with replayed(state, args, kwargs):
            yield


class _Captured:
    """Has the random operators of captured parts draw again."""

    def __init__(self, device: torch.device, seen: _Seen) -> None:
        cuda: Any = torch.cuda
        self._seen, self._device = seen, device
        self._generator: Any = cuda.default_generators[device.index]
        self.generators: list[list[torch.Generator]] = [
            [torch.Generator(device) for _ in part] for part in seen.reruns
        ]
        """One for each run but the first, by part."""
        self._starts = [(0, 0), (0, 0)]
        """The generator's seed and offset when the latest replay of each part began."""
        self._part = self._first = self._rerun = 0

    def begin(self, part: int) -> None:
        """A part is captured from here on."""
        self._part, self._first, self._rerun = part, 0, 0

    def before(self, _args: Sequence[Any], _kwargs: Mapping[str, Any]) -> _Drawn:
        """Where it draws from was seen."""
        firsts = self._seen.firsts[self._part]
        if self._first >= len(firsts):
            raise CannotCaptureError("random operators do not run as in the step before")
        self._first += 1
        return firsts[self._first - 1]

    @contextmanager
    def again(self, state: _Drawn, _args: Sequence[Any], _kwargs: Mapping[str, Any]) -> Iterator[None]:
        """Draw from a generator that each replay puts into place."""
        generators, reruns = self.generators[self._part], self._seen.reruns[self._part]
        if self._rerun >= len(reruns) or reruns[self._rerun] != state:
            raise CannotCaptureError("random operators do not run again as in the step before")
        mine = self._generator.graphsafe_get_state()
        self._generator.graphsafe_set_state(generators[self._rerun])
        self._rerun += 1
        try:
            yield
        finally:
            self._generator.graphsafe_set_state(mine)

    def set_out(self, part: int) -> None:
        """A part is going to be replayed: put its generators into place."""
        self._starts[part] = self._generator.initial_seed(), self._generator.get_offset()
        for generator, drawn in zip(self.generators[part], self._seen.reruns[part], strict=True):
            self._put(generator, drawn)

    def state(self, drawn: _Drawn) -> torch.Tensor:
        """The state of the generator there, in the latest replay."""
        return self._put(torch.Generator(self._device), drawn).get_state()

    def _put(self, generator: torch.Generator, drawn: _Drawn) -> torch.Generator:
        seed, start = self._starts[drawn.part]
        generator.manual_seed(seed)
        generator.set_offset(start + drawn.offset)
        return generator


class _Copies(CudaTransfers):
    """Copies to the same memory of the host whenever they are replayed."""

    def __init__(self, device: torch.device, sizes: Sequence[Sequence[int]]) -> None:
        """``sizes`` are those of the copies to the host in forward and in backward, in order."""
        super().__init__(device)
        self._buffers = [[self._pinned(size) for size in part] for part in sizes]
        if not all(one.is_pinned() for part in self._buffers for one in part):
            raise CannotCaptureError("the host has no pinned memory left to offload to")
        self._left: list[torch.Tensor] = []
        self._busy: list[Any] = []

    def begin(self, part: int) -> None:
        """A part is captured from here on."""
        self._left, self._busy = list(reversed(self._buffers[part])), []

    def join(self) -> None:
        """The part ends once its copies have."""
        stream = torch.cuda.current_stream(self._device)
        for lane in self._busy:
            stream.wait_stream(lane)
        self._busy = []

    def take(self, size: int) -> torch.Tensor:
        """Memory for the next copy."""
        if not self._left or self._left[-1].numel() != size:
            raise CannotCaptureError("tensors of another size are offloaded than the plan says")
        return self._left.pop().detach()

    def ticket(self, lane: Any) -> Any:
        """An event inside of the graph."""
        if lane not in self._busy:
            self._busy.append(lane)
        return super().ticket(lane)

    def come_after(self, sent: Any) -> None:
        """Copies of the part before have ended with it."""
        if sent is not None:
            super().come_after(sent)

    def send(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Start, if it is one of the device."""
        if tensor.device.type == "cpu":
            raise CannotCaptureError("a tensor of the host is offloaded")
        return super().send(tensor)

    def settle(self) -> None:
        """Nothing is under way while a graph is captured."""


class Beside:
    """The copies and random numbers of one Program, whose parts are captured."""

    def __init__(self, interpreter: Interpreter, device: torch.device) -> None:
        self._interpreter, self._device = interpreter, device
        self._seen = _Seen()
        self._captured: _Captured | None = None
        self._copies: _Copies | None = None
        program = interpreter.program
        self._sizes = [self._sent(program.forward), self._sent(program.backward)]

    def _sent(self, lines: Sequence[Instruction]) -> list[int]:
        values = self._interpreter.joint.values
        return [Form.of(values[line.tensor]).storage_bytes for line in lines if isinstance(line, Send)]

    @contextmanager
    def watching(self, part: int) -> Iterator[None]:
        """Inside, a part runs as always."""
        cuda: Any = torch.cuda
        self._seen.begin(part, cuda.default_generators[self._device.index].get_offset())
        with self._interpreter.lent(redraws=self._seen):
            yield

    def generators(self, part: int) -> Sequence[torch.Generator]:
        """Those that the graph of a part must know before it is captured."""
        if self._captured is None:
            if self._seen.on_host:
                raise CannotCaptureError("a random operator of the host runs again")
            self._captured = _Captured(self._device, self._seen)
            self._copies = _Copies(self._device, self._sizes) if any(self._sizes) else None
        return self._captured.generators[part]

    @contextmanager
    def capturing(self, part: int) -> Iterator[None]:
        """Inside, a part is captured; ``generators`` was called before."""
        assert self._captured is not None
        self._captured.begin(part)
        if self._copies is not None:
            self._copies.begin(part)
        with self._interpreter.lent(self._copies, self._captured):
            yield
            if self._copies is not None:
                self._copies.join()

    def set_out(self, part: int) -> None:
        """A part is going to be replayed."""
        assert self._captured is not None
        if any(self._seen.reruns):
            self._captured.set_out(part)

    def as_saved(self, value: Any) -> Any:
        """What backward expects in place of something that a captured forward has saved."""
        return self._captured.state(value) if self._captured and isinstance(value, _Drawn) else value
