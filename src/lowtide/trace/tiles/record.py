"""A forward graph of ATen operators and its backward, written down while autograd runs them on shapes.

AOTAutograd traces any function: it looks for inputs that are written over and results that share memory, and
runs everything several times to be sure. A graph that Lowtide wrote itself has none of that. Running it once,
with each operator written down below autograd as it comes, gives the same joint graph in less time.
Where something comes up that only AOTAutograd can put right, ``None`` says so.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx, nn

from lowtide.graph import Op
from lowtide.torch_internals import (
    FakeTensor,
    FakeTensorMode,
    LazyGraphModule,
    TorchDispatchMode,
    autocast_disabled,
    last_sequence_number,
    running_sequence_number,
    schema_of,
    storage_id,
)
from lowtide.trace.eager.in_place_calls import IN_PLACE_OF
from lowtide.trace.eager.layouts import Layouts

__all__ = ["recorded", "written_for"]

aten = torch.ops.aten
_FORWARD, _BACKWARD = "is_forward", "is_backward"
_FROM_CODE = ("stack_trace", "nn_module_stack", "custom")
"""What nodes know about the user's code."""


class _BeyondError(RuntimeError):
    """Something that a joint graph cannot say as it is."""


def recorded(
    graph: fx.Graph, root: nn.Module, inputs: Sequence[Tensor], mode: FakeTensorMode, layouts: Layouts
) -> tuple[fx.GraphModule, int] | None:
    """Forward and backward of the graph for inputs of this mode, in the form of AOTAutograd's joint graph.

    Also how many of its results are those of forward; behind them is for each input its gradient, or None.
    Where no result has a gradient, there is nothing behind. ``root`` has the modules that the graph calls.
    None: this takes AOTAutograd.
    """
    recorder = _Recorder(layouts)
    for k, value in enumerate(inputs, 1):
        recorder.leaf(f"primals_{k}", value)
    try:
        with torch.autograd.set_multithreading_enabled(False), autocast_disabled(), mode, recorder:
            results = recorder.run(graph, root, inputs)
            if _share_memory([*inputs, *results]):
                return None
            gradients = recorder.differentiate(results, inputs)
        recorder.graph.output((*map(recorder.node, results), *gradients))
    except RuntimeError:  # ours, or torch's: AOTAutograd can do it, or tells why not and where
        return None
    recorder.graph.eliminate_dead_code()
    return LazyGraphModule(nn.Module(), recorder.graph), len(results)  # nobody runs it: no code is made


def _share_memory(values: Sequence[Any]) -> bool:
    storages = [storage_id(value) for value in values if isinstance(value, Tensor)]
    return len(set(storages)) < len(storages)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, layouts: Layouts) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.layouts = layouts
        self.graph = fx.Graph()
        self.nodes: dict[int, tuple[Tensor, fx.Node]] = {}
        """What stands for a tensor, by its address: each is held, so that no other gets it."""
        self.last: fx.Node | None = None
        """The last input: others come behind it."""
        self.phase = _FORWARD
        self.about: Mapping[str, Any] = {}
        """What is known of the user's code that is run."""
        self.code: dict[int, Mapping[str, Any]] = {}
        """The same by the number that autograd gave to an operator."""
        self.detaches = False
        """Whether the user's code detaches a tensor, and not autograd."""
        self.number = -1
        """That of the last operator of forward, for what no backward of an operator runs."""

    def leaf(self, name: str, value: Tensor) -> None:
        """An input of the graph."""
        if self.last is None:
            node = self.graph.placeholder(name)
        else:
            with self.graph.inserting_after(self.last):
                node = self.graph.placeholder(name)
        node.meta["val"] = value
        self.nodes[id(value)] = value, node
        self.last = node

    def node(self, value: Any) -> Any:
        """What stands for a value in the graph."""
        if not isinstance(value, Tensor):
            return value
        try:
            return self.nodes[id(value)][1]
        except KeyError:
            raise _BeyondError from None

    def run(self, graph: fx.Graph, root: nn.Module, inputs: Sequence[Tensor]) -> list[Any]:
        """The results of forward."""
        values: dict[fx.Node, Any] = {}
        given = iter(inputs)
        for node in graph.nodes:
            if node.op == "output":
                return list(fx.map_arg(node.args[0], values.__getitem__))
            if node.op == "placeholder":
                values[node] = next(given)
                continue
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            self.about = {key: node.meta[key] for key in _FROM_CODE if key in node.meta}
            self.detaches = node.target is aten.detach.default
            if node.op == "call_function":
                with self.layouts.laid_out_by(node.meta.get(IN_PLACE_OF)):
                    values[node] = node.target(*args, **kwargs)
            elif node.op == "call_module":
                values[node] = root.get_submodule(str(node.target))(*args, **kwargs)
            else:
                raise _BeyondError
        raise AssertionError("a graph ends with its output")

    def differentiate(self, results: Sequence[Any], inputs: Sequence[Tensor]) -> list[fx.Node | None]:
        """Gradients of the inputs, for gradients of the results that go in behind them."""
        have = [value for value in results if isinstance(value, Tensor) and value.requires_grad]
        wanted = [value for value in inputs if value.requires_grad]
        if not have or not wanted:
            return []
        self.phase, self.number, self.detaches = _BACKWARD, last_sequence_number(), False
        with torch.no_grad():
            tangents = [torch.empty_like(value) for value in have]
        for k, value in enumerate(tangents, 1):
            self.leaf(f"tangents_{k}", value)
        found = iter(torch.autograd.grad(have, wanted, tangents, allow_unused=True))
        return [self._gradient(next(found)) if value.requires_grad else None for value in inputs]

    def _gradient(self, value: Tensor | None) -> fx.Node | None:
        return None if value is None else self.node(value)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # questions about a tensor, most of them where it is
            known = func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor)
            return args[0].fake_device if known else func(*args, **kwargs)
        if schema_of(func).is_mutable:
            raise _BeyondError
        made = func(*args, **kwargs)
        several = isinstance(made, tuple | list)
        if not any(isinstance(one, Tensor) for one in (made if several else (made,))):
            return made
        if func is aten.detach.default and not self.detaches:  # a mark of autograd's on what it keeps
            self.nodes[id(made)] = made, self.node(args[0])
            return made
        told = {key: one for key, one in kwargs.items() if one is not None or key not in _optional(func)}
        given, named = self._written((args, told))
        node = self.graph.create_node("call_function", func, given, named, func.overloadpacket.__name__)
        node.meta = self._meta(made)
        if not several:
            self.nodes[id(made)] = made, node
            return made
        for k, one in enumerate(made):
            if isinstance(one, Tensor):
                item = self.graph.call_function(operator.getitem, (node, k))
                item.meta = node.meta | {"val": one}
                self.nodes[id(one)] = one, item
        return made

    def _written(self, value: Any) -> Any:
        if isinstance(value, tuple | list):
            return type(value)(map(self._written, value))
        if isinstance(value, dict):
            return {key: self._written(one) for key, one in value.items()}
        return self.node(value)

    def _meta(self, value: Any) -> dict[str, Any]:
        if self.phase == _FORWARD:
            number = last_sequence_number()
            self.code.setdefault(number, self.about)
            marked = {} if self.layouts.in_place is None else {IN_PLACE_OF: self.layouts.in_place}
            return {"val": value, "seq_nr": number, "partitioner_tag": _FORWARD, **self.about, **marked}
        running = running_sequence_number()
        number = self.number if running is None else running
        about = self.code.get(number, {})
        known = {key: about[key] for key in ("stack_trace", "custom") if key in about}
        if "nn_module_stack" in about:
            known["fwd_nn_module_stack"] = about["nn_module_stack"]
        return {"val": value, "seq_nr": number, "partitioner_tag": _BACKWARD, **known}


@contextmanager
def written_for(graph: fx.Graph, op: Op) -> Iterator[None]:
    """Nodes that are written meanwhile come from the line and from the module of an operator of the step."""
    last = next(iter(reversed(graph.nodes)), None)
    yield
    about: dict[str, Any] = {}
    if op.source is not None:
        about["stack_trace"] = f'File "{op.source.file}", line {op.source.line}, in step'
    if "annotation" in op.attributes:
        about["custom"] = op.attributes["annotation"]
    if op.name:
        about["nn_module_stack"] = {op.name: (op.name, nn.Module)}
    for node in reversed(graph.nodes):
        if node is last:
            break
        node.meta = about | node.meta


@cache
def _optional(func: Any) -> frozenset[str]:
    """Arguments that are None unless they are given."""
    arguments = schema_of(func).arguments
    return frozenset(one.name for one in arguments if one.has_default_value() and one.default_value is None)
