"""A function that ``torch.compile`` hands over in several graphs, planned while it trains.

Nobody can rehearse it: the backend sees graphs, not the function. The first call shows that there are
several graphs, when the first of them has run already. So the next call runs them by plans that hold least,
and is noted. Before the call after that the graphs are planned together, and share the budget from there on.
A later call may run others, or these in another order. Nothing can be taken back then; before the call after
it, they are planned together with the calls before.
"""

from __future__ import annotations

import contextlib
import gc
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lowtide.errors import CaptureError, InfeasibleError
from lowtide.execute.breaks.called_graphs import (
    CalledGraphs,
    PassedIn,
    PlannedCalls,
    calls_in_another_order,
    recorded_calls,
)
from lowtide.execute.breaks.forward_record import ForwardRecord, has_storage, storage_bytes
from lowtide.execute.breaks.subgraph import Subgraph
from lowtide.execute.breaks.subgraphs import AGAIN, Subgraphs
from lowtide.execute.compile.family import Shapes
from lowtide.execute.planning.other_shapes import Bucket, ShapePlans
from lowtide.plan.make.share_budget import GraphPlan
from lowtide.plan.request import PlanRequest
from lowtide.plan.result.plan import Plan
from lowtide.torch_internals import storage_id
from lowtide.trace.eager.nothing_ran import calls_begun
from lowtide.units import format_bytes

__all__ = ["LiveGraph", "LiveStep", "live_step"]

_Known = weakref.WeakKeyDictionary[Subgraph, tuple[dict[int, int], dict[int, int]]]
"""Parameters of graphs, and leaves that get a gradient: their storages, with bytes."""

_ORDERS = 64
"""So many orders are remembered, the last ones."""


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
        self._refused: tuple[str, int, int] | None = None
        """Why no plan fits, the budget, and one that works. An error would hold what its traceback does."""
        self._parameters: _Known = weakref.WeakKeyDictionary()
        self._passing = _Passing(self._parameters)
        self._outside_bytes = 0
        """What was on a CUDA device in the call that was noted, besides what passes between graphs."""
        self._over: list[list[Subgraph]] = []
        """Calls that were told of: no plan was found for them."""

    def leave(self, why: str) -> None:
        """Tell why a graph runs as it is, once."""
        if why not in self.unplanned:
            warnings.warn(f"no Program runs a part of the compiled function: {why}", stacklevel=2)
        super().leave(why)

    def graph_runs(self) -> None:
        """A graph is about to run: in the same call as others, or in the next one."""
        if self._refused is not None:
            why, budget, works = self._refused
            raise InfeasibleError(why, budget=budget, smallest_budget=works, floor=0, holds_for="nothing")
        call, before = calls_begun(), self._call
        self._call = call
        if call != before:
            passing, self._passing = self._passing, _Passing(self._parameters)
            ran, self.together.ran = self.together.ran, []
            self._plan_what_is_known()
            self._plan_what_ran(ran, passing)
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
        given = [one for call in record.calls for one in call.alive if isinstance(one, nn.Parameter)]
        problem = CalledGraphs(recorded_calls(record))
        if problem.device == "cuda":
            parameters = {storage_id(one): storage_bytes(one) for one in given}
            self._outside_bytes = record.others_bytes + sum(parameters.values())
        try:
            self._plan(problem)
        except InfeasibleError as error:
            self._refused = str(error), error.budget, error.smallest_budget
            raise
        finally:
            record.clear()

    def graph_ran(self, arguments: Sequence[Any], results: Any) -> None:
        """A graph has run."""
        if self._before:
            self._passing.note(self.together.ran, arguments, results)

    def _plan_what_ran(self, ran: Sequence[Subgraph], passing: _Passing) -> None:
        """Plan what the last call has run as well, if that may take more than the budget."""
        graphs = [self.together.planned_as(one) for one in ran]
        whole = len(passing.calls) == len(ran)  # else an error has ended it
        if not self._before or not whole or self.together.knows(graphs) or not _trained(graphs):
            return
        calls = passing.around(graphs, self._outside_bytes)
        taken, budget = calls.taken_bytes, self.budget_bytes
        if taken <= budget:
            self.remember(calls, self._before, budget)
            self.together.orders = [graphs, *self.together.orders][:_ORDERS]
            return
        if graphs in self._over or self._again > AGAIN:
            return
        self._again += 1
        if self._again > AGAIN:
            behind = (
                "So may others: no further graphs are planned. lowtide.fit plans such calls before it trains"
            )
        else:
            behind = self._planned_with_others(CalledGraphs(calls, self._before))
        warnings.warn(
            "the compiled function ran graphs that it was not planned with (another branch or other shapes), "
            f"and may have taken {format_bytes(taken)} of {format_bytes(budget)}. {behind}",
            stacklevel=2,
        )

    def _planned_with_others(self, problem: CalledGraphs) -> str:
        """Plan graphs together with those before, if they fit; what became of it, in words."""
        try:
            self._plan(problem)
        except InfeasibleError as error:
            self._over = [list(problem.now.graphs), *self._over][:_ORDERS]
            with contextlib.suppress(InfeasibleError):  # then at least as little as leaves the others theirs
                self._adopt(problem, problem.least(self.budget_bytes))
                self.together.orders.remove(list(problem.now.graphs))
            return f"So may others like it: {error}"
        return "They are planned together from here on"

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
        self._adopt(problem, chosen)
        self.remember(problem.now, problem.before, budget)

    def _adopt(self, problem: CalledGraphs, chosen: Sequence[GraphPlan[Plan]]) -> None:
        self.adopt(problem, chosen, verify=False)
        for one in self.made:
            one.let_go()
            if one.plans is None and one.stands_for is not None:
                one.forget()  # it runs by the plan of another, which may have a new one
        gc.collect()  # the user trains: nothing that planning has left may take memory


class _Passing:
    """What passes between the graphs of one call. It holds no memory."""

    def __init__(self, known: _Known) -> None:
        """``known`` are the parameters of graphs."""
        self.calls: list[PassedIn] = []
        self._leaves = 0
        """Bytes of the batch and of buffers."""
        self._seen: dict[int, weakref.ref[torch.Tensor]] = {}
        """Storages that graphs were given or have made, besides parameters, each with a tensor on it."""
        self._carried = 0
        """Bytes that graphs which run as they are were given or have made."""
        self._known = known

    def note(self, ran: Sequence[Subgraph], arguments: Sequence[Any], results: Any) -> None:
        """A graph has run, in parts maybe: the last ones that ``ran``; none of them if it runs as it is."""
        parts = ran[len(self.calls) :]
        given = self._not_seen(one for one in arguments if not isinstance(one, nn.Parameter))
        self._leaves += sum(size for one, size in given if one.grad_fn is None)
        fresh = self._carried + sum(size for one, size in given if one.grad_fn is not None)
        made = sum(size for _, size in self._not_seen(results if isinstance(results, tuple | list) else ()))
        self._carried = 0 if parts else fresh + made
        if len(parts) > 1:  # each may make as much
            fresh += made
        for one in parts:
            if one not in self._known:
                self._known[one] = _parameters(arguments)
            self.calls.append(PassedIn(*self._known[one], fresh))

    def _not_seen(self, values: Iterable[Any]) -> list[tuple[torch.Tensor, int]]:
        """Tensors on storages that no graph before was given or has made, with the bytes of these."""
        found = []
        for one in values:
            if not has_storage(one):
                continue
            key = storage_id(one)
            known = self._seen.get(key)
            if known is None or known() is None:
                self._seen[key] = weakref.ref(one)
                found.append((one, storage_bytes(one)))
        return found

    def around(self, graphs: Sequence[Subgraph], outside: int) -> PlannedCalls:
        """These calls, with what is on the device around each at most."""
        if not outside:
            found: dict[int, int] = {}
            for one in self.calls:
                found |= one.parameters
            outside = sum(found.values())
        return calls_in_another_order(graphs, self.calls, outside + self._leaves)


def _parameters(arguments: Sequence[Any]) -> tuple[dict[int, int], dict[int, int]]:
    """Parameters among these, and all leaves that get a gradient, by their storages, with bytes."""
    tensors = [one for one in arguments if isinstance(one, nn.Parameter)]
    trained = [one for one in arguments if has_storage(one) and one.is_leaf and one.requires_grad]
    first, second = ({storage_id(one): storage_bytes(one) for one in some} for some in (tensors, trained))
    return first, second


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
    if known is None or known.together.request != request:
        known = _STEPS[id(options)] = LiveStep(options, request, bucket)
    return known
