"""What a captured part does beside its operators: copies to the host, and random numbers drawn again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from lowtide.execute.graphs.arena.errors import CannotCaptureError
from lowtide.execute.graphs.beside.redraws import CapturedDraws, Drawn, SeenDraws
from lowtide.execute.graphs.beside.same_copies import SameCopies, SeenTurns
from lowtide.execute.graphs.beside.wires import Between, There, WireAside, WireBetween
from lowtide.execute.runtime.copies import Form
from lowtide.execute.runtime.interpreter import Interpreter
from lowtide.plan.program.instructions import Instruction, Send
from lowtide.trace.distributed.wires import wire_of

__all__ = ["Beside"]


class Beside:
    """The copies and random numbers of one Program, whose parts are captured."""

    def __init__(self, interpreter: Interpreter, device: torch.device) -> None:
        self._interpreter, self._device = interpreter, device
        self._seen = SeenDraws()
        self._captured: CapturedDraws | None = None
        self._in_turns = SeenTurns()
        self._copies: SameCopies | None = None
        program = interpreter.program
        self._sizes = [self._sent(program.forward), self._sent(program.backward)]

    def _sent(self, lines: Sequence[Instruction]) -> list[int]:
        values = self._interpreter.joint.values
        return [Form.of(values[line.tensor]).storage_bytes for line in lines if isinstance(line, Send)]

    @contextmanager
    def watching(self, part: int, aside: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
        """Inside, a part runs as always; ``aside`` are operators that are not counted."""
        cuda: Any = torch.cuda
        self._seen.begin(part, cuda.default_generators[self._device.index].get_offset())
        with self._interpreter.lent(
            redraws=self._seen, in_turns=self._in_turns, wires=lambda name: WireAside(wire_of(name), aside)
        ):
            yield

    def generators(self, part: int) -> Sequence[torch.Generator]:
        """Those that the graph of a part must know before it is captured."""
        if self._captured is None:
            if self._seen.on_host:
                raise CannotCaptureError("a random operator of the host runs again")
            self._captured = CapturedDraws(self._device, self._seen)
            if any(self._sizes) or self._in_turns.sizes:
                self._copies = SameCopies(self._device, self._sizes, self._in_turns.sizes)
        return self._captured.generators[part]

    @contextmanager
    def capturing(self, part: int, between: Between, there: There) -> Iterator[None]:
        """Inside, a part is captured; ``generators`` was called before.

        Communications happen ``between`` graphs. Copies end with the graph that began them.
        """
        assert self._captured is not None
        self._captured.begin(part)
        if self._copies is not None:
            self._copies.begin(part)

        def apart(call: Callable[[], None]) -> None:
            if self._copies is not None:
                self._copies.join()
            between(call)

        def wire(name: str) -> WireBetween:
            return WireBetween(name, apart, there)

        with self._interpreter.lent(self._copies, self._captured, self._copies, wire, computes=False):
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
        return self._captured.state(value) if self._captured and isinstance(value, Drawn) else value
