"""Predicted against measured times of steps that are split over processes of this machine.

    python benchmarks/shards.py                     steps on 2, 4 and 8 processes
    python benchmarks/shards.py --devices 2 4       on these numbers of processes
    python benchmarks/shards.py --simulate          predictions for 8 to 1,024 devices; nothing runs

Writes benchmarks/results/shards-cpu.json, or shards-simulated.json. Each process measures its links and its operators, and
predicts a step by its own Program, as with `lowtide.fit(..., mesh=N)`. It has one thread. Where there are more processes than
processors, operators are predicted to take as many times longer.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lowtide.nested import leaves

RESULTS = Path(__file__).parent / "results"
TARGETS = (
    "unet:base=8,batch=8,size=188",
    "resnet50:batch=8,size=64,classes=10,width=16",
    "gpt2:batch=8,layers=2,width=128,heads=8,length=64,vocab=512",
)
LARGE = ("unet", "resnet50:batch=1024", "gpt2:batch=1024")
REPEATS = 9
KINDS = ("data parallel", "any")
"""The batch cut alone, and what is chosen by measured links."""


def timed(function: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of calls, which all processes start together; the first one is not counted."""
    function()
    found = []
    for _ in range(repeats):
        dist.barrier()
        began = time.perf_counter()
        function()
        found.append(time.perf_counter() - began)
    return found


def step(task: dict[str, Any]) -> dict[str, Any]:
    """What this process predicts of a step, and what it measures."""
    import msgspec

    import lowtide
    from lowtide import zoo
    from lowtide.execute.shards.choose import choose_shards
    from lowtide.execute.shards.meshes import connected
    from lowtide.execute.shards.split import crowded_seconds, cut_model, proven_communications, split_step
    from lowtide.graph.shards import Shards
    from lowtide.trace.shards.kinds import CUT_KINDS
    from lowtide.trace.step.capture import capture

    built = zoo.build(task["target"])
    began = time.perf_counter()
    here = connected(task["world"])
    linked = time.perf_counter() - began
    joint = capture(built.loss, built.model, *built.batch).joint
    chosen = b""
    if not here.rank:
        found, _ = choose_shards(joint, here.mesh, 5.0, CUT_KINDS[task["kind"]], links=here.speeds)
        chosen = msgspec.json.encode(found)
    shards = msgspec.json.decode(here.meeting.everybody("split the step", chosen)[0], type=Shards)
    split = split_step(joint, shards, here)
    cut_model(built.model, split.boxes)
    batch = [one for one in leaves(built.batch) if isinstance(one, torch.Tensor)]
    parts = [value[box.slices()] for value, (_, _, box) in zip(batch, split.inputs, strict=True)]
    options = {"budget": "100%", "time_limit": 5.0, "verify": False, "kernels": "eager", "fullgraph": True}
    made = here.meeting.settled(
        "plan the step", lambda: lowtide.fit(split.step, built.model, *parts, **options)
    )
    plan = made.plan
    talks = proven_communications(plan, here, split)

    def run() -> None:
        here.watch.begin([one.label for one in talks])
        made(built.model, *parts).backward()
        built.model.zero_grad()

    seconds = timed(run, REPEATS)
    here.watch.close()
    return {
        "seconds": statistics.median(seconds),
        "fastest_seconds": min(seconds),
        "planned_wire_bytes": sum(one.sent_bytes for one in talks),
        "predicted_seconds": crowded_seconds(plan, here.crowding),
        "compute_seconds": sum(plan.seconds) * here.crowding,
        "wire_seconds": sum(plan.wire_seconds.values()),
        "crowding": here.crowding,
        "communications": len(talks),
        "split_operators": len(shards.operators),
        "links": msgspec.to_builtins(here.speeds),
        "link_seconds": linked,
        "disturbed": plan.disturbed,
    }


def worker(task_file: str, store: str, rank: int, world: int, out: str) -> None:
    task = json.loads(Path(task_file).read_text())
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=500)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=limit)
    found = step(task)
    dist.barrier()
    dist.destroy_process_group()
    Path(out, f"{rank}.json").write_text(json.dumps(found))


def on_processes(task: dict[str, Any], world: int) -> list[dict[str, Any]]:
    import subprocess

    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder, "task.json")
        told.write_text(json.dumps(task))
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        words = [sys.executable, "-W", "ignore", __file__, "--worker", str(told), str(Path(folder, "store"))]
        running = [
            subprocess.Popen([*words, str(rank), str(world), folder], env=environment)
            for rank in range(world)
        ]
        codes = [one.wait() for one in running]
        assert not any(codes), codes
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(world)]


def captured(target: str) -> Any:
    from lowtide import zoo
    from lowtide.cost.estimate import estimate
    from lowtide.cost.probe import measure_device
    from lowtide.trace.step.capture import capture

    torch.set_num_threads(1)
    built = zoo.build(target)
    joint = capture(built.loss, built.model, *built.batch).joint
    costs = zip(joint.graph.ops, estimate(joint.graph, measure_device("cpu")), strict=True)
    found = {k: cost.seconds.value for k, (op, cost) in enumerate(costs) if op.phase.value == "forward"}
    return built, joint, found


def one_process(target: str) -> tuple[float, Callable[[], list[float]]]:
    """Seconds of the step on one process, predicted by a fitted one; and what measures some steps of it."""
    import lowtide
    from lowtide import zoo

    torch.set_num_threads(1)
    built = zoo.build(target)
    made = lowtide.fit(built.loss, built.model, *built.batch, budget="100%", time_limit=5.0, verify=False)

    def some() -> list[float]:
        found = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            made(built.model, *built.batch).backward()
            found.append(time.perf_counter() - began)
            built.model.zero_grad()
        return found

    return made.plan.predicted.seconds, some


def measured(devices: list[int], targets: Sequence[str], keep: Callable[[dict[str, Any]], None]) -> None:
    """Each row is kept as soon as it is there. One process is measured before and after each."""
    rows: list[dict[str, Any]] = []
    for target in targets:
        predicted, some = one_process(target)
        for world in devices:
            for kind in KINDS:
                load, before = os.getloadavg()[0], some()
                ran = on_processes({"target": target, "world": world, "kind": kind}, world)
                alone = [*before, *some()]
                slowest = max(ran, key=lambda one: one["predicted_seconds"])
                took = max(one["seconds"] for one in ran)
                row = {
                    "target": target,
                    "processes": world,
                    "split": kind,
                    "one_process_predicted_seconds": predicted,
                    "one_process_seconds": statistics.median(alone),
                    "one_process_fastest_seconds": min(alone),
                    "measured_seconds": took,
                    "fastest_seconds": max(one["fastest_seconds"] for one in ran),
                    "ratio": took / slowest["predicted_seconds"],
                    "one_process_ratio": statistics.median(alone) / predicted,
                    "load_before": load,
                    "load_after": os.getloadavg()[0],
                    "at": datetime.datetime.now(datetime.timezone.utc).strftime("%H:%M"),
                }
                rows.append(slowest | row)
                print(rows[-1], flush=True)
                keep({"rows": rows})


def simulated() -> dict[str, Any]:
    from lowtide.cost.device import Device, Environment
    from lowtide.cost.estimate import estimate
    from lowtide.cost.wire import WireSpeed
    from lowtide.execute.shards.axes import axes_of, split_axes
    from lowtide.graph.shards import Mesh

    device = Device(Environment("H200-like", "cuda"), {"float32": 4e13}, 3.5e12, 4e-6, 141 << 30)
    inside, between = WireSpeed(4e11, 5e-6), WireSpeed(4e10, 1e-5)
    rows = []
    for target in LARGE:
        _, joint, _ = captured(target)
        seconds = {k: c.seconds.value for k, c in enumerate(estimate(joint.graph, device))}
        for devices in (8, 32, 128, 1024):
            sizes = axes_of(devices)
            speeds = [between] * (len(sizes) - 1) + [inside]
            ordered = (*sizes[1:], sizes[0])
            found = split_axes(joint, Mesh(ordered), seconds, speeds)
            row = {
                "target": target,
                "devices": devices,
                "mesh": list(ordered),
                "seconds": found.seconds,
                "compute_seconds": found.compute_seconds,
                "wire_seconds": found.wire_seconds,
                "wire_bytes_per_device": found.wire_bytes,
                "held_bytes_per_device": found.held_bytes,
                "planning_seconds": found.planning_seconds,
            }
            rows.append(row)
            print(row, flush=True)
    return {"rows": rows, "device": "40 TFLOP/s, 3.5 TB/s, 4 µs a launch; 400 GB/s and 5 µs along the last axis, "
            "40 GB/s and 10 µs along others"}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--targets", nargs="+", default=TARGETS)
    parser.add_argument("--simulate", action="store_true")
    parser.add_argument("--worker", nargs=5)
    args = parser.parse_args()
    if args.worker:
        told, store, rank, world, out = args.worker
        worker(told, store, int(rank), int(world), out)
        return
    if args.simulate:
        keep("shards-simulated", simulated())
    else:
        measured(args.devices, args.targets, lambda found: keep("shards-cpu", found))


def keep(name: str, found: dict[str, Any]) -> None:
    """Write what is known so far."""
    found |= {
        "machine": f"{platform.machine()}, {os.cpu_count()} processors, torch {torch.__version__}",
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
    }
    found["command"] = " ".join(["python benchmarks/shards.py", *sys.argv[1:]])
    (RESULTS / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
