"""Several processes on one device run a split step: bytes of each process and on the wire against the plan.

    python benchmarks/shard_gpu.py [TARGET=CUT ...] [--device cuda] [--processes 2 4] [--graphs off] [--limit 150] [--out FILE]

Each process has a share of the step on the same device, planned by 100% of what it takes plainly, with eager kernels. They talk by
gloo, which takes tensors of CUDA through pinned memory of the host; NCCL is asked first, and usually refuses several processes on one
device; where it says nothing, it is left after 25 s. "peak" is the most that PyTorch's allocator counts for a process in its
second step: of the process that comes nearest to its plan, with what that process has allocated beside the step ("beside":
workspaces of libraries). With `--graphs auto` steps are replayed as CUDA graphs between which processes communicate; steps
before do not count then, and the memory of the graphs is part of the peak. "reserved" is what the process has taken of the device for the step, by
PyTorch's allocator and for graphs, of its peak. "gradients within" is the largest difference of a gradient from the step on one device, as a share of
its norm. TF32 is off, and PyTorch's allocator has expandable segments. CUT is what `lowtide shard --cut` takes. A row is ended
after 60 s, or 3 s after one of its processes has failed, and says what they were doing. Rows that are not begun within the limit
are named. `--device cpu` tries it out.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lowtide.files import check_outputs, write_atomically
from lowtide.trace.shards.kinds import CUT_KINDS
from plain import machine

CASES = {
    "unet:base=16,batch=4,size=380": "height",
    "gpt2:batch=8,layers=4,width=256,heads=8,length=256,vocab=1024": "heads",
    "locallyconnected:batch=8,size=17,channels=8,classes=10": "height",
}
SMALL = {
    "unet:base=2,batch=1,size=188": "height",
    "gpt2:batch=4,layers=1,width=32,heads=4,length=16,vocab=64": "heads",
    "locallyconnected:batch=4,size=17,channels=2,classes=4": "height",
}
"""On the CPU, unless others are named."""
ROW_SECONDS, NCCL_SECONDS, LAST_WORDS_SECONDS = 60, 25, 3
WARM = 6
"""Steps before a step is replayed, and the first replays."""
STAGE = "stage: "
EXPANDABLE = "expandable_segments:True"
"""As the `lowtide` command has it: the allocator counts whole blocks otherwise, up to 1 MiB more than was asked for."""
HEAD = [
    "| target | processes | cut | numbers | peak of planned bytes | all inside | beside | one device | bytes sent | as planned | "
    "gradients within | ms a step | s | reserved | graphs |",
    "| --- | ---: | --- | --- | ---: | --- | ---: | ---: | ---: | --- | ---: | ---: | ---: | ---: | --- |",
]


def stage(name: str) -> None:
    """Say in the log of this process what it does now."""
    print(f"{STAGE}{name}", flush=True)


def synchronised(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def watched(function: Any, device: str) -> tuple[int, int]:
    """The peak of a call as the allocator counts it, and what was allocated before."""
    from lowtide.cost.watch import watch_cpu

    gc.collect()
    if device == "cpu":
        return watch_cpu(lambda _: function())[1].peak_bytes, 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated(), before


def built(task: dict[str, Any]) -> Any:
    from lowtide.commands.shard_task import built_step

    return built_step(task["target"], 0, task["numbers"] == "float64", task["device"])


def one_device(task: dict[str, Any]) -> tuple[dict[str, torch.Tensor], int]:
    """Gradients of the step on one device, on the host, and its peak."""
    from lowtide.execute.shards.split import named_tensors

    one = built(task)
    batch = named_tensors(one.loss, one.model, *one.batch).values()
    there = (*one.model.parameters(), *one.model.buffers(), *batch)
    held = sum(x.nbytes for x in there) if task["device"] == "cpu" else 0

    def run() -> None:
        one.model.zero_grad(set_to_none=True)
        torch.manual_seed(0)
        one.loss(one.model, *one.batch).backward()

    run()
    gradients = {name: p.grad.cpu() for name, p in one.model.named_parameters() if p.grad is not None}
    one.model.zero_grad(set_to_none=True)
    return gradients, watched(run, task["device"])[0] + held


def share(task: dict[str, Any]) -> dict[str, Any]:
    """What this process takes of a step."""
    import msgspec

    import lowtide
    from lowtide.cost.wire import WireSpeed
    from lowtide.execute.shards.choose import choose_shards
    from lowtide.execute.shards.meshes import connected
    from lowtide.execute.shards.split import cut_model, named_tensors, proven_communications, split_step
    from lowtide.graph.shards import Shards
    from lowtide.trace.step.capture import capture

    device = task["device"]
    stage("running the step on one device")
    expected, whole = one_device(task)
    step = built(task)
    stage("capturing the step")
    here = connected(task["processes"], links=[WireSpeed(1e11, 0.0)])
    joint = here.meeting.settled(
        "capture the step", lambda: capture(step.loss, step.model, *step.batch).joint
    )

    def chosen() -> bytes:
        if here.rank:
            return b""
        return msgspec.json.encode(choose_shards(joint, here.mesh, 3.0, CUT_KINDS[task["cut"]])[0])

    stage("choosing a split")
    told = here.meeting.everybody("split", here.meeting.settled("choose how to split", chosen))[0]
    shards = msgspec.json.decode(told, type=Shards)
    split = here.meeting.settled("split the step", lambda: split_step(joint, shards, here))
    cut_model(step.model, split.boxes)
    batch = named_tensors(step.loss, step.model, *step.batch)
    parts = [batch[name][box.slices()].clone() for name, _, box in split.inputs]
    model, loss_of, step = step.model, split.step, None
    del batch
    stage("planning its share")
    options = {"budget": "100%", "time_limit": 3.0, "verify": False, "kernels": "eager", "fullgraph": True}
    options["graphs"] = task["graphs"]
    made = here.meeting.settled("plan the step", lambda: lowtide.fit(loss_of, model, *parts, **options))
    talks = proven_communications(made.plan, here, split)

    def run() -> None:
        model.zero_grad(set_to_none=True)
        here.watch.begin([one.label for one in talks])
        torch.manual_seed(0)
        made(model, *parts).backward()

    stage("running its share")
    for _ in range(1 if task["graphs"] == "off" else WARM):
        run()
    apart = 0.0
    least = 1e-4 * max(float(one.double().norm()) for one in expected.values())
    for name, p in model.named_parameters():
        if name in expected:
            assert p.grad is not None, name
            difference = p.grad.cpu().double() - expected[name][split.boxes[name].slices()].double()
            apart = max(apart, float(difference.norm()) / max(float(expected[name].double().norm()), least))
    model.zero_grad(set_to_none=True)
    before = sum(wire.sent_bytes for wire in here.wires)
    dist.barrier()
    peak, allocated = watched(run, device)
    peak += made.graph_bytes
    reserved = made.graph_bytes + (torch.cuda.max_memory_reserved() if device == "cuda" else 0)
    sent = sum(wire.sent_bytes for wire in here.wires) - before
    seconds = []
    for _ in range(5):
        dist.barrier()
        began = time.perf_counter()
        run()
        synchronised(device)
        seconds.append(time.perf_counter() - began)
    here.watch.close()
    resident = sum(x.nbytes for x in (*model.parameters(), *model.buffers(), *parts))
    return {
        "graphs": " ".join(made.explain_graphs()).removeprefix("graphs").strip(),
        "reserved_bytes": reserved,
        "peak_bytes": peak + (resident if device == "cpu" else 0),
        "planned_bytes": made.plan.predicted.peak_bytes,
        "beside_bytes": max(0, allocated - resident),
        "one_device_bytes": whole,
        "wire_bytes": sent,
        "planned_wire_bytes": sum(one.sent_bytes for one in talks),
        "gradients_within": apart,
        "seconds": sorted(seconds)[len(seconds) // 2],
        "communications": len(talks),
        "split_operators": len(shards.operators),
    }


def worker(told: str, store: str, rank: int, out: str) -> None:
    """A process: it joins the others, and writes what it found to a file."""
    task = json.loads(Path(told).read_text())
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True
    limit = datetime.timedelta(seconds=ROW_SECONDS)
    stage(f"joining the others by {task['backend']}")
    if task["device"] == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group(
        task["backend"], init_method=f"file://{store}", rank=rank, world_size=task["processes"], timeout=limit
    )
    if task["backend"] == "nccl":
        x = torch.ones(4, device="cuda")
        dist.all_reduce(x)
        assert x.sum().item() == 4 * task["processes"]
    Path(out, f"{rank}.joined").touch()
    found = share(task)
    dist.barrier()
    Path(out, f"{rank}.json").write_text(json.dumps(found))
    with contextlib.suppress(RuntimeError):
        dist.destroy_process_group()


def row(task: dict[str, Any]) -> dict[str, Any]:
    """All processes of a row, ended after a time; what they found, or the last words of the first that failed."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder, "task.json")
        told.write_text(json.dumps(task))
        running, why, codes = [], "", list[int | None]()
        try:
            for rank in range(task["processes"]):
                log = Path(folder, f"log{rank}")
                words = [sys.executable, "-W", "ignore", __file__, "--worker", str(told)]
                call = [*words, str(Path(folder, "store")), str(rank), folder]
                with log.open("wb") as out:
                    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTORCH_CUDA_ALLOC_CONF": EXPANDABLE}
                    running.append(subprocess.Popen(call, stdout=out, stderr=out, env=environment))
            while any(one.poll() is None for one in running) and not any(one.poll() for one in running):
                joined = all(Path(folder, f"{rank}.joined").exists() for rank in range(task["processes"]))
                most = ROW_SECONDS if joined or task["backend"] != "nccl" else NCCL_SECONDS
                if time.perf_counter() - began > most:
                    why = f"not ended after {most} s: "
                    break
                time.sleep(0.05)
            if any(one.poll() for one in running):
                until = time.perf_counter() + LAST_WORDS_SECONDS
                while any(one.poll() is None for one in running) and time.perf_counter() < until:
                    time.sleep(0.05)  # others may say more
            codes += [one.poll() for one in running]
        finally:
            for one in running:
                if one.poll() is None:
                    one.kill()
                one.wait()
        files = [Path(folder, f"{rank}.json") for rank in range(task["processes"])]
        found = task | {"row_seconds": time.perf_counter() - began}
        if all(file.exists() for file in files):
            return found | {"ranks": [json.loads(file.read_text()) for file in files]}
        logs = [Path(folder, f"log{rank}").read_text(errors="replace") for rank in range(task["processes"])]
        told = [last_words(log, rank, code) for rank, (log, code) in enumerate(zip(logs, codes, strict=True))]
        return found | {"error": why + " / ".join(one for one in dict.fromkeys(told) if one)}


def last_words(log: str, rank: int, code: int | None) -> str:
    """The line of an error, and what NCCL says beside it; else what the process was doing."""
    lines = [line.strip().removeprefix(STAGE) for line in log.splitlines() if line.strip()]
    told = [line for line in lines if "Error" in line or "Duplicate" in line]
    ended = f"process {rank} ended with {code}: " if code and not told else ""
    return ended + " ".join(dict.fromkeys(told[-3:] or lines[-1:]))[:500].replace("|", "/")


def line(found: dict[str, Any]) -> str:
    """A row of the table."""
    cells = [
        f"`{found['target']}`",
        str(found["processes"]),
        found["cut"],
        f"{found['numbers']}, {found['backend']}",
    ]
    if "error" in found:
        return (
            "| "
            + " | ".join([*cells, found["error"], *[""] * 7, f"{found['row_seconds']:.0f}", "", ""])
            + " |"
        )
    ranks = found["ranks"]
    nearest = max(ranks, key=lambda one: one["peak_bytes"] / one["planned_bytes"])
    sent, planned = (sum(one[key] for one in ranks) for key in ("wire_bytes", "planned_wire_bytes"))
    same = all(one["wire_bytes"] == one["planned_wire_bytes"] for one in ranks)
    cells += [
        f"{nearest['peak_bytes']:,} of {nearest['planned_bytes']:,}",
        "yes" if all(one["peak_bytes"] <= one["planned_bytes"] for one in ranks) else "NO",
        f"{nearest['beside_bytes']:,}",
        f"{ranks[0]['one_device_bytes']:,}",
        f"{sent:,}",
        "yes" if same else f"NO, {planned:,}",
        f"{max(one['gradients_within'] for one in ranks):.0e}",
        f"{1e3 * max(one['seconds'] for one in ranks):.1f}",
        f"{found['row_seconds']:.0f}",
        f"{nearest['reserved_bytes'] / nearest['peak_bytes']:.3f}" if nearest["reserved_bytes"] else "",
        nearest["graphs"],
    ]
    return "| " + " | ".join(cells) + " |"


def tasks(chosen: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows, in their order."""
    named = [tuple(one.rsplit("=", 1)) for one in chosen.targets]
    cases = named or [*(CASES if chosen.device == "cuda" else SMALL).items()]
    known = [
        {
            "target": target,
            "cut": cut,
            "processes": count,
            "numbers": numbers,
            "backend": "gloo",
            "graphs": graphs,
        }
        for graphs in chosen.graphs
        for numbers in chosen.numbers
        for target, cut in cases
        for count in chosen.processes
    ]
    first = [known[0] | {"backend": "nccl"}] if chosen.device == "cuda" else []
    return [one | {"device": chosen.device} for one in (*first, *known)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument(
        "--numbers", nargs="+", choices=("float32", "float64"), default=["float32", "float64"]
    )
    parser.add_argument("--graphs", nargs="+", choices=("off", "auto"), default=["off"])
    parser.add_argument("--limit", type=float, default=150.0, help="seconds in which rows are begun")
    parser.add_argument("--out", type=Path, help="the table, as Markdown; .json beside it has all ranks")
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("targets", nargs="*", metavar="TARGET=CUT", default=[])
    chosen = parser.parse_args()
    if chosen.worker:
        told, store, rank, out = chosen.worker
        worker(told, store, int(rank), out)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a limit of time ends processes of a row too
    for one in chosen.targets:
        if one.rpartition("=")[2] not in CUT_KINDS:
            parser.error(f"{one!r}: give TARGET=CUT, with one of {', '.join(CUT_KINDS)} as CUT")
    if chosen.out is not None:
        check_outputs(chosen.out, chosen.out.with_suffix(".json"))
    began, rows, left, lines = time.perf_counter(), [], [], [*HEAD]
    where = ", ".join(f"{key} {value}" for key, value in machine(chosen.device).items())
    words = " ".join(["python benchmarks/shard_gpu.py", *sys.argv[1:]])
    print("\n".join(lines), flush=True)
    for task in tasks(chosen):
        if time.perf_counter() - began > chosen.limit:
            left.append(f"`{task['target']}` on {task['processes']} in {task['numbers']}")
            continue
        rows.append(row(task))
        lines.append(line(rows[-1]))
        print(lines[-1], flush=True)
        about = [f"Command: `{words}`. {datetime.date.today()}, {where}, one thread a process."]
        keep(chosen.out, rows, lines, about)
    if left:
        about.append(f"Not begun within {chosen.limit:.0f} s: {'; '.join(left)}.")
        print(about[-1])
        keep(chosen.out, rows, lines, about)


def keep(out: Path | None, rows: list[dict[str, Any]], lines: list[str], about: list[str]) -> None:
    """Write what is known so far."""
    if out is not None:
        text = "\n".join(["# Several processes on one device", "", *lines, "", *about, ""])
        write_atomically(out, text.encode())
        write_atomically(out.with_suffix(".json"), json.dumps(rows, indent=1).encode() + b"\n")


if __name__ == "__main__":
    main()
