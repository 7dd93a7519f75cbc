"""All formats, and reading and writing files in them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from lowtide.collector import collector_paused
from lowtide.cost import Step
from lowtide.documents import kind_of
from lowtide.errors import ConvertError, FormatError
from lowtide.files import read_bytes, write_atomically
from lowtide.formats import (
    chainer,
    csvfile,
    dataflow,
    dot,
    megengine,
    native,
    pytorch,
    tensorflow,
    tilelog,
    trace,
)
from lowtide.formats.base import Format, Written
from lowtide.graph.shown import graph_html
from lowtide.suggest import did_you_mean

__all__ = ["FORMATS", "Loaded", "format_named", "read_data", "read_file", "recognise", "write_file"]

_ALL = (
    native.FORMAT,
    chainer.FORMAT,
    megengine.FORMAT,
    dataflow.FORMAT,
    tensorflow.FORMAT,
    tilelog.FORMAT,
    csvfile.FORMAT,
    dot.FORMAT,
    dot.SVG_FORMAT,
    trace.FORMAT,
    pytorch.SNAPSHOT_FORMAT,
    pytorch.PROFILER_FORMAT,
)

FORMATS: dict[str, Format] = {one.name: one for one in _ALL}

_HEAD_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Loaded:
    """A step, the format of the file it was read from, and the file."""

    step: Step
    format: Format
    path: str

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return graph_html(self.step.graph, self.step.timeline, title=f"{self.path}: {self.format.title}")


_NO_STEPS = {
    "plan": "a plan, which `lowtide check` and `report` read",
    "run": "a measured run, which `lowtide report`, `show` and `diff` show",
    "sweep": "plans for all budgets, which `lowtide report` shows",
    "shards": "a split step, which `lowtide report` shows",
    "timeline": "a measured timeline, which `lowtide report` shows beside its plan",
    "device": "a description of a device, which `lowtide report` shows",
    "report": "the data of a page, which holds no step that can be read back",
}
"""Files of our own that are no step, by their kind."""


def recognise(data: bytes) -> Format:
    """The format of a file, told from its contents."""
    head = data[:_HEAD_BYTES]
    for format_ in FORMATS.values():
        if format_.recognise is not None and format_.recognise(head):
            return format_
    kind = kind_of(data)
    if kind in _NO_STEPS:
        raise FormatError(_NO_STEPS[kind], expected="a step", byte=0)
    readable = ", ".join(name for name, f in FORMATS.items() if f.read is not None)
    problem = "the file is empty" if not data else "the contents are of no known format"
    raise FormatError(problem, expected=f"one of: {readable}", byte=0)


def read_file(path: str | os.PathLike[str]) -> Loaded:
    """Read a file of any known format."""
    name = os.fspath(path)
    return read_data(read_bytes(name), name)


def read_data(data: bytes, name: str) -> Loaded:
    """Read the contents of a file of any known format."""
    try:
        format_ = recognise(data)
        assert format_.read is not None
        with collector_paused():
            return Loaded(format_.read(data), format_, name)
    except FormatError as error:
        raise error.at(name) from None


def format_named(name: str) -> Format:
    """The format of this name."""
    if name not in FORMATS:
        known = [n for n, f in FORMATS.items() if f.write is not None]
        raise ConvertError(
            f"there is no format {name!r}.{did_you_mean(name, known)} Formats: {', '.join(known)}"
        )
    return FORMATS[name]


def write_file(
    step: Step, name: str, path: str | os.PathLike[str], *, boxes: int | Literal["all"] | None = None
) -> Written:
    """Write the step in the named format, whole or not at all, and return what was written.

    A picture is folded into at most so many ``boxes``, or shows ``"all"``; None leaves it to the format.
    """
    format_ = format_named(name)
    if format_.write is None:
        raise ConvertError(f"the format {name!r} can only be read; see `lowtide formats`, and choose another")
    try:
        if boxes is not None:
            return _drawn(format_, step, path, boxes)
        written = format_.write(step)
        if format_.read is not None and format_ is not native.FORMAT:
            _read_back(format_, written.data)
    except RecursionError:
        raise ConvertError(
            f"{name} cannot hold this step: its attributes are nested too deeply; see `lowtide show`"
        ) from None
    except UnicodeEncodeError:
        raise ConvertError(
            f"{name} cannot hold this step: a name in it is half a character; rename it"
        ) from None
    write_atomically(path, written.data)
    return written


def _drawn(format_: Format, step: Step, path: str | os.PathLike[str], boxes: int | Literal["all"]) -> Written:
    if format_.draw is None:
        pictures = ", ".join(one.name for one in FORMATS.values() if one.draw is not None)
        raise ConvertError(
            f"the format {format_.name!r} is no picture: only {pictures} can be folded; "
            "leave out --fold and --all"
        )
    written = format_.draw(step, None if boxes == "all" else boxes)
    write_atomically(path, written.data)
    return written


def _read_back(format_: Format, data: bytes) -> None:
    """A file that we could not read again is not written."""
    try:
        reader = recognise(data).read
        assert reader is not None
        with collector_paused():
            reader(data)
    except FormatError as error:
        raise ConvertError(f"{format_.name} cannot hold this step: {error}; write it as native") from None
