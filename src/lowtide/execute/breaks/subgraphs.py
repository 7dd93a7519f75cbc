"""A step in several graphs: where torch cannot go on, a graph ends, Python runs, and another graph begins.

In a rehearsal the step's forward runs once, and each graph by its smallest plan. Then it is known which
graphs there are, what goes from one to the next, and what is on the device meanwhile; and the graphs are
planned again, so that together they stay inside the budget (``plan/make/share_budget.py``). A call that meets
another graph, for which that leaves too little, is taken back; the step is rehearsed with it, and called
again.
"""

from __future__ import annotations

import contextlib
import gc
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from lowtide.errors import GraphBreakError, InfeasibleError
from lowtide.execute.breaks.attempt import Attempt
from lowtide.execute.breaks.boundary import arrived, silent, used_behind
from lowtide.execute.breaks.called_graphs import CalledGraphs, PlannedCalls, recorded_calls
from lowtide.execute.breaks.forward_record import ForwardRecord
from lowtide.execute.breaks.graph_plans import in_words
from lowtide.execute.breaks.split import OrInParts, split_at
from lowtide.execute.breaks.subgraph import Subgraph
from lowtide.execute.breaks.together import Together
from lowtide.execute.compile.aot import KeepsGraphError
from lowtide.execute.compile.family import Family
from lowtide.execute.compile.sharded import unsynchronised
from lowtide.execute.memory.device import Room
from lowtide.plan.make.share_budget import GraphPlan
from lowtide.plan.request import PlanRequest
from lowtide.plan.result.plan import Plan
from lowtide.trace.distributed.stand_ins import nothing_sent
from lowtide.trace.eager.layouts import Layouts
from lowtide.trace.refusal import why_broken
from lowtide.trace.step.joint import Leaf
from lowtide.units import format_bytes

__all__ = ["AGAIN", "Subgraphs"]

_FIGURES = "budget_bytes", "plain_bytes", "peak_bytes", "measured_bytes", "python_bytes"

_ROUNDS = 4
"""Graphs are planned so many times at most, each time with less, until a step stays inside the budget."""

_CROSSINGS = 4
"""A step is rehearsed so many times at most, until gradients pass from graph to graph as in eager."""

_REHEARSALS = 16
"""The calls of so many rehearsals have to fit together, the last ones."""

AGAIN = 32
"""A step is rehearsed so many times at most while the user trains. Then it goes on, and a warning says so."""

_LATER = 64
"""So many graphs that are met after planning are remembered, to be told of."""

_SHAPES = 8
"""A graph is captured for so many shapes; with others, which then come from data, it runs as it is."""


class Subgraphs:
    """The graphs of one step, and the budget that they share."""

    def __init__(self, request: PlanRequest) -> None:
        self.together = Together(request)
        self.made: list[Subgraph] = []
        self.breaks: dict[str, None] = {}
        """Why graphs end where they do, each once."""
        self.unplanned: dict[str, None] = {}
        """Why graphs run as they are."""
        self.budget_bytes = self.plain_bytes = self.peak_bytes = self.measured_bytes = 0
        self.python_bytes = 0
        """What is saved for backward by code that torch did not capture."""
        self._later: deque[Subgraph] = deque()
        """Graphs that were met after all were planned."""
        self._before: list[PlannedCalls] = []
        """The calls of the rehearsals so far."""
        self.on_retry: Callable[[], None] | None = None
        """Called before a call that was taken back is made again."""
        self._again = 0
        """How many times the step was rehearsed while the user trains."""
        self._promised = 0
        """What the last rehearsal was planned for."""
        self._attempt: Attempt | None = None
        """The calls of the user's, which may be taken back."""

    def rehearse(
        self,
        run: Callable[[], Any],
        modules: Sequence[nn.Module],
        batch: Sequence[torch.Tensor],
        *,
        verify: bool,
    ) -> None:
        """Run the step, plan its graphs together, and measure a step by these plans.

        Where it takes more than the budget, as code between graphs may, they are planned again with less.
        Nothing of it leaves a trace. If it fails, graphs run as they did before.
        """
        before = {one: vars(one).copy() for one in self.made}
        known, figures = self.together.known(), {name: getattr(self, name) for name in _FIGURES}

        def alone() -> Any:
            with nothing_sent():
                return run()

        try:
            with unsynchronised(modules):
                attempt = Attempt(modules, batch)
                attempt.begin(())
                record = self._with_graphs_left(alone, modules, batch)
                attempt.learn(record.changed.values(), before=self._attempt)
                attempt.end()
                self._attempt = attempt
                if record.calls:
                    self._planned(alone, record, verify=verify)
        except BaseException:  # torch keeps what it has compiled for functions of the user
            for one in self.made:
                one.forget()
            for one, was in before.items():
                vars(one).update(was)
            self.together.adopted, self.together.orders = known
            vars(self).update(figures)
            raise
        finally:
            if self.together.record is not None:
                self.together.record.clear()
            self.together.record = None
            for one in self.made:
                one.let_go()

    def call(
        self,
        run: Callable[[], Any],
        modules: Callable[[], Sequence[nn.Module]],
        batch: Sequence[torch.Tensor],
    ) -> Any:
        """A call of the user's; where it meets a graph that does not fit, the step is rehearsed first."""
        attempt = self.together.attempt = self._attempt if self._again < AGAIN else None
        if attempt is None:
            return run()
        try:
            done, results = attempt.called(run, batch, modules)
        finally:
            self.together.attempt = None
            if attempt.stale:
                self._attempt = Attempt(modules(), batch)
        if done:
            if self.together.cut_short:
                attempt.tell_of_errors()
            return results
        self._again += 1
        gc.collect()  # what a call leaves in cycles
        with self.together.training():
            self.rehearse(run, modules(), batch, verify=False)
        gc.collect()
        if self.on_retry is not None:
            self.on_retry()
        return run()

    def _with_graphs_left(
        self, run: Callable[[], Any], modules: Sequence[nn.Module], batch: Sequence[torch.Tensor]
    ) -> ForwardRecord:
        """The same; graphs whose backward the step differentiates, or runs again, are left as they are."""
        while True:
            try:
                return self._recorded(run, modules, batch)
            except KeepsGraphError as error:  # noqa: PERF203
                found = [one for one in self.made if one.interpreter is error.interpreter]
                if not found:
                    raise
                for one in found:
                    one.left = True
                    one.forget()
                    self.made.remove(one)
                    self.together.count -= 1
                self.leave(
                    "a graph whose backward is called inside of the step with create_graph or retain_graph "
                    "runs as it is"
                )

    def _recorded(
        self,
        run: Callable[[], Any],
        modules: Sequence[nn.Module],
        batch: Sequence[torch.Tensor],
        *,
        again: bool = False,
    ) -> ForwardRecord:
        """What is on the device in a step, once gradients pass from graph to graph as in eager."""
        for left in reversed(range(_CROSSINGS)):
            record = self.together.record = ForwardRecord(modules, batch)
            first = not again and left + 1 == _CROSSINGS
            if not self._crossed(run, record, again=not first) or not left:
                break
            record.clear()
        return record

    def _planned(self, run: Callable[[], Any], record: ForwardRecord, *, verify: bool) -> None:
        """Plan the graphs; in tiles where there is no other plan."""
        try:
            self._plan_and_measure(run, record, verify=verify)
        except InfeasibleError as error:
            if not self.together.request.on("cpu" if record.cuda is None else "cuda").tiles:
                raise
            self.together.tiles = True
            for one in dict.fromkeys(call.graph for call in record.calls):
                one.relax()
            record = self._recorded(run, record.modules, record.batch, again=True)
            try:
                self._plan_and_measure(run, record, verify=verify)
            except InfeasibleError:
                why = [one.plans.no_tiles for one in self.made if one.plans and one.plans.no_tiles]
                error.args = (f"{error}\ntiles: {why[-1] if why else 'none helps'}",)
                raise error from None

    def _crossed(self, run: Callable[[], Any], record: ForwardRecord, *, again: bool) -> bool:
        """Whether graphs are to be made again, so that gradients pass from one to the next as in eager.

        ``again``: what others use too is known, as this is not the first rehearsal.
        """
        with record.forward():
            outputs = record.backward(run())
        used = {} if again else used_behind(record.crossings, outputs)
        never = {} if again else silent(record.crossings)
        strides = arrived(record.crossings)
        changed = False
        for one in dict.fromkeys(call.graph for call in record.calls):
            planned = one in self.together.adopted
            changed |= one.cross(used.get(one), never.get(one), strides.get(one, {}), planned=planned)
        return changed

    def _plan_and_measure(self, run: Callable[[], Any], record: ForwardRecord, *, verify: bool) -> None:
        problem = CalledGraphs(recorded_calls(record), self._before)
        self.python_bytes = record.python_bytes
        self.plain_bytes = problem.plain_bytes
        budget = self.budget_bytes = self._budget(problem.called)
        problem.before = self._with_more(budget)
        beyond = 0
        for left in reversed(range(_ROUNDS)):
            chosen: list[GraphPlan[Plan]] | None = None
            if left:
                with contextlib.suppress(InfeasibleError):
                    chosen = problem.shared(budget - beyond)
            try:
                plans = chosen or problem.least(budget - beyond)
                self.adopt(problem, plans, verify=verify and not beyond)
            except InfeasibleError:  # tiles are captured again with what was learned of them
                if not left:
                    raise
                continue
            record.clear()
            self.measured_bytes = record.measured(run)
            if not beyond and self.together.request.budget.share is not None:
                # a share is one of the whole step: what the code between graphs takes is seen only now
                self.plain_bytes += max(0, self.measured_bytes - self.peak_bytes)
                budget = self.budget_bytes = self._budget(problem.called)
                problem.before = self._with_more(budget)
            if self.measured_bytes <= budget:
                outside = problem.outside_bytes(record.leaf_bytes + record.trained_bytes)
                self.together.rehearsed(budget - beyond, self.peak_bytes, outside)
                self.remember(problem.now, problem.before, budget, beyond)
                return
            if chosen is None:
                break
            beyond += self.measured_bytes - budget
        raise problem.refused(budget, self.measured_bytes, self.python_bytes)

    def _with_more(self, budget: int) -> list[PlannedCalls]:
        """The calls before, where a budget that is a share of a larger step than theirs is good for all."""
        more = max(0, budget - self._promised) if self.together.request.budget.share is not None else 0
        return [replace(calls, limit=calls.limit + more) for calls in self._before]

    def remember(
        self, now: PlannedCalls, before: Sequence[PlannedCalls], budget: int, beyond: int = 0
    ) -> None:
        """These calls are planned for the budget, but for what they were measured to take ``beyond``."""
        limit = max(budget - beyond, self.peak_bytes)
        self._before = [*before, replace(now, limit=limit)][-_REHEARSALS:]
        self._promised = budget

    def adopt(self, problem: CalledGraphs, chosen: Sequence[GraphPlan[Plan]], *, verify: bool) -> None:
        """Run by these plans."""
        self.peak_bytes = problem.peak_bytes(chosen)
        for graph, one in zip(problem.free, chosen, strict=False):  # others keep their plans
            graph.adopt(one.plan, verify=verify)
            graph.arguments = []
            self.together.adopted[graph] = one.plan.graph, one.plan
        self.together.orders = [list(calls.graphs) for calls in (problem.now, *reversed(problem.before))]

    def note(self, module: fx.GraphModule) -> None:
        """Remember why a graph ends where it does."""
        reason = getattr(module, "compile_subgraph_reason", None)
        if reason is not None and getattr(reason, "graph_break", False):
            self.breaks[why_broken(reason)] = None

    def leave(self, why: str) -> None:
        """Remember why a graph runs as it is."""
        self.unplanned[why] = None

    def subgraph(
        self,
        static: fx.GraphModule,
        leaves: Sequence[Leaf],
        layouts: Layouts,
        family: Family | None = None,
    ) -> Callable[..., Any]:
        """A graph for the shapes of ``static``, or ``static`` itself where too many others were met.

        They belong to the ``family``, where torch gives a graph with symbols for sizes.
        """
        if family is not None and family.unlike >= _SHAPES:
            self.leave("a graph whose shapes come from data runs as it is, after as many as are planned")
            return static
        made = Subgraph(static, leaves, layouts, self.together, family)
        made.others = [one for one in self.made if one.leaves == made.leaves]
        made.cross_by(made.others[0].boundary if made.others else made.boundary)
        self._add(made)

        def parted(error: GraphBreakError) -> Callable[..., Any]:
            """The graph where torch cannot trace it: in parts, or as it is."""
            self.made.remove(made)
            self.together.count -= 1
            self.breaks[str(error).partition(" Move it out")[0]] = None

            def part(inner: fx.GraphModule, given: Sequence[Leaf]) -> Callable[..., Any]:
                return self.subgraph(inner, given, layouts)

            found = split_at(static, leaves, error.line, part)
            if found is None:
                self.leave(str(error))
            return found or static

        return OrInParts(made, parted)

    def _add(self, made: Subgraph) -> None:
        """One more graph; of those that are met after planning, the last ones are remembered."""
        self.made.append(made)
        if self.together.adopted and self.together.record is None:
            self._later.append(made)
            if len(self._later) > _LATER:
                self.made.remove(self._later.popleft())
                return
        self.together.count += 1

    def _budget(self, called: Sequence[Subgraph]) -> int:
        """What a rehearsal may take; of a share, no less than the one before, as with other shapes."""
        budget = self.together.request.budget
        arguments = [a for one in called for a in one.arguments]
        room = Room(arguments) if arguments else called[0].room
        found = budget.resolve(self.plain_bytes, room.free_bytes() if budget.auto else None)
        return found if budget.share is None else max(found, self._promised)

    @property
    def plans(self) -> list[Plan]:
        """The plans of its graphs."""
        return [one.plan for one in self.made if one.plan is not None]

    def explain(self) -> str:
        """The step in words: its graphs, why they end where they do, and the plan of each."""
        lines = [
            f"graphs     {len(self.made)}, planned inside one budget",
            f"budget     {format_bytes(self.budget_bytes)}; plain {format_bytes(self.plain_bytes)}, "
            f"planned {format_bytes(self.peak_bytes)}, measured {format_bytes(self.measured_bytes)}",
        ]
        if self.python_bytes:
            lines.append(
                f"python     holds {format_bytes(self.python_bytes)} for its backward, outside of graphs"
            )
        lines += [f"break      {why}" for why in self.breaks]
        lines += [f"unplanned  {why}" for why in self.unplanned]
        for k, one in enumerate(self.made):
            if one.plan is not None and one.joint is not None:
                lines.append(f"graph {k + 1:<4} {in_words(one.joint, one.plan)}")
        return "\n".join(lines)
