"""Our own file: a step as versioned JSON that gives back every field."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from lowtide.cost import Step, validate_step
from lowtide.cost.device import Environment
from lowtide.errors import FormatError, GraphError
from lowtide.formats.base import Format, Written
from lowtide.formats.jsontext import Key, locate
from lowtide.formats.text import decode
from lowtide.graph import upgraded

__all__ = ["FORMAT", "VERSION", "read", "write"]

VERSION = 2
_BEFORE = 1
"""In files of this version, what operators mean stands among their attributes."""
_HEAD = re.compile(rb'\s*\{\s*"lowtide"\s*:')
_PATH = re.compile(r" - at `(?:key in )?\$([^`]*)`$")
_PART = re.compile(r"\.([^.\[]+)|\[(\d+|\.\.\.)\]")
_BYTE = re.compile(r"\(byte (\d+)\)")


class _Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The outermost object of the file."""

    lowtide: Literal["step"]
    version: int
    step: Step


class _Header(msgspec.Struct):
    """The part that a file of any version has."""

    lowtide: str
    version: int


_DOCUMENT = msgspec.json.Decoder(_Document)
_HEADER = msgspec.json.Decoder(_Header)


def read(data: bytes) -> Step:
    """The step, checked: every reference resolves and every list is as long as it says."""
    try:
        header = _HEADER.decode(data)
        if header.version not in (_BEFORE, VERSION):
            raise FormatError(
                f"this file has version {header.version}",
                expected=f"version {VERSION}; use the release of lowtide that wrote it",
                byte=locate(decode(data), ["version"]),
            )
        step = _DOCUMENT.decode(data).step
        if header.version == _BEFORE:
            step = _with_environment(msgspec.structs.replace(step, graph=upgraded(step.graph)))
        validate_step(step)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _translate(error, data) from None
    except GraphError as error:
        raise FormatError(
            str(error), expected="a graph that does not contradict itself", byte=_blame(error, data)
        ) from None
    except RecursionError:
        raise FormatError("nested too deeply", expected="a step written by lowtide", byte=0) from None
    return step


def _with_environment(step: Step) -> Step:
    """The step with the environment of its costs in the place of an attribute of the graph."""
    rest = dict(step.graph.attributes)
    try:
        found = msgspec.convert(rest.pop("environment", None), Environment | None)
    except msgspec.ValidationError as error:
        raise GraphError(f"the environment of the costs is not what lowtide wrote: {error}") from None
    graph = msgspec.structs.replace(step.graph, attributes=rest)
    return msgspec.structs.replace(step, graph=graph, environment=found)


def write(step: Step) -> Written:
    """The step with all its fields on one line of JSON."""
    return Written(msgspec.json.encode(_Document("step", VERSION, step)) + b"\n")


def _translate(error: Exception, data: bytes) -> FormatError:
    text = str(error)
    found = _BYTE.search(text)
    if found:
        return FormatError(text, expected="a step written by lowtide", byte=int(found.group(1)))
    path = _PATH.search(text)
    keys: list[Key] = []
    for name, index in _PART.findall(path.group(1)) if path else ():
        if index == "...":
            break
        keys.append(int(index) if index else name)
    try:
        byte = locate(decode(data), keys)
    except (ValueError, FormatError, RecursionError):
        byte = len(data)  # truncated: the parser ran off the end
    return FormatError(text, expected="a step written by lowtide", byte=byte)


def _blame(error: GraphError, data: bytes) -> int:
    keys: list[Key] = ["step", "graph"]
    if error.tensor is not None:
        keys += ["tensors", error.tensor]
    elif error.op is not None:
        keys += ["ops", error.op]
    return locate(decode(data), keys)


FORMAT = Format(
    name="native",
    title="Lowtide step",
    recognise=lambda data: _HEAD.match(data) is not None,
    read=read,
    write=write,
)
