"""Operators of our own, known to torch as ``torch.ops.lowtide``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["define"]

_LIBRARY: Any = torch.library.Library("lowtide", "DEF")  # type: ignore[no-untyped-call]


def define(schema: str, function: Callable[..., Any], tags: Sequence[torch.Tag] = ()) -> None:
    """Make an operator of a schema and the function that runs it, on any device and while torch traces."""
    _LIBRARY.define(schema, tags=tuple(tags))
    _LIBRARY.impl(schema.partition("(")[0], function, "CompositeExplicitAutograd")
