"""Trade-off curves: what a budget costs, from all the memory of the plain step down to the smallest that works.

    python benchmarks/curves.py [--name NAME] [--time-limit 10] FILE_OR_TARGET ...
    python benchmarks/curves.py --name NAME --draw-only     from curves that are stored

A FILE is a plan as `lowtide plan TARGET --budget 100% --only recompute,offload -o FILE` writes it, on this machine or
another: its operators, their times and the link are taken as they are. A TARGET is planned here first. Stores the curves
as curves-NAME.json and a picture as curves-NAME.svg under benchmarks/results/; what budgets.py has measured of the same
networks is drawn as points. The picture needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import sys
from datetime import date
from pathlib import Path
from typing import Any

from lowtide.documents import read_document
from lowtide.files import write_atomically
from lowtide.plan.make.sweep import Sweep, sweep
from lowtide.plan.program.costs import Costs
from lowtide.plan.request import DeviceRoom, PlanRequest
from lowtide.plan.result.plan import Plan

RESULTS = Path(__file__).parent / "results"
MEANS = (("recompute",), ("recompute", "offload"))
COLOURS = {"recompute": "#1f6f8b", "recompute,offload": "#c8553d"}


def base_of(source: str) -> Plan:
    """The plan of the plain step."""
    if Path(source).is_file():
        return read_document(source, Plan)
    from lowtide import fit, zoo
    from lowtide.cost.probe import best_device

    built = zoo.build(source, device=best_device())
    return fit(built.loss, built.model, *built.batch, budget="100%", only="recompute,offload").plan


def curve(base: Plan, only: tuple[str, ...], time_limit: float) -> Sweep:
    """All budgets with these means."""
    return sweep(
        base.graph,
        Costs(base.seconds, base.workspace_bytes, base.cost, short=base.short),
        PlanRequest.of("100%", only=only, time_limit=time_limit),
        DeviceRoom(base.beside_bytes, link=base.link if "offload" in only else None),
        able=base.able,
        progress=lambda text: sys.stderr.write(f"{','.join(only)} {text}\n"),
    )


def measured(name: str, device: str) -> list[tuple[float, float, str]]:
    """Peak in GiB, time over eager, and the way, of what budgets.py has run of this network."""
    files = sorted(RESULTS.glob(f"budgets*-{device}.json"))
    rows = [row for file in files for row in json.loads(file.read_text())["rows"]]
    return [
        (row["measured"]["peak_bytes"] / 2**30, row["ratio"], row["way"])
        for row in rows
        if row["target"] == name and "measured" in row
    ]


def picture(curves: dict[str, dict[str, Any]], path: Path, device: str) -> None:
    """One panel a network: peak against time, bounds dashed."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "lowtide"
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(curves), figsize=(5.2 * len(curves), 4.2), squeeze=False)
    for panel, (name, by_means) in zip(panels[0], curves.items(), strict=True):
        for means, found in by_means.items():
            memory = [point["budget_bytes"] / 2**30 for point in found["points"]]
            for key, style, word in (("overhead", "-o", "planned"), ("bound_overhead", "--", "bound")):
                times = [1 + point[key] for point in found["points"]]
                label = f"{means.replace(',', ' and ')}, {word}"
                panel.plot(memory, times, style, color=COLOURS[means], markersize=3.5, label=label)
        points = measured(name, device)
        limit = 1.15 * max(1 + p["overhead"] for f in by_means.values() for p in f["points"])
        for memory, ratio, way in points:
            mark = "D" if way.startswith("lowtide") else "x"
            if ratio <= limit or mark == "D":
                panel.plot([memory], [ratio], mark, color="black", markersize=5)
                panel.annotate(way.removeprefix("lowtide "), (memory, ratio), fontsize=6, xytext=(4, 3),
                               textcoords="offset points")  # fmt: skip
        panel.set_title(name)
        panel.set_xlabel("peak memory, GiB")
        panel.set_ylabel("time of a step, over the plain step")
        panel.grid(alpha=0.3)
        panel.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Plan, store, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--name", default="cpu")
    parser.add_argument("--time-limit", type=float, default=10.0)
    parser.add_argument("--draw-only", action="store_true", help="draw the curves that are stored")
    parser.add_argument("sources", nargs="*", metavar="FILE_OR_TARGET")
    chosen = parser.parse_args()
    stored = RESULTS / f"curves-{chosen.name}.json"
    if chosen.draw_only:
        curves = json.loads(stored.read_text())["curves"]
    else:
        curves = {}
        for source in chosen.sources:
            base = base_of(source)
            name = Path(source).stem if Path(source).is_file() else source
            curves[name] = {",".join(only): curve(base, only, chosen.time_limit).as_json() for only in MEANS}
        command = " ".join(["python benchmarks/curves.py", *sys.argv[1:]])
        document = {"date": str(date.today()), "command": command, "curves": curves}
        write_atomically(stored, json.dumps(document, indent=1).encode() + b"\n")
    picture(curves, RESULTS / f"curves-{chosen.name}.svg", chosen.name)


if __name__ == "__main__":
    main()
