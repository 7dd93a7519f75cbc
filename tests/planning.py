"""Requests in one call, for tests: what to plan, for which budget, with options by name."""

from lowtide.plan.bounds.cut import CutProblem, Effort, solve_cuts
from lowtide.plan.budget import Budget
from lowtide.plan.make.make_plan import make_plan
from lowtide.plan.make.search import search
from lowtide.plan.recompute.annealing.kernel import Annealer, Cooling
from lowtide.plan.request import DeviceRoom, Limits, PlanRequest

_LIMITS = ("time_limit", "seed", "progress")
_ROOM = ("outside_bytes", "free_bytes", "link", "pinned")


def limits_of(options):
    """The limits of a search, taken out of the options."""
    return Limits(**{name: options.pop(name) for name in _LIMITS if name in options})


def request_of(budget, options):
    """What is asked of a plan, and what the device has, taken out of the options."""
    limits = limits_of(options)
    room = DeviceRoom(**{name: options.pop(name) for name in _ROOM if name in options})
    methods = tuple(options.pop("only", ("recompute",)))
    names = [name for name in ("offload", "crossing", "smallest_seconds") if name in options]
    budget = budget if isinstance(budget, Budget) else Budget(bytes=budget)
    return PlanRequest(budget, methods, limits=limits, **{name: options.pop(name) for name in names}), room


def plan_for(graph, costs, budget, **options):
    """The plan for a budget."""
    request, room = request_of(budget, options)
    return make_plan(graph, costs, request, room, **options)


def searched(problem, budget, only=("recompute",), **options):
    """What a search finds inside a budget."""
    return search(problem, budget, limits_of(options), methods=only, **options)


def solved(problem, budget, cuts, *, heavy=(), link=None, relaxation=None, start=None, ties=None, **effort):
    """What a cut program gives."""
    asked = CutProblem(problem, budget, cuts, heavy, link, relaxation)
    return solve_cuts(asked, Effort(**effort), start=start, ties=ties)


def annealed(problem, start, budget, *, moves, seed, **cooling):
    """One round of annealing."""
    return Annealer(problem).round(start, budget, Cooling(**cooling), moves=moves, seed=seed)
