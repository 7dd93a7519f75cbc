"""Reading and writing whole files: nothing half-written, nothing endless."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path

from lowtide.errors import FileError

__all__ = ["MAX_FILE_BYTES", "read_bytes", "write_atomically"]

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


def write_atomically(path: str | os.PathLike[str], data: bytes) -> None:
    """Put the data at this path, whole or not at all: written beside it, then moved there."""
    target = Path(path)
    temporary = ""
    try:
        if not os.fspath(path):
            raise FileError("no file to write was named; give its path")
        target = target.resolve()  # through a link to what it points at, so that the link stays one
        if target.exists() and not target.is_file():
            raise FileError(f"{path}: not a regular file; give the path of a file to write or replace")
        handle, temporary = tempfile.mkstemp(
            dir=target.parent, prefix=f".{target.name[:100]}.", suffix=".part"
        )
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(_mode(target))
        Path(temporary).replace(target)
        temporary = ""
    except (OSError, ValueError) as error:
        raise FileError(f"{os.fspath(path)}: cannot be written: {_reason(error)}") from error
    finally:
        if temporary:
            with contextlib.suppress(OSError):
                Path(temporary).unlink()


def _mode(target: Path) -> int:
    with contextlib.suppress(OSError):
        return stat.S_IMODE(target.stat().st_mode)
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
