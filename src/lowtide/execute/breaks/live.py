"""A function that ``torch.compile`` hands over in several graphs, planned while it trains.

Nobody can rehearse it: the backend sees graphs, not the function. The first call shows that there are
several graphs, when the first of them has run already. So the next call runs them by plans that hold least,
and is noted. Before the call after that the graphs are planned together, and share the budget from there on.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lowtide.errors import CaptureError, InfeasibleError
from lowtide.execute.breaks.forward_record import ForwardRecord
from lowtide.execute.breaks.subgraphs import Subgraphs
from lowtide.execute.compile.family import Shapes
from lowtide.execute.planning.other_shapes import Bucket, ShapePlans
from lowtide.plan.request import PlanRequest
from lowtide.trace.eager.nothing_ran import calls_begun

__all__ = ["LiveGraph", "LiveStep", "live_step"]


class _Record(ForwardRecord):
    """The graphs that run in a call of the user's, of which nothing is put back."""

    def __init__(self) -> None:
        super().__init__(())
        self.listening = True

    def restore(self, tensors: Sequence[torch.Tensor]) -> None:
        """Nothing: the step is a real one."""


class LiveStep(Subgraphs):
    """All graphs of what is compiled with the same options."""

    def __init__(self, options: Mapping[str, Any], request: PlanRequest, bucket: Bucket = None) -> None:
        super().__init__(request)
        self.options = options
        self.shapes = Shapes(ShapePlans(bucket))
        self.together.live = True
        self.several = False
        """Whether a call runs several graphs, as far as is known."""
        self._midway = False
        """Whether calls are noted from the middle of one on."""
        self._call = 0
        """The call of the user's in which a graph ran last."""
        self._refused: InfeasibleError | None = None
        """Why no plan fits."""

    def leave(self, why: str) -> None:
        """Tell why a graph runs as it is, once."""
        if why not in self.unplanned:
            warnings.warn(f"no Program runs a part of the compiled function: {why}", stacklevel=2)
        super().leave(why)

    def graph_runs(self) -> None:
        """A graph is about to run: in the same call as others, or in the next one."""
        if self._refused is not None:
            raise self._refused
        call, before = calls_begun(), self._call
        self._call = call
        if call != before:
            self._plan_what_is_known()
        elif call and not self.several:
            self.run_several()

    def run_several(self) -> None:
        """There are several graphs: note what they take, to plan them together."""
        if self.several:
            return
        self.several = True
        request = self.together.request
        if request.offload or request.optimizer is not None:
            raise CaptureError(
                "the function is compiled in several graphs, which count no state of an optimizer, and "
                "offload activations alone: leave out `offload` and `optimizer`, and take what they need off "
                "the budget"
            )
        self.together.record, self._midway = _Record(), True

    def _plan_what_is_known(self) -> None:
        """Plan the graphs together, once all of a call have run."""
        record = self.together.record
        if record is None or not record.calls:
            return
        called = dict.fromkeys(call.graph for call in record.calls)
        evaluated = not any(one.joint is not None and one.joint.tangents for one in called)
        if evaluated or self._midway:
            record.clear()
            self.together.record, self._midway = _Record(), False
            return
        self.together.record = None
        try:
            self.plan_together(record)
        except InfeasibleError as error:
            self._refused = error
            raise
        finally:
            record.clear()
            for one in called:
                one.let_go()


class LiveGraph:
    """One of the graphs: planned by itself, until it turns out that there are others."""

    def __init__(
        self, step: LiveStep, alone: Callable[..., Any] | None, shared: Callable[[], Callable[..., Any]]
    ) -> None:
        """``alone`` is None where it is known that there are others; ``shared`` makes it one of them."""
        self._step, self._alone, self._make = step, alone, shared
        self._shared: Callable[..., Any] | None = None

    def __call__(self, *arguments: Any) -> Any:
        """The results for these arguments."""
        self._step.graph_runs()
        if self._alone is not None and not self._step.several:
            return self._alone(*arguments)
        if self._shared is None:
            self._shared, self._alone = self._make(), None
        return self._shared(*arguments)


_STEPS: weakref.WeakValueDictionary[int, LiveStep] = weakref.WeakValueDictionary()
"""What is compiled with the same options, by the identity of these: torch passes them on with each graph."""


def live_step(options: Mapping[str, Any], request: PlanRequest, bucket: Bucket) -> LiveStep:
    """The step that graphs with these options belong to."""
    known = _STEPS.get(id(options))
    if known is None:
        known = _STEPS[id(options)] = LiveStep(options, request, bucket)
    return known
