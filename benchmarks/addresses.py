"""Arenas against live bytes: a document, the zoo inside budgets, public instances, many storages.

    python benchmarks/addresses.py document
    python benchmarks/addresses.py zoo [TARGET ...]
    python benchmarks/addresses.py instances --folder DIR    CSV files such as minimalloc's A to K
    python benchmarks/addresses.py scale [--count 100000]

minimalloc's instances are the files benchmarks/asplos2024/*.csv of github.com/google/minimalloc, in any version;
columns may be called buffer,start,end,size. Every result is checked. Prints tables and stores them under
benchmarks/results/ as addresses-PART.json and addresses-PART.md.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import random
import sys
import time
from collections.abc import Iterator
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import msgspec  # noqa: E402

from lowtide import __version__  # noqa: E402
from lowtide.cost.device import Device, Environment  # noqa: E402
from lowtide.cost.estimate import estimate  # noqa: E402
from lowtide.errors import InfeasibleError  # noqa: E402
from lowtide.files import write_atomically  # noqa: E402
from lowtide.formats import csvfile  # noqa: E402
from lowtide.formats.registry import read_file  # noqa: E402
from lowtide.graph import Graph  # noqa: E402
from lowtide.plan.address.allocations import graph_allocations, program_allocations  # noqa: E402
from lowtide.plan.address.place import place  # noqa: E402
from lowtide.plan.address.types import AddressPlan, Allocation, EventClock  # noqa: E402
from lowtide.plan.budget import Budget  # noqa: E402
from lowtide.plan.check.addresses import check_addresses, check_storages  # noqa: E402
from lowtide.plan.make.make_plan import make_plan  # noqa: E402
from lowtide.plan.program.copy_lanes import Link  # noqa: E402
from lowtide.plan.program.costs import Costs  # noqa: E402
from lowtide.plan.request import DeviceRoom, Limits, PlanRequest  # noqa: E402

RESULTS = Path(__file__).parent / "results"
DOCUMENT = ROOT / "examples" / "documents" / "001_825e28a4f520ddc2.txt"
ZOO = ["unet", "alexnet", "vgg19", "resnet50", "resnet152", "gpt2", "densenet161:batch=8"]
ZOO += ["locallyconnected", "convpool", "vgg16body"]
SHARES = [0.8, 0.6, 0.4]
H200 = Device(Environment("H200", "cuda"), {"float32": 5e13}, 4e12, 4e-6, 141 << 30)
LINK = Link(51 * 2**30, 51 * 2**30, 5e-6)
Row = dict[str, Any]


def placed(
    name: str, allocations: list[Allocation], alignment: int, limit: float, clock: EventClock
) -> AddressPlan:
    """The plan, checked; how long it took is in it."""
    found = place(allocations, alignment=alignment, time_limit=limit, clock=clock)
    live = check_addresses(found.allocations, arena_bytes=found.arena_bytes, alignment=alignment)
    assert live == found.live_bytes, name
    return found


def row_of(name: str, found: AddressPlan) -> Row:
    return {
        "name": name,
        "allocations": len(found.allocations),
        "live_bytes": found.live_bytes,
        "arena_bytes": found.arena_bytes,
        "efficiency": found.efficiency,
        "greedy": found.live_bytes / found.greedy_bytes if found.greedy_bytes else 1.0,
        "optimal": found.optimal,
        "method": found.method,
        "seconds": found.solve_seconds,
    }


def document(options: argparse.Namespace) -> Iterator[Row]:
    graph = read_file(DOCUMENT).step.graph
    for alignment in (1, 64, 512):
        found = placed("001", graph_allocations(graph), alignment, options.limit, EventClock.OPERATOR)
        yield row_of(f"document 001, alignment {alignment}", found)


def on_cuda(graph: Graph) -> Graph:
    """The graph as if captured on a GPU: memory is counted in blocks of 512 bytes."""
    replace = msgspec.structs.replace
    tensors = tuple(replace(tensor, device="cuda:0") for tensor in graph.tensors)
    return replace(graph, tensors=tensors, ops=tuple(replace(op, device="cuda:0") for op in graph.ops))


def zoo(options: argparse.Namespace) -> Iterator[Row]:
    """Recomputation and offload at three budgets, as on a GPU, with estimated costs; else at the smallest."""
    import torch

    from lowtide import zoo as networks
    from lowtide.trace.step.capture import capture

    for target in options.targets or ZOO:
        torch._dynamo.reset()
        built = networks.build(target)
        graph = on_cuda(capture(built.loss, built.model, *built.batch).step.graph)
        seconds = tuple(float(c.seconds.value) if c.seconds else 0.0 for c in estimate(graph, H200))
        for share in SHARES:
            request = PlanRequest(
                Budget(share=share), ("recompute", "offload"), limits=Limits(time_limit=options.plan_limit)
            )
            try:
                plan = make_plan(graph, Costs(seconds), request, DeviceRoom(link=LINK))
            except InfeasibleError as error:
                request = PlanRequest(
                    Budget(bytes=error.smallest_budget),
                    ("recompute", "offload"),
                    limits=Limits(time_limit=options.plan_limit),
                )
                plan = make_plan(graph, Costs(seconds), request, DeviceRoom(link=LINK))
            rows = program_allocations(graph, plan.program)
            found = placed(target, rows, 512, options.limit, EventClock.INSTRUCTION)
            check_storages(found.allocations, graph, plan.program)
            reached = plan.budget_bytes / plan.plain.peak_bytes
            yield row_of(f"{target} at {reached:.0%}", found) | {"budget_bytes": plan.budget_bytes}


def instances(options: argparse.Namespace) -> Iterator[Row]:
    for path in sorted(Path(options.folder).glob("*.csv")):
        data = path.read_bytes()
        head, _, rest = data.partition(b"\n")
        renamed = head.replace(b"buffer", b"id").replace(b"start", b"lower").replace(b"end", b"upper")
        step = csvfile.read(renamed + b"\n" + rest)
        rows = graph_allocations(step.graph, times=csvfile.times_of(step)[0])
        found = placed(path.name, rows, 1, options.limit, EventClock.OPERATOR)
        yield row_of(path.name, found) | {"sha256": hashlib.sha256(data).hexdigest()}


def scale(options: argparse.Namespace) -> Iterator[Row]:
    """As many storages as asked for, few or half of them live at once; the time of all that is done to them."""
    from scale import training_step

    makes = {
        "short lives": lambda n: list(_short_lives(n)),
        "a chain and its backward": lambda n: graph_allocations(training_step(2 * n // 3).graph),
        "lives of all lengths": lambda n: list(_all_lengths(n)),
    }
    for name, make in makes.items():
        rows = make(options.count)[: options.count]
        began = time.perf_counter()
        found = placed(name, rows, 1, options.limit, EventClock.OPERATOR)
        yield row_of(name, found) | {"with_check_seconds": time.perf_counter() - began}


def _size(draw: random.Random) -> int:
    return draw.choice([1, 2, 3, 5, 8, 13, 100, 1000]) * draw.randint(1, 50) * 1024


def _short_lives(count: int) -> Iterator[Allocation]:
    draw = random.Random(0)
    for _ in range(count):
        birth = draw.randrange(count)
        yield Allocation(birth, birth + 1 + int(draw.expovariate(1 / 50)), _size(draw))


def _all_lengths(count: int) -> Iterator[Allocation]:
    draw = random.Random(0)
    for k in range(count):
        birth = draw.randrange(count // 2 if k % 2 else count)
        yield Allocation(
            birth, count - birth if k % 2 else birth + 1 + int(draw.expovariate(0.2)), _size(draw)
        )


def told(part: str, rows: list[Row], options: argparse.Namespace, command: str) -> str:
    mean = sum(row["efficiency"] for row in rows) / len(rows)
    least = min(row["efficiency"] for row in rows)
    lines = [
        f"# Addresses: {part}",
        "",
        f"`{command}`, {date.today()}, {platform.machine()}, {os.cpu_count()} cores, Python "
        f"{platform.python_version()}, lowtide {__version__}, omnimalloc {version('omnimalloc')}; the search "
        f"has {options.limit:g} s each.",
        "",
        f"Efficiency is live bytes over arena bytes: {mean:.3%} in the mean, {least:.3%} at least, "
        f"{sum(row['optimal'] for row in rows)} of {len(rows)} proven optimal. Greedy is that of placement by "
        "size.",
        "",
        "| what | allocations | live bytes | arena bytes | efficiency | greedy | optimal | by | seconds |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {row['name']} | {row['allocations']:,} | {row['live_bytes']:,} | {row['arena_bytes']:,} | "
        f"{row['efficiency']:.3%} | {row['greedy']:.3%} | {'yes' if row['optimal'] else 'not proven'} | "
        f"{row['method']} | {row['seconds']:.2f} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = {"document": document, "zoo": zoo, "instances": instances, "scale": scale}
    parser.add_argument("part", choices=list(parts))
    parser.add_argument("targets", nargs="*")
    parser.add_argument("--folder", help="of instances")
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--limit", type=float, default=3.0, help="seconds of a search for addresses")
    parser.add_argument("--plan-limit", type=float, default=3.0, help="seconds of a search for a plan")
    parser.add_argument("--name", help="of the stored results [addresses-PART]")
    options = parser.parse_args()
    rows = []
    for row in parts[options.part](options):
        print(f"{row['name']}: {row['efficiency']:.3%} in {row['seconds']:.2f} s", flush=True)
        rows.append(row)
    words = sys.argv[1:]
    if options.folder:
        words = ["DIR" if word == options.folder else word for word in words]  # wherever they lie
    text = told(options.part, rows, options, f"python benchmarks/addresses.py {' '.join(words)}")
    print(text)
    name = options.name or f"addresses-{options.part}"
    result = {"date": str(date.today()), "machine": platform.machine(), "limit": options.limit, "rows": rows}
    write_atomically(RESULTS / f"{name}.json", (json.dumps(result, indent=1) + "\n").encode())
    write_atomically(RESULTS / f"{name}.md", text.encode())


if __name__ == "__main__":
    main()
