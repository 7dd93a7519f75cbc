"""Budgets as people write them: ``8GiB``, ``4500 MiB``, ``1e9``, ``40%`` of the plain peak, ``auto``.

``8GiB reserved`` is for what PyTorch's allocator reserves on a CUDA device.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from lowtide.errors import PlanError

__all__ = ["Budget", "parse_budget"]

_UNITS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
    "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40,
}  # fmt: skip
_NUMBER = re.compile(r"\s*(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+)\s*([a-zA-Z]*|%)\s*")
_HELP = (
    "give bytes with a unit (8GiB, 4500MiB), a share of the plain peak (40%), or auto; on a CUDA device "
    "'8GiB reserved' counts what PyTorch's allocator reserves"
)


@dataclass(frozen=True, slots=True)
class Budget:
    """A number of bytes, a share of what the plain step takes, or what the device has free."""

    bytes: int | None = None
    share: float | None = None
    reserved: bool = False
    """Whether it is for what PyTorch's allocator reserves, not for what is allocated."""
    at_least: int = 0
    """What a share stands for at least: smaller shapes may take as much as larger ones before them."""

    @property
    def auto(self) -> bool:
        """Whether the device decides."""
        return self.bytes is None and self.share is None

    def resolve(self, plain_peak: int, free_bytes: int | None) -> int:
        """The budget in bytes; ``free_bytes`` is what the device can give to the step and what it holds."""
        if self.reserved:
            raise PlanError("a budget of reserved bytes is for a step that runs: give it to lowtide.fit")
        if self.bytes is not None:
            return self.bytes
        if self.share is not None:
            return max(self.at_least, math.floor(plain_peak * self.share))
        if free_bytes is None:
            raise PlanError(
                "the budget `auto` asks the device what it has free, and there is none at hand; give "
                "bytes, as 8GiB"
            )
        return free_bytes


def parse_budget(value: str | int | Budget) -> Budget:
    """The budget that a text or a number of bytes stands for."""
    if isinstance(value, Budget):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return _positive(Budget(bytes=value), value)
    text = str(value)
    if text.strip().lower() == "auto":
        return Budget()
    whole, text = text, text.strip()
    reserved = text.lower().endswith(" reserved")
    text = text[: -len("reserved")] if reserved else whole
    found = _NUMBER.fullmatch(text)
    if found is None:
        raise PlanError(f"{text!r} is no budget; {_HELP}")
    number, unit = float(found.group(1)), found.group(2).lower()
    if unit == "%" and reserved:
        raise PlanError(f"{whole!r}: give reserved bytes with a unit, such as '8GiB reserved'")
    if unit == "%":
        return _positive(Budget(share=number / 100), number)
    if unit not in _UNITS:
        raise PlanError(f"{text!r}: there is no unit {found.group(2)!r}; {_HELP}")
    size = number * _UNITS[unit]
    if not math.isfinite(size) or size >= 2**63:
        raise PlanError(f"{text!r} is more than any device has; {_HELP}")
    return _positive(Budget(bytes=int(size), reserved=reserved), int(size))


def _positive(budget: Budget, number: float) -> Budget:
    if number <= 0:
        raise PlanError(f"a budget is more than nothing; {_HELP}")
    return budget
