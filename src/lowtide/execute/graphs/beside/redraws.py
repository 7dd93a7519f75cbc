"""Random operators of captured parts that run again.

One draws from a generator of its own, which is put where that of the first run was before a replay. That
place, counted from the beginning of the part, is seen in a step that runs as always.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from lowtide.execute.calls.random_state import generator_of, random_state, replayed
from lowtide.execute.graphs.arena.errors import CannotCaptureError

__all__ = ["CapturedDraws", "Drawn", "SeenDraws"]


class Drawn(NamedTuple):
    """A place in the numbers of a generator: a part of the step, and the offset from its beginning."""

    part: int
    offset: int


class SeenDraws:
    """Notes where random operators draw from, in a step that runs as always."""

    def __init__(self) -> None:
        self.firsts: list[list[Drawn]] = [[], []]
        """Of each operator that will run again, by the part of its first run, in order."""
        self.reruns: list[list[Drawn]] = [[], []]
        """The place that each of the later runs wants, by part, in order."""
        self.on_host = False
        self._known: dict[bytes, Drawn] = {}
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
            drawn = Drawn(self._part, generator.get_offset() - self._start)
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


class CapturedDraws:
    """Has the random operators of captured parts draw again."""

    def __init__(self, device: torch.device, seen: SeenDraws) -> None:
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

    def before(self, _args: Sequence[Any], _kwargs: Mapping[str, Any]) -> Drawn:
        """Where it draws from was seen."""
        firsts = self._seen.firsts[self._part]
        if self._first >= len(firsts):
            raise CannotCaptureError("random operators do not run as in the step before")
        self._first += 1
        return firsts[self._first - 1]

    @contextmanager
    def again(self, state: Drawn, _args: Sequence[Any], _kwargs: Mapping[str, Any]) -> Iterator[None]:
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

    def state(self, drawn: Drawn) -> torch.Tensor:
        """The state of the generator there, in the latest replay."""
        return self._put(torch.Generator(self._device), drawn).get_state()

    def _put(self, generator: torch.Generator, drawn: Drawn) -> torch.Generator:
        seed, start = self._starts[drawn.part]
        generator.manual_seed(seed)
        generator.set_offset(start + drawn.offset)
        return generator
