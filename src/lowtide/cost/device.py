"""Devices: what one can do at most, and the circumstances under which its figures hold."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
from pathlib import Path
from typing import Literal

import msgspec

from lowtide.errors import FileError, FormatError, LowtideError
from lowtide.files import read_bytes, write_atomically

__all__ = ["Device", "Environment", "cache_folder", "load_device", "read_device", "store_device"]


class Environment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a measurement depends on besides the operator; figures are shared only inside one of these."""

    name: str
    """Of the device, as its maker calls it."""
    kind: str
    """``cpu`` or ``cuda``."""
    versions: dict[str, str] = {}
    """Libraries that bring the kernels, by name."""
    settings: dict[str, str] = {}
    """Switches that choose among kernels, and the number of threads on a CPU."""

    @property
    def key(self) -> str:
        """A short name for files that belong to this environment."""
        text = msgspec.json.encode(self, order="sorted")
        return f"{self.kind}-{hashlib.sha256(text).hexdigest()[:16]}"


class Device(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a device does at most; measured once, then operators are estimated from it."""

    environment: Environment
    matrix_flop_per_second: dict[str, float]
    """By type of values: the rate of a large product of matrices."""
    bytes_per_second: float
    """Read and written together, by a large copy."""
    launch_seconds: float
    """What the smallest operator takes."""
    memory_bytes: int
    to_device_bytes_per_second: float | None = None
    """From pinned memory of the host; None where host and device are one."""
    from_device_bytes_per_second: float | None = None
    handover_seconds: float | None = None
    """What a computation spends on a copy beside it: telling when it may start, and waiting for its end."""
    lowtide: Literal["device"] = "device"
    version: Literal[1] = 1

    @property
    def name(self) -> str:
        """As its maker calls it."""
        return self.environment.name

    @property
    def kind(self) -> str:
        """``cpu`` or ``cuda``."""
        return self.environment.kind

    def matrix_rate(self, dtype: str | None) -> float:
        """FLOP a second of products of this type; of single precision where the type was not measured."""
        rates = self.matrix_flop_per_second
        return rates.get(dtype or "float32") or rates.get("float32") or max(rates.values())


def cache_folder() -> Path:
    """Where measurements are kept: ``LOWTIDE_CACHE``, else ``lowtide`` in the user's cache folder."""
    own = os.environ.get("LOWTIDE_CACHE")
    if own:
        return Path(own)
    shared = os.environ.get("XDG_CACHE_HOME", "")
    if Path(shared).is_absolute():
        return Path(shared) / "lowtide"
    try:
        return Path.home() / ".cache" / "lowtide"
    except RuntimeError:
        raise FileError(
            "there is no home folder to keep measurements in; set LOWTIDE_CACHE to a folder"
        ) from None


def read_device(path: str | os.PathLike[str]) -> Device:
    """The device that a file describes, or a FormatError that says what is wrong with it."""
    data = read_bytes(path)
    expected = "a device description written by `lowtide doctor`"
    try:
        device = msgspec.json.decode(data, type=Device)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(str(error), expected=expected, byte=0, path=os.fspath(path)) from None
    links = (device.to_device_bytes_per_second, device.from_device_bytes_per_second)
    rates = [*device.matrix_flop_per_second.values(), device.bytes_per_second, device.launch_seconds]
    rates += [link for link in links if link is not None]
    sound = all(math.isfinite(rate) and rate > 0 for rate in rates)
    sound = sound and math.isfinite(device.handover_seconds or 0.0) and (device.handover_seconds or 0.0) >= 0
    if not sound or not device.matrix_flop_per_second or device.memory_bytes <= 0:
        raise FormatError("a rate is not positive", expected=expected, byte=0, path=os.fspath(path))
    return device


def load_device(folder: Path, environment: Environment) -> Device | None:
    """The device as it was measured here before; None where it was not, or where its file is damaged."""
    with contextlib.suppress(LowtideError):
        device = read_device(_path(folder, environment))
        return device if device.environment == environment else None
    return None


def store_device(folder: Path, device: Device) -> Path:
    """Keep a device for :func:`load_device`; returns the file."""
    path = _path(folder, device.environment)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(
            f"{folder}: cannot be made: {error.strerror}; set LOWTIDE_CACHE to a folder"
        ) from error
    write_atomically(path, msgspec.json.format(msgspec.json.encode(device), indent=2) + b"\n")
    return path


def _path(folder: Path, environment: Environment) -> Path:
    return folder / f"device-{environment.key}.json"
