"""A captured function that is compiled at its first call, when its arguments are there to try it with.

Whatever was captured is rehearsed: one step, without a trace, in which every result is held against what the
capture says of it. Where one lies in memory otherwise than torch's tracing says, the function is captured
again with that known.
"""

from __future__ import annotations

import contextlib
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from lowtide.collector import collector_paused
from lowtide.cost.watch import Marker
from lowtide.dynamo_internals import forget_metrics
from lowtide.errors import LowtideError, PlanError, RunError
from lowtide.execute.compile.aot import Aot, Programs, State, Watch
from lowtide.execute.compile.family import Family
from lowtide.execute.compile.traced import called_before
from lowtide.execute.compile.trial import stepped
from lowtide.execute.compile.verify import Verification
from lowtide.execute.kernels.compiler import can_compile
from lowtide.execute.kernels.ways import in_faster_ways
from lowtide.execute.memory.device import Room
from lowtide.execute.memory.out_of_memory import ran_out, while_measuring
from lowtide.execute.runtime.interpreter import Interpreter
from lowtide.execute.runtime.parameter_offload import bring_back
from lowtide.execute.runtime.witness import Witness
from lowtide.execute.tiling.plan_tiles import cut_as_it_runs, has_loop
from lowtide.plan.program.instructions import Program
from lowtide.plan.program.simple import store_all
from lowtide.trace.eager.layouts import Layouts
from lowtide.trace.step.boundary import Boundary
from lowtide.trace.step.joint import Joint, Leaf
from lowtide.trace.step.split_convolutions import ALL, Split

__all__ = ["Differs", "FirstCall", "MeasuringRun", "Unplanned"]

_CAPTURES = 8
"""A function is captured so many times at most: what is learned shows what else is to be learned."""


class FirstCall(ABC):
    """The function, made ready at its first call."""

    def __init__(
        self,
        module: fx.GraphModule,
        leaves: Sequence[Leaf],
        layouts: Layouts,
        family: Family | None = None,
    ) -> None:
        """``family`` are the other shapes of the function."""
        self.module, self.leaves, self.layouts = module, leaves, layouts
        self.family = family or Family(lambda: None)
        self._state: State = tuple
        self._fused = False
        """Whether operators run in groups, as compiled kernels."""
        self._split: Split = frozenset()
        """Which convolutions run in less memory: their backward in two calls, or in slices."""
        self._layout_seconds = 2.0
        """To measure which layout of convolutions is faster then."""
        self._laid_out: fx.GraphModule | None = None
        """The function with the layout that was measured to be faster, once it was."""
        self.interpreters: list[Interpreter] = []
        """What the function was compiled for the last time runs by."""
        self.boundary: Boundary | None = None
        """That of one of several graphs of a step."""
        self._aot: Aot | None = None
        """The function as it was traced, while it is made ready."""
        self._ready: Callable[..., Any] | None = None

    def __call__(self, *arguments: Any) -> Any:
        """The results for these arguments."""
        if self._ready is None:
            try:
                self._ready = self.made(arguments)
            finally:
                self.let_go()
        return self._ready(*arguments)

    def let_go(self) -> None:
        """Hold nothing that only making it ready needs, nor have torch do so."""
        self._aot = None
        forget_metrics()

    def made(self, arguments: Sequence[Any]) -> Callable[..., Any]:
        """The function, captured again until what it gives is what the capture says."""
        if self._fused and not can_compile(arguments):
            self.run_eagerly()
        for _ in range(_CAPTURES):
            witness, self._aot = Witness(self.layouts), None
            ready = self.make(arguments, witness)
            if ready is not None:
                self.family.agrees(self._aot)
                return ready
            self.family.differs(self._aot)
            if not witness.learned:
                break
        raise RunError(
            f"a result lies in memory otherwise than torch says while it traces: {witness.about}. The step "
            "cannot be captured as it runs; report this with your version of torch and the line that it is in"
        )

    def run_eagerly(self) -> None:
        """Take the kernels of eager PyTorch: no others can be had."""
        self._fused = False

    @abstractmethod
    def make(self, arguments: Sequence[Any], witness: Witness) -> Callable[..., Any] | None:
        """The function, rehearsed before the witness; None where what it gave was not as captured."""

    def compiled(self, arguments: Sequence[Any], program: Programs, watch: Watch) -> Callable[..., Any]:
        """The function for the shapes of these arguments, run by a Program."""
        if self._aot is None:
            module = self._as_laid_out(arguments)
            known, fused, split = self.layouts, self._fused, self._split
            self._aot = self.family.aot(
                module, self.leaves, arguments, known, self.boundary, fused=fused, split=split
            )
        self.interpreters.clear()

        def seen(interpreter: Interpreter) -> None:
            self.interpreters.append(interpreter)
            watch(interpreter)

        with collector_paused() if self._ran_before else contextlib.nullcontext():
            return self._aot.compiled(program, seen, self._state)

    def _as_laid_out(self, arguments: Sequence[Any]) -> fx.GraphModule:
        """The function; with fused kernels, its convolutions and products in the faster of several ways."""
        if not self._fused:
            return self.module
        if self._laid_out is None:
            shapes = self.family.shapes
            self._laid_out, shapes.ways = in_faster_ways(
                self.module, arguments, self.layouts, self._layout_seconds, shapes.ways
            )
        return self._laid_out

    @property
    def _ran_before(self) -> bool:
        """Whether the function was traced for many shapes, and ran with another one."""
        return self._aot is not None and self._aot.before is not None

    def rehearsed(
        self,
        function: Callable[..., Any],
        interpreter: Interpreter,
        arguments: Sequence[Any],
        witness: Witness,
        verification: Verification | None = None,
    ) -> bool:
        """Whether all results of one step, which leaves no trace, are what the capture says of them.

        The ``verification`` is shown what a second step leaves behind, which runs as those of training will.
        """
        interpreter.watched.witness = witness
        before = witness.differing
        try:
            with called_before() if self._ran_before else contextlib.nullcontext():
                stepped(function, arguments, self.leaves, interpreter.joint, kept=False)
            if verification is not None and witness.differing == before:
                interpreter.watched.witness = None
                near = verification.near
                verification.compare(
                    stepped(function, arguments, self.leaves, interpreter.joint, near=near), near=near
                )
        except LowtideError:
            raise
        except Exception as error:  # what was captured wrongly may end in anything
            if witness.differing == before or ran_out(error):
                raise
            traceback.clear_frames(error.__traceback__)
        finally:
            interpreter.watched.witness = None
            bring_back()
        return witness.differing == before


class Unplanned(FirstCall):
    """The function run by a Program that needs no figures."""

    def __init__(
        self,
        module: fx.GraphModule,
        leaves: Sequence[Leaf],
        layouts: Layouts,
        program: Programs,
        watch: Watch | None,
        state: State,
        family: Family | None = None,
        *,
        fused: bool = False,
    ) -> None:
        super().__init__(module, leaves, layouts, family)
        self._fused = fused
        self._program, self._watch, self._state = program, watch, state

    def make(self, arguments: Sequence[Any], witness: Witness) -> Callable[..., Any] | None:
        """The function, rehearsed."""
        made: list[Interpreter] = []
        said: list[Split] = []

        def program(joint: Joint) -> Program:
            chosen = self._program(joint)
            said.append(frozenset(chosen.split))
            if said[-1] and said[-1] != self._split:
                raise PlanError("the program is of the step with other convolutions split; plan again")
            return chosen

        try:
            ready = self.compiled(arguments, program, made.append)
        except PlanError:  # a program that is given may be of the step as it really runs: not known yet
            if not self._as_captured(arguments, witness):
                return None
            if self._split:
                raise
            self._aot = None  # or of one some of whose convolutions are split, which older files do not say
            self._split = said[-1] if said and said[-1] else ALL
            with contextlib.suppress(PlanError):
                return self.make(arguments, witness)
            self._split = frozenset()
            raise
        if made and not self.rehearsed(ready, made[-1], arguments, witness):
            return None
        if made and self._watch is not None:
            self._watch(made[-1])
        return ready

    def _as_captured(self, arguments: Sequence[Any], witness: Witness) -> bool:
        """Whether the step, by the plain program, and its tiles run as they were captured."""
        made: list[Interpreter] = []
        plain = self.compiled(arguments, lambda joint: store_all(joint.graph), made.append)
        if not made:
            return True
        if not self.rehearsed(plain, made[-1], arguments, witness):
            return False
        joint = made[-1].joint
        try:
            program = self._program(joint)
        except PlanError:  # it is of another graph: of one with split convolutions, as may be
            return True
        if not has_loop(program):
            return True
        before = witness.learned
        cut_as_it_runs(joint, program, arguments, witness, self._state())
        return witness.learned == before


class Differs(Exception):  # noqa: N818  it is captured again
    """Ends the planning of a step that was not captured as it runs."""


class MeasuringRun:
    """Runs a step once, without a trace; raises Differs where it was not captured as it runs."""

    def __init__(
        self,
        step: FirstCall,
        function: Callable[..., Any],
        interpreter: Interpreter,
        arguments: Sequence[Any],
        witness: Witness,
    ) -> None:
        self._step, self._function, self._interpreter = step, function, interpreter
        self._arguments, self._witness = arguments, witness
        self.ran = False

    def __call__(self, marker: Marker | None = None) -> None:
        """Run it, with a marker that measures it."""
        self._interpreter.marker, self.ran = marker, True
        try:
            same = self._step.rehearsed(self._function, self._interpreter, self._arguments, self._witness)
        except Exception as error:
            told = while_measuring(error, Room(self._arguments).device)
            if told is None:
                raise
            traceback.clear_frames(error.__traceback__)
            raise told from error
        finally:
            self._interpreter.marker = None
        if not same:
            raise Differs
