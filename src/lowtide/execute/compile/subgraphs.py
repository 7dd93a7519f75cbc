"""A step in several graphs: where torch cannot go on, a graph ends, Python runs, and another graph begins.

In a rehearsal the step's forward runs once, and each graph by its smallest plan. Then it is known which
graphs there are, what goes from one to the next, and what is on the device meanwhile; and the graphs are
planned again, so that together they stay inside the budget (``plan/make/share_budget.py``).
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import fx, nn

from lowtide.errors import InfeasibleError
from lowtide.execute.compile.forward_record import ForwardRecord
from lowtide.execute.compile.subgraph import Subgraph, Together
from lowtide.execute.memory.device import Room
from lowtide.plan.make.share_budget import GraphCall, share_budget, shared_peak
from lowtide.plan.request import PlanRequest
from lowtide.plan.result.plan import Plan
from lowtide.trace.eager.layouts import Layouts
from lowtide.trace.refusal import why_broken
from lowtide.trace.step.joint import Leaf
from lowtide.units import format_bytes, format_seconds

__all__ = ["Subgraphs"]

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
        self.budget_bytes = self.plain_bytes = self.peak_bytes = 0
        self.python_bytes = 0
        """What is saved for backward by code that torch did not capture."""
        self._shapes: Counter[int] = Counter()

    @contextlib.contextmanager
    def rehearsal(self, modules: Sequence[nn.Module], *, verify: bool) -> Iterator[None]:
        """Inside, the step's forward runs once and leaves no trace; then its graphs are planned together."""
        record = self.together.record = ForwardRecord(modules)
        try:
            with record.forward():
                yield
            if record.calls:
                self._plan(record, verify=verify)
        except BaseException:  # torch keeps what it has compiled for functions of the user
            for one in self.made:
                one.forget()
            raise
        finally:
            self.together.record = None
            record.clear()
            for one in self.made:
                one.let_go()

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
        module: fx.GraphModule,
        static: fx.GraphModule,
        leaves: Sequence[Leaf],
        layouts: Layouts,
    ) -> Callable[..., Any]:
        """A graph for the shapes of ``static``, or ``static`` itself where too many others were met."""
        self._shapes[id(module)] += 1
        if self._shapes[id(module)] > _SHAPES:
            self.leave("a graph whose shapes come from data runs as it is, after as many as are planned")
            return static
        made = Subgraph(static, leaves, layouts, self.together)
        self.made.append(made)
        self.together.count += 1
        return made

    def _plan(self, record: ForwardRecord, *, verify: bool) -> None:
        called: list[Subgraph] = list(dict.fromkeys(call.graph for call in record.calls))
        number = {one: k for k, one in enumerate(called)}
        graphs = [one.shared() for one in called]
        around, end = record.around({one: one.held(one.plan) for one in called if one.plan is not None})
        self.python_bytes = record.python_bytes
        calls = [GraphCall(number[one.graph], size) for one, size in zip(record.calls, around, strict=True)]
        plain = [graph.plan(graph.plain_bytes) for graph in graphs]
        self.plain_bytes = shared_peak(calls, plain, end)
        self.budget_bytes = self._budget(called)
        try:
            chosen = share_budget(graphs, calls, self.budget_bytes, end)
        except InfeasibleError as error:
            if self.python_bytes:
                python = format_bytes(self.python_bytes)
                error.args = (
                    f"{error}. Code that torch did not capture holds {python} of it for its backward",
                )
            raise
        self.peak_bytes = shared_peak(calls, chosen, end)
        spans = [graph.plain_bytes - graph.smallest_bytes for graph in graphs]
        above = [one.peak_bytes - graph.smallest_bytes for one, graph in zip(chosen, graphs, strict=True)]
        self.together.share = min(1.0, max(0.0, sum(above) / sum(spans))) if sum(spans) else 1.0
        for graph, one in zip(called, chosen, strict=True):
            graph.adopt(one.plan, verify=verify)

    def _budget(self, called: Sequence[Subgraph]) -> int:
        budget = self.together.request.budget
        arguments = [a for one in called for a in one.arguments]
        return budget.resolve(self.plain_bytes, Room(arguments).free_bytes() if budget.auto else None)

    @property
    def plans(self) -> list[Plan]:
        """The plans of its graphs."""
        return [one.plan for one in self.made if one.plan is not None]

    def explain(self) -> str:
        """The step in words: its graphs, why they end where they do, and the plan of each."""
        lines = [
            f"graphs     {len(self.made)}, planned inside one budget",
            f"budget     {format_bytes(self.budget_bytes)}; plain {format_bytes(self.plain_bytes)}, "
            f"planned {format_bytes(self.peak_bytes)}",
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
            passing = one.joint.outputs if one.joint is not None else ()
            out = sum(plan.graph.tensors[t].bytes for t in passing if t is not None)
            taken, plain = format_bytes(plan.predicted.peak_bytes), format_bytes(plan.plain.peak_bytes)
            lines.append(
                f"graph {k + 1:<4} {taken} of {plain} plain, {plan.overhead:+.1%} on "
                f"{format_seconds(plan.plain.seconds)}; holds {format_bytes(one.held(plan))} for its "
                f"backward, hands on {format_bytes(out)}"
            )
        return "\n".join(lines)
