"""What the devices of this machine are, and what each does at most: real kernels, a second or two."""

from __future__ import annotations

import functools
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lowtide.cost.device import Device, Environment
from lowtide.cost.watch import timing_event
from lowtide.errors import ToolError

__all__ = ["best_device", "environment", "host_memory", "measure_device", "torch_facts"]

_DTYPES = {
    "cpu": (torch.float32, torch.float64, torch.bfloat16),
    "cuda": (torch.float32, torch.float64, torch.bfloat16, torch.float16),
}
_SIZES = (128, 256, 512, 1024, 2048, 4096, 8192)
_CALL_SECONDS = 0.02
"""Products grow until one takes so long: small ones measure how busy the machine is, not how fast."""
_REPEATS = 5
_LAUNCHES = 300
_COPIES = 100
_BESIDE = 100
"""Operators that the device works at while copies are timed: for longer than one takes."""
_BUFFER_BYTES = {"cpu": 256 << 20, "cuda": 1 << 30}


def best_device() -> str:
    """``cuda`` where there is one, else ``cpu``."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def torch_facts() -> dict[str, str | int | list[dict[str, str | int]] | None]:
    """What PyTorch is and sees: version, CUDA, threads, GPUs with their memory."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    properties = [torch.cuda.get_device_properties(k) for k in range(count)]
    return {
        "version": str(torch.__version__),
        "cuda": torch.version.cuda,
        "threads": torch.get_num_threads(),
        "gpus": [{"name": gpu.name, "memory_bytes": gpu.total_memory} for gpu in properties],
    }


def environment(kind: str) -> Environment:
    """The circumstances of a measurement on the current device of this kind."""
    if kind == "cuda" and not torch.cuda.is_available():
        raise ToolError(
            "there is no CUDA device here that torch can use; `lowtide doctor` says what there is"
        )
    versions = {"torch": str(torch.__version__)}
    settings = {
        "matmul_precision": _setting(torch.get_float32_matmul_precision),
        "deterministic": _setting(torch.are_deterministic_algorithms_enabled),
    }
    if kind == "cuda":
        cudnn: Any = torch.backends.cudnn
        versions |= {"cuda": str(torch.version.cuda), "cudnn": str(cudnn.version())}
        for flag in ("enabled", "benchmark", "deterministic", "allow_tf32"):
            settings[f"cudnn_{flag}"] = _setting(functools.partial(getattr, cudnn, flag))
        name = torch.cuda.get_device_name()
    else:
        versions["capability"] = torch.backends.cpu.get_cpu_capability()
        settings |= {"threads": str(torch.get_num_threads()), "mkldnn": str(torch.backends.mkldnn.enabled)}
        name = _processor()
    return Environment(name, kind, versions, settings)


def _setting(read: Callable[[], object]) -> str:
    try:
        return str(read())
    except RuntimeError:  # torch refuses to answer where its old and new switches were mixed
        return "mixed"


def measure_device(kind: str) -> Device:
    """What the current device of this kind does at most."""
    where = environment(kind)
    device = torch.device(kind)
    with torch.no_grad():
        rates = {str(dtype).removeprefix("torch."): _matrix_rate(device, dtype) for dtype in _DTYPES[kind]}
        bandwidth = _bandwidth(device)
        launch = _launch(device)
        up, down = _links(device) if kind == "cuda" else (None, None)
        handover = _handover(device) if kind == "cuda" else None
    memory = torch.cuda.get_device_properties(device).total_memory if kind == "cuda" else host_memory()
    return Device(where, rates, bandwidth, launch, memory, up, down, handover)


def _seconds(device: torch.device, call: Callable[[], object]) -> float:
    """The quickest of some calls, after one to warm up: what else runs is no limit of the device."""
    call()
    samples: list[float] = []
    for _ in range(_REPEATS):
        if device.type == "cuda":
            start, end = timing_event(), timing_event()
            torch.cuda.synchronize()
            start.record()
            call()
            end.record()
            torch.cuda.synchronize()
            samples.append(start.elapsed_time(end) * 1e-3)
        else:
            started = time.perf_counter()
            call()
            samples.append(time.perf_counter() - started)
    return max(min(samples), 1e-9)


def _matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP a second of the fastest square product of those that do not take long."""
    best = 0.0
    for n in _SIZES:
        left = torch.ones(n, n, dtype=dtype, device=device)
        out = torch.empty_like(left)
        seconds = _seconds(device, lambda a=left, c=out: torch.mm(a, a, out=c))  # type: ignore[misc]
        best = max(best, 2 * n**3 / seconds)
        if seconds > _CALL_SECONDS:
            break
    return best


def _bandwidth(device: torch.device) -> float:
    """Bytes a second that a copy inside the device reads and writes, taken together."""
    source = torch.ones(_buffer_bytes(device) // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _seconds(device, lambda: target.copy_(source))


def _launch(device: torch.device) -> float:
    """Seconds an operator takes that has next to nothing to do, when many are issued in a row."""
    one = torch.ones(1, device=device)
    for _ in range(3):
        torch.add(one, one)
    samples = []
    for _ in range(_REPEATS):
        if device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(_LAUNCHES):
            torch.add(one, one)
        if device.type == "cuda":
            torch.cuda.synchronize()
        samples.append((time.perf_counter() - started) / _LAUNCHES)
    return min(samples)


def _links(device: torch.device) -> tuple[float, float]:
    """Bytes a second from pinned memory of the host to the device, and back, while the device is at work."""
    cuda: Any = torch.cuda
    size = min(_buffer_bytes(device), 256 << 20)
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(size, dtype=torch.uint8, device=device)
    work = torch.ones(1 << 26, device=device)
    lane = cuda.Stream(device)

    def copied(target: torch.Tensor, source: torch.Tensor) -> float:
        samples: list[float] = []
        for _ in range(_REPEATS + 1):
            cuda.synchronize()
            start, end = timing_event(), timing_event()
            for _ in range(_BESIDE):
                work.add_(1.0)
            with cuda.stream(lane):
                start.record()
                target.copy_(source, non_blocking=True)
                end.record()
            cuda.synchronize()
            samples.append(start.elapsed_time(end) / 1e3)
        return statistics.median(samples[1:])

    return size / copied(there, host), size / copied(host, there)


def _handover(device: torch.device) -> float:
    """Seconds that a copy beside the computation costs it: an event before it, and waiting for its end."""
    cuda: Any = torch.cuda
    lane, current = cuda.Stream(device), cuda.current_stream(device)
    work = torch.ones(1 << 26, device=device)  # longer on the device than a copy takes on the host
    host = torch.empty(1024, pin_memory=True)

    def row(copies: bool) -> None:
        before = current.record_event()
        for _ in range(_COPIES):
            if copies:
                current.wait_event(before)  # of a copy that has ended long ago
                lane.wait_stream(current)
                with cuda.stream(lane):
                    host.copy_(work[:1024], non_blocking=True)
                before = lane.record_event()
            work.add_(1.0)

    with_copies, without = (_seconds(device, functools.partial(row, copies)) for copies in (True, False))
    return max(0.0, with_copies - without) / _COPIES


def _buffer_bytes(device: torch.device) -> int:
    """Larger than any cache of the device, and an eighth of what is free at most."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else host_memory()
    return max(1 << 20, min(_BUFFER_BYTES[device.type], free // 8))


def host_memory() -> int:
    """Bytes of memory that the host has in all."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _processor() -> str:
    """As its maker calls it, where the system says so."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for wanted in ("model name", "CPU part"):
        for line in lines:
            field, _, value = line.partition(":")
            if field.strip() == wanted:
                said = value.strip()
                return said if wanted == "model name" else f"{platform.machine()} part {said}"
    return platform.processor() or platform.machine()
