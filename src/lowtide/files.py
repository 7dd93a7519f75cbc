"""Reading and writing whole files: nothing half-written, nothing endless."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from lowtide.errors import FileError
from lowtide.printable import printable

try:
    import fcntl
except ImportError:  # no such locks on this system: what a killed writer leaves behind stays
    fcntl = None  # type: ignore[assignment]

__all__ = [
    "MAX_FILE_BYTES",
    "check_outputs",
    "is_file",
    "read_bytes",
    "write_atomically",
    "write_together",
]

MAX_FILE_BYTES = 4 << 30


def is_file(path: str | os.PathLike[str]) -> bool:
    """Whether a regular file can be found at this path; a name that no file can have is none."""
    with contextlib.suppress(OSError, ValueError):
        return Path(path).is_file()
    return False


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """The contents of a regular file of at most 4 GiB."""
    name = _shown(path)
    try:
        status = Path(path).stat()
        if not stat.S_ISREG(status.st_mode):
            raise FileError(f"{name}: not a regular file; give the path of a file")
        if status.st_size > MAX_FILE_BYTES:
            raise FileError(
                f"{name}: {status.st_size} bytes is more than the {MAX_FILE_BYTES} that are read; "
                "take a shorter recording"
            )
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:
        raise FileError(f"{name}: cannot be read: {_reason(error)}; check the path") from error


def check_outputs(
    *paths: str | os.PathLike[str] | None, inputs: Iterable[str | os.PathLike[str] | None] = ()
) -> None:
    """Before any work is done: refuse files that cannot be written, are one and the same, or are read.

    ``inputs`` are those that are read; None stands for a file that nobody asked for.
    """
    targets: set[Path] = set()
    for path in paths:
        if path is None:
            continue
        name, folder = _shown(path), _shown(Path(path).parent)
        target = _target(path)
        with _writing(path):
            if not target.parent.is_dir():
                raise FileError(f"{name}: cannot be written: there is no folder {folder}; make it first")
            if not os.access(target.parent, os.W_OK | os.X_OK):
                raise FileError(
                    f"{name}: cannot be written: no permission for the folder {folder}; give another path"
                )
        if target in targets:
            raise FileError(f"{name}: two outputs would be written to this file; give each its own")
        if any(_same(target, one) for one in inputs if one is not None):
            raise FileError(f"{name}: this is the file that is read; name another to write")
        targets.add(target)


def write_atomically(path: str | os.PathLike[str], data: bytes) -> None:
    """Put the data at this path, whole or not at all: written beside it, then moved there."""
    write_together([(path, data)])


def write_together(files: Iterable[tuple[str | os.PathLike[str], bytes]]) -> None:
    """Put each data at its path, all whole or none: written beside them first, then all moved there.

    A writer that is killed leaves each file as it was, or whole. What it had written beside them is removed
    by the next one that writes there.
    """
    with contextlib.ExitStack() as parts:
        moves: list[tuple[str | os.PathLike[str], Path, Path]] = []
        for path, data in files:
            target = _target(path)
            _sweep(target)
            with _writing(path):
                part = _part(target, data, parts)
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
            name = _shown(path)
            raise FileError(f"{name}: not a regular file; give the path of a file to write or replace")
        return target


def _same(target: Path, other: str | os.PathLike[str]) -> bool:
    with contextlib.suppress(OSError, ValueError):  # one of them does not exist
        return target.samefile(other)
    return False


def _part(target: Path, data: bytes, parts: contextlib.ExitStack) -> Path:
    """A file with the data beside the target, with its permissions; when the stack ends it is gone.

    Until then it is locked: a part that nobody has locked is one whose writer was killed.
    """
    while True:
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=_prefix(target), suffix=".part")
        part = Path(name)
        parts.callback(_gone, part)
        file = parts.enter_context(os.fdopen(handle, "wb"))
        locked = _locked(file, wait=True)
        if part.exists():  # else it was taken for a dead one before it was locked
            break
    file.write(data)
    file.flush()
    os.fsync(file.fileno())
    part.chmod(_mode(target))
    if not locked:
        file.close()
    return part


def _prefix(target: Path) -> str:
    return f".{target.name[:100]}."


def _sweep(target: Path) -> None:
    """Remove parts of this target whose writers were killed."""
    pattern = re.compile(re.escape(_prefix(target)) + r"[a-z0-9_]{8}\.part")
    parts: list[Path] = []
    with contextlib.suppress(OSError):
        parts += [path for path in target.parent.iterdir() if pattern.fullmatch(path.name)]
    for part in parts:
        with contextlib.suppress(OSError):  # moved meanwhile, or not ours
            if part.is_file() and not part.is_symlink():
                with part.open("r+b") as file:
                    if _locked(file, wait=False):
                        part.unlink()


def _locked(file: IO[bytes], *, wait: bool) -> bool:
    """Whether the file is ours alone now, until it is closed."""
    if fcntl is not None:
        with contextlib.suppress(OSError):  # somebody has it, or the file system has no locks
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    return False


def _gone(part: Path) -> None:
    with contextlib.suppress(OSError):
        part.unlink()


@contextlib.contextmanager
def _writing(path: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:
        raise FileError(f"{_shown(path)}: cannot be written: {_reason(error)}; give another path") from error


def _mode(target: Path) -> int:
    with contextlib.suppress(OSError):
        return stat.S_IMODE(target.stat().st_mode)
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


def _shown(path: str | os.PathLike[str]) -> str:
    return printable(os.fspath(path))


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
