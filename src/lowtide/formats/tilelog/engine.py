"""The text of a tile log without the messages of the autograd engine, and with them again.

The engine runs in a thread of its own and prints whole lines into the middle of others:

    max 1[torch/csrc/autograd/engine.cpp] call_function SumBackward0
     torch.Size([1, 1, 5, 5])
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate

from lowtide.errors import FormatError
from lowtide.formats.text import Lines, shorten
from lowtide.formats.tilelog.model import EngineCall

__all__ = ["Clean", "weave"]

_MESSAGE = "[torch/csrc/autograd/engine.cpp] call_function "
_CALL = re.compile(re.escape(_MESSAGE) + r"([A-Za-z0-9_:]{1,200})[ \t\r]*\n", re.ASCII)
_TRAILING = " \t\r"


class Clean(Lines):
    """A cursor over the lines of a log without the engine's messages and without trailing blanks.

    Errors name the line of the document as it is.
    """

    def __init__(self, text: str) -> None:
        pieces, calls = _separate(text)
        super().__init__("".join(pieces))
        self._lines = [line.rstrip(_TRAILING) for line in self._lines]
        self.calls = calls
        self._numbers = _numbers(calls, len(self._lines))

    @property
    def line(self) -> int:
        """Number in the document of the line last taken."""
        return self.line_of(self.number - 1)

    def line_of(self, index: int) -> int:
        """Number in the document of a line of the clean text, which counts from 0."""
        return self._numbers[min(max(index, 0), len(self._numbers) - 1)]

    @property
    def cut(self) -> list[int]:
        """Lines of the document that a message has cut in two."""
        return sorted({self.line_of(call.line) for call in self.calls if call.column})

    def take(self, expected: str) -> str:
        """The next line; a FormatError at the end of the text."""
        if not self.left:
            raise FormatError("the file ends here", expected=expected, line=self.line_of(self.number))
        return super().take(expected)

    def take_many(self, count: int, expected: str) -> tuple[list[str], list[int]]:
        """The next lines, and their numbers in the document."""
        if self.left < count:
            raise FormatError("the file ends too early", expected=expected, line=self._numbers[-1])
        start = self.number
        self.number += count
        return self._lines[start : self.number], self._numbers[start : self.number]

    def fail(self, problem: str, expected: str) -> FormatError:
        """An error at the line last taken."""
        return FormatError(problem, expected=expected, line=self.line)

    def expect(self, texts: Sequence[str]) -> None:
        """Take these lines; a FormatError at the first one that differs."""
        start, end = self.number, self.number + len(texts)
        wanted = [text.rstrip(_TRAILING) for text in texts]
        if self._lines[start:end] == wanted:
            self.number = end
            return
        for text in wanted:
            if (found := self.take(f"`{text}`")) != text:
                raise self.fail(shorten(found), f"`{text}`" if text else "an empty line")


def _separate(text: str) -> tuple[list[str], tuple[EngineCall, ...]]:
    """The text between the messages, and the messages with their places."""
    pieces: list[str] = []
    calls: list[EngineCall] = []
    start = line = column = 0
    for match in _CALL.finditer(text):
        piece = text[start : match.start()]
        start = match.end()
        feeds = piece.count("\n")
        line += feeds
        column = len(piece) - piece.rfind("\n") - 1 if feeds else column + len(piece)
        pieces.append(piece)
        calls.append(EngineCall(line, column, match.group(1)))
    pieces.append(text[start:])
    return pieces, tuple(calls)


def _numbers(calls: Sequence[EngineCall], count: int) -> list[int]:
    """The number in the document of every clean line, and of the end."""
    steps = [1] + [0] * (count + 1)
    steps[1 : count + 1] = [1] * count
    for call in calls:
        # a message in the middle of a line moves only the lines after it
        at = call.line + bool(call.column)
        if at <= count:
            steps[at] += 1
    return list(accumulate(steps[: count + 1]))


def weave(text: str, calls: Sequence[EngineCall]) -> str:
    """The clean text with the engine's messages back in their places.

    A message whose place does not exist, as in a tensor that was laid out otherwise, goes to the nearest one.
    """
    lengths = [len(line) for line in text.split("\n")]
    starts = list(accumulate((length + 1 for length in lengths), initial=0))
    pieces = []
    done = 0
    for call in calls:
        line = min(call.line, len(lengths) - 1)
        at = max(done, starts[line] + min(call.column, lengths[line]))
        pieces += [text[done:at], f"{_MESSAGE}{call.function}\n"]
        done = at
    pieces.append(text[done:])
    return "".join(pieces)
