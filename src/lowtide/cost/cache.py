"""Costs that were measured before, kept on disk by signature: one file an environment."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from lowtide.cost.device import Environment
from lowtide.cost.types import Cost
from lowtide.cost.validate import MAX_FIGURE, MAX_SECONDS
from lowtide.errors import FileError, LowtideError
from lowtide.files import read_bytes, write_atomically

try:
    import fcntl
except ImportError:  # no such locks on this system: the last of two writers wins, whole
    fcntl = None  # type: ignore[assignment]

__all__ = ["CostCache", "open_cache"]

_VERSION = 2


class _Header(msgspec.Struct):
    """The part that a file of any version has."""

    lowtide: str
    version: int


class _Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file."""

    lowtide: str
    version: int
    environment: Environment
    costs: dict[str, Cost]


class CostCache:
    """Costs by signature. Reading and writing the file is :func:`open_cache` and :meth:`save`."""

    def __init__(
        self, path: Path, environment: Environment, costs: dict[str, Cost], problem: str = ""
    ) -> None:
        self.path = path
        self.environment = environment
        self.problem = problem
        """Why a file that was there could not be used; nothing where all is well."""
        self._costs = costs
        self._added: dict[str, Cost] = {}
        self._assumed: dict[str, Cost] = {}

    def __len__(self) -> int:
        return len(self._costs)

    def get(self, signature: str) -> Cost | None:
        """What an operator of this signature takes, if it was measured before, or is assumed."""
        return self._costs.get(signature) or self._assumed.get(signature)

    def assume(self, signature: str, cost: Cost) -> None:
        """Answer with a cost as long as none was measured; it is never written."""
        self._assumed[signature] = cost

    def add(self, signature: str, cost: Cost) -> None:
        """Remember a cost; it is on disk after :meth:`save`."""
        self._costs[signature] = self._added[signature] = cost

    def save(self) -> None:
        """Put what was added on disk, together with what others have put there meanwhile.

        The file is replaced whole, so that a reader never sees half of it. A FileError says why it cannot be.
        """
        if not self._added:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FileError(
                f"{self.path.parent}: cannot be made: {error.strerror}; set LOWTIDE_CACHE to a folder"
            ) from error
        with _locked(self.path.with_suffix(".lock")):
            costs, _ = _read(self.path, self.environment)
            costs |= self._added
            document = _Document("costs", _VERSION, self.environment, costs)
            write_atomically(self.path, msgspec.json.encode(document) + b"\n")
        self._costs = costs | self._costs
        self._added.clear()
        self.problem = ""


def open_cache(folder: Path, environment: Environment) -> CostCache:
    """What was measured in this environment before; empty where nothing was, or where the file is damaged."""
    path = folder / f"costs-{environment.key}.json"
    costs, problem = _read(path, environment)
    return CostCache(path, environment, costs, problem)


_READ: dict[Path, tuple[object, dict[str, Cost]]] = {}
"""What was read of files, and which state of them: one with thousands of costs takes long to read."""


def _read(path: Path, environment: Environment) -> tuple[dict[str, Cost], str]:
    """The costs in a file, or why it has none."""
    if not os.path.lexists(path):
        return {}, ""
    state = _state(path)
    known, costs = _READ.get(path, (None, {}))
    if state is None or known != (state, environment):
        costs, problem = _parsed(path, environment)
        if problem:
            return {}, problem
        _READ[path] = (state, environment), costs
    return dict(costs), ""


def _state(path: Path) -> object:
    """What changes whenever the file is replaced; None where it cannot be told."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _parsed(path: Path, environment: Environment) -> tuple[dict[str, Cost], str]:
    try:
        data = read_bytes(path)
        header = msgspec.json.decode(data, type=_Header)
        if (header.lowtide, header.version) != ("costs", _VERSION):
            return {}, f"{path}: written by another release; measured anew"
        document = msgspec.json.decode(data, type=_Document)
    except (LowtideError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return {}, f"{path}: ignored, it cannot be used: {error}"
    if document.environment != environment:
        return {}, f"{path}: ignored, it belongs to another device or other versions"
    bad = next((name for name, cost in document.costs.items() if not _sound(cost)), None)
    if bad is not None:
        return {}, f"{path}: ignored, it is damaged: impossible figures for {bad}"
    return document.costs, ""


def _sound(cost: Cost) -> bool:
    limits: list[tuple[Any, float]] = [(cost.seconds, MAX_SECONDS)]
    limits += [(figure, MAX_SECONDS) for figure in cost.short_seconds.values()]
    limits += [(figure, MAX_FIGURE) for figure in (cost.flop, cost.bytes_moved, cost.workspace_bytes)]
    return cost.seconds is not None and all(f is None or 0 <= f.value <= most for f, most in limits)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Inside, no other process is between reading and replacing. Without locks, it may be."""
    with contextlib.ExitStack() as stack:
        if fcntl is not None:
            with contextlib.suppress(OSError):
                file = stack.enter_context(path.open("w"))
                fcntl.flock(file, fcntl.LOCK_EX)
        yield
