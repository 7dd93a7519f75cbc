"""Processes of this machine that run a program each, and what becomes of them."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from lowtide.errors import RunError

__all__ = ["on_ranks", "one_of_several"]

_POLL = 0.05
_LINES = 3


def on_ranks(module: str, arguments: Sequence[str], devices: int, seconds: float) -> None:
    """Run ``python -m module arguments... STORE RANK DEVICES`` once a device, on this machine.

    If one fails or all take longer, the others are ended, and a RunError names it with its last words.
    """
    with tempfile.TemporaryDirectory() as folder:
        running: list[tuple[subprocess.Popen[bytes], Path]] = []
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        try:
            for rank in range(devices):
                log = Path(folder, f"rank{rank}")
                words = [*arguments, str(Path(folder, "store")), str(rank), str(devices)]
                with log.open("wb") as out:
                    call = [sys.executable, "-W", "ignore", "-m", module, *words]
                    running.append((subprocess.Popen(call, stdout=out, stderr=out, env=environment), log))
            _wait(running, seconds)
        finally:
            for one, _ in running:
                if one.poll() is None:
                    one.kill()
                one.wait()


def _wait(running: Sequence[tuple[subprocess.Popen[bytes], Path]], seconds: float) -> None:
    """Return once all have ended well."""
    until = time.monotonic() + seconds
    while True:
        codes = [one.poll() for one, _ in running]
        failed = [rank for rank, code in enumerate(codes) if code not in (None, 0)]
        if failed:
            raise RunError(
                f"rank {failed[0]} has ended with {codes[failed[0]]}: {_said(running[failed[0]][1])}"
            )
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > until:
            late = [rank for rank, code in enumerate(codes) if code is None]
            raise RunError(
                f"rank {late[0]} has not ended after {seconds:.0f} s, nor have {len(late) - 1} others: "
                f"{_said(running[late[0]][1])}; give more time, or a smaller step"
            )
        time.sleep(_POLL)


def _said(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " / ".join(lines[-_LINES:]) or "it said nothing"


@contextmanager
def one_of_several(store: str, rank: int, devices: int, seconds: float) -> Iterator[None]:
    """Inside, this process is one of several, on gloo; all leave together."""
    distributed: Any = torch.distributed
    if not distributed.is_available() or not distributed.is_gloo_available():
        raise RunError(
            "this torch has no gloo, by which processes of this machine talk; install another build"
        )
    limit, where = timedelta(seconds=seconds), f"file://{store}"
    distributed.init_process_group("gloo", init_method=where, rank=rank, world_size=devices, timeout=limit)
    try:
        yield
        distributed.barrier()
    finally:
        distributed.destroy_process_group()
