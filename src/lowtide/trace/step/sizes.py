"""A captured function whose sizes are symbols, made again for the sizes of one call.

When a batch size changes, torch hands over a graph with symbols for sizes. A plan is for bytes, so each
call's sizes are put in: numbers take the place of everything that is computed from symbols.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx

from lowtide.errors import CaptureError
from lowtide.torch_internals import expressions, tree_map_only

__all__ = ["SYMBOLS", "Fixed", "Symbolic", "fingerprint", "has_numbers", "has_symbols"]

SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def has_symbols(module: fx.GraphModule) -> bool:
    """Whether some input of the function has a symbol for a size, or is one."""
    values = (node.meta.get("example_value") for node in module.graph.find_nodes(op="placeholder"))
    return any(
        isinstance(value, SYMBOLS)
        or (isinstance(value, torch.Tensor) and any(isinstance(d, torch.SymInt) for d in value.shape))
        for value in values
    )


def has_numbers(module: fx.GraphModule) -> bool:
    """Whether some input is a Python number that torch put into a tensor: its value may be in the graph."""
    inputs = module.graph.find_nodes(op="placeholder")
    return any(isinstance(_number_in(node), SYMBOLS) for node in inputs)


def _number_in(node: fx.Node) -> Any:
    """The number that stands for an input which is a Python number, put into a tensor by torch; else None.

    A tensor of the user's may know a number too, once its value was asked for; it stays a tensor.
    """
    is_number = getattr(node.meta.get("grapharg"), "pass_arg_as_tensor", False)
    return getattr(node.meta.get("example_value"), "item_memo", None) if is_number else None


@dataclass(frozen=True, slots=True)
class Fixed:
    """A function of tensors alone, and how its call follows from a call of the one with symbols."""

    module: fx.GraphModule
    places: tuple[int, ...]
    """Which arguments it takes."""
    results: tuple[Any, ...]
    """Numbers among the results; None where the next of its own results goes."""


class Symbolic:
    """A captured function with symbols for sizes, kept apart from torch's own copy of it."""

    def __init__(self, module: fx.GraphModule) -> None:
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        self._values: dict[fx.Node, Any] = {}
        self._in_tensors: set[fx.Node] = set()
        """Inputs that are numbers and come in tensors."""
        self._sizes: dict[fx.Node, list[Any]] = {}
        """Of inputs that are tensors: how each size is written, None where it is a number."""
        for node in module.graph.nodes:
            copies[node] = graph.node_copy(node, lambda n: copies[n])
            # what torch knows about the inputs of its first call would keep them alive
            copies[node].meta = {
                k: v for k, v in node.meta.items() if k in ("stack_trace", "nn_module_stack")
            }
            value = node.meta.get("example_value")
            if node.op == "placeholder" and isinstance(value, torch.Tensor):
                sizes: Sequence[Any] = value.shape
                self._sizes[copies[node]] = [d.node.expr if isinstance(d, SYMBOLS) else None for d in sizes]
                value = _number_in(node)
                if value is not None:
                    self._in_tensors.add(copies[node])
            if _symbolic(value):
                self._values[copies[node]] = value
        self._module = fx.GraphModule(module, graph)
        inputs = self._module.graph.find_nodes(op="placeholder")
        self.numbers = frozenset(k for k, node in enumerate(inputs) if node in self._values)
        """Arguments that are sizes or Python numbers; one of the latter may come in a tensor."""

    def of_tensors(self) -> tuple[fx.GraphModule, list[frozenset[int]]] | None:
        """The function of tensors alone, its sizes taken from them; and which sizes of each tensor vary.

        None where it takes a number that is the size of no tensor, or an object, such as a mesh of devices.
        """
        nodes = list(self._module.graph.nodes)
        inputs = [node for node in nodes if node.op == "placeholder"]
        tensors = [node for node in inputs if node not in self._values]
        if any(node not in self._sizes for node in tensors):
            return None
        graph = fx.Graph()
        made = {node: graph.placeholder(node.name) for node in tensors}
        for node in inputs:
            if node in self._values:
                written = _expressions(self._values[node])
                places = [
                    (t, k) for t in tensors for k, d in enumerate(self._sizes.get(t, ())) if d in written
                ]
                if not places:
                    return None
                of, axis = places[0]
                made[node] = graph.call_method("size", (made[of], axis))
        for node in nodes:
            if node.op == "output":
                results = [r for r in node.args[0] if isinstance(r, fx.Node) and r not in self._values]
                graph.output(tuple(made[r] for r in results))
            elif node.op != "placeholder":
                made[node] = graph.node_copy(node, lambda n: made[n])
        varying = [frozenset(k for k, d in enumerate(self._sizes[t]) if d is not None) for t in tensors]
        return fx.GraphModule(self._module, graph), varying

    @cached_property
    def used(self) -> tuple[fx.Node, ...]:
        """Numbers that go into operators."""
        return tuple(
            node
            for node in self._values
            if any(user not in self._values and user.op != "output" for user in node.users)
        )

    @cached_property
    def floats(self) -> frozenset[int]:
        """Which of those are real numbers that follow from values, not from shapes."""
        given = [node for node in self._values if node.op == "placeholder"]
        real = {one for node in given for one in _expressions(self._values[node]) if _is_real(one)}
        return frozenset(
            k
            for k, node in enumerate(self.used)
            if isinstance(self._values[node], torch.SymFloat)
            and node not in self._in_tensors
            and not real.isdisjoint(self._values[node].node.expr.free_symbols)
        )

    @cached_property
    def integers(self) -> frozenset[int]:
        """Which of those are integers that the function was given, and that are the size of no tensor."""
        sizes = {one for known in self._sizes.values() for one in known}
        return frozenset(
            k
            for k, node in enumerate(self.used)
            if isinstance(self._values[node], torch.SymInt)
            and node.op == "placeholder"
            and self._values[node].node.expr not in sizes
        )

    def values(self, arguments: Sequence[Any]) -> dict[fx.Node, Any]:
        """All numbers of the function in a call with these arguments."""
        inputs = self._module.graph.find_nodes(op="placeholder")
        known: dict[Any, Any] = {}
        for node, argument in zip(inputs, arguments, strict=True):
            if node in self._values:
                number = argument.item() if isinstance(argument, torch.Tensor) else argument
                known |= dict.fromkeys(_expressions(self._values[node]), number)
        found: dict[fx.Node, Any] = {}
        for node, value in self._values.items():
            computed = node.op == "call_function" and all(one in found for one in node.all_input_nodes)
            found[node] = _computed(node, found) if computed else _number(value, known)
        return found

    def results(self, values: Mapping[fx.Node, Any]) -> tuple[Any, ...]:
        """Numbers among the results; None where the next tensor goes."""
        results: Any = self._module.graph.output_node().args[0]
        found = fx.node.map_arg(tuple(results), lambda n: values.get(n, n))
        return tuple(None if isinstance(one, fx.Node) else one for one in found)

    def at(
        self,
        arguments: Sequence[Any],
        free: Collection[int] = (),
        readers: tuple[Callable[..., Any], Callable[..., Any]] | None = None,
    ) -> Fixed:
        """The function for the sizes and numbers of these arguments.

        Functions inside of it, such as what is checkpointed, take numbers in tensors, and find constants. Of
        the numbers that it uses, it takes those that are ``free`` as further arguments, two tensors each,
        and has ``readers`` read them, the second one integers.
        """
        nodes = list(self._module.graph.nodes)
        inputs = [node for node in nodes if node.op == "placeholder"]
        values = self.values(arguments)
        taken = {self.used[k]: k for k in free}
        graph = fx.Graph()
        made: dict[fx.Node, Any] = dict(values)
        for node in inputs:
            if node not in values:
                made[node] = graph.node_copy(node)
        tensors = {k: [graph.placeholder(f"number_{k}_{n}") for n in (64, 32)] for k in sorted(free)}
        for node in nodes:
            if node.op == "output":
                results = tuple(fx.node.map_arg(node.args[0], lambda n: values.get(n, made[n])))
                graph.output(tuple(r for r in results if isinstance(r, fx.Node)))
            elif node in self._in_tensors and node in self.used:
                made[node] = graph.call_function(torch.tensor, (values[node],), {"dtype": torch.float64})
            elif node in taken:
                assert readers is not None
                read = readers[isinstance(self._values[node], torch.SymInt)]
                made[node] = graph.call_function(read, (taken[node], *tensors[taken[node]]))
            elif node not in made:
                made[node] = graph.node_copy(node, lambda n: made[n])
        places = tuple(k for k, node in enumerate(inputs) if node not in values)
        return Fixed(fx.GraphModule(self._module, graph), places, self.results(values))


def fingerprint(module: fx.GraphModule) -> Hashable:
    """Equal for two functions that compute the same; None where that cannot be told from the graph alone."""
    place = {node: k for k, node in enumerate(module.graph.nodes)}
    if has_numbers(module) or any(node.op in ("get_attr", "call_module") for node in place):
        return None
    lines = []
    for node in place:
        arguments = tree_map_only(fx.Node, lambda n: f"%{place[n]}", (node.args, node.kwargs))
        lines.append((node.op, "" if node.op == "placeholder" else node.target, repr(arguments)))
    return tuple(lines)


def _symbolic(value: Any) -> bool:
    """Whether this is a number, or several, that tracing did not fix."""
    if isinstance(value, tuple | list):
        return bool(value) and all(_symbolic(v) or isinstance(v, int) for v in value)
    return isinstance(value, SYMBOLS)


def _is_real(symbol: Any) -> bool:
    return symbol.is_integer is not True


def _expressions(value: Any) -> set[Any]:
    """How an input that is a number may be written in what is computed from it."""
    return {expression for expression in expressions(value) if getattr(expression, "is_symbol", False)}


def _computed(node: fx.Node, made: Mapping[fx.Node, Any]) -> Any:
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: made[n])
    assert callable(node.target)
    return node.target(*args, **kwargs)


def _number(value: Any, known: dict[Any, Any]) -> Any:
    """What a size, or several, come to when the inputs are known."""
    if isinstance(value, tuple | list):
        return type(value)(_number(v, known) for v in value)
    if not isinstance(value, SYMBOLS):
        return value
    expression = value.node.expr
    if expression in known:  # as it is: -0.0 stays what it is
        return known[expression]
    result = expression.subs(known)
    if result.free_symbols:
        raise CaptureError(
            f"a size depends on values ({expression}), so no plan can be made for it. Keep sizes to what "
            "follows from the shapes of the inputs"
        )
    kind = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}[type(value)]
    return kind(result)
