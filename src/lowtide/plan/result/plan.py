"""Plan: a Program with what it is for, what it takes, and how good it is proven to be."""

from __future__ import annotations

import enum
from collections.abc import Collection
from typing import Any, Literal

import msgspec

from lowtide.graph import Graph, upgraded
from lowtide.plan.program.copy_lanes import Link
from lowtide.plan.program.instructions import Program

__all__ = ["Bound", "Decisions", "HoldsFor", "Plan", "Side", "by_methods"]


class HoldsFor(str, enum.Enum):
    """Which programs something is proven for: of those without tiles that use the methods of the plan."""

    EVERY_ORDER = "every order"
    """Every valid program: any order of the operators that gives the same values, any number of runs."""
    BACKWARD_ONCE = "every order, backward once"
    """Those among them that run no operator of backward again: where costs say that backward is free."""
    NOTHING = "nothing"
    """Nothing is proven."""

    @property
    def words(self) -> str:
        """The set of programs in words, behind what is said of them."""
        return _WORDS[self]


_WORDS = {
    HoldsFor.EVERY_ORDER: "in any order of the operators",
    HoldsFor.BACKWARD_ONCE: "in any order of the operators, with backward run once",
    HoldsFor.NOTHING: "which is not proven",
}
_METHODS = {"recompute": "recomputation", "offload": "offload"}


def by_methods(only: Collection[str]) -> str:
    """The methods that a proof counts with, in words; nothing is proven of tiles."""
    return "by " + " and ".join(word for name, word in _METHODS.items() if name in only)


class Side(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """What one way to run the step takes."""

    peak_bytes: int
    seconds: float


class Bound(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """What no program of a set can beat inside the budget."""

    seconds: float
    overhead: float
    holds_for: HoldsFor = HoldsFor.NOTHING
    """The set of programs; files of earlier versions do not say it."""


class Decisions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """How many storages that backward needs are kept, made again, or sent away; operators run in place.

    Parameters and optimiser state that are sent away count among them.
    """

    kept: int
    recomputed: int
    offloaded: int
    in_place: int
    tiles: int = 0
    """Into how many tiles the step is cut; the others are then counted in one of them."""


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A step inside a budget. Times are those of the costs that it was planned with."""

    budget_bytes: int
    plain: Side
    predicted: Side
    overhead: float
    """Planned over plain time, less 1; with unit costs recomputed over forward cost."""
    bound: Bound
    gap: float
    """(predicted − bound) over predicted seconds: what may be left to gain, as a share of the step."""
    smallest_budget_bytes: int
    """The smallest budget that a plan is known for."""
    decisions: Decisions
    solve_seconds: float
    checked: bool
    method: str
    cost: str
    """Where costs come from: measured, estimated, unit or a file."""
    only: tuple[str, ...]
    beside_bytes: int
    """What was on the device besides the step, counted in every peak."""
    graph: Graph
    program: Program
    workspace_bytes: tuple[int, ...] = ()
    seconds: tuple[float, ...] = ()
    """What each operator was taken to cost."""
    short: dict[int, float] = {}
    """What short second runs were taken to cost, by operator."""
    wire_seconds: dict[int, float] = {}
    """What communications were taken to cost on their lane, by operator, beside ``seconds``."""
    able: tuple[int, ...] = ()
    """Operators that may run in place."""
    offload: tuple[str, ...] = ()
    """What may leave the device besides activations: parameters, optimizer."""
    resident_bytes: int = 0
    """Leaves of the step, and what is beside it: on the device throughout, unless it may leave."""
    interrupted: bool = False
    stopped_by_time: bool = False
    """Whether the time limit ended the search before it had tried everything."""
    link: Link | None = None
    """The rates of copies to the host that the times were predicted with."""
    no_tiles: str = ""
    """Why the step is not cut into tiles, in words, where that was allowed."""
    disturbed: int = 0
    """Operators whose times were measured while the machine was busy."""
    plain_graph: Graph | None = None
    """The step as eager PyTorch runs it, where the plan has other operators: tiles, or fused kernels."""
    plain_seconds: tuple[float, ...] = ()
    """What each operator of that step takes, where this is known."""
    plain_workspace_bytes: tuple[int, ...] = ()
    lowtide: Literal["plan"] = "plan"
    version: Literal[1, 2] = 2

    def upgraded(self) -> Plan:
        """The same as this version writes it, where it is from a file of the version before."""
        return msgspec.structs.replace(
            self, graph=upgraded(self.graph), program=self.program.upgraded(), version=2
        )

    def as_json(self) -> dict[str, Any]:
        """Keys as ``lowtide plan --json`` prints them."""
        names = (
            "budget_bytes", "plain", "predicted", "overhead", "bound", "gap", "smallest_budget_bytes",
            "decisions", "solve_seconds", "checked", "method", "cost", "only", "beside_bytes",
            "resident_bytes", "offload", "interrupted", "stopped_by_time", "disturbed",
        )  # fmt: skip
        found: dict[str, Any] = msgspec.to_builtins({name: getattr(self, name) for name in names})
        return found

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from lowtide.plan.result.shown import plan_html

        return plan_html(self)

    def explain(self) -> str:
        """The plan in words: what is kept, recomputed and sent away, by size and source line."""
        from lowtide.plan.result.explain import explain

        return explain(self)
