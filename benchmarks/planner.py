"""The planner against true optima, on the U-Net document, and on captured steps of the zoo.

    python benchmarks/planner.py small [--count 300] [--forward 3,9]
    python benchmarks/planner.py small --add --first 100 --count 100     to go on from what is stored
    python benchmarks/planner.py medium [--count 60] [--forward 10,25]
    python benchmarks/planner.py document
    python benchmarks/planner.py zoo [TARGET ...]
    python benchmarks/planner.py blocks [TARGET ...]     with and without the use of repeated blocks
    python benchmarks/planner.py skips [TARGET ...]      large steps with many skips at 30%; a PSPNet is among them

Prints tables and stores them under benchmarks/results/ as planner-PART.json and planner-PART.md.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, suppress
from datetime import date
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tests.plan.optimum import optimum  # noqa: E402
from tests.plan.random_steps import random_step  # noqa: E402

from lowtide import __version__, read  # noqa: E402
from lowtide.cost.device import Device, Environment  # noqa: E402
from lowtide.cost.estimate import estimate  # noqa: E402
from lowtide.cost.unit import unit_seconds  # noqa: E402
from lowtide.errors import InfeasibleError, PlanError  # noqa: E402
from lowtide.files import write_atomically  # noqa: E402
from lowtide.plan.baselines import BASELINES, run_seconds  # noqa: E402
from lowtide.plan.baselines.checkmate import checkmate  # noqa: E402
from lowtide.plan.bounds.lower_bounds import smallest_conceivable  # noqa: E402
from lowtide.plan.bounds.relaxation import relax  # noqa: E402
from lowtide.plan.check.checker import check  # noqa: E402
from lowtide.plan.make.search import Found, Link, search  # noqa: E402
from lowtide.plan.offload import search as away  # noqa: E402
from lowtide.plan.problem.problem import Problem, build_problem  # noqa: E402
from lowtide.plan.problem.reorder import in_order, lean_order  # noqa: E402
from lowtide.plan.problem.schedule import evaluate  # noqa: E402
from lowtide.plan.program.in_place import pointwise  # noqa: E402
from lowtide.plan.recompute import portfolio  # noqa: E402
from lowtide.plan.recompute.smallest_budget import lowest_in_order  # noqa: E402
from lowtide.plan.request import Limits  # noqa: E402

RESULTS = Path(__file__).parent / "results"
DOCUMENT = ROOT / "examples" / "documents" / "000_1953327273121cc3.txt"
ZOO = ["unet", "alexnet", "vgg19", "resnet50", "resnet152", "gpt2", "densenet161:batch=8"]
ZOO += ["locallyconnected", "convpool", "vgg16body"]
SHARES = [0.7, 0.5, 0.35, 0.25]
SKIPS = ["densenet161:batch=8", "resnet152", "pspnet"]
REPEATING = ["resnet152", "gpt2", "vgg19"]
LIMITS = [1.0, 3.0, 10.0]
RIVALS = ("keep-all", "chen", "lower-sets", "dtr")
H200 = Device(Environment("H200", "cuda"), {"float32": 5e13}, 4e12, 4e-6, 141 << 30)
LINK = Link(51 * 2**30, 51 * 2**30, 5e-6)


def planned(
    problem: Problem, budget: int, workspace: Sequence[int] = (), **options: Any
) -> Found | InfeasibleError:
    try:
        names = [name for name in ("time_limit", "seed", "progress") if name in options]
        limits = Limits(**{name: options.pop(name) for name in names})
        found = search(problem, budget, limits, **options)
    except InfeasibleError as error:
        return error
    check(problem.graph, found.program, budget=budget, workspace_bytes=workspace)
    return found


def small(count: int, forward: tuple[int, int], first: int) -> list[dict[str, Any]]:
    rows = []
    for seed in range(first, first + count):
        graph, seconds, workspace, able = random_step(seed, forward, charges=False)
        problem = build_problem(graph, seconds, workspace_bytes=workspace, able=able if seed % 2 else ())
        floor, peak = lowest_in_order(problem), evaluate(problem, ()).peak
        for k in range(5):
            budget = floor + (peak - floor) * k // 5
            began = time.perf_counter()
            try:
                best = optimum(problem, budget, limit=20_000)
            except OverflowError:
                best = "unknown"
            middle = time.perf_counter()
            try:
                found = search(problem, budget, Limits())
                cost, bound = found.cost, found.bound
            except InfeasibleError:
                cost = bound = None
            row = {"seed": seed, "budget": budget, "optimum": best, "cost": cost, "bound": bound}
            row |= {"seconds": time.perf_counter() - middle, "optimum_seconds": middle - began}
            rows.append(row)
            known = best not in ("unknown", None)  # in program order: another order may cost less
            if known and (cost is None or cost > best or bound > best):
                print("worse:", row, flush=True)
    return rows


def medium(count: int, forward: tuple[int, int], first: int) -> list[dict[str, Any]]:
    """Against Checkmate's integer program, which runs an operator at most once between two new ones."""
    rows = []
    for seed in range(first, first + count):
        graph, seconds, workspace, _ = random_step(seed, forward, charges=False)
        problem = build_problem(graph, seconds, workspace_bytes=workspace)
        floor, peak = lowest_in_order(problem), evaluate(problem, ()).peak
        for k in range(5):
            budget = floor + (peak - floor) * k // 5
            row: dict[str, Any] = {"seed": seed, "budget": budget}
            began = time.perf_counter()
            found = planned(problem, budget, workspace)
            row["seconds"] = time.perf_counter() - began
            good = isinstance(found, Found)
            row |= {"cost": found.cost if good else None, "bound": found.bound if good else None}
            began = time.perf_counter()
            try:
                best = checkmate(
                    graph, seconds, budget, workspace_bytes=workspace, time_limit=60.0, most_operators=10_000
                )
                row["optimum"] = round(run_seconds(best, seconds) - sum(seconds))
            except PlanError as error:
                row["optimum"] = None if "no plan" in str(error) else "unknown"
            row["optimum_seconds"] = time.perf_counter() - began
            rows.append(row)
            if row["optimum"] not in ("unknown", row["cost"]):
                print("differs:", row, flush=True)
    return rows


def summary(rows: list[dict[str, Any]]) -> str:
    known = [row for row in rows if row["optimum"] != "unknown"]
    above = [row["cost"] / row["optimum"] - 1 for row in known if row["cost"] and row["optimum"]]
    feasible = [row for row in known if row["optimum"] is not None and row["cost"] is not None]
    lines = [
        ("cases", len(rows)),
        ("with known optimum", len(known)),
        ("equal to it", sum(row["cost"] == row["optimum"] for row in known)),
        ("below it", sum(row["cost"] < row["optimum"] for row in feasible)),
        (
            "proven optimal (gap 0)",
            sum(row["cost"] is not None and row["cost"] == row["bound"] for row in rows),
        ),
        (
            "infeasible though feasible",
            sum(row["cost"] is None and row["optimum"] is not None for row in known),
        ),
        ("bounds above the optimum", sum(row["bound"] > row["optimum"] for row in feasible)),
        (
            "largest excess over the optimum, as a share of it",
            f"{max(above, default=0):.2%}",
        ),
        ("longest search, seconds", round(max(row["seconds"] for row in rows), 1)),
    ]
    return "| what | value |\n| --- | ---: |\n" + "".join(f"| {what} | {value} |\n" for what, value in lines)


def cheapest_rival(problem: Problem, budget: int, names: Sequence[str]) -> tuple[str, float] | None:
    """The fastest of the planners of others, and what it adds to the plain step."""
    graph = problem.graph
    seconds = [0.0] * len(graph.ops)
    for op, spent in zip(problem.ops, problem.time, strict=True):
        seconds[op] = problem.seconds(spent)
    found = []
    for name in names:
        with suppress(PlanError):
            program = BASELINES[name](graph, seconds, budget)
            found.append((run_seconds(program, seconds) / sum(seconds) - 1, name))
    return (min(found)[1], min(found)[0]) if found else None


def curve(
    problem: Problem, name: str, shares: Sequence[float], *, rivals: Sequence[str] = (), **options: Any
) -> list[dict[str, Any]]:
    peak = evaluate(problem, ()).peak
    rows = []
    for share in shares:
        found = planned(problem, int(peak * share), **options)
        row: dict[str, Any] = {"step": name, "operators": len(problem.ops), "share": share}
        if isinstance(found, InfeasibleError):
            row |= {"smallest": found.smallest_budget / peak, "floor": found.floor / peak}
        else:
            total = problem.total_time
            row |= {"cost": found.cost, "overhead": found.cost / total, "bound": found.bound / total}
            row |= {"gap": found.gap, "seconds": found.solve_seconds, "method": found.method}
        if rivals:
            row["rival"] = cheapest_rival(problem, int(peak * share), rivals)
        rows.append(row)
        print(row, flush=True)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    text = "| step | operators | budget | overhead | bound | gap | seconds | by | best of others |\n"
    text += "| --- | ---: | ---: | ---: | ---: | ---: | ---: | --- | --- |\n"
    for row in rows:
        head = f"| `{row['step']}` | {row['operators']} | {row['share']:.1%} |"
        rival = "none fits" if "rival" in row else ""
        rival = "{} {:.2%}".format(*row["rival"]) if row.get("rival") else rival
        if "cost" not in row:
            text += (
                f"{head} | | | | no plan; smallest known {row['smallest']:.1%}, "
                f"none below {row['floor']:.1%} | {rival} |\n"
            )
            continue
        text += f"{head} {row['overhead']:.2%} | {row['bound']:.2%} | {row['gap']:.2%} |"
        text += f" {row['seconds']:.1f} | {row['method']} | {rival} |\n"
    return text


def captured(target: str) -> Problem:
    import torch

    from architectures.as_users_write import CASES
    from lowtide import zoo
    from lowtide.trace.step.capture import capture

    torch._dynamo.reset()
    if target in CASES:
        model, batch, loss_of = CASES[target]("cpu", False)
    else:
        built = zoo.build(target)
        model, batch, loss_of = built.model, built.batch, built.loss
    graph = capture(loss_of, model, *batch).step.graph
    costs = estimate(graph, H200)
    seconds = [float(c.seconds.value) if c.seconds else 0.0 for c in costs]
    problem = build_problem(graph, seconds)
    return in_order(problem, lean_order(problem))


def network(target: str, shares: Sequence[float] = SHARES) -> list[dict[str, Any]]:
    """One network at several budgets, with and without offload."""
    problem = captured(target)
    both = {"methods": {"recompute", "offload"}, "link": LINK}
    return [
        *curve(problem, target, shares, rivals=RIVALS),
        *curve(problem, f"{target}, offload too", shares, **both),
    ]


def repeating(target: str) -> list[dict[str, Any]]:
    """One network at all budgets in 1, 3 and 10 seconds, without the use of repeated blocks and with it."""
    problem = captured(target)
    peak = evaluate(problem, ()).peak
    both: dict[str, Any] = {"methods": {"recompute", "offload"}, "link": LINK}
    rows = []
    for name, options in (("recompute", {}), ("offload too", both)):
        for share, limit in product(SHARES, LIMITS):
            row: dict[str, Any] = {"step": target, "means": name, "share": share, "limit": limit}
            row["operators"] = len(problem.ops)
            for key in ("without", "with"):
                with ExitStack() as stack:
                    for module in (portfolio, away) if key == "without" else ():
                        stack.enter_context(patch.object(module, "shared", lambda *_: []))
                    found = planned(problem, int(peak * share), time_limit=limit, **options)
                if isinstance(found, InfeasibleError):
                    break
                row[key] = {"overhead": found.cost / problem.total_time, "gap": found.gap}
                row[key] |= {"seconds": found.solve_seconds, "method": found.method}
            else:
                rows.append(row)
                print(row, flush=True)
    return rows


def beside(rows: list[dict[str, Any]]) -> str:
    text = (
        "| step | operators | means | budget | limit | without: overhead | gap | seconds | with: overhead |"
    )
    text += " gap | seconds | by |\n| --- | ---: | --- | ---: | ---: |" + " ---: |" * 6 + " --- |\n"
    for row in rows:
        text += f"| `{row['step']}` | {row['operators']} | {row['means']} | {row['share']:.0%} |"
        text += f" {row['limit']:g} s |"
        for key in ("without", "with"):
            one = row[key]
            text += f" {one['overhead']:.2%} | {one['gap']:.2%} | {one['seconds']:.1f} |"
        text += f" {row['with']['method']} |\n"
    return text


def spread(
    work: Callable[[Any], list[dict[str, Any]]], items: Iterable[Any], jobs: int
) -> list[dict[str, Any]]:
    """The rows of every item in order, from so many processes."""
    if jobs == 1:
        return [row for item in items for row in work(item)]
    with ProcessPoolExecutor(jobs) as pool:
        return [row for rows in pool.map(work, items) for row in rows]


def stored_rows(part: str) -> list[dict[str, Any]]:
    """The rows of the results that are there."""
    path = RESULTS / f"planner-{part}.json"
    rows: list[dict[str, Any]] = json.loads(path.read_bytes())["rows"] if path.exists() else []
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=["small", "medium", "document", "zoo", "blocks", "skips"])
    parser.add_argument("targets", nargs="*")
    parser.add_argument("--count", type=int)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--forward")
    parser.add_argument("--add", action="store_true", help="keep stored rows; only seeds that have none")
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side, each with one core")
    options = parser.parse_args()
    if options.part in ("small", "medium"):
        count, forward, cases = (300, "3,9", small) if options.part == "small" else (60, "10,25", medium)
        low, high = (int(k) for k in (options.forward or forward).split(","))
        stored = stored_rows(options.part) if options.add else []
        known = {row["seed"] for row in stored}
        seeds = range(options.first, options.first + (options.count or count))
        missing = [seed for seed in seeds if seed not in known]
        rows = [*stored, *spread(partial(cases, 1, (low, high)), missing, options.jobs)]
        text = summary(rows)
    elif options.part == "document":
        graph = read(DOCUMENT).step.graph
        problem = build_problem(graph, unit_seconds(graph), able=pointwise(graph))
        shares = [0.9, 0.7, 0.5, 0.4, 0.35, 0.33, 1.03 * smallest_conceivable(relax(problem)) / 7_329_956_112]
        rows = curve(problem, "000", shares, rivals=[*RIVALS, "lower-sets-exact"])
        text = table(rows)
    elif options.part == "blocks":
        rows = spread(repeating, options.targets or REPEATING, options.jobs)
        text = beside(rows)
    elif options.part == "skips":
        rows = spread(partial(network, shares=[0.3]), options.targets or SKIPS, options.jobs)
        text = table(rows)
    else:
        rows = spread(network, options.targets or ZOO, options.jobs)
        text = table(rows)
    told = f"Python {platform.python_version()}, lowtide {__version__}, {platform.machine()}"
    command = " ".join(["python benchmarks/planner.py", *sys.argv[1:]])
    report = {"date": date.today().isoformat(), "command": command, "machine": told, "rows": rows}
    RESULTS.mkdir(exist_ok=True)
    write_atomically(RESULTS / f"planner-{options.part}.json", json.dumps(report, indent=1).encode() + b"\n")
    text = f"# Planner: {options.part}\n\n`{command}`, {report['date']}; {told}\n\n{text}"
    write_atomically(RESULTS / f"planner-{options.part}.md", text.encode())
    print(text)


if __name__ == "__main__":
    main()
