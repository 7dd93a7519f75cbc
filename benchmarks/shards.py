"""Links between processes of this machine, and predicted against measured times of split steps.

    python benchmarks/shards.py                     measure links, then steps on 2, 4 and 8 processes
    python benchmarks/shards.py --devices 2 4       on these numbers of processes
    python benchmarks/shards.py --simulate          predictions for 8 to 1,024 devices; nothing runs

Writes benchmarks/results/shards-cpu.json, or shards-simulated.json. A process has one thread. Where there are more
processes than processors, computing is predicted to take as many times longer.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

RESULTS = Path(__file__).parent / "results"
TARGETS = (
    "unet:base=8,batch=8,size=188",
    "resnet50:batch=8,size=64,classes=10,width=16",
    "gpt2:batch=8,layers=2,width=128,heads=8,length=64,vocab=512",
)
LARGE = ("unet", "resnet50:batch=1024", "gpt2:batch=1024")
SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 24)
REPEATS = 7
KINDS = ("batch", "any")


class Wire:
    """Processes of a group."""

    def __init__(self) -> None:
        self.place, self.sent = dist.get_rank(), 0

    def swap(self, sends: Any, receives: Any) -> None:
        calls = [dist.P2POp(dist.isend, x, to) for to, x in sends]
        calls += [dist.P2POp(dist.irecv, x, come) for come, x in receives]
        for work in dist.batch_isend_irecv(calls) if calls else ():
            work.wait()
        self.sent += sum(x.nbytes for _, x in sends)

    def add_up(self, x: torch.Tensor) -> None:
        dist.all_reduce(x)
        self.sent += x.nbytes


def timed(function: Callable[[], object], repeats: int = REPEATS) -> float:
    """The fastest of some calls, which all processes start together: others were disturbed."""
    function()
    found = []
    for _ in range(repeats):
        dist.barrier()
        began = time.perf_counter()
        function()
        found.append(time.perf_counter() - began)
    return min(found)


def links(rank: int, world: int) -> dict[str, Any]:
    """Seconds of messages to the next process, all at once, and of sums, by size."""
    wire, found = Wire(), {"message": {}, "sum": {}}
    for size in SIZES:
        x, y = torch.zeros(size // 4), torch.zeros(size // 4)
        ahead, behind = (rank + 1) % world, (rank - 1) % world
        found["message"][size] = timed(lambda x=x, y=y, a=ahead, b=behind: wire.swap([(a, x)], [(b, y)]))
        found["sum"][size] = timed(lambda x=x: wire.add_up(x))
    return found


def line(points: dict[int, float]) -> tuple[float, float]:
    """Latency and bytes a second, by the smallest and the largest message."""
    (small, first), (large, last) = min(points.items()), max(points.items())
    rate = (large - small) / max(1e-9, last - first)
    return max(1e-6, first - small / rate), rate


def step(task: dict[str, Any], rank: int) -> dict[str, Any]:
    """Seconds of forward and backward on this process's share."""
    import msgspec

    from lowtide import zoo
    from lowtide.graph.shards import Shards
    from lowtide.trace.distributed.wires import connect
    from lowtide.trace.shards.local import local_step
    from lowtide.trace.step.capture import capture

    built = zoo.build(task["target"])
    joint = capture(built.loss, built.model, *built.batch).joint
    shards = msgspec.json.decode(json.dumps(task["shards"]).encode(), type=Shards)
    wire = Wire()
    connect("bench", wire)
    local = local_step(joint, shards, rank, ["bench"])
    known = {**dict(built.model.named_parameters()), **dict(built.model.named_buffers())}
    batch, given = iter(built.batch), []
    for place, (t, box) in enumerate(zip(joint.inputs, local.boxes, strict=True)):
        name = joint.graph.tensors[t].label
        value = (known[name] if name in known else next(batch)).detach()[box.slices()].clone()
        given.append(value.requires_grad_() if joint.gradients[place] is not None else value)

    def run() -> None:
        local.module(*given)[0].backward()
        for place in local.summed:
            wire.add_up(given[place].grad)
        for one in given:
            one.grad = None

    seconds = timed(run)
    wire.sent = 0
    run()
    return {"seconds": seconds, "wire_bytes": wire.sent}


def worker(task_file: str, store: str, rank: int, world: int, out: str) -> None:
    task = json.loads(Path(task_file).read_text())
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=500)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=limit)
    found = links(rank, world) if task["kind"] == "links" else step(task, rank)
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


def one_process(built: Any) -> float:
    """Seconds of the plain step here."""
    found = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        built.step().backward()
        found.append(time.perf_counter() - began)
        built.model.zero_grad()
    return min(found)


def measured(devices: list[int], targets: Sequence[str]) -> dict[str, Any]:
    import msgspec

    from lowtide.cost.wire import WireSpeed
    from lowtide.execute.shards.axes import split_axes
    from lowtide.graph.shards import Mesh
    from lowtide.trace.shards.kinds import CUT_KINDS

    rows, speeds = [], {}
    for world in devices:
        points = on_processes({"kind": "links"}, world)[0]
        (delay, rate), (sum_delay, sum_rate) = (
            line({int(k): v for k, v in points[kind].items()}) for kind in ("message", "sum")
        )
        speeds[world] = {"message": [delay, rate], "sum": [sum_delay, sum_rate], "points": points}
        print(f"{world} processes: a message {delay * 1e6:.0f} µs and {rate / 1e9:.2f} GB/s, "
              f"a sum {sum_delay * 1e6:.0f} µs and {sum_rate / 1e9:.2f} GB/s", flush=True)  # fmt: skip
    cores = os.cpu_count() or 1
    for target in targets:
        built, joint, seconds = captured(target)
        alone = one_process(built)
        scale = alone / (3 * sum(seconds.values()))  # backward is taken to be twice forward
        for world in devices:
            delay, rate = speeds[world]["message"]
            busy = max(1.0, world / cores)
            costs = {k: one * scale * busy for k, one in seconds.items()}
            for name in KINDS:
                link = WireSpeed(rate, delay)
                found = split_axes(joint, Mesh((world,)), costs, [link], CUT_KINDS[name])
                told = json.loads(msgspec.json.encode(found.shards))
                ran = on_processes({"kind": "step", "target": target, "shards": told}, world)
                row = {
                    "target": target,
                    "processes": world,
                    "cut": name,
                    "one_process_seconds": alone,
                    "predicted_seconds": found.seconds,
                    "measured_seconds": max(one["seconds"] for one in ran),
                    "predicted_wire_bytes": found.wire_bytes,
                    "measured_wire_bytes": max(one["wire_bytes"] for one in ran),
                }
                rows.append(row)
                print(row, flush=True)
    return {"links": speeds, "rows": rows}


def simulated() -> dict[str, Any]:
    from lowtide.cost.device import Device, Environment
    from lowtide.cost.estimate import estimate
    from lowtide.execute.shards.axes import axes_of, split_axes
    from lowtide.graph.shards import Mesh
    from lowtide.trace.shards.kinds import WireSpeed

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
    found = simulated() if args.simulate else measured(args.devices, args.targets)
    name = "shards-simulated" if args.simulate else "shards-cpu"
    found |= {
        "machine": f"{platform.machine()}, {os.cpu_count()} processors, torch {torch.__version__}",
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
    }
    found["command"] = " ".join(["python benchmarks/shards.py", *sys.argv[1:]])
    (RESULTS / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
