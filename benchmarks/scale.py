"""How reading, liveness and the peak grow with the size of a step.

    python benchmarks/scale.py            prints a table and stores it under benchmarks/results/

Two series, each size in a process of its own so that its peak memory is its own:
- our own file with 10^4, 10^5 and 10^6 operators: read, lifetimes, peak;
- the MegEngine profile of examples/documents, once, 10 times and 100 times as large: read, lifetimes, peak.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

from lowtide import __version__
from lowtide.cost import Step
from lowtide.files import write_atomically
from lowtide.formats import native
from lowtide.formats.registry import read_file
from lowtide.graph import Graph, Op, Phase, Role, Source, Tensor

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
LIMIT_SECONDS, LIMIT_BYTES = 20.0, 3e9


def training_step(operators: int) -> Step:
    """A chain with skips and its backward: half the operators forward, half backward, a weight each."""
    half = operators // 2
    tensors = [Tensor("x", 4096, Role.INPUT, "x", (32, 32), "float32", "cuda:0")]
    ops: list[Op] = []
    outputs = [0]
    for k in range(half):
        weight = len(tensors)
        tensors.append(Tensor(f"w{k}", 256, Role.PARAMETER, f"layer.{k}.weight", (8, 8), "float32", "cuda:0"))
        tensors.append(Tensor(f"a{k}", 4096 + k % 7 * 512, shape=(32, 32), dtype="float32", device="cuda:0"))
        inputs = (outputs[-1], weight, outputs[max(0, len(outputs) - 1 - k % 9)])
        line = Source("model.py", k % 500 + 1)
        ops.append(Op(f"f{k}", "conv", inputs=inputs, outputs=(weight + 1,), name=f"layer.{k}", source=line))
        outputs.append(weight + 1)
    flowing = None
    for k in reversed(range(half)):
        forward = ops[k]
        activation, weight = forward.outputs[0], forward.inputs[1]
        gradient = len(tensors)
        tensors.append(
            Tensor(f"g{k}", tensors[activation].bytes, Role.GRADIENT, shape=(32, 32), dtype="float32")
        )
        tensors.append(Tensor(f"w{k}.grad", 256, Role.GRADIENT, gradient_of=weight))
        reads = (*(() if flowing is None else (flowing,)), activation, weight)
        ops.append(
            Op(f"b{k}", "conv.grad", Phase.BACKWARD, reads, (gradient, gradient + 1), f"layer.{k}.grad")
        )
        flowing = gradient
    return Step(Graph(tuple(tensors), tuple(ops)), "benchmark")


def repeated_profile(times: int) -> bytes:
    """The profile with all its operators and variables repeated, one copy after the other."""
    source = json.loads(next((ROOT / "examples" / "documents").glob("001_*")).read_bytes())
    profiler, graph = source["profiler"], source["graph_exec"]
    many: dict[str, Any] = {
        "profiler": {"opr_internal_pf": {}, "host": {}, "device": {}, "opr_footprint": {}},
        "graph_exec": {"comp_seq": [], "mem_chunk": {}, "var": {}, "operator": {}},
    }
    for copy in range(times):

        def renamed(name: str, copy: int = copy) -> str:
            return f"{name}.{copy}" if copy else name

        for section in ("host", "device", "opr_footprint"):
            many["profiler"][section] |= {renamed(k): v for k, v in profiler[section].items()}
        out = many["graph_exec"]
        out["comp_seq"] += [renamed(k) for k in graph["comp_seq"]]
        for k, v in graph["var"].items():
            out["var"][renamed(k)] = v | {"id": renamed(k)}
        for k, v in graph["operator"].items():
            ends = {end: [renamed(name) for name in v[end]] for end in ("input", "output")}
            out["operator"][renamed(k)] = v | ends | {"id": renamed(k)}
        for k, v in graph["mem_chunk"].items():
            out["mem_chunk"][renamed(k)] = v | {"owner_var": renamed(v["owner_var"]), "id": renamed(k)}
    return json.dumps(many).encode()


def measure(path: str) -> dict[str, Any]:
    """Read the file, compute lifetimes, find the peak; run in a fresh process."""
    start = time.perf_counter()
    step = read_file(path).step
    read = time.perf_counter()
    timeline = step.lifetimes()
    peak, at = timeline.peak_bytes, timeline.peak_step
    end = time.perf_counter()
    return {
        "operators": len(step.graph.ops),
        "file_bytes": Path(path).stat().st_size,
        "read_seconds": read - start,
        "liveness_seconds": end - read,
        "seconds": end - start,
        "memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "peak_bytes": peak,
        "peak_step": at,
    }


def make(kind: str, size: str, path: str) -> None:
    data = native.write(training_step(int(size))).data if kind == "native" else repeated_profile(int(size))
    Path(path).write_bytes(data)


def made_and_measured(kind: str, size: int, path: Path) -> dict[str, Any]:
    """Made in one process, measured in another: a child inherits memory, so the parent stays small."""
    subprocess.run([sys.executable, __file__, "--make", kind, str(size), str(path)], check=True)
    command = [sys.executable, __file__, "--measure", str(path)]
    result: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return result


def machine() -> dict[str, Any]:
    model = next(
        (line.split(":")[1].strip() for line in _cpu_lines() if "model name" in line), platform.machine()
    )
    cores = len([line for line in _cpu_lines() if line.startswith("processor")])
    return {"cpu": model, "cores": cores, "python": platform.python_version(), "lowtide": __version__}


def _cpu_lines() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def table(title: str, rows: list[dict[str, Any]]) -> str:
    lines = [
        f"## {title}",
        "",
        "| operators | file MB | read s | liveness s | total s | µs an operator | memory GB |",
    ]
    lines.append("| ---: " * 7 + "|")
    for row in rows:
        each = row["seconds"] / row["operators"] * 1e6
        lines.append(
            f"| {row['operators']:,} | {row['file_bytes'] / 1e6:.1f} | {row['read_seconds']:.2f} | "
            f"{row['liveness_seconds']:.2f} | {row['seconds']:.2f} | {each:.1f} | "
            f"{row['memory_bytes'] / 1e9:.2f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--make", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure)))
        return
    if options.make:
        make(*options.make)
        return
    series: dict[str, list[dict[str, Any]]] = {"native": [], "megengine": []}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "step.json"
        for operators in (10_000, 100_000, 1_000_000):
            series["native"].append(made_and_measured("native", operators, file))
        for times in (1, 10, 100):
            series["megengine"].append(made_and_measured("megengine", times, file))
    largest = series["native"][-1]
    report = {
        "date": date.today().isoformat(),
        "command": "python benchmarks/scale.py",
        "machine": machine(),
        "limits": {"seconds": LIMIT_SECONDS, "memory_bytes": LIMIT_BYTES},
        "within_limits": largest["seconds"] < LIMIT_SECONDS and largest["memory_bytes"] < LIMIT_BYTES,
        "series": series,
    }
    told = ", ".join(f"{key} {value}" for key, value in machine().items())
    text = f"# Scale\n\n`{report['command']}`, {report['date']}; {told}\n\n"
    text += table("Our own file", series["native"]) + "\n" + table("MegEngine profile", series["megengine"])
    RESULTS.mkdir(exist_ok=True)
    write_atomically(RESULTS / "scale.json", json.dumps(report, indent=2).encode() + b"\n")
    write_atomically(RESULTS / "scale.md", text.encode())
    print(text)
    print("within the limits" if report["within_limits"] else "NOT within the limits")


if __name__ == "__main__":
    main()
