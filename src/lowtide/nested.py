"""Batches as people have them: values inside of tuples, lists and dicts, as deep as they like."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

__all__ = ["leaves", "mapped"]


def leaves(value: Any) -> Iterator[Any]:
    """Everything in a value that is no tuple, list or dict, in order."""
    if isinstance(value, Mapping):
        for key in value:
            yield from leaves(value[key])
    elif isinstance(value, tuple | list):
        for one in value:
            yield from leaves(one)
    else:
        yield value


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """The same value with ``function`` of every leaf in its place; nothing is changed in place."""
    if isinstance(value, MutableMapping):
        made = copy.copy(value)  # whatever kind of dict it is
        for key in value:
            made[key] = mapped(function, value[key])
        return made
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(function, one) for one in value))
    if isinstance(value, tuple | list):
        return type(value)(mapped(function, one) for one in value)
    return function(value)
