"""Tensors and operators of a Graph from the nodes of an fx graph."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import fx

from lowtide.cost.short import saved_results
from lowtide.errors import CaptureError
from lowtide.graph import RESIDENT_ROLES, Graph, Op, Phase, Role, Source, Tensor, validate
from lowtide.torch_internals import overload_name, schema_of, storage_id
from lowtide.trace.distributed.collectives import is_collective
from lowtide.trace.eager.in_place_calls import IN_PLACE_OF, in_place_form
from lowtide.trace.eager.kernels import eager_target
from lowtide.trace.eager.layouts import as_number, is_functional_of, same_sort
from lowtide.trace.eager.updates import written_arguments
from lowtide.trace.step.group import Group
from lowtide.trace.step.sizes import SYMBOLS
from lowtide.trace.step.sources import annotation_of, module_path, source_of, text, where

__all__ = ["Builder", "Call", "call_facts", "given", "is_random", "kind_of"]


@dataclass(frozen=True, slots=True)
class Call:
    """How an operator is run: the function and its arguments, an fx node wherever a tensor goes."""

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[int, ...]
    """The tensor of each result, -1 for a result that is no tensor."""
    several: bool
    """Whether the function returns a sequence of results."""
    source: Any
    """The operator of the traced graph, which autograd knows; what runs may be another form of it."""
    laid_out_by: Any
    """The operator that says how its results lie in memory."""


class Builder:
    """Tensors and operators as they are met, behind the tensors that are there already.

    ``prefix`` keeps the ids of what is added apart from theirs.
    """

    def __init__(self, tensors: Sequence[Tensor] = (), prefix: str = "") -> None:
        self.prefix = prefix
        self.tensors: list[Tensor] = list(tensors)
        self.values: list[torch.Tensor] = []
        self.sizes: list[Any] = []
        """The bytes of every tensor that is added, with symbols where its value has some."""
        self.nodes: list[fx.Node] = []
        """What each operator was read from."""
        self.ops: list[Op] = []
        self.calls: list[Call] = []
        self.tensor_of: dict[fx.Node, int] = {}
        self.constants: dict[int, torch.Tensor] = {}
        self.written: list[int] = []
        """Tensors that an operator of the step writes over."""
        self.early: list[int] = []
        """Those of them that are written before the end of forward."""
        self._op_of: dict[fx.Node, int] = {}
        self._leaves: dict[int, int] = {}
        """The first input on each storage."""
        self._forward: dict[int, str] = {}
        """Operators of forward by the number that autograd gave them, which their backward has too."""

    def add_leaf(self, node: fx.Node, name: str, role: Role) -> None:
        """An input, if it is a tensor."""
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return
        storage = _storage(value)
        alias = None if storage is None else self._leaves.setdefault(storage, len(self.tensors))
        shared = None if alias == len(self.tensors) else alias
        self.tensor_of[node] = self._add(node.name, value, role, text(name), alias=shared)

    def _add(
        self,
        name: str,
        value: torch.Tensor,
        role: Role,
        label: str = "",
        *,
        alias: int | None = None,
        source: Source | None = None,
        size: Any = None,
    ) -> int:
        """One more tensor; its position. It takes ``size`` bytes, or as many as its value says."""
        size = _bytes(value, alias) if size is None else size
        made = Tensor(
            id=name,
            bytes=as_number(size),
            role=role,
            name=label,
            shape=tuple(map(as_number, value.shape)),
            dtype=str(value.dtype).removeprefix("torch."),
            device=str(value.device),
            alias=alias,
            source=source,
        )
        self.tensors.append(made)
        self.values.append(value)
        self.sizes.append(size)
        return len(self.tensors) - 1

    def add_constant(self, node: fx.Node, value: Any) -> None:
        """A value written in the user's code."""
        if not isinstance(value, torch.Tensor):
            user = next(iter(node.users), node)
            raise CaptureError(
                f"{where(user)}: {kind_of(user.target)} runs a function of its own inside the step, which is "
                "not supported; write the part without it, or leave it out of the compiled function"
            )
        position = self._add(node.name, value, Role.CONSTANT)
        self.constants[position], self.tensor_of[node] = value, position
        self.values[-1] = node.meta.get("val", value)

    def add_call(self, node: fx.Node, phase: Phase) -> None:
        """An operator with a tensor for each result; one in place writes what it is given."""
        if node.op != "call_function":
            raise CaptureError(
                f"{where(node)}: {node.op} {node.target!r} is not supported in a captured step; leave "
                "it out of "
                "the compiled function"
            )
        if node.target is operator.getitem:
            self._add_output(node)
            return
        values = node.meta.get("val")
        inputs = [self.tensor_of[n] for n in node.all_input_nodes if n in self.tensor_of]
        results: list[int] = []
        written = [self.tensor_of[n] for n in written_arguments(node) if n in self.tensor_of]
        self.written += written
        self.early += written if node.target is not torch.ops.aten.copy_.default else []
        if written and (isinstance(values, torch.Tensor) or not values):
            self.tensor_of[node] = written[0]
            results += written
        elif isinstance(values, torch.Tensor):
            alias = self._viewed(node)
            size = None if alias is not None else _with_gaps(node)
            name, source = self.prefix + node.name, source_of(node)
            made = self._add(name, values, Role.ACTIVATION, alias=alias, source=source, size=size)
            self.tensor_of[node] = made
            results.append(made)
        elif isinstance(values, tuple | list):
            self._op_of[node] = len(self.ops)
            alias = self._viewed(node)
            for k, value in enumerate(values):
                name, source = f"{self.prefix}{node.name}.{k}", source_of(node)
                is_tensor = isinstance(value, torch.Tensor)
                results.append(
                    self._add(name, value, Role.ACTIVATION, alias=alias, source=source) if is_tensor else -1
                )
        else:
            results.append(-1)
        outputs = [t for t in results if t >= 0]
        args, kwargs = given(node)
        in_place = _in_place(node, args)
        said = annotation_of(node)
        self.nodes.append(node)
        self.ops.append(
            Op(
                id=self.prefix + node.name,
                kind=kind_of(node.target),
                phase=phase,
                inputs=tuple(inputs),
                outputs=tuple(outputs),
                name=module_path(node),
                device=str(self.tensors[outputs[0]].device) if outputs else "",
                source=source_of(node),
                attributes={"annotation": said} if said else {},
                in_place=in_place is not None,
                updates=tuple(sorted(set(map(inputs.index, written)))),
                short=_short(node, args, results),
                differentiates=self._differentiated(node, phase),
                overload=overload_name(node.target),
                random=is_random(node),
                once=_runs_once(node),
                body=node.target.graph if isinstance(node.target, Group) else None,
                **call_facts(node, args, kwargs, _strides),
            )
        )
        several = isinstance(values, tuple | list)
        target = eager_target(node.target)
        told = node.meta.get("traced", node.target)
        if in_place is not None:
            target, told = in_place, node.meta[IN_PLACE_OF]
        self.calls.append(Call(target, args, kwargs, tuple(results), several, node.target, told))

    def _differentiated(self, node: fx.Node, phase: Phase) -> str:
        """Which operator of forward one of backward belongs to, if any.

        Sums of gradients, and backward that users have written, belong to the last one.
        """
        number: int = node.meta.get("seq_nr", -1)
        if phase is Phase.FORWARD and number >= 0:
            self._forward[number] = self.prefix + node.name
        known = phase is Phase.BACKWARD and number in self._forward
        return self._forward[number] if known else ""

    def _add_output(self, node: fx.Node) -> None:
        """A getitem names one of the results of an operator with several."""
        producer, index = node.args
        assert isinstance(producer, fx.Node)
        assert isinstance(index, int)
        self.tensor_of[node] = self.calls[self._op_of[producer]].results[index]

    def _viewed(self, node: fx.Node) -> int | None:
        """The tensor whose storage the results share: some operators say that they copy, and do not."""
        values = node.meta["val"]
        results = values if isinstance(values, tuple | list) else (values,)
        made = {_storage(value) for value in results} - {None}
        for source in node.all_input_nodes:
            if source in self.tensor_of and _storage(source.meta.get("val")) in made:
                return self.tensor_of[source]
        return self._viewed_by_schema(node)

    def _viewed_by_schema(self, node: fx.Node) -> int | None:
        schema = schema_of(node.target)
        if schema is None or not schema.returns or schema.returns[0].alias_info is None:
            return None
        for argument, value in zip(schema.arguments, node.args, strict=False):
            if argument.alias_info is not None and isinstance(value, fx.Node):
                return self.tensor_of.get(value)
        return None

    def graph(
        self,
        inputs: Sequence[int | None],
        outputs: Sequence[int | None],
        gradients: Sequence[int | None],
        updated: Sequence[int],
    ) -> Graph:
        """Everything met, checked; what goes in and comes out tells gradients from other values."""
        tensors = list(self.tensors)
        for leaf, gradient in zip(inputs, gradients, strict=False):
            if leaf is not None and gradient is not None and tensors[gradient].role not in RESIDENT_ROLES:
                replaced = msgspec.structs.replace(tensors[gradient], role=Role.GRADIENT, gradient_of=leaf)
                tensors[gradient] = replaced
        return validate(
            Graph(
                tuple(tensors),
                tuple(self.ops),
                returned=tuple(sorted({t for t in outputs if t is not None})),
                updated=tuple(sorted(set(updated))),
                updated_early=tuple(sorted(set(self.early))),
            )
        )


def _runs_once(node: fx.Node) -> bool:
    """Whether a second run may not give the same, or waits for other processes that do not run it again."""
    known = getattr(node.target, "namespace", "aten") in _REPEATABLE and not is_collective(node.target)
    return not is_random(node) and not known


_REPEATABLE = frozenset({"aten", "prims", "lowtide"})
"""Where operators that are not marked as random give the same each time; nobody knows of others."""


def _bytes(value: torch.Tensor, alias: int | None) -> Any:
    """What a tensor takes; all of its storage where that is its own."""
    if alias is None and value.layout is torch.strided:
        return value.untyped_storage().nbytes()
    return value.numel() * value.itemsize


_KEEP_GAPS = frozenset({"copy", "slice_scatter", "select_scatter", "diagonal_scatter", "as_strided_scatter"})
"""Operators that copy all of the memory under their first input, with what a view of it leaves out.

What torch says of that memory while it traces depends on whether it has seen such a call before.
"""


def _with_gaps(node: fx.Node) -> Any:
    """All the bytes that the result of such an operator takes; None for another operator."""
    name = kind_of(node.target).removeprefix("aten.")
    first = node.args[0].meta.get("val") if name in _KEEP_GAPS and isinstance(node.args[0], fx.Node) else None
    if not isinstance(first, torch.Tensor) or first.layout is not torch.strided:
        return None
    return first.untyped_storage().nbytes()


def kind_of(target: Any) -> str:
    """The operator without its overload: ``aten.add``."""
    packet = getattr(target, "overloadpacket", None)
    return str(packet if packet is not None else getattr(target, "__name__", target))


def _hint(number: Any) -> Any:
    return number.node.hint


def given(node: fx.Node, number: Callable[[Any], Any] = _hint) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """The arguments of a call, with a ``number`` in the place of each symbol."""

    def plain(value: Any) -> Any:
        return number(value) if isinstance(value, SYMBOLS) else value

    found: tuple[tuple[Any, ...], Mapping[str, Any]] = fx.node.map_aggregate((node.args, node.kwargs), plain)
    return found


def _in_place(node: fx.Node, args: Sequence[Any]) -> Any:
    """The form of an operator that runs in place in eager, where the call is one of those; None otherwise."""
    told, first = node.meta.get(IN_PLACE_OF), node.args[0] if node.args else None
    if told is None or not isinstance(first, fx.Node) or not is_functional_of(node.target, told):
        return None
    same = same_sort(node.meta.get("val"), first.meta.get("val"))
    return in_place_form(node.target, told, args) if same else None


def _short(node: fx.Node, args: Sequence[Any], results: Sequence[int]) -> tuple[int, ...]:
    """Positions in the operator's outputs of what a short second run reads, where it has one."""
    outputs = [t for t in results if t >= 0]
    saved = [results[k] for k in saved_results(eager_target(node.target), args)]
    return tuple(outputs.index(t) for t in saved) if saved and min(saved) >= 0 else ()


def call_facts(
    node: fx.Node,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    strides: Callable[[torch.Tensor], tuple[int, ...] | None],
) -> dict[str, Any]:
    """What besides shapes decides how the operator runs: its arguments, and strides of inputs."""
    tensors = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]

    def plain(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return {"input": tensors.index(value)} if value in tensors else str(value.meta.get("val"))
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        if isinstance(value, float) and not math.isfinite(value):
            return str(value)  # JSON has no infinity
        return value if value is None or isinstance(value, int | float | str) else str(value)

    return {
        "arguments": tuple(plain(value) for value in args),
        "options": {key: plain(value) for key, value in kwargs.items()},
        "strides": tuple(strides(n.meta["val"]) for n in tensors),
    }


def _storage(value: Any) -> int | None:
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    return storage_id(value)


def _strides(value: torch.Tensor) -> tuple[int, ...] | None:
    return tuple(map(as_number, value.stride())) if value.layout is torch.strided else None


def is_random(node: fx.Node) -> bool:
    """Whether the operator draws from a generator; attention without dropout could, and does not."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) and _dropped(node) != 0


def _dropped(node: fx.Node) -> Any:
    """The share that an operator of attention drops; None where it has no such argument."""
    schema = schema_of(node.target)
    for position, argument in enumerate(schema.arguments if schema is not None else ()):
        if argument.name == "dropout_p":
            given = node.args[position] if position < len(node.args) else argument.default_value
            return node.kwargs.get("dropout_p", given)
    return None
