"""A joint forward-and-backward graph of AOTAutograd as a Graph, with the calls that run its operators."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import fx

from lowtide.capture.kernels import eager_target
from lowtide.capture.updates import written_arguments
from lowtide.errors import CaptureError
from lowtide.graph import RESIDENT_ROLES, Graph, Op, Phase, Role, Source, Tensor, validate

__all__ = ["Call", "Joint", "Leaf", "read_joint"]

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')


@dataclass(frozen=True, slots=True)
class Leaf:
    """An input of the captured function: what it is called and what it is for."""

    name: str
    role: Role


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


@dataclass(frozen=True, slots=True)
class Joint:
    """A captured step: the graph, how to run it, and which tensors go in and come out."""

    graph: Graph
    calls: tuple[Call, ...]
    tensor_of: Mapping[fx.Node, int]
    values: tuple[torch.Tensor, ...]
    """Every tensor as shape, type and layout alone."""
    inputs: tuple[int | None, ...]
    """The tensor of every input of forward; None for a value that is no tensor."""
    tangents: tuple[int, ...]
    outputs: tuple[int | None, ...]
    """What forward returns; None for a value that is no tensor."""
    gradients: tuple[int | None, ...]
    """What backward returns, one an input; None where no gradient is asked for."""
    constants: Mapping[int, torch.Tensor]
    """Values written in the user's code, by tensor."""
    plain: Mapping[int, Any]
    """Results of forward that are no tensors, by their place among the outputs."""


def read_joint(module: fx.GraphModule, num_outputs: int, leaves: Sequence[Leaf]) -> Joint:
    """The Graph of a joint module whose first ``num_outputs`` results are those of forward."""
    nodes = list(module.graph.nodes)
    for node in nodes:
        if node.op == "call_function":
            _refuse_what_depends_on_values(node)
    results = list(nodes[-1].args[0])
    placeholders = [node for node in nodes if node.op == "placeholder"]
    primals = [node for node in placeholders if not node.name.startswith("tangents")]
    tangents = [node for node in placeholders if node.name.startswith("tangents")]
    returned = [r for r in results[:num_outputs] if isinstance(r, fx.Node)]
    after_loss = _descendants(tangents)
    effects = [n for n in nodes if _has_effect(n) and (not tangents or _traced_in_forward(n))]
    writes = [n for n in nodes if n not in after_loss and written_arguments(n)]
    forward = _ancestors([*returned, *effects, *writes])
    builder = _Builder()
    for position, node in enumerate(primals):
        place = getattr(node.meta.get("desc"), "idx", position)
        leaf = leaves[place] if place < len(leaves) else Leaf(node.name, Role.INPUT)
        builder.add_leaf(node, leaf.name, leaf.role)
    for node in tangents:
        builder.add_leaf(node, node.name, Role.GRADIENT)
    for node in nodes:
        if node.op == "get_attr":
            builder.add_constant(node, getattr(module, str(node.target), None))
    calls = [node for node in nodes if node.op not in ("placeholder", "output", "get_attr")]
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        for node in calls:
            if (node in forward) == (phase is Phase.FORWARD):
                builder.add_call(node, phase)
    inputs = tuple(builder.tensor_of.get(node) for node in primals)
    gradients = tuple(builder.tensor_of[r] if isinstance(r, fx.Node) else None for r in results[num_outputs:])
    outputs = tuple(
        builder.tensor_of.get(r) if isinstance(r, fx.Node) else None for r in results[:num_outputs]
    )
    updated = [builder.tensor_of[node] for node in _updated(nodes[-1], primals) if node in builder.tensor_of]
    updated += builder.written
    return Joint(
        graph=builder.graph(inputs, outputs, gradients, updated),
        calls=tuple(builder.calls),
        tensor_of=builder.tensor_of,
        values=tuple(builder.values),
        inputs=inputs,
        tangents=tuple(builder.tensor_of[node] for node in tangents),
        outputs=outputs,
        gradients=gradients,
        constants=builder.constants,
        plain={k: r for k, r in enumerate(results[:num_outputs]) if not isinstance(r, fx.Node)},
    )


def _has_effect(node: fx.Node) -> bool:
    """Whether it matters when the operator runs, though nobody may read what it gives."""
    return node.op == "call_function" and (_random(node) or node.meta.get("val") is None)


def _traced_in_forward(node: fx.Node) -> bool:
    return bool(node.meta.get("partitioner_tag") == "is_forward")


def _updated(output: fx.Node, primals: Sequence[fx.Node]) -> list[fx.Node]:
    """Inputs that the step writes a new value into once forward has run."""
    written = [getattr(one, "mutated_input", None) for one in output.meta.get("desc") or ()]
    return [node for node in primals if node.meta.get("desc") in [w for w in written if w is not None]]


def _ancestors(roots: Iterable[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += node.all_input_nodes
    return found


def _descendants(roots: Iterable[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += node.users
    return found


class _Builder:
    """Tensors and operators as they are met."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.values: list[torch.Tensor] = []
        self.ops: list[Op] = []
        self.calls: list[Call] = []
        self.tensor_of: dict[fx.Node, int] = {}
        self.constants: dict[int, torch.Tensor] = {}
        self.written: list[int] = []
        """Tensors that an operator of the step writes over."""
        self.early: list[int] = []
        """Those of them that are written before the end of forward."""
        self._op_of: dict[fx.Node, int] = {}

    def add_leaf(self, node: fx.Node, name: str, role: Role) -> None:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return
        self.tensor_of[node] = len(self.tensors)
        self.tensors.append(_tensor(node.name, value, role, name))
        self.values.append(value)

    def add_constant(self, node: fx.Node, value: Any) -> None:
        if not isinstance(value, torch.Tensor):
            user = next(iter(node.users), node)
            raise CaptureError(
                f"{_where(user)}: {_kind(user.target)} runs a function of its own inside the step, which is "
                "not supported; write the part without it, or leave it out of the compiled function"
            )
        self.constants[len(self.tensors)] = value
        self.tensor_of[node] = len(self.tensors)
        self.tensors.append(_tensor(node.name, value, Role.CONSTANT))
        self.values.append(node.meta.get("val", value))

    def add_call(self, node: fx.Node, phase: Phase) -> None:
        if node.op != "call_function":
            raise CaptureError(
                f"{_where(node)}: {node.op} {node.target!r} is not supported in a captured step"
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
        if written and isinstance(values, torch.Tensor):
            self.tensor_of[node] = written[0]
            results.append(written[0])
        elif isinstance(values, torch.Tensor):
            alias = self._viewed(node)
            self.tensor_of[node] = len(self.tensors)
            results.append(len(self.tensors))
            self.tensors.append(
                _tensor(node.name, values, Role.ACTIVATION, alias=alias, source=_source(node))
            )
            self.values.append(values)
        elif isinstance(values, tuple | list):
            self._op_of[node] = len(self.ops)
            alias = self._viewed(node)
            for k, value in enumerate(values):
                results.append(len(self.tensors) if isinstance(value, torch.Tensor) else -1)
                if isinstance(value, torch.Tensor):
                    name = f"{node.name}.{k}"
                    self.values.append(value)
                    self.tensors.append(
                        _tensor(name, value, Role.ACTIVATION, alias=alias, source=_source(node))
                    )
        else:
            results.append(-1)
        outputs = [t for t in results if t >= 0]
        self.ops.append(
            Op(
                id=node.name,
                kind=_kind(node.target),
                phase=phase,
                inputs=tuple(inputs),
                outputs=tuple(outputs),
                name=_module_path(node),
                device=str(self.tensors[outputs[0]].device) if outputs else "",
                source=_source(node),
                attributes=_attributes(node)
                | ({"updates": sorted(set(map(inputs.index, written)))} if written else {}),
            )
        )
        several = isinstance(values, tuple | list)
        target = eager_target(node.target)
        self.calls.append(Call(target, node.args, node.kwargs, tuple(results), several))

    def _add_output(self, node: fx.Node) -> None:
        """A getitem names one of the results of an operator with several."""
        producer, index = node.args
        assert isinstance(producer, fx.Node)
        assert isinstance(index, int)
        self.tensor_of[node] = self.calls[self._op_of[producer]].results[index]

    def _viewed(self, node: fx.Node) -> int | None:
        """The tensor whose storage the results share, by the operator's own schema."""
        schema = getattr(node.target, "_schema", None)
        if node.target is torch.ops.aten._unsafe_view.default:  # says that it copies, and does not
            return self.tensor_of.get(node.all_input_nodes[0])
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
        tensors = list(self.tensors)
        for leaf, gradient in zip(inputs, gradients, strict=False):
            if leaf is not None and gradient is not None and tensors[gradient].role not in RESIDENT_ROLES:
                replaced = msgspec.structs.replace(tensors[gradient], role=Role.GRADIENT, gradient_of=leaf)
                tensors[gradient] = replaced
        returned = sorted({t for t in outputs if t is not None})
        attributes = {"returned": returned} | ({"updated": sorted(set(updated))} if updated else {})
        attributes |= {"updated_early": sorted(set(self.early))} if self.early else {}
        return validate(Graph(tuple(tensors), tuple(self.ops), attributes=attributes))


def _tensor(
    name: str,
    value: torch.Tensor,
    role: Role,
    label: str = "",
    *,
    alias: int | None = None,
    source: Source | None = None,
) -> Tensor:
    size = value.numel() * value.itemsize
    if alias is None and value.layout is torch.strided:
        size = value.untyped_storage().nbytes()
    return Tensor(
        id=name,
        bytes=int(size),
        role=role,
        name=label,
        shape=tuple(int(d) for d in value.shape),
        dtype=str(value.dtype).removeprefix("torch."),
        device=str(value.device),
        alias=alias,
        source=source,
    )


def _kind(target: Any) -> str:
    packet = getattr(target, "overloadpacket", None)
    return str(packet if packet is not None else getattr(target, "__name__", target))


def _attributes(node: fx.Node) -> dict[str, Any]:
    """What besides shapes decides how the operator runs: its overload, arguments, and strides of inputs."""
    tensors = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]

    def plain(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return {"input": tensors.index(value)} if value in tensors else str(value.meta.get("val"))
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        if isinstance(value, float) and not math.isfinite(value):
            return str(value)  # JSON has no infinity
        return value if value is None or isinstance(value, int | float | str) else str(value)

    found: dict[str, Any] = {
        "overload": getattr(node.target, "_overloadname", ""),
        "arguments": [plain(value) for value in node.args],
        "strides": [_strides(n.meta["val"]) for n in tensors],
    }
    if node.kwargs:
        found["options"] = {key: plain(value) for key, value in node.kwargs.items()}
    if _random(node):
        found["random"] = True
    return found


def _strides(value: torch.Tensor) -> list[int] | None:
    return [int(d) for d in value.stride()] if value.layout is torch.strided else None


def _random(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _module_path(node: fx.Node) -> str:
    """`layer1.0.conv1`, from the innermost module that ran the operator; forward's for its backward."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    path = str(list(stack.values())[-1][0])
    return re.sub(r"^[LG]\['\w+'\]\.?|__\w+__\.?", "", path).replace("['", ".").replace("']", "").strip(".")


def _source(node: fx.Node) -> Source | None:
    """The innermost line of the user's own code."""
    trace = node.meta.get("stack_trace")
    frames = _FRAME.findall(trace) if trace else []
    for file, line in reversed(frames):
        if "/torch/" not in file:
            return Source(file, int(line))
    return Source(frames[-1][0], int(frames[-1][1])) if frames else None


def _refuse_what_depends_on_values(node: fx.Node) -> None:
    """A number read from a tensor, or a selection by mask: what follows has no shape before the step runs."""
    values = node.meta.get("val")
    for value in values if isinstance(values, tuple | list) else (values,):
        if isinstance(value, torch.Tensor) and any(isinstance(d, torch.SymInt) for d in value.shape):
            problem = f"the shape of what {_kind(node.target)} gives depends on values"
        elif isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool) and node.users:
            problem = f"the step depends on the number that {_kind(node.target)} reads from a tensor"
        else:
            continue
        raise CaptureError(
            f"{_where(node)}: {problem}, so no plan can be made for it. Keep it in tensors of a fixed shape "
            "(torch.where, a mask that is multiplied), or leave this part out of the compiled function"
        )


def _where(node: fx.Node) -> str:
    source = _source(node)
    return f"{source.file}:{source.line}" if source else "the captured step"
