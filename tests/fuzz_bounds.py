"""Are the planner's proofs true? Tiny steps against a search over every order and every recomputation.

    python -m tests.fuzz_bounds --cases 10000 --seed 0
    python -m tests.fuzz_bounds --only 4711      one case once more

A case draws a step and a budget. What `make_plan` proves, and what each part of the proof says by itself, is
held against the true optimum (tests/plan/every_order.py). With offload, where no such search is possible, it
is held against plans: no bound may be above any plan that exists. A false proof raises an AssertionError with
the number of the case.
"""

import argparse
import random
import sys
import time
from collections import Counter
from itertools import product

from lowtide.errors import InfeasibleError
from lowtide.graph import Phase
from lowtide.plan.bounds.first_heavy import ordered
from lowtide.plan.bounds.lower_bounds import chained, smallest_conceivable, surely_infeasible
from lowtide.plan.bounds.relaxation import relax, skippable
from lowtide.plan.budget import Budget
from lowtide.plan.check.checker import check
from lowtide.plan.make.make_plan import plain_peak
from lowtide.plan.offload.trips import Trip, with_trips
from lowtide.plan.problem.lower import lower
from lowtide.plan.problem.problem import build_problem
from lowtide.plan.problem.reorder import in_order
from lowtide.plan.program.copy_lanes import Link
from lowtide.plan.program.costs import Costs
from lowtide.plan.program.simulate import simulate
from lowtide.plan.result.plan import HoldsFor
from tests.plan.every_order import EveryOrder, TooLargeError
from tests.plan.tiny_steps import tiny_step
from tests.planning import plan_for, solved

SUMMING = 1e-9
"""What adding up seconds may be wrong by, as a share of them."""
OPTIMAL = 2e-6
"""What a plan that is called optimal may take more, as a share of the step."""


class Case:
    """A tiny step, a budget, and the true optimum."""

    def __init__(self, seed):
        self.draw = draw = random.Random(seed)
        self.graph, self.seconds, self.workspace, able = tiny_step(seed, (2, draw.choice([3, 4])))
        self.able = able if draw.random() < 0.5 else []
        forward = [op.phase is Phase.FORWARD for op in self.graph.ops]
        self.backward_free = draw.random() < 0.15
        if self.backward_free:
            self.seconds = [s if early else 0.0 for s, early in zip(self.seconds, forward, strict=True)]
        self.costs = Costs(tuple(self.seconds), tuple(self.workspace))
        self.problem = build_problem(self.graph, self.seconds, workspace_bytes=self.workspace, able=self.able)
        self.relaxation = relax(self.problem)
        self.floor = smallest_conceivable(self.relaxation)
        self.peak = plain_peak(self.graph, self.costs, self.able)
        self.budget = draw.randint(max(1, self.floor - 1), max(self.floor, self.peak - 1))
        again = None
        if not all(self.problem.asked):
            again = [k for k, asked in zip(self.problem.ops, self.problem.asked, strict=True) if asked]
        self.truth = EveryOrder(
            self.graph, self.seconds, self.workspace, self.able, again=again, in_turn=draw.random() < 0.5
        )
        self.everything = sum(self.seconds)

    def plan(self, budget=None, **options):
        return plan_for(
            self.graph,
            self.costs,
            Budget(bytes=budget or self.budget),
            able=self.able,
            **{"time_limit": 2.0, **options},
        )

    def random_cuts(self):
        """Operators that run one after the other in every order, and some that may be heavy."""
        cuts = []
        size = len(self.problem.ops)
        for op in self.draw.sample(range(size), self.draw.randint(1, min(4, size))):
            if chained(self.relaxation, cuts, op):
                cuts.append(op)
        heavy = [op for op in range(size) if self.draw.random() < 0.3]
        return cuts or [size - 1], heavy

    def by_cases(self, link=None):
        """What two operators in either order prove: the lesser bound, None where no order fits; or nothing."""
        order, optional = self.relaxation.precedence, self.relaxation.optional
        able = [v for v in range(len(self.problem.ops)) if not optional >> v & 1]
        pairs = [(u, v) for u in able for v in able if u < v and not order.chained(u, v)]
        for one, other in self.draw.sample(pairs, min(2, len(pairs))):
            results = [
                solved(self.problem, self.budget, [first], link=link, nodes=nodes, relaxation=there)
                for first, then in ((one, other), (other, one))
                for there in [ordered(self.relaxation, first, then)]
                for nodes in [self.draw.choice([0, 1000])]
            ]
            bounds = [self.problem.seconds(result.bound) for result in results if result.feasible]
            yield (one, other), min(bounds, default=None)


def recompute(case):
    """What make_plan proves by recomputation, and every part of the proof; what came of it, in a word."""
    best = case.truth.best(case.budget)
    _check_parts(case, best)
    try:
        plan = case.plan()
    except InfeasibleError as error:
        return _check_refusal(case, error, best)
    scope = HoldsFor.BACKWARD_ONCE if not all(case.problem.asked) else HoldsFor.EVERY_ORDER
    assert plan.bound.holds_for is scope
    assert best is not None, "a plan where none exists"
    optimum = case.everything + best[0]
    assert optimum <= plan.predicted.seconds * (1 + SUMMING), "the reference misses a plan"
    assert plan.bound.seconds <= optimum * (1 + SUMMING), f"bound {plan.bound.seconds} > {optimum}"
    if plan.gap == 0:
        assert plan.predicted.seconds <= optimum * (1 + OPTIMAL), "proven optimal, and is not"
        return "optimal"
    return "not proven" if plan.predicted.seconds <= optimum * (1 + OPTIMAL) else "above optimum"


def _check_refusal(case, error, best):
    assert not (error.proven and best is not None), f"no plan fits {case.budget}, but one does"
    assert error.floor <= error.smallest_budget
    below = case.truth.best(error.floor - 1)
    assert below is None, f"none exists below {error.floor}, but one does"
    assert case.plan(error.smallest_budget).predicted.peak_bytes <= error.smallest_budget
    return "refused" if error.proven else "refused, open" if best is None else "missed"


def _check_parts(case, best):
    """The floor, and cut programs at cuts drawn at random, against the optimum."""
    assert best is None or case.floor <= case.budget, "a plan below the floor"
    cuts, heavy = case.random_cuts()
    result = solved(case.problem, case.budget, cuts, heavy=heavy, relaxation=case.relaxation)
    if best is None:
        return
    assert result.feasible, f"cuts {cuts} are infeasible, heavy {heavy}"
    told = case.problem.seconds(result.bound)
    assert told <= best[0] * (1 + SUMMING) + SUMMING, f"cuts {cuts} say {told}, not {best[0]}; heavy {heavy}"
    assert not surely_infeasible(case.problem, case.relaxation, case.budget)
    for pair, told in case.by_cases():
        assert told is not None, f"cases of {pair} are infeasible"
        assert told <= best[0] * (1 + SUMMING) + SUMMING, f"cases of {pair} say {told}, not {best[0]}"


def offload(case):
    """Bounds with offload against all trips of a few storages in two orders, and against the planner."""
    draw = case.draw
    if draw.random() < 0.5:  # views take time as well, in which copies go on
        free = [not spent and draw.random() < 0.7 for spent in case.seconds]
        times = zip(case.seconds, free, strict=True)
        case.seconds = [draw.uniform(0, 3) if none else spent for spent, none in times]
        case.costs = Costs(tuple(case.seconds), tuple(case.workspace))
    rates = [draw.choice([draw.uniform(0.5, 5), draw.uniform(3, 60)]) for _ in range(2)]
    link = Link(*rates, draw.choice([0.0, 0.1, 1.0]), draw.choice([0.0, 0.0, 0.02]))
    case.problem = build_problem(
        case.graph, case.seconds, workspace_bytes=case.workspace, able=case.able, fine=True
    )
    case.relaxation = relax(case.problem)
    found = [*_trips(case, case.problem, link)]
    found += _trips(case, in_order(case.problem, _random_order(case)), link)
    lower_peaks = sorted({peak for _, peak in found if peak < found[0][1]})
    if lower_peaks:  # a budget that asks for some trip, and has one
        case.budget = draw.choice(lower_peaks)
    best = min((took for took, peak in found if peak <= case.budget), default=None)
    _check_copies(case, found, best, link)
    means = draw.choice([("offload",), ("recompute", "offload")])
    try:
        plan = case.plan(only=means, link=link, time_limit=0.5)
    except InfeasibleError as error:
        assert best is None or not error.proven, f"no plan fits {case.budget}, but one does"
        assert all(peak >= error.floor for _, peak in found)
        return "refused" if error.proven else "refused, open"
    best = min(plan.predicted.seconds, plan.predicted.seconds if best is None else best)
    assert plan.bound.seconds <= best * (1 + SUMMING), f"bound {plan.bound.seconds} > {best}"
    return "optimal" if plan.gap == 0 else "not proven"


def _check_copies(case, found, best, link):
    """The floor and cut programs with a link, against programs that send storages to the host."""
    floor = smallest_conceivable(case.relaxation, offload=True)
    assert all(peak >= floor for _, peak in found), "a program below the floor"
    if best is None:
        return
    needed = sum(case.seconds) - sum(case.seconds[k] for k in skippable(case.graph))
    size = len(case.problem.ops)
    for cuts in [*([op] for op in range(size)), *(case.random_cuts()[0] for _ in range(4))]:
        result = solved(case.problem, case.budget, cuts, link=link, relaxation=case.relaxation)
        assert result.feasible, f"cuts {cuts} are infeasible"
        told = needed + case.problem.seconds(result.bound)
        assert told <= best * (1 + SUMMING), f"cuts {cuts} say {told}, above {best}"
    for pair, told in case.by_cases(link):
        assert told is not None, f"cases of {pair} are infeasible"
        assert needed + told <= best * (1 + SUMMING), f"cases of {pair} say {needed + told}, above {best}"


def _random_order(case):
    """The operators in an order in which each follows those it must."""
    left, order = set(range(len(case.problem.ops))), []
    while left:
        placed = set(order)
        ready = [
            v for v in sorted(left)
            if all(u in placed for u in left | placed if case.relaxation.precedence.planned[v] >> u & 1)
        ]  # fmt: skip
        order.append(case.draw.choice(ready))
        left.discard(order[-1])
    return order


def _trips(case, problem, link, most=400):
    """Seconds and peaks of programs in which one or two storages are away, at all times there are."""
    size = len(problem.ops)
    options = []
    for s, readers in enumerate(problem.readers):
        made = problem.producer[s]
        if made < 0 or problem.kept[s] or not problem.bytes[s]:
            continue
        places = [
            Trip(s, gone, back, late)
            for late in readers
            for early in [max([r for r in readers if r < late], default=made)]
            for gone in range(early + 1, size)
            for back in range(gone, late + 1)
            if gone < late
        ]
        if places:
            options.append(places)
    case.draw.shuffle(options)
    pairs = [(one,) for places in options for one in places]
    if len(options) > 1:
        pairs += product(options[0], options[1])
    case.draw.shuffle(pairs)
    for taken in [(), *pairs[:most]]:
        there = with_trips(problem, taken)
        program = lower(there, ())
        timeline = simulate(
            case.graph, program, workspace_bytes=case.workspace, seconds=case.seconds, link=link
        )
        checked = check(case.graph, program, workspace_bytes=case.workspace)
        yield sum(timeline.seconds), checked.peak_bytes


KINDS = {"recompute": recompute, "offload": offload}


def run(cases, seed):
    """Play so many cases, each known by its number; how many ended in which way."""
    told = Counter()
    for number in range(seed, seed + cases):
        kind = "offload" if number % 4 == 3 else "recompute"
        try:
            told[f"{kind} {KINDS[kind](Case(number))}"] += 1
        except TooLargeError:
            told[f"{kind} too large"] += 1
        except Exception as error:
            raise AssertionError(f"case {number} ({kind}): {error}") from error
    return told


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="the number of the first case")
    parser.add_argument("--only", type=int, help="only the case of this number")
    options = parser.parse_args()
    if options.only is not None:
        options.cases, options.seed = 1, options.only
    began = time.monotonic()
    counts = run(options.cases, options.seed)
    ends = ", ".join(f"{count} {what}" for what, count in sorted(counts.items()))
    told = f"{options.cases} cases from {options.seed}, no false proof: {ends}"
    sys.stdout.write(f"{told}; {time.monotonic() - began:.0f} s\n")


if __name__ == "__main__":
    main()
