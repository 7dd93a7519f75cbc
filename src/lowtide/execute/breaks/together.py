"""What the graphs of one step have in common."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lowtide.execute.breaks.attempt import Attempt, DoesNotFit
from lowtide.execute.breaks.forward_record import ForwardRecord
from lowtide.graph import Graph
from lowtide.plan.request import PlanRequest
from lowtide.plan.result.plan import Plan
from lowtide.trace.eager.nothing_ran import calls_begun

if TYPE_CHECKING:
    from lowtide.execute.breaks.subgraph import Subgraph

__all__ = ["Together"]


@dataclass(slots=True)
class Together:
    """What the graphs of a step have in common."""

    request: PlanRequest
    record: ForwardRecord | None = None
    """While forward of the step is rehearsed."""
    count: int = 0
    """How many graphs there are."""
    tiles: bool = False
    """Whether graphs may run in tiles."""
    live: bool = False
    """Whether nobody can rehearse the step: they are planned while the user trains."""
    trains: bool = False
    """Whether the step is rehearsed once more while the user trains."""
    adopted: dict[Subgraph, tuple[Graph, Plan]] = field(default_factory=dict)
    """The graphs that were planned together, with what they run by."""
    orders: list[list[Subgraph]] = field(default_factory=list)
    """These graphs as they are called: one order for each rehearsal, the last one first."""
    left_bytes: int = 0
    """What the budget leaves as the step is predicted; less than 0 where it fits only as it was measured."""
    outside_bytes: int = 0
    """What is on the device in any call besides what graphs are given, make and hold: leaves, gradients."""
    limit_bytes: int = 0
    """What a call may be predicted to take."""
    attempt: Attempt | None = None
    """The call of the user's that runs, where it may be taken back."""
    ran: list[Subgraph] = field(default_factory=list)
    """The graphs that ran in the last call of the user's."""
    _call: int = 0
    """Which call that is."""
    _matching: list[list[Subgraph]] = field(default_factory=list)
    """The orders that begin with these."""
    _held: int = 0
    """What they hold and have made."""

    def known(self) -> tuple[dict[Subgraph, tuple[Graph, Plan]], list[list[Subgraph]]]:
        """The graphs that were planned, and their orders."""
        return dict(self.adopted), list(self.orders)

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Inside, the step is rehearsed while the user trains."""
        self.trains = True
        try:
            yield
        finally:
            self.trains = False

    def rehearsed(self, limit: int, peak: int, outside: int) -> None:
        """A step was rehearsed: what it may take, its peak, and what is on the device outside of graphs."""
        self.limit_bytes, self.left_bytes = limit, limit - peak
        self.outside_bytes = max(self.outside_bytes, outside)

    @property
    def cut_short(self) -> bool:
        """Whether graphs are missing from the last call, as far as its order was rehearsed."""
        whole = any(len(order) == len(self.ran) for order in self._matching)
        return bool(self.orders) and (self._call != calls_begun() or not whole)

    def runs(self, graph: Subgraph) -> None:
        """A graph is about to run."""
        call = calls_begun()
        if call != self._call:
            self._call, self.ran, self._held, self._matching = call, [], 0, self.orders
        self.ran.append(graph)

    def fits(self, graph: Subgraph) -> None:
        """A graph is about to run that is ready: see that it fits, in an order that was not rehearsed.

        In another order, what is on the device around it is not known. All leaves and their gradients, and
        all that graphs have made, count then.
        """
        taken = graph.taken()
        needed = taken.peak - self.allowed(taken.given)
        self._held += taken.made + taken.held
        place, either = len(self.ran) - 1, (graph, self.planned_as(graph))
        self._matching = [one for one in self._matching if place < len(one) and one[place] in either]
        if self.orders and not self._matching and needed > 0:
            self.does_not_fit()

    def planned_as(self, graph: Subgraph) -> Subgraph:
        """The graph that was planned for, and takes no less than this one; else this one."""
        other = graph.stands_for
        if other is None:
            return graph
        ours, theirs = graph.taken(), other.taken()
        less = ours.peak <= theirs.peak and ours.held <= theirs.held and ours.made <= theirs.made
        return other if less else graph

    def knows(self, graphs: Sequence[Subgraph]) -> bool:
        """Whether these graphs were planned in this order, from the first one on."""
        return any(order[: len(graphs)] == list(graphs) for order in self.orders)

    def allowed(self, given: int) -> int:
        """The peak that a graph may have which runs now, and is given so much."""
        return self.limit_bytes - self.outside_bytes - self._held + given

    def in_its_place(self) -> Subgraph | None:
        """The graph that is planned for where another one is about to run; None where there is none.

        Best is one behind the same graphs.
        """
        place = len(self.ran) - 1
        longer = [order for order in self.orders if len(order) > place >= 0]
        longer.sort(key=lambda order: order[:place] != self.ran[:place])
        return longer[0][place] if longer else None

    def does_not_fit(self) -> None:
        """A graph that was met later leaves too little to the others: end the call, or go on and tell."""
        if self.live or self.record is not None:
            return
        if self.attempt is not None and self.attempt.can_be_taken_back():
            self.attempt.ended = True
            raise DoesNotFit
        warnings.warn(
            "the step runs graphs that it was not planned with (another branch, or other shapes), and may "
            "take more than its budget. Give `fit` a call that goes there as one of its `examples`",
            stacklevel=2,
        )
