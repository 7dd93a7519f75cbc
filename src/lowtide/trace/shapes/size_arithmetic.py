"""Arithmetic on symbolic sizes, done once.

While a function is traced with symbols, torch computes the strides and the layout of every tensor from them,
and asks about them: tens of thousands of sums, products and comparisons for a model with a few layers, all
of them among a few hundred. Each goes through a computer algebra system. Inside of :func:`computed_once` a
result that is known is given again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.sym_node import SymNode

__all__ = ["computed_once"]

_OF_TWO = (
    *("add", "sub", "mul", "mod", "int_floordiv", "int_truediv", "float_truediv", "float_pow"),
    *("pow_by_natural", "eq", "ne", "gt", "lt", "le", "ge", "sym_max", "sym_min"),
    *("and_", "or_", "sym_and", "sym_or"),
)
_OF_ONE = ("neg", "floor", "ceil", "sym_float", "sym_not")
_CONSTANTS = ("wrap_int", "wrap_bool", "wrap_float")
_ASKED = ("maybe_as_int",)
_NOTHING = object()

_LOCK = threading.RLock()


@contextmanager
def computed_once() -> Iterator[None]:
    """Inside, what was computed from symbolic sizes before is not computed again."""
    with _LOCK:
        kinds = [(_OF_TWO, _of_two), (_OF_ONE, _of_one), (_CONSTANTS, _constant), (_ASKED, _known)]
        before = {name: vars(SymNode)[name] for names, _ in kinds for name in names if name in vars(SymNode)}
        try:
            for names, once in kinds:
                for name in names:
                    if name in before:
                        setattr(SymNode, name, once(before[name]))
            yield
        finally:
            for name, method in before.items():
                setattr(SymNode, name, method)


Method = Callable[..., Any]


def _of_two(method: Method) -> Method:
    """The method of two numbers; what a graph is traced for knows how to compute its results."""
    known: dict[Any, dict[Any, Any]] = {}

    def once(self: Any, other: Any) -> Any:
        table = known.setdefault(get_proxy_mode(), {})
        key = self, other
        result = table.get(key)
        if result is None:
            written = _written(self), _written(other)
            result = table.get(written)
            if result is None:
                result = table[written] = method(self, other)
            table[key] = result
        return result

    return once


def _of_one(method: Method) -> Method:
    known: dict[Any, Any] = {}

    def once(self: Any) -> Any:
        key = get_proxy_mode(), *_written(self)
        result = known.get(key)
        if result is None:
            result = known[key] = method(self)
        return result

    return once


def _known(method: Method) -> Method:
    known: dict[Any, Any] = {}

    def once(self: Any) -> Any:
        result = known.get(self, _NOTHING)
        if result is _NOTHING:
            result = known[self] = method(self)
        return result

    return once


def _constant(method: Method) -> Method:
    known: dict[Any, Any] = {}

    def once(self: Any, number: Any) -> Any:
        key = self.shape_env, repr(number)
        result = known.get(key)
        if result is None:
            result = known[key] = method(self, number)
        return result

    return once


def _written(node: Any) -> tuple[Any, ...]:
    """How a number is written, and what it belongs to."""
    return node.shape_env, node.expr, node.pytype, node.hint, node.constant
