"""Changes valid Programs and plans by the thousand: ``python -m tests.fuzz_plans --cases 10000``.

What the checker accepts must run right: on symbols (tests/symbolic.py), and small steps of torch by the
interpreter, whose results, gradients, buffers and random state are compared with the plain step bit for bit. What
it refuses although it runs right is counted by the rule that refuses it. Each case is made from its number alone,
so that one that fails can be looked at again with ``--only``.
"""

from __future__ import annotations

import argparse
import functools
import math
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

import msgspec
import torch

from lowtide.documents import decode_document, encode_document
from lowtide.errors import LowtideError
from lowtide.execute.runtime.in_place import able_in_place
from lowtide.graph import LOOP
from lowtide.plan.check.checker import check
from lowtide.plan.make.plan_loop import LoopedStep, TileStep, plan_loop
from lowtide.plan.program.costs import Costs
from lowtide.plan.program.in_place import with_in_place
from lowtide.plan.program.instructions import Loop, Run
from lowtide.plan.program.simple import offload_all, recompute_all, store_all
from lowtide.plan.request import DeviceRoom, PlanRequest
from lowtide.plan.result.plan import Plan, Side
from lowtide.plan.result.validate import valid_plan
from tests import torch_steps
from tests.mutate import structure
from tests.mutate_plans import mutated, with_other_figure
from tests.symbolic import WrongError, runs_right
from tests.wild_steps import looped_step, planned, programs_of, wild_step

replace = msgspec.structs.replace

_MUTATIONS = 6
"""So many changes of one valid Program are tried."""
KINDS = ("symbols", "symbols", "symbols", "symbols", "symbols", "torch", "torch", "torch", "figures", "files")
_FREE = {
    "solve_seconds",
    "budget_bytes",
    "smallest_budget_bytes",
    "seconds",
    "workspace_bytes",
    "able",
    "short",
}
_FREE |= {"only", "offload", "link"}
"""Figures that may change in a way that contradicts nothing."""


@dataclass
class Tally:
    """What became of the cases."""

    cases: Counter = field(default_factory=Counter)
    refused: Counter = field(default_factory=Counter)
    """By rule: what was refused although it runs right."""
    failures: list = field(default_factory=list)

    def add(self, kind, number, refused, wrong):
        """``refused`` is the error of the checker, ``wrong`` why it does not run right, or unknown."""
        self.cases[kind] += 1
        if refused is None and wrong is not None:
            self.failures.append(f"{kind} {number}: accepted, and {wrong}")
        if refused is not None:
            self.cases[f"{kind} refused"] += 1
        if refused is not None and wrong is None:
            self.refused[kind, getattr(refused, "rule", None)] += 1


@functools.lru_cache(maxsize=4)
def base(number):
    """A step on symbols with a valid Program of it."""
    step, turned = looped_step(number) if number % 4 == 3 else (wild_step(number), lambda program: program)
    return step, programs_of(number, step, turned)


def on_symbols(number, tally):
    step, program = base(number // _MUTATIONS)
    graph, _, workspace, able = step
    changed = program
    if number % _MUTATIONS:  # the first is as it is
        changed = mutated(random.Random(f"symbols {number}"), graph, program, able)
    refused = wrong = None
    peak = most = 0
    try:
        leaving = ("parameters",)
        peak = check(graph, changed, workspace_bytes=workspace, offload=leaving, able=able).peak_bytes
        if not same_tiles(program, changed):  # whoever runs it compares tiles with those that were captured
            refused = LowtideError("other tiles")
    except LowtideError as error:
        refused = error
    try:
        most = runs_right(graph, changed, able, program)
    except WrongError as error:
        wrong = str(error)
    if refused is None and wrong is None and most > peak:
        wrong = f"takes {most} bytes, more than {peak}"
    if changed is program and refused is not None:
        tally.failures.append(f"symbols {number}: a valid program is refused: {refused}")
    tally.add("symbols", number, refused, wrong)


def same_tiles(one, other):
    """Whether the loops of two Programs have the same tiles."""
    loops = [{x.op: x.tiles for x in p.instructions if isinstance(x, Loop)} for p in (one, other)]
    return all(loops[0].get(op, tiles) == tiles for op, tiles in loops[1].items())


def _planner(draw, graph, able, leaving=True):
    """A valid Program of a captured step."""
    kinds = [store_all, recompute_all, functools.partial(recompute_all, each_use=True), offload_all, None]
    kind = draw.choice(kinds)
    if kind is None:
        step = graph, [1.0] * len(graph.ops), [0] * len(graph.ops), able
        made = planned(draw.randrange(100), step, draw, leaving=leaving)
        if made is not None:
            return made.program
        kind = store_all
    return with_in_place(graph, kind(graph), able if draw.random() < 0.8 else ())


def _in_bodies(draw, subject):
    """The Program of a step in tiles, with bodies that recompute, offload and run in place."""
    whole, program = subject.joint, subject.tiles
    joints = [joint for call in whole.calls if hasattr(call.target, "bodies") for joint in call.target.bodies]
    bodies = []
    for body, joint in zip(program.bodies, joints, strict=True):
        able = tuple(sorted(able_in_place(joint)))
        loops = any(op.kind == LOOP for op in body.graph.ops)
        made = body.program if loops else _planner(draw, body.graph, able, leaving=False)
        bodies.append(replace(body, program=made, able=able))
    return replace(program, bodies=tuple(bodies))


@functools.cache
def plain(name):
    """What a step leaves behind where every operator runs once, in order."""
    subject = torch_steps.subject(name)
    return subject.run(subject.tiles or store_all(subject.joint.graph))


@functools.lru_cache(maxsize=8)
def torch_base(number):
    draw = random.Random(f"torch {number}")
    name = draw.choice([*torch_steps.MODELS, *torch_steps.TILED])
    subject = torch_steps.subject(name)
    if subject.tiles is not None:
        return name, _in_bodies(draw, subject)
    return name, _planner(draw, subject.joint.graph, able_in_place(subject.joint))


@functools.cache
def able_of(name):
    return sorted(able_in_place(torch_steps.subject(name).joint))


def in_torch(number, tally):
    name, program = torch_base(number // _MUTATIONS)
    subject = torch_steps.subject(name)
    draw, changed = random.Random(f"torch {number}"), program
    if number % _MUTATIONS:
        changed = mutated(draw, subject.joint.graph, program, able_of(name))
    refused = wrong = None
    try:
        found = subject.run(changed)
        short = any(isinstance(x, Run) and x.short for x in changed.instructions)
        if not torch_steps.alike(found, plain(name), 1e-4 if short else 0.0):
            wrong = f"{name} differs from the plain step"
    except LowtideError as error:
        refused, wrong = error, "not run"
    except Exception as error:
        wrong = f"{name} crashes: {error!r}"
    if changed is program and refused is not None:
        tally.failures.append(f"torch {number}: a valid program is refused: {refused}")
    tally.add("torch", number, refused, wrong)


@functools.cache
def _tiled_plan(name):
    """A plan in tiles of a captured step."""
    subject = torch_steps.subject(name)
    whole, program = subject.joint, subject.tiles
    loops = [call.target for call in whole.calls if hasattr(call.target, "tiles")]
    steps, which = [], []
    for region in loops:
        numbers = {id(joint): len(steps) + k for k, joint in enumerate(region.bodies)}
        steps += [TileStep(j.graph, _costs(j.graph), able_in_place(j)) for j in region.bodies]
        which.append([numbers[id(tile.joint)] for tile in region.tiles])
    loop = next(line for line in program.forward if isinstance(line, Loop))
    boxes = [tile.over for tile in loop.tiles]
    looped = LoopedStep(
        whole.graph, _costs(whole.graph), boxes, which, steps, able_in_place(whole), loop.cut, loop.end
    )
    request = PlanRequest.of(10**6, only="recompute,tile", time_limit=0.1)
    return plan_loop(looped, Side(10**5, 100.0), request, DeviceRoom())


def _costs(graph):
    return Costs((1.0,) * len(graph.ops), (8,) * len(graph.ops), "estimated")


@functools.lru_cache(maxsize=4)
def plan_of(number):
    """A valid plan, in tiles or not."""
    if number % 5 == 4:
        return _tiled_plan(("rows in tiles", "image in tiles", "image outside")[number // 5 % 3])
    for attempt in range(number * 50, number * 50 + 50):
        made = planned(attempt, wild_step(attempt), random.Random(f"plan {attempt}"))
        if made is not None:
            return made
    raise AssertionError("no plan fits")


def with_figures(number, tally):
    plan, draw = plan_of(number // _MUTATIONS), random.Random(f"figures {number}")
    if not number % _MUTATIONS:
        valid_plan(plan)
    name, changed = with_other_figure(draw, plan)
    if changed is None:
        tally.cases["figures"] += 1
        return
    refused = None
    try:
        valid_plan(changed if _no_number(changed, name) else decode_document(encode_document(changed), Plan))
    except LowtideError as error:
        refused = error
    tiled = plan.decisions.tiles
    free = (
        name in _FREE
        or (tiled and name == "plain.peak_bytes")
        or (name == "resident_bytes" and not changed.resident_bytes)
    )
    wrong = f"{name} was changed" if not free or _no_number(changed, name) else None
    tally.add("figures", number, refused, wrong if refused is None else wrong or "it may be")


def _no_number(plan, name):
    value = plan
    for part in name.split("."):
        value = getattr(value, part)
    return isinstance(value, int | float) and not 0 <= value < math.inf


def in_files(number, tally):
    """A damaged plan file: refused with an error of ours, or its program runs right."""
    plan, draw = plan_of(number // _MUTATIONS), random.Random(f"files {number}")
    if plan.decisions.tiles:
        plan = plan_of(0)
    data = structure(draw, encode_document(plan).strip())
    refused = wrong = None
    try:
        read = valid_plan(decode_document(data, Plan))
        runs_right(read.graph, read.program, read.able, read.program)
    except LowtideError as error:
        refused, wrong = error, "not run"
    except WrongError as error:
        wrong = str(error)
    except Exception as error:
        wrong = f"crashes: {error!r}"
    tally.add("files", number, refused, wrong)


CHECKS = {"symbols": on_symbols, "torch": in_torch, "figures": with_figures, "files": in_files}


def run(cases, seed=0, only=None):
    """The tally of so many cases."""
    tally = Tally()
    counts = dict.fromkeys(CHECKS, 0)
    torch.set_num_threads(1)
    if only is not None:
        kind, _, number = only.partition(" ")
        CHECKS[kind](int(number), tally)
        return tally
    for k in range(cases):
        kind = KINDS[k % len(KINDS)]
        CHECKS[kind](seed * 10_000_000 + counts[kind], tally)
        counts[kind] += 1
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="one case, as a failure names it: 'symbols 17'")
    options = parser.parse_args()
    start = time.perf_counter()
    tally = run(options.cases, options.seed, options.only)
    for kind in CHECKS:
        if tally.cases[kind]:
            sys.stdout.write(f"{kind}: {tally.cases[kind]} cases, {tally.cases[f'{kind} refused']} refused\n")
    for (kind, rule), count in sorted(tally.refused.items(), key=lambda item: -item[1]):
        sys.stdout.write(f"  refused although it runs right: {count} {kind}, rule {rule or 31}\n")
    for failure in tally.failures:
        sys.stdout.write(f"FAILED {failure}\n")
    sys.stdout.write(f"{len(tally.failures)} failures, {time.perf_counter() - start:.0f} s\n")
    sys.exit(bool(tally.failures))


if __name__ == "__main__":
    main()
