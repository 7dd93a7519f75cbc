"""What character recognition does to words: which letters it confuses, and how far two words are apart."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

__all__ = ["KINDS", "Spelling", "digits_of", "distance", "fold", "nearest", "swapped"]

KINDS = ("data", "filter", "filterA", "filterNL", "linear", "softmax", "evaluate", "accuracy")
"""Operators of the format; the last part of an operator's name, before its number."""

_WORDS = frozenset((*KINDS, "output", "input", "labels", "probability", "grad", "weights", "W", "a", "b"))
_DIGITS = str.maketrans("OoQDlIi|!ZSB", "000011111258")
_FOLD = str.maketrans("0OQ1lI|!5S8$2Z9", "oooiiiiisssszzg")
_CONFUSED = "0123456789OoQIl|"
_LAYER = re.compile(rf"([A-Z])([{_CONFUSED}]+)")
_NUMBERED = re.compile(r"([A-Za-z_]+)([0-9]+)", re.ASCII)
_LONGEST = 200
"""Longer words are noise: nothing is looked for in them."""


def digits_of(text: str) -> str:
    """The text with the letters that stand for digits turned into digits: O is 0, l is 1."""
    return text.translate(_DIGITS)


def fold(text: str) -> str:
    """The text with characters that look alike made equal."""
    return text.translate(_FOLD)


def distance(a: str, b: str, bound: int) -> int:
    """Characters to change, add or drop between two words, or ``bound + 1`` when it is more than that.

    Characters that look alike are equal. The work grows with the length times the bound.
    """
    far = bound + 1
    if abs(len(a) - len(b)) > bound or max(len(a), len(b)) > _LONGEST:
        return far
    a, b = fold(a), fold(b)
    if a == b:
        return 0
    row = [j if j <= bound else far for j in range(len(b) + 1)]
    for i, letter in enumerate(a, 1):
        low, high = max(1, i - bound), min(len(b), i + bound)
        new = [far] * (len(b) + 1)
        if i <= bound:
            new[0] = i
        for j in range(low, high + 1):
            step = row[j - 1] + (letter != b[j - 1])
            new[j] = min(step, row[j] + 1, new[j - 1] + 1, far)
        row = new
        if min(row) > bound:
            return far
    return row[-1]


def nearest(word: str, choices: Iterable[str], bound: int) -> str | None:
    """The one choice that is nearest to the word, or None when none is within the bound or two tie."""
    best, found = bound + 1, None
    for choice in choices:
        d = distance(word, choice, min(best, bound))
        if d < best:
            best, found = d, choice
        elif d == best and d <= bound:
            found = None
    return found


def swapped(a: str, b: str) -> bool:
    """Whether two words differ by the order of their letters only, which recognition never changes."""
    return a != b and sorted(a) == sorted(b)


def _is_word(part: str) -> bool:
    return part in _WORDS or part.endswith("_output") or _NUMBERED.fullmatch(part) is not None


class Spelling:
    """How the parts of the names of one document are spelt, judged from all of them together."""

    def __init__(self, names: Sequence[str]) -> None:
        parts = [part for name in names for part in name.split(".")]
        self._count = Counter(parts)
        self._stems = {m[1] for part in self._count if (m := _NUMBERED.fullmatch(part))} | _WORDS
        self._folded: dict[str, str] = {}
        for part, count in sorted(self._count.items()):
            if count > self._count[self._folded.get(fold(part), "")]:
                self._folded[fold(part)] = part
        self._folded |= {fold(word): word for word in _WORDS}
        self._right = {part: self._part(part) for part in self._count}
        self._known = Counter[str]()
        for part, count in self._count.items():
            self._known[self._right[part]] += count

    def name(self, raw: str) -> str:
        """The name with letters and digits that look alike told apart."""
        return ".".join(self._right.get(part) or self._part(part) for part in raw.split("."))

    def whole(self, name: str) -> bool:
        """Whether every part is a word of the format, a numbered word, or stands elsewhere, too."""
        return all(self._whole(part) for part in name.split("."))

    def noise(self, name: str) -> bool:
        """Whether no part is a word of the format or numbered: not a damaged name but no name at all."""
        return not any(_is_word(part) for part in name.split("."))

    def _whole(self, part: str) -> bool:
        return _is_word(part) or self._known[part] > 1

    def _part(self, part: str) -> str:
        if part in _WORDS or len(part) > _LONGEST or _NUMBERED.fullmatch(part):
            return part
        layer = _LAYER.fullmatch(part)
        if layer:
            return layer[1] + digits_of(layer[2])
        for cut in range(len(part.rstrip(_CONFUSED)), len(part)):
            if part[:cut] in self._stems:
                return part[:cut] + digits_of(part[cut:])
        return self._folded.get(fold(part), part)
