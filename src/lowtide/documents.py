"""Our own JSON files besides the step: a head that says what it is and which version, then its fields."""

from __future__ import annotations

import os
import re
from typing import Any, TypeVar, cast, get_args

import msgspec

from lowtide.errors import FileError, FormatError, GraphError
from lowtide.files import read_bytes, write_atomically

__all__ = ["decode_document", "encode_document", "kind_of", "read_document", "write_document"]

T = TypeVar("T", bound=msgspec.Struct)
_BYTE = re.compile(r"\(byte (\d+)\)")


class _Head(msgspec.Struct):
    """What a file of any kind and version has."""

    lowtide: str
    version: int


def kind_of(data: bytes) -> str:
    """What one of our own files says that it is, as ``plan`` or ``step``; nothing for other files."""
    try:
        return msgspec.json.decode(data, type=_Head).lowtide
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""


def encode_document(value: msgspec.Struct) -> bytes:
    """The object, whose fields ``lowtide`` and ``version`` are its head, on one line of JSON."""
    try:
        return msgspec.json.encode(value) + b"\n"
    except UnicodeEncodeError:
        raise FileError("a name in the step is half a character, which no file can hold; rename it") from None


def decode_document(data: bytes, kind: type[T]) -> T:
    """The object of this type; a FormatError names the key that is wrong."""
    expected = _expected(kind)
    what = f"{expected['lowtide']} file of version {expected['version']}, as lowtide writes it"
    try:
        head = msgspec.json.decode(data, type=_Head)
        if head.lowtide != expected["lowtide"]:
            raise FormatError(f"this is a {head.lowtide} file", expected=f"a {what}", byte=0)
        if head.version not in _versions(kind):
            problem = f"this file has version {head.version}"
            raise FormatError(problem, expected=f"a {what}; use the release of lowtide that wrote it", byte=0)
        value = msgspec.json.decode(data, type=kind)
        return value if head.version == expected["version"] else _upgraded(value)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        found = _BYTE.search(str(error))
        byte = int(found.group(1)) if found else len(data) if "truncated" in str(error) else 0
        raise FormatError(str(error), expected=f"a {what}", byte=byte) from None
    except GraphError as error:
        raise FormatError(str(error), expected=f"a {what}", byte=0) from None
    except RecursionError:
        raise FormatError("nested too deeply", expected=f"a {what}", byte=0) from None


def read_document(path: str | os.PathLike[str], kind: type[T]) -> T:
    """The object in a file."""
    try:
        return decode_document(read_bytes(path), kind)
    except FormatError as error:
        raise error.at(os.fspath(path)) from None


def write_document(path: str | os.PathLike[str], value: msgspec.Struct) -> None:
    """Put the object into a file, whole or not at all."""
    write_atomically(path, encode_document(value))


def _upgraded(value: T) -> T:
    """An object of the version before; its type knows what has changed since."""
    newer: T = cast(Any, value).upgraded()
    return newer


def _versions(kind: type[msgspec.Struct]) -> tuple[int, ...]:
    """The versions that a type is read from."""
    (field,) = (field for field in msgspec.structs.fields(kind) if field.name == "version")
    return get_args(field.type)


def _expected(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """The head that a type writes: the defaults of its first fields."""
    return {
        field.name: field.default
        for field in msgspec.structs.fields(kind)
        if field.name in ("lowtide", "version")
    }
