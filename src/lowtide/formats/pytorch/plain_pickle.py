"""Reads pickles of plain data: dicts, lists, tuples, numbers, strings, bytes, None, True and False.

Nothing is imported and nothing is called: an opcode that would is refused, with its byte. What is read holds
no cycle, since a container that is part of another cannot change any more, and is nested a few levels deep at
most. No opcode makes more than the bytes that stand in the file.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from lowtide.errors import FormatError

__all__ = ["MAX_DEPTH", "PlainData", "read_plain_pickle"]

MAX_DEPTH = 24
"""Containers inside of containers; a snapshot has six."""
_MAX_NUMBER_BYTES = 16
_NEWEST = 5
_PLAIN = "a pickle of plain data: containers, numbers and strings"

_REFUSED = {
    b"c": "GLOBAL", b"\x93": "STACK_GLOBAL", b"R": "REDUCE", b"b": "BUILD", b"i": "INST", b"o": "OBJ",
    b"\x81": "NEWOBJ", b"\x92": "NEWOBJ_EX", b"\x82": "EXT1", b"\x83": "EXT2", b"\x84": "EXT4",
    b"P": "PERSID", b"Q": "BINPERSID", b"\x97": "NEXT_BUFFER", b"\x98": "READONLY_BUFFER",
    b"\x96": "BYTEARRAY8", b"\x8f": "EMPTY_SET", b"\x90": "ADDITEMS", b"\x91": "FROZENSET",
    b"0": "POP", b"1": "POP_MARK", b"2": "DUP", b"\x8b": "LONG4",
}  # fmt: skip
"""Opcodes that import, call or build something, or that no pickle of plain data has since protocol 2."""


@dataclass(frozen=True, slots=True)
class PlainData:
    """What a pickle holds, and where in the file each of its containers begins."""

    value: Any
    starts: dict[int, int]
    """By the ``id`` of a container, all of which are alive as long as the value."""

    def byte(self, container: Any) -> int:
        """Where a container begins."""
        return self.starts.get(id(container), 0)


def read_plain_pickle(data: bytes) -> PlainData:
    """The value of a pickle of protocol 2 to 5, or a FormatError that names the byte."""
    machine = _Machine(data)
    machine.run()
    return PlainData(machine.stack[0], machine.starts)


class _Machine:
    """A stack of values, the stacks below each mark, and a memo of values that are used again."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0
        """Of the next byte."""
        self.opcode = 0
        """Where the opcode at work stands."""
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.starts: dict[int, int] = {}
        self.height: dict[int, int] = {}
        """Levels of containers inside of each container, by its id."""
        self.open: set[int] = set()
        """Containers that are no part of another yet."""

    def run(self) -> None:
        """Opcode after opcode; the most frequent ones are dealt with here, the others by their handler."""
        data, end, memo, stack, at = self.data, len(self.data), self.memo, self.stack, self.at
        while at < end:
            code = data[at]
            if code == _BINGET and at + 1 < end and data[at + 1] in memo:
                stack.append(memo[data[at + 1]])
                at += 2
            elif code in _FOUR_BYTES and at + 4 < end:
                (number,) = _INT(data, at + 1)
                self.opcode = at
                stack.append(number if code == _BININT else self.recalled(number))
                at += 5
            elif code == _MEMOIZE and stack:
                memo[len(memo)] = stack[-1]
                at += 1
            elif code == _BININT1 and at + 1 < end:
                stack.append(data[at + 1])
                at += 2
            else:
                self.opcode, self.at = at, at + 1
                if code == _STOP:
                    self._stop()
                    return
                self._handler(code)(self)
                stack, at = self.stack, self.at
        raise FormatError("the file ends here", expected=_PLAIN, byte=end)

    def _handler(self, code: int) -> Callable[[_Machine], None]:
        handler = _HANDLERS.get(code)
        if handler is None:
            name = _REFUSED.get(bytes([code]))
            raise self.fail(f"the opcode {name or hex(code)}", _PLAIN)
        return handler

    def fail(self, problem: str, expected: str) -> FormatError:
        return FormatError(problem, expected=expected, byte=self.opcode)

    def _stop(self) -> None:
        if self.marks or len(self.stack) != 1:
            raise self.fail("the end, with values left over or none", "one value")
        if self.at != len(self.data):
            raise FormatError("more after the end of the pickle", expected="nothing", byte=self.at)

    # what stands in the file

    def take(self, count: int) -> bytes:
        if count > len(self.data) - self.at:
            raise self.fail(f"{count} bytes, of which the file has {len(self.data) - self.at}", _PLAIN)
        start = self.at
        self.at += count
        return self.data[start : self.at]

    def number(self, count: int) -> int:
        return int.from_bytes(self.take(count), "little")

    # what stands on the stack

    def pop(self) -> Any:
        if not self.stack:
            raise self.fail("a value is asked for, and there is none", _PLAIN)
        return self.stack.pop()

    def above_mark(self) -> list[Any]:
        if not self.marks:
            raise self.fail("a mark is asked for, and there is none", _PLAIN)
        values, self.stack = self.stack, self.marks.pop()
        return values

    def container(self, value: Any) -> None:
        key = id(value)
        self.starts[key] = self.opcode
        self.height[key] = 0
        self.open.add(key)
        self.stack.append(value)

    def changeable(self, kind: type) -> Any:
        """The container on top of the stack, which is about to get members."""
        target = self.stack[-1] if self.stack else None
        if type(target) is not kind:
            raise self.fail(f"members of something that is no {kind.__name__}", _PLAIN)
        if id(target) not in self.open:
            raise self.fail("members of a container that is part of another already", "no cycles")
        return target

    def hold(self, parent: Any, members: Iterable[Any]) -> None:
        """Members become part of a container: from now on they stay as they are."""
        height, key = self.height, id(parent)
        most = height[key]
        for member in members:
            if type(member) in _CONTAINERS:
                if member is parent:
                    raise self.fail("a container inside of itself", "no cycles")
                self.open.discard(id(member))
                most = max(most, height[id(member)] + 1)
        if most >= MAX_DEPTH:
            raise self.fail(f"containers nested {most + 1} deep", f"at most {MAX_DEPTH} levels")
        height[key] = most

    def add(self, members: Sequence[Any]) -> None:
        target = self.changeable(list)
        self.hold(target, members)
        target.extend(members)

    def set(self, pairs: Sequence[Any]) -> None:
        target = self.changeable(dict)
        if len(pairs) % 2:
            raise self.fail("a key without a value", _PLAIN)
        keys, values = pairs[::2], pairs[1::2]
        for key in keys:
            if type(key) is not str:
                raise self.fail(f"a {type(key).__name__} as a key", "strings as keys")
        before = len(target)
        target.update(zip(keys, values, strict=True))
        if len(target) != before + len(keys):
            raise self.fail("a key that stands twice in one dict", "each key once")
        self.hold(target, values)

    def tuple_of(self, members: Sequence[Any]) -> None:
        made = tuple(members)
        self.container(made)
        self.hold(made, made)

    def remember(self, key: int) -> None:
        if not self.stack:
            raise self.fail("a value is stored, and there is none", _PLAIN)
        self.memo[key] = self.stack[-1]

    def recalled(self, key: int) -> Any:
        if key not in self.memo:
            raise self.fail(f"value {key} is used, which was not stored", _PLAIN)
        return self.memo[key]


_CONTAINERS = frozenset({list, dict, tuple})
_STOP, _BINGET, _LONG_BINGET, _MEMOIZE, _BININT, _BININT1 = (
    ord("."),
    ord("h"),
    ord("j"),
    0x94,
    ord("J"),
    ord("K"),
)
_FOUR_BYTES = frozenset({_LONG_BINGET, _BININT})
_INT = struct.Struct("<i").unpack_from


def _proto(machine: _Machine) -> None:
    version = machine.number(1)
    if version > _NEWEST:
        raise machine.fail(f"a pickle of protocol {version}", f"protocol {_NEWEST} or an earlier one")


def _frame(machine: _Machine) -> None:
    size = machine.number(8)
    if size > len(machine.data) - machine.at:
        raise machine.fail(f"a frame of {size} bytes", "a frame that ends inside the file")


def _mark(machine: _Machine) -> None:
    machine.marks.append(machine.stack)
    machine.stack = []


def _text(machine: _Machine, data: bytes) -> None:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        if data[error.start] != 0xED:  # half a character, as names of files may have
            raise machine.fail("a string that is not UTF-8", _PLAIN) from None
        text = data.decode("utf-8", "replace")
    machine.stack.append(text)


def _long(machine: _Machine) -> None:
    size = machine.number(1)
    if size > _MAX_NUMBER_BYTES:
        raise machine.fail(f"a whole number of {size} bytes", f"at most {_MAX_NUMBER_BYTES}")
    machine.stack.append(int.from_bytes(machine.take(size), "little", signed=True))


def _setitem(machine: _Machine) -> None:
    value = machine.pop()
    machine.set([machine.pop(), value])


def _last(count: int) -> Callable[[_Machine], None]:
    def handler(machine: _Machine) -> None:
        machine.tuple_of([machine.pop() for _ in range(count)][::-1])

    return handler


def _constant(value: Any) -> Callable[[_Machine], None]:
    return lambda machine: machine.stack.append(value)


def _sized(width: int, push: Callable[[_Machine, bytes], None]) -> Callable[[_Machine], None]:
    return lambda machine: push(machine, machine.take(machine.number(width)))


def _push(machine: _Machine, value: Any) -> None:
    machine.stack.append(value)


_HANDLERS: dict[int, Callable[[_Machine], None]] = {
    0x80: _proto,
    0x95: _frame,
    ord("("): _mark,
    ord("N"): _constant(None),
    0x88: _constant(True),
    0x89: _constant(False),
    _BININT: lambda m: m.stack.append(int.from_bytes(m.take(4), "little", signed=True)),
    _BININT1: lambda m: m.stack.append(m.number(1)),
    ord("M"): lambda m: m.stack.append(m.number(2)),
    0x8A: _long,
    ord("G"): lambda m: m.stack.append(struct.unpack(">d", m.take(8))[0]),
    0x8C: _sized(1, _text),
    ord("X"): _sized(4, _text),
    0x8D: _sized(8, _text),
    ord("C"): _sized(1, _push),
    ord("B"): _sized(4, _push),
    0x8E: _sized(8, _push),
    ord("]"): lambda m: m.container([]),
    ord("a"): lambda m: m.add([m.pop()]),
    ord("e"): lambda m: m.add(m.above_mark()),
    ord(")"): lambda m: m.container(()),
    ord("t"): lambda m: m.tuple_of(m.above_mark()),
    0x85: _last(1),
    0x86: _last(2),
    0x87: _last(3),
    ord("}"): lambda m: m.container({}),
    ord("s"): _setitem,
    ord("u"): lambda m: m.set(m.above_mark()),
    ord("q"): lambda m: m.remember(m.number(1)),
    ord("r"): lambda m: m.remember(m.number(4)),
    _MEMOIZE: lambda m: m.remember(len(m.memo)),
    _BINGET: lambda m: m.stack.append(m.recalled(m.number(1))),
    _LONG_BINGET: lambda m: m.stack.append(m.recalled(m.number(4))),
}
