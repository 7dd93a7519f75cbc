"""The value that a branch depends on, as a function of the tensors and sizes that a call is given.

Dynamo has captured how it is computed, on tensors without values. The part of the graph that leads to it is
run on the real tensors of the call: while the step is traced, and before each later call.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn

from lowtide.dynamo_internals import sources_of_sizes, value_at
from lowtide.torch_internals import (
    HigherOrderOperator,
    TorchDispatchMode,
    schema_of,
    storage_id,
    tree_leaves,
    version_of,
)

__all__ = ["Condition", "NotKnown", "always", "condition_of"]

_OF_TORCH = ("aten", "prims")
_UNIFORM = (torch.rand, torch.rand_like)
_FULL = (torch.float32, torch.float64)
"""Types in which a number that is drawn from [0, 1) is never rounded up to 1."""


class NotKnown(Exception):  # noqa: N818  it is no error
    """The value cannot be known before the step runs; says why."""


class Condition:
    """A value that follows from what is at some sources of a call."""

    def __init__(self, graph: fx.Graph, sources: Sequence[Any], *, of_sizes: bool) -> None:
        self._graph, self.sources = graph, sources
        self._computed = fx.GraphModule(nn.Module(), graph).forward
        self._known: dict[tuple[Any, ...], bool] | None = {} if of_sizes else None
        """Values that were computed, where they follow from sizes alone."""

    def holds(self, *values: Any) -> bool:
        """Whether it is true for what is at the sources."""
        if self._known is None:
            return bool(self._computed(*values))
        if values not in self._known:
            self._known[values] = bool(self._computed(*values))
        return self._known[values]

    def fails(self, *values: Any) -> bool:
        """Whether it is false for what is at the sources."""
        return not self.holds(*values)

    def first(self, output: Any, given: Callable[[torch.Tensor], bool]) -> bool:
        """The same in the call that is traced, for the first time: NotKnown where it is no function of it.

        ``given`` tells whether a tensor is one that the step is given.
        """
        values = [value_at(source, output) for source in self.sources]
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        for tensor in tensors:
            if isinstance(tensor, nn.Parameter) or tensor.requires_grad:
                raise NotKnown("it depends on a parameter")
            if not given(tensor):
                raise NotKnown("it depends on what the step computes")
        with _Pure({storage_id(tensor) for tensor in tensors}):
            return bool(_AsTraced(nn.Module(), graph=self._graph).run(*values))


class _Pure(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operators whose results are not a function of their inputs, or which change the given ones."""

    def __init__(self, given: Collection[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._given = given

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace not in _OF_TORCH or torch.Tag.nondeterministic_seeded in func.tags:
            raise NotKnown(f"it depends on {func.namespace}.{func.__name__}")
        for k, argument in enumerate(schema_of(func).arguments):
            value = args[k] if k < len(args) else kwargs.get(argument.name)
            if argument.is_write and any(storage_id(one) in self._given for one in _tensors(value)):
                raise NotKnown(f"{func.namespace}.{func.__name__} changes an input")
        return func(*args, **kwargs)


class _AsTraced(fx.Interpreter):
    """Holds what is computed against what was traced: inside of a context such as autocast it may differ."""

    def run_node(self, node: fx.Node) -> Any:
        """What a node gives."""
        value, traced = super().run_node(node), node.meta.get("traced")
        look = (value.dtype, value.device, value.dim()) if isinstance(value, torch.Tensor) else None
        if node.op != "output" and look != traced:
            raise NotKnown("it is computed in a context of its own")
        return value


def always(node: fx.Node) -> bool | None:
    """What a comparison of a random number with a constant always gives; None where that may be either.

    A layer that is dropped with probability 0 is never dropped, whatever is drawn.
    """
    target = getattr(node.target, "__name__", node.target)
    if target not in ("lt", "le", "gt", "ge") or len(node.args) != 2 or node.kwargs:
        return None
    drawn, limit = node.args
    if not isinstance(drawn, fx.Node) or drawn.target not in _UNIFORM or not isinstance(limit, int | float):
        return None
    value = drawn.meta.get("example_value")
    if not isinstance(value, torch.Tensor) or value.dtype not in _FULL or version_of(value):
        return None
    if limit >= 1:
        return target in ("lt", "le")
    if limit < 0 or (limit == 0 and target in ("lt", "ge")):
        return target in ("gt", "ge")
    return None


def condition_of(node: fx.Node, output: Any) -> Condition:
    """The value of a node of the graph that Dynamo captures; NotKnown where the inputs do not tell it."""
    needed = _needed(node)
    storages: set[int] = set()
    for value in (value for one in needed for value in _traced(one)):
        if value.layout is not torch.strided:
            raise NotKnown("a tensor on the way to it is sparse")
        storages.add(storage_id(value))
    for one in node.graph.nodes:
        function = isinstance(one.target, HigherOrderOperator)  # may change what it takes, and not say so
        shown = one.all_input_nodes if function else [one]
        for value in (value for each in shown for value in _traced(each)):
            changed = value.layout is torch.strided and (function or version_of(value) > 0)
            if changed and storage_id(value) in storages:
                raise NotKnown("it is changed in place before the branch")
    return _Copy(output).of(needed, node)


def _needed(node: fx.Node) -> list[fx.Node]:
    """The nodes that lead to this one, in order. Sizes are known without computing what has them."""
    found: set[fx.Node] = set()
    left = [node]
    while left:
        one = left.pop()
        if one not in found:
            found.add(one)
            left += [] if _is_size(one) else one.all_input_nodes
    return [one for one in node.graph.nodes if one in found]


class _Copy:
    """A graph of its own for a part of the graph that Dynamo captures."""

    def __init__(self, output: Any) -> None:
        self._output = output
        self._graph = fx.Graph()
        self._sources: list[Any] = []
        self._symbols: dict[Any, fx.Node] = {}
        self._made: dict[fx.Node, Any] = {}
        self._of_sizes = True

    def of(self, nodes: Sequence[fx.Node], last: fx.Node) -> Condition:
        """These nodes, of which the last gives the value."""
        for node in nodes:  # inputs of a graph come first
            if _is_size(node):
                for symbol in sorted(_symbols_in(node.meta["example_value"]), key=str):
                    self._size(symbol)
            elif node.op == "placeholder":
                self._input(node)
        for node in nodes:
            if _is_size(node):
                self._made[node] = self._sized(node.meta["example_value"])
            elif node.op in ("call_function", "call_method"):
                made = self._made[node] = self._graph.node_copy(node, lambda one: self._made[one])
                made.meta = {"traced": _look(node)}
            elif node.op != "placeholder":
                raise NotKnown("it depends on a constant of the graph")
        self._graph.output(self._made[last])
        return Condition(self._graph, self._sources, of_sizes=self._of_sizes)

    def _input(self, node: fx.Node) -> None:
        argument: Any = node.meta.get("grapharg")
        source = getattr(argument, "source", None)
        if source is None or argument.pass_arg_as_tensor:
            raise NotKnown("it depends on a number that Python computes")
        if value_at(source, self._output) is not argument.example:
            raise NotKnown("it depends on what the call does not show")
        self._made[node] = self._graph.placeholder(node.name)
        self._made[node].meta = {"traced": _look(node)}
        self._sources.append(source)
        self._of_sizes = False

    def _size(self, symbol: Any) -> None:
        """A symbol as an input."""
        sources = sources_of_sizes(self._output).get(symbol)
        if not sources:
            raise NotKnown("it depends on a size that comes from data")
        if symbol not in self._symbols:
            self._symbols[symbol] = self._graph.placeholder(str(symbol))
            self._sources.append(sources[0])

    def _sized(self, value: Any) -> Any:
        """A size, or several, as computed from symbols."""
        if isinstance(value, tuple | list):
            return tuple(self._sized(one) for one in value)
        if not isinstance(value, torch.SymInt):
            return value
        expression = value.node.expr
        symbols = sorted(expression.free_symbols, key=str)
        if expression in self._symbols:
            return self._symbols[expression]
        if not symbols:
            return int(expression)
        given = tuple(self._symbols[symbol] for symbol in symbols)
        return self._graph.call_function(_Number(expression, symbols), given)


class _Number:
    """A size as an expression of others."""

    __name__ = "size"

    def __init__(self, expression: Any, symbols: Sequence[Any]) -> None:
        self._expression, self._symbols = expression, symbols

    def __call__(self, *sizes: int) -> int:
        return int(self._expression.subs(dict(zip(self._symbols, sizes, strict=True))))


def _is_size(node: fx.Node) -> bool:
    """Whether a node gives sizes: whole numbers, of which some are symbols."""
    sizes = _several(node.meta.get("example_value"))
    numbers = all(isinstance(one, int | torch.SymInt) for one in sizes)
    return numbers and any(isinstance(one, torch.SymInt) for one in sizes)


def _several(value: Any) -> Sequence[Any]:
    return value if isinstance(value, tuple | list) else (value,)


def _symbols_in(value: Any) -> set[Any]:
    sizes = [one for one in _several(value) if isinstance(one, torch.SymInt)]
    return {symbol for one in sizes for symbol in one.node.expr.free_symbols}


def _look(node: fx.Node) -> tuple[Any, ...] | None:
    value = node.meta.get("example_value")
    return (value.dtype, value.device, value.dim()) if isinstance(value, torch.Tensor) else None


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    return (one for one in tree_leaves(value) if isinstance(one, torch.Tensor))


def _traced(node: fx.Node) -> Iterator[torch.Tensor]:
    """The tensors without values that stand for what a node gives."""
    return _tensors(node.meta.get("example_value"))
