"""A step in several graphs: where torch cannot go on, a graph ends, Python runs, and another graph begins.

In a rehearsal the step's forward runs once, and each graph by its smallest plan. Then it is known which
graphs there are, what goes from one to the next, and what is on the device meanwhile; and the graphs are
planned again, so that together they stay inside the budget (``plan/make/share_budget.py``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

from lowtide.cost.watch import watch_cpu
from lowtide.errors import GraphBreakError, InfeasibleError
from lowtide.execute.breaks.boundary import arrived, silent, used_behind
from lowtide.execute.breaks.called_graphs import CalledGraphs
from lowtide.execute.breaks.forward_record import ForwardRecord
from lowtide.execute.breaks.graph_plans import held_bytes
from lowtide.execute.breaks.split import split_at
from lowtide.execute.breaks.subgraph import Subgraph, Together
from lowtide.execute.compile.aot import KeepsGraphError
from lowtide.execute.compile.family import Family
from lowtide.execute.compile.sharded import unsynchronised
from lowtide.execute.memory.device import Room
from lowtide.plan.make.share_budget import GraphPlan, share_budget, shared_peak
from lowtide.plan.request import PlanRequest
from lowtide.plan.result.plan import Plan
from lowtide.trace.distributed.stand_ins import nothing_sent
from lowtide.trace.eager.layouts import Layouts
from lowtide.trace.refusal import why_broken
from lowtide.trace.step.joint import Leaf
from lowtide.units import format_bytes, format_seconds

__all__ = ["Subgraphs"]

_ROUNDS = 4
"""Graphs are planned so many times at most, each time with less, until a step stays inside the budget."""

_CROSSINGS = 4
"""A step is rehearsed so many times at most, until gradients pass from graph to graph as in eager."""

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
        Nothing of it leaves a trace.
        """

        def alone() -> Any:
            with nothing_sent():
                return run()

        try:
            with unsynchronised(modules):
                record = self._with_graphs_left(alone, modules, batch)
                if record.calls:
                    self._planned(alone, record, verify=verify)
        except BaseException:  # torch keeps what it has compiled for functions of the user
            for one in self.made:
                one.forget()
            raise
        finally:
            if self.together.record is not None:
                self.together.record.clear()
            self.together.record = None
            for one in self.made:
                one.let_go()

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
            for one in self.made:
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
            changed |= one.cross(used.get(one), never.get(one), strides.get(one, {}))
        return changed

    def _plan_and_measure(self, run: Callable[[], Any], record: ForwardRecord, *, verify: bool) -> None:
        problem = self._problem(record)
        budget = self.budget_bytes = self._budget(problem.called)
        beyond = 0
        for left in reversed(range(_ROUNDS)):
            chosen = problem.shared(budget - beyond) if left else None
            try:
                self._adopt(problem, chosen or problem.least, verify=verify and not beyond)
            except InfeasibleError:  # tiles are captured again with what was learned of them
                if not left:
                    raise
                continue
            record.clear()
            self.measured_bytes = _measured(run, record)
            if not beyond and self.together.request.budget.share is not None:
                # a share is one of the whole step: what the code between graphs takes is seen only now
                self.plain_bytes += max(0, self.measured_bytes - self.peak_bytes)
                budget = self.budget_bytes = self._budget(problem.called)
            if self.measured_bytes <= budget:
                return
            if chosen is None:
                break
            beyond += self.measured_bytes - budget
        raise _refused(budget, len(problem.graphs), self.measured_bytes, self.python_bytes)

    def plan_together(self, record: ForwardRecord) -> None:
        """Plan the graphs whose calls were noted, inside the budget as far as is known without a rehearsal.

        An InfeasibleError names a budget that works.
        """
        problem = self._problem(record)
        budget = self.budget_bytes = self._budget(problem.called)
        try:
            chosen = share_budget(problem.graphs, problem.calls, budget, problem.end)
        except InfeasibleError:
            if not self.together.request.on(problem.device).tiles:
                raise
            self.together.tiles = True
            for one in problem.called:
                one.relax()
            chosen = share_budget(problem.graphs, problem.calls, budget, problem.end)
        self._adopt(problem, chosen, verify=False)

    def _problem(self, record: ForwardRecord) -> CalledGraphs:
        problem = CalledGraphs(record)
        self.python_bytes = record.python_bytes
        plain = [graph.plain for graph in problem.graphs]
        self.plain_bytes = shared_peak(problem.calls, plain, problem.end)
        return problem

    def _adopt(self, problem: CalledGraphs, chosen: Sequence[GraphPlan[Plan]], *, verify: bool) -> None:
        """Run by these plans."""
        self.peak_bytes = shared_peak(problem.calls, chosen, problem.end)
        self.together.adopted.clear()
        self.together.order = [problem.called[call.graph] for call in problem.calls]
        for graph, one in zip(problem.called, chosen, strict=True):
            graph.adopt(one.plan, verify=verify)
            graph.arguments = []
            self.together.adopted.append((one.plan.graph, one.plan))

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

        return _OrInParts(made, parted)

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
        budget = self.together.request.budget
        arguments = [a for one in called for a in one.arguments]
        room = Room(arguments) if arguments else called[0].room
        return budget.resolve(self.plain_bytes, room.free_bytes() if budget.auto else None)

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
            plan = one.plan
            if plan is None:
                continue
            assert one.joint is not None
            passing = one.joint.outputs
            out = sum(one.joint.graph.tensors[t].bytes for t in passing if t is not None)
            tiles = f"in {plan.decisions.tiles} tiles, " if plan.decisions.tiles else ""
            held = held_bytes(one.joint, plan.program)
            taken, plain = format_bytes(plan.predicted.peak_bytes), format_bytes(plan.plain.peak_bytes)
            lines.append(
                f"graph {k + 1:<4} {taken} of {plain} plain, {tiles}{plan.overhead:+.1%} on "
                f"{format_seconds(plan.plain.seconds)}; holds {format_bytes(held)} for its "
                f"backward, hands on {format_bytes(out)}"
            )
        return "\n".join(lines)


class _OrInParts:
    """A graph, or what stands for it where torch cannot trace it."""

    def __init__(
        self, graph: Callable[..., Any], parted: Callable[[GraphBreakError], Callable[..., Any]]
    ) -> None:
        self._runs, self._parted = graph, parted
        self._whole = True

    def __call__(self, *arguments: Any) -> Any:
        """The results for these arguments."""
        try:
            return self._runs(*arguments)
        except GraphBreakError as error:
            if not self._whole:
                raise
            self._whole, self._runs = False, self._parted(error)
        return self._runs(*arguments)


def _measured(run: Callable[[], Any], record: ForwardRecord) -> int:
    """What one step takes, with parameters, buffers and the batch; it leaves no trace."""

    def step() -> None:
        record.backward(run())

    with record.undone():
        if record.cuda is None:
            _, seen = watch_cpu(lambda _: step())
            return seen.peak_bytes + record.leaf_bytes
        torch.cuda.synchronize(record.cuda)
        torch.cuda.reset_peak_memory_stats(record.cuda)
        step()
        torch.cuda.synchronize(record.cuda)
        return torch.cuda.max_memory_allocated(record.cuda)


def _refused(budget: int, graphs: int, works: int, python: int) -> InfeasibleError:
    told = (
        f". Code that torch did not capture holds {format_bytes(python)} of it for its backward"
        if python
        else ""
    )
    return InfeasibleError(
        f"no plan fits {format_bytes(budget)} ({budget} bytes) for the {graphs} graphs of this step; the "
        f"smallest budget with a known plan is {format_bytes(works)} ({works} bytes){told}. Give that, or "
        "take a smaller batch; a step without graph breaks may need less (fullgraph=True names the first "
        "break)",
        budget=budget,
        smallest_budget=works,
        floor=0,
        holds_for="nothing",
    )
