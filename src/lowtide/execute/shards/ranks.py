"""Processes of this machine that run a program each, and what becomes of them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from lowtide.errors import RunError
from lowtide.execute.shards.faults import found_out, read_verdict, where_is

__all__ = ["on_ranks", "one_of_several"]

_POLL = 0.05
_LINES, _MOST_LINES = 3, 20
_ERROR = re.compile(r"[\w.]*Error: ")
"""Where the last words of a process begin: what it raised, of any number of lines."""
_HOST = "127.0.0.1"


def on_ranks(module: str, arguments: Sequence[str], devices: int, seconds: float) -> None:
    """Run ``python -m module arguments... PORT RANK DEVICES`` once a device, on this machine.

    They meet in a store at this port, which outlives them. If one fails or all take longer, the others are
    ended, and a RunError names it with the operator that it was at and its last words.
    """
    store = _distributed().TCPStore(_HOST, 0, None, True, timedelta(seconds=seconds), wait_for_workers=False)
    with _unwinding(), tempfile.TemporaryDirectory() as folder:
        running: list[tuple[subprocess.Popen[bytes], Path]] = []
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        try:
            for rank in range(devices):
                log = Path(folder, f"rank{rank}")
                words = [*arguments, str(store.port), str(rank), str(devices)]
                with log.open("wb") as out:
                    call = [sys.executable, "-W", "ignore", "-m", module, *words]
                    running.append((subprocess.Popen(call, stdout=out, stderr=out, env=environment), log))
            _wait(running, seconds, store)
        finally:
            for one, _ in running:
                if one.poll() is None:
                    one.kill()
                one.wait()


@contextmanager
def _unwinding() -> Iterator[None]:
    """Inside, a process that is asked to end (SIGTERM) raises SystemExit: nothing is left running."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _wait(running: Sequence[tuple[subprocess.Popen[bytes], Path]], seconds: float, store: Any) -> None:
    """Return once all have ended well."""
    until = time.monotonic() + seconds
    while True:
        codes = [one.poll() for one, _ in running]
        failed = [rank for rank, code in enumerate(codes) if code not in (None, 0)]
        if failed:
            known = read_verdict(store)
            if known:
                raise RunError(known)
            # one that was killed rather than one that lost it
            rank = min(failed, key=lambda k: (codes[k] or 0) > 0)
            ended, where = _ended(codes[rank] or 0), where_is(store, rank)
            at = f", {where}" if where else ""
            raise RunError(
                f"rank {rank} has {ended}{at}: {_said(running[rank][1])}; see "
                "whether `lowtide run TARGET` works on one device"
            )
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > until:
            late = [rank for rank, code in enumerate(codes) if code is None]
            told = found_out(store, len(running)) if where_is(store, late[0]) else ""
            raise RunError(
                f"rank {late[0]} has not ended after {seconds:.0f} s, nor have {len(late) - 1} others: "
                f"{told or _said(running[late[0]][1])}; give more time (--timeout), or a smaller step"
            )
        time.sleep(_POLL)


def _ended(code: int) -> str:
    return f"ended with {code}" if code > 0 else f"been killed ({signal.Signals(-code).name})"


def _said(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    error = next((k for k in reversed(range(len(lines))) if _ERROR.match(lines[k])), len(lines) - _LINES)
    return " / ".join(lines[max(0, error) :][:_MOST_LINES]) or "it said nothing"


def _distributed() -> Any:
    distributed: Any = torch.distributed
    if not distributed.is_available() or not distributed.is_gloo_available():
        raise RunError(
            "this torch has no gloo, by which processes of this machine talk; install another build"
        )
    return distributed


@contextmanager
def one_of_several(port: int, rank: int, devices: int, seconds: float) -> Iterator[Any]:
    """Inside, this process is one of several, on gloo; all leave together. Gives their store."""
    distributed, limit = _distributed(), timedelta(seconds=seconds)
    store = distributed.TCPStore(_HOST, port, None, False, limit)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=devices, timeout=limit)
    try:
        yield store
        distributed.barrier()
    finally:
        distributed.destroy_process_group()
