"""Reading and writing whole files: nothing half-written, nothing endless."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from lowtide.errors import FileError

__all__ = ["MAX_FILE_BYTES", "check_outputs", "read_bytes", "write_atomically", "write_together"]

MAX_FILE_BYTES = 4 << 30


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """The contents of a regular file of at most 4 GiB."""
    name = os.fspath(path)
    try:
        status = Path(name).stat()
        if not stat.S_ISREG(status.st_mode):
            raise FileError(f"{name}: not a regular file; give the path of a file")
        if status.st_size > MAX_FILE_BYTES:
            raise FileError(f"{name}: {status.st_size} bytes is more than the {MAX_FILE_BYTES} that are read")
        return Path(name).read_bytes()
    except (OSError, ValueError) as error:
        raise FileError(f"{name}: cannot be read: {_reason(error)}") from error


def check_outputs(*paths: str | os.PathLike[str] | None) -> None:
    """Refuse, before any work is done, files that cannot be written or that are one and the same."""
    targets: dict[Path, str] = {}
    for path in paths:
        if path is None:
            continue
        name = os.fspath(path)
        target = _target(path)
        if not target.parent.is_dir():
            raise FileError(f"{name}: cannot be written: there is no folder {Path(name).parent}")
        if not os.access(target.parent, os.W_OK | os.X_OK):
            raise FileError(f"{name}: cannot be written: no permission for the folder {Path(name).parent}")
        if target in targets:
            raise FileError(f"{name}: two outputs would be written to this file; give each its own")
        targets[target] = name


def write_atomically(path: str | os.PathLike[str], data: bytes) -> None:
    """Put the data at this path, whole or not at all: written beside it, then moved there."""
    write_together([(path, data)])


def write_together(files: Iterable[tuple[str | os.PathLike[str], bytes]]) -> None:
    """Put each data at its path, all whole or none: written beside them first, then all moved there."""
    with contextlib.ExitStack() as parts:
        moves: list[tuple[str | os.PathLike[str], Path, Path]] = []
        for path, data in files:
            target = _target(path)
            with _writing(path):
                part = _part(target, data)
            parts.callback(_gone, part)
            moves.append((path, part, target))
        for path, part, target in moves:
            with _writing(path):
                part.replace(target)


def _target(path: str | os.PathLike[str]) -> Path:
    """The file that a path names: through a link to what it points at, so that the link stays one."""
    if not os.fspath(path):
        raise FileError("no file to write was named; give its path")
    with _writing(path):
        target = Path(path).resolve()
        if target.exists() and not target.is_file():
            raise FileError(
                f"{os.fspath(path)}: not a regular file; give the path of a file to write or replace"
            )
        return target


def _part(target: Path, data: bytes) -> Path:
    """A file with the data beside the target, with its permissions."""
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:100]}.", suffix=".part")
    part = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.chmod(_mode(target))
    except BaseException:
        _gone(part)
        raise
    return part


def _gone(part: Path) -> None:
    with contextlib.suppress(OSError):
        part.unlink()


@contextlib.contextmanager
def _writing(path: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:
        raise FileError(f"{os.fspath(path)}: cannot be written: {_reason(error)}") from error


def _mode(target: Path) -> int:
    with contextlib.suppress(OSError):
        return stat.S_IMODE(target.stat().st_mode)
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
