"""What stack frames say about who allocated: the line of the user's code, the operator, the phase."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from lowtide.graph import Phase, Source

__all__ = ["NOBODY", "Requester", "is_library", "requester_of"]

_ATEN = re.compile(r"^at::_ops::(\w+)::(?:call|redispatch)\b")
_ENGINE = re.compile(r"torch::autograd::Engine|^_engine_run_backward$")
_TRACED = re.compile(r'File "([^"\n]+)", line (\d{1,9}), in ([^\s,]+)')
_SEPARATOR = re.compile(r"[/\\]")
_LIBRARY = re.compile(
    r"/(?:site|dist)-packages/|/lib/python3\.|torchinductor|^<"
    r"|(?:^|/)torch/(?:_|nn/|autograd/|optim/|utils/|cuda/|distributed/|amp/|fx/|jit/|functional\.py|overrides\.py)"
    r"|^(?:contextlib|threading|functools|runpy|queue|copy)\.py$|^(?:asyncio|concurrent|multiprocessing|importlib)/"
)
"""Python files that are not the user's; a profiler leaves out the folder that packages are in."""


@dataclass(frozen=True, slots=True)
class Requester:
    """Who asked for a block of memory."""

    name: str = ""
    """The user's line and function, as ``train.py:31 forward``."""
    kind: str = "allocation"
    """The ATen operator, where frames of C++ name it."""
    phase: Phase = Phase.FORWARD
    source: Source | None = None


NOBODY = Requester()
"""For events without frames."""


def is_library(file: str) -> bool:
    """Whether a Python file is none of the user's, by its path."""
    return _LIBRARY.search(file.replace("\\", "/")) is not None


def requester_of(frames: Iterable[Any]) -> Requester:
    """Who is behind these frames, innermost first; what is not as expected is passed over."""
    found: tuple[str, int, str] | None = None
    user = kind = traced = None
    phase = Phase.FORWARD
    for frame in frames:
        if not isinstance(frame, dict):
            continue
        file, line, name = (frame.get(key) for key in ("filename", "line", "name"))
        if not isinstance(file, str) or not isinstance(name, str) or type(line) is not int:
            continue
        operator = _ATEN.match(name)
        if operator:
            kind = operator[1]  # the outermost one stays: what was called, not what it is made of
        phase = _phase(phase, file, name)
        original = frame.get("fx_original_trace")
        if traced is None and isinstance(original, str):
            traced = _last_of(original)
        if file.endswith(".py") and 0 < line < 1 << 31:
            found = found or (file, line, name)
            if user is None and not is_library(file):
                user = (file, line, name)
    best = traced or user or found
    if best is None:
        return Requester("", f"aten.{kind}" if kind else NOBODY.kind, phase)
    file, line, name = best
    short = _SEPARATOR.split(file)[-1]
    return Requester(
        f"{short}:{line} {name}", f"aten.{kind}" if kind else NOBODY.kind, phase, Source(file, line)
    )


def _phase(known: Phase, file: str, name: str) -> Phase:
    if "/torch/optim/" in file:
        return Phase.UPDATE
    return Phase.BACKWARD if known is Phase.FORWARD and _ENGINE.search(name) else known


def _last_of(trace: str) -> tuple[str, int, str] | None:
    """The innermost line of a stack trace as Python prints it."""
    lines = _TRACED.findall(trace)
    return (lines[-1][0], int(lines[-1][1]), lines[-1][2]) if lines else None
