"""A function that ``torch.compile`` hands over in several graphs, planned while it trains.

Nobody can rehearse it: the backend sees graphs, not the function. The first call shows that there are
several graphs, when the first of them has run already. So the next call runs them by plans that hold least,
and is noted. Before the call after that the graphs are planned together, and share the budget from there on.
A later call may run others, or these in another order. Nothing can be taken back then; before the call after
it, they are planned together with the calls before.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from lowtide.distributed_internals import local_of
from lowtide.errors import CaptureError, InfeasibleError
from lowtide.execute.breaks.called_graphs import CalledGraphs, calls_in_another_order, recorded_calls
from lowtide.execute.breaks.forward_record import ForwardRecord, has_storage, storage_bytes
from lowtide.execute.breaks.subgraph import Subgraph
from lowtide.execute.breaks.subgraphs import AGAIN, Subgraphs
from lowtide.execute.compile.family import Shapes
from lowtide.execute.planning.other_shapes import Bucket, ShapePlans
from lowtide.plan.request import PlanRequest
from lowtide.trace.eager.nothing_ran import calls_begun
from lowtide.units import format_bytes

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
        self._seen: set[StorageWeakRef] = set()
        """What graphs were given and have made in this call, besides parameters; the memory is not held."""
        self._fresh: list[int] = []
        """For each graph that ran in this call, the bytes that were given to it and are not of these."""

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
            self._plan_what_ran()
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
        if self._midway or not _trained(call.graph for call in record.calls):
            record.clear()
            self.together.record, self._midway = _Record(), False
            return
        self.together.record = None
        try:
            self._plan(CalledGraphs(recorded_calls(record)))
        except InfeasibleError as error:
            self._refused = error
            raise
        finally:
            record.clear()

    def graph_ran(self, arguments: Sequence[Any], results: Any) -> None:
        """A graph has run."""
        if not self._before:
            return
        fresh = self._not_seen(one for one in arguments if not isinstance(one, nn.Parameter))
        made = self._not_seen(results if isinstance(results, tuple | list) else ())
        parts = len(self.together.ran) - len(self._fresh)  # of a graph in parts, each may make as much
        self._fresh += [fresh + (made if parts > 1 else 0)] * parts

    def _not_seen(self, values: Iterable[Any]) -> int:
        """The bytes that no graph before was given or has made."""
        tensors = [local_of(one) for one in values if has_storage(one)]
        weak: Callable[..., Any] = StorageWeakRef
        new = {weak(one.untyped_storage()): storage_bytes(one) for one in tensors}
        size = sum(new[one] for one in new.keys() - self._seen)
        self._seen.update(new)
        return size

    def _plan_what_ran(self) -> None:
        """Plan what the last call has run as well, if that may take more than the budget."""
        ran, fresh = [self.together.planned_as(one) for one in self.together.ran], self._fresh
        self._fresh = []
        self._seen.clear()
        whole = len(fresh) == len(ran)  # else an error has ended it
        if not self._before or not whole or self.together.knows(ran) or not _trained(ran):
            return
        calls = calls_in_another_order(ran, fresh, self._before)
        taken = calls.taken_bytes
        if taken <= self.budget_bytes:
            self.remember(calls, self._before, self.budget_bytes)
            self.together.orders.insert(0, ran)
            return
        told = (
            "the compiled function ran graphs that it was not planned with (another branch or other shapes), "
            f"and may have taken {format_bytes(taken)} of {format_bytes(self.budget_bytes)}. "
        )
        if self._again >= AGAIN:
            warnings.warn(f"{told}So may others: no further graphs are planned", stacklevel=2)
            return
        self._again += 1
        try:
            self._plan(CalledGraphs(calls, self._before))
            told += "They are planned together from here on"
        except InfeasibleError as error:
            self.together.orders.insert(0, ran)
            told += f"So may others like it: {error}"
        warnings.warn(told, stacklevel=2)

    def _plan(self, problem: CalledGraphs) -> None:
        """Plan graphs inside the budget as far as is known without a rehearsal.

        An InfeasibleError names a budget that works.
        """
        self.plain_bytes = problem.plain_bytes
        budget = self.budget_bytes = self._budget(problem.called)
        problem.before = self._with_more(budget)
        try:
            chosen = problem.shared(budget)
        except InfeasibleError:
            if not self.together.request.on(problem.device).tiles:
                raise
            self.together.tiles = True
            for one in problem.called:
                one.relax()
            chosen = problem.shared(budget)
        self.adopt(problem, chosen, verify=False)
        self.remember(problem.now, problem.before, budget)
        for one in self.made:
            one.let_go()
            if one.plans is None and one.stands_for is not None:
                one.forget()  # it runs by the plan of another, which may have a new one
        gc.collect()  # the user trains: nothing that planning has left may take memory


def _trained(graphs: Iterable[Subgraph]) -> bool:
    """Whether these graphs have a backward: else the user evaluates."""
    return any(one.joint is not None and one.joint.tangents for one in graphs)


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
        results = self._shared(*arguments)
        self._step.graph_ran(arguments, results)
        return results


_STEPS: weakref.WeakValueDictionary[int, LiveStep] = weakref.WeakValueDictionary()
"""What is compiled with the same options, by the identity of these: torch passes them on with each graph."""


def live_step(options: Mapping[str, Any], request: PlanRequest, bucket: Bucket) -> LiveStep:
    """The step that graphs with these options belong to."""
    known = _STEPS.get(id(options))
    if known is None:
        known = _STEPS[id(options)] = LiveStep(options, request, bucket)
    return known
