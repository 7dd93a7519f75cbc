"""How fast the page of `lowtide report` opens and answers in Chromium, and how large its file is.

    python benchmarks/report_page.py

Opening is timed from the start of the navigation by the page's own marks: its script has started, the document is read,
the first canvas is drawn, content is painted. Three steps: a GPT-2 of about 3,000 operators, captured, with a plan for 40% of its memory (costs estimated, so that
nothing is measured but the page); a made-up step of 50,000 operators, whose data are thinned; and the same with a plan of more
than 100,000 instructions, which recomputes in segments and is checked as every plan is. A hover is timed
from the event to the frame that shows its answer. Needs Chromium, chromedriver and selenium. The result is stored in
benchmarks/results/ as report-page-cpu.json and report-page-cpu.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from tests.report.page.browser import Browser, missing, started  # noqa: E402
from tests.steps import DEVICE  # noqa: E402

from lowtide import capture, zoo  # noqa: E402
from lowtide.cost import Step  # noqa: E402
from lowtide.cost.estimate import estimate  # noqa: E402
from lowtide.execute.runtime.in_place import able_in_place  # noqa: E402
from lowtide.graph import Graph, Op, Phase, Role, Tensor  # noqa: E402
from lowtide.plan.budget import Budget  # noqa: E402
from lowtide.plan.make.make_plan import make_plan, plain_peak, plan_with  # noqa: E402
from lowtide.plan.program.costs import Costs  # noqa: E402
from lowtide.plan.program.instructions import Program  # noqa: E402
from lowtide.plan.program.simple import with_drops  # noqa: E402
from lowtide.plan.request import DeviceRoom, Limits, PlanRequest, PlanTask  # noqa: E402
from lowtide.report.page.html import html_page  # noqa: E402
from lowtide.report.page.make import Given, report_of  # noqa: E402

TARGET = "gpt2:batch=4,layers=38,width=64,heads=4,length=64,vocab=256"
FIELDS = {
    "overview": "memory-after",
    "categories": "categories",
    "layout": "layout",
    "lanes": "lanes",
    "operators": "roofline",
}
HOVERS = 120

OPENED = """
const done = arguments[0];
setTimeout(() => {
  const marks = {};
  for (const one of performance.getEntriesByType("mark")) marks[one.name.slice(8)] ??= one.startTime;
  for (const one of performance.getEntriesByType("paint")) marks[one.name] = one.startTime;
  done(marks);
}, 300);
"""
HOVERED = """
const [name, count, done] = arguments;
const canvas = document.querySelector(`[data-field="${name}"] canvas.top`);
canvas.scrollIntoView({ block: "center" });
const box = canvas.getBoundingClientRect(), handled = [], shown = [];
let k = 0;
const next = () => {
  if (k === count) return done({ handled, shown });
  const x = box.left + box.width * (0.1 + 0.85 * ((k * 0.618034) % 1)), y = box.top + box.height * (0.2 + 0.6 * ((k * 0.414214) % 1));
  k++;
  const start = performance.now();
  canvas.dispatchEvent(new PointerEvent("pointermove", { clientX: x, clientY: y, bubbles: true }));
  handled.push(performance.now() - start);
  requestAnimationFrame(() => setTimeout(() => { shown.push(performance.now() - start); next(); }));
};
next();
"""
CLICKED = """
const [name, done] = arguments, start = performance.now();
document.getElementById(`tab-${name}`).click();
requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now() - start)));
"""


def planned() -> tuple[list[Given], int]:
    """The network with its plan."""
    built = zoo.build(TARGET)
    captured = capture(built.loss, built.model, *built.batch)
    graph = captured.step.graph
    costs = estimate(graph, DEVICE)
    seconds = tuple(float(cost.seconds.value) for cost in costs if cost.seconds)
    request = PlanRequest(
        Budget(share=0.4), ("recompute",), limits=Limits(time_limit=5.0), smallest_seconds=0.0
    )
    plan = make_plan(
        graph, Costs(seconds, (), "estimated"), request, DeviceRoom(), able=able_in_place(captured.joint)
    )
    return [Given("plan", plan), Given("device", DEVICE)], len(graph.ops)


def made_up(operators: int = 50_000) -> tuple[list[Given], int]:
    """Forward and backward of a long chain; each backward reads what its forward wrote."""
    half = operators // 2
    tensors = [Tensor("x", 1 << 16, Role.INPUT)]
    ops = []
    for k in range(half):
        tensors.append(Tensor(f"t{k}", 4096 * (1 + k * 7919 % 97), shape=(1024,), dtype="float32"))
        ops.append(
            Op(f"f{k}", "aten.relu", Phase.FORWARD, (k,), (k + 1,), name=f"layers.{k // 100}.{k % 100}")
        )
    for k in reversed(range(half)):
        tensors.append(Tensor(f"g{k}", 4096, shape=(1024,), dtype="float32"))
        read = (len(tensors) - 2, k + 1) if k < half - 1 else (k + 1,)
        ops.append(
            Op(
                f"b{k}",
                "aten.relu",
                Phase.BACKWARD,
                read,
                (len(tensors) - 1,),
                name=f"layers.{k // 100}.{k % 100}",
            )
        )
    return [Given("chain", Step(Graph(tuple(tensors), tuple(ops))))], operators


def segmented(operators: int = 50_000) -> tuple[list[Given], int]:
    """The chain with a plan: forward is kept every so many operators, and the rest runs again in backward."""
    given, _ = made_up(operators)
    assert isinstance(given[0].value, Step)
    graph = given[0].value.graph
    half, backward = operators // 2, list[int]()
    every = int(half**0.5)
    for first in reversed(range(0, half, every)):
        after = min(half, first + every)
        backward += range(first, after - 1) if after < half else ()
        backward += [operators - 1 - k for k in reversed(range(first, after))]
    costs = Costs(tuple(1e-5 * (1 + k % 7) for k in range(operators)), (), "estimated")
    peak = plain_peak(graph, costs)
    request = PlanRequest(Budget(share=0.1), ("recompute",))
    program = Program(*with_drops(graph, list(range(half)), backward))
    plan = plan_with(graph, costs, program, PlanTask(request, DeviceRoom(), peak // 10, peak, ()), "segments")
    assert plan is not None
    assert len(plan.program.instructions) > 100_000
    return [Given("plan", plan)], operators


def measured(browser: Browser, path: Path) -> dict[str, Any]:
    """Times in milliseconds."""
    browser.size(1280, 900)
    opened = []
    for _ in range(5):
        browser.driver.get("about:blank")
        browser.driver.get(path.as_uri())
        opened.append(browser.driver.execute_async_script(OPENED))
    views, hovers = {}, {}
    for view in browser.tabs():
        views[view] = round(browser.driver.execute_async_script(CLICKED, view), 1)
        field = FIELDS.get(view)
        browser.settle()
        if field and browser.colours(field) > 1:
            found = browser.driver.execute_async_script(HOVERED, field, HOVERS)
            hovers[view] = {
                "handled_ms": spread(found["handled"]),
                "shown_ms": spread(found["shown"]),
            }
    return {
        "opened_ms": {name: spread([one[name] for one in opened]) for name in opened[0]},
        "view_ms": views,
        "hover": hovers,
        "errors": browser.said(),
    }


def table(machine: dict[str, Any], results: dict[str, dict[str, Any]]) -> str:
    """The same for people."""
    lines = [
        "# The page of `lowtide report` in a browser",
        "",
        f"`python benchmarks/report_page.py`, {machine['date']}; {machine['machine']}, {machine['processors']} cores, "
        f"{machine['browser']}, Python {machine['python']}, torch {machine['torch']}. Times are milliseconds, median and most.",
        "",
        "| step | operators | events | file, bytes | made, s | first picture drawn | hover: view | handled | on the screen |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, row in results.items():
        drawn = row["opened_ms"]["drawn"]
        head = f"| {name} | {row['operators']:,} | {row['events']:,} | {row['bytes']:,} | {row['made_seconds']} | {both(drawn)} |"
        for view, hover in row["hover"].items():
            lines.append(f"{head} {view} | {both(hover['handled_ms'])} | {both(hover['shown_ms'])} |")
            head = "| | | | | | |"
    return "\n".join(lines) + "\n"


def both(found: dict[str, float]) -> str:
    return f"{found['median']}, {found['most']}"


def spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {"median": round(statistics.median(ordered), 2), "most": round(ordered[-1], 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.parse_args()
    if missing():
        sys.exit(missing())
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder, started() as browser:
        for name, make in (("planned", planned), ("made up", made_up), ("made up, planned", segmented)):
            given, operators = make()
            began = time.perf_counter()
            report = report_of(given, title=name)
            data = html_page(report)
            seconds = time.perf_counter() - began
            path = Path(folder) / f"{name.replace(', ', '-').replace(' ', '-')}.html"
            path.write_bytes(data)
            results[name] = {
                "target": TARGET if name == "planned" else "a chain",
                "operators": operators,
                "events": max(run.blocks.events for run in report.runs),
                "bytes": len(data),
                "made_seconds": round(seconds, 2),
                "notes": report.notes,
                **measured(browser, path),
            }
            print(json.dumps(results[name], indent=1))
        versions = browser.driver.capabilities
        machine = {
            "date": date.today().isoformat(),
            "machine": platform.machine(),
            "processors": os.cpu_count(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "browser": f"{versions['browserName']} {versions['browserVersion']}",
        }
    stored = ROOT / "benchmarks" / "results" / "report-page-cpu"
    stored.with_suffix(".json").write_text(
        json.dumps({"machine": machine, "results": results}, indent=1) + "\n"
    )
    stored.with_suffix(".md").write_text(table(machine, results))
    print(f"Wrote {stored}.json and .md")


if __name__ == "__main__":
    main()
