"""A joint forward-and-backward graph of AOTAutograd as a Graph, with the calls that run its operators."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from lowtide.errors import CaptureError
from lowtide.graph import Graph, Phase, Role
from lowtide.trace.distributed.collectives import COLLECTIVES, is_collective, lacks_joined_form
from lowtide.trace.distributed.gradient_sums import is_of_a_share, summed_over
from lowtide.trace.eager.gradients import owners_of_gradients, place_of, whole
from lowtide.trace.eager.in_place_calls import NO_GRAD, WRITTEN_OVER
from lowtide.trace.eager.layouts import Layout, layout_of
from lowtide.trace.eager.rewrite import traced_in_forward
from lowtide.trace.eager.updates import written_arguments
from lowtide.trace.step.builder import Builder, Call, is_random, kind_of
from lowtide.trace.step.sources import where

__all__ = ["Call", "Joint", "Leaf", "ReadStep", "forward_nodes", "read_joint", "read_symbolic"]


@dataclass(frozen=True, slots=True)
class Leaf:
    """An input of the captured function: what it is called and what it is for."""

    name: str
    role: Role


@dataclass(frozen=True, slots=True)
class Joint:
    """A captured step: the graph, how to run it, and which tensors go in and come out."""

    graph: Graph
    calls: tuple[Call, ...]
    tensor_of: Mapping[fx.Node, int]
    values: Sequence[torch.Tensor]
    """Every tensor as shape, type and layout alone."""
    inputs: tuple[int | None, ...]
    """The tensor of every input of forward; None for a value that is no tensor."""
    tangents: tuple[int, ...]
    """Gradients that come in."""
    outputs: tuple[int | None, ...]
    """What forward returns; None for a value that is no tensor."""
    gradients: tuple[int | None, ...]
    """What backward returns, one an input; None where no gradient is asked for. Then those of ``apart``."""
    constants: Mapping[int, torch.Tensor]
    """Values written in the user's code, by tensor."""
    plain: Mapping[int, Any]
    """Results of forward that are no tensors, by their place among the outputs."""
    stopped: frozenset[int] = frozenset()
    """Tensors of forward that were made while gradients were switched off."""
    overwritten: Mapping[int, int] = field(default_factory=dict)
    """Those of them that were written over another tensor, which autograd takes them for."""
    marks: str | None = None
    """What the user's function does to gradients beyond its operators, in words."""
    summed: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """Inputs whose gradients are added up over processes, and by which connections."""
    apart: tuple[int, ...] = ()
    """Inputs by their places, one for each gradient behind those of all inputs: it is to be added to it."""
    tangents_of: tuple[int | None, ...] = ()
    """Which result of the user's function each incoming gradient is of, where that is known."""
    ungrouped: Joint | None = None
    """The same step operator by operator, where its operators run in groups; tiles are cut from it."""
    kernels: dict[bytes, Any] | None = None
    """Compiled kernels by their group, where tiles of this step, and what is around them, run in groups."""
    split: bool = False
    """Whether the backward of some of its convolutions, and of all of its tiles, runs in two calls each."""
    passed: Mapping[int, int] = field(default_factory=dict)
    """Results that are inputs and no tensors, as the mesh of a DTensor is: the place of each such input.

    Results are counted from those of forward on through the gradients.
    """
    objects: Mapping[int, Any] = field(default_factory=dict)
    """Such results that are in no input: torch may have met the same mesh before, and hold another of it."""
    looks: Callable[[int], Layout] | None = None
    """How a strided tensor lies in memory, where that is known without its value."""

    def layout(self, tensor: int) -> Layout | None:
        """How a tensor lies in memory; None where it is not strided."""
        if self.looks is not None:
            return self.looks(tensor)
        value = self.values[tensor]
        return layout_of(value) if value.layout is torch.strided else None

    @property
    def evaluates(self) -> bool:
        """Whether nothing is differentiated."""
        return not self.tangents

    @property
    def leaves(self) -> frozenset[int]:
        """Inputs that get gradients; of an evaluation its parameters, or all numbers where it has none."""
        if not self.evaluates:
            pairs = zip(self.inputs, self.gradients, strict=False)
            return frozenset(t for t, gradient in pairs if t is not None and gradient is not None)
        given = [t for t in self.inputs if t is not None and self.values[t].is_floating_point()]
        parameters = [t for t in given if self.graph.tensors[t].role is Role.PARAMETER]
        return frozenset(parameters or given)

    @property
    def main_result(self) -> int | None:
        """The one result that has a gradient, or the one of an evaluation; None: several, or not known."""
        if len(self.tangents) > 1:
            return None
        if len(self.outputs) == 1:
            return self.outputs[0]
        if self.evaluates:
            return None
        place = self.tangents_of[0] if self.tangents_of and not self.graph.updated else None
        return None if place is None or place >= len(self.outputs) else self.outputs[place]


@dataclass(frozen=True, slots=True)
class ReadStep:
    """A captured step, and what it was read from."""

    joint: Joint
    nodes: tuple[fx.Node, ...]
    """The node of every operator."""
    sizes: tuple[Any, ...]
    """The bytes of every tensor, with symbols where the graph has some."""


def read_joint(
    module: fx.GraphModule,
    num_outputs: int,
    leaves: Sequence[Leaf],
    marks: str | None = None,
    *,
    again: bool = False,
    apart: Sequence[int] = (),
) -> Joint:
    """The Graph of a joint module whose first ``num_outputs`` results are those of forward.

    Behind one gradient an input it returns further ones of the inputs ``apart``.
    With ``again`` forward runs for backward alone, when the gradients of its results are there: it is what
    was traced as forward, and these gradients are inputs like others.
    """
    for node in module.graph.nodes:
        if node.op == "call_function":
            _refuse_what_depends_on_values(node)
            _refuse_unknown_collectives(node)
    return read_symbolic(module, num_outputs, leaves, marks, again=again, apart=apart).joint


def read_symbolic(
    module: fx.GraphModule,
    num_outputs: int,
    leaves: Sequence[Leaf],
    marks: str | None = None,
    *,
    again: bool = False,
    apart: Sequence[int] = (),
) -> ReadStep:
    """The same of a module that may have symbols for sizes, for the sizes that it was traced with."""
    nodes = list(module.graph.nodes)
    results = list(nodes[-1].args[0])
    placeholders = [node for node in nodes if node.op == "placeholder"]
    primals = [node for node in placeholders if not _is_tangent(node)]
    tangents = [node for node in placeholders if _is_tangent(node) and _is_tensor(node)]
    forward = forward_nodes(nodes, num_outputs, again=again)
    builder = Builder()
    for position, node in enumerate(primals):
        place = place_of(node, position)
        known = place is not None and place < len(leaves)
        leaf = leaves[place or 0] if known else Leaf(node.name, Role.INPUT)
        builder.add_leaf(node, leaf.name, leaf.role)
    for node in tangents:
        builder.add_leaf(node, node.name, Role.INPUT if again or _is_held(node) else Role.GRADIENT)
    places = {node: place for place, node in enumerate(primals)}
    objects: dict[fx.Node, Any] = {}
    for node in nodes:
        if node.op == "get_attr":
            value = getattr(module, str(node.target), None)
            if _is_returned_object(node, value):
                objects[node] = getattr(value, "real_obj", value)
            else:
                builder.add_constant(node, value)
    calls = [node for node in nodes if node.op not in ("placeholder", "output", "get_attr")]
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        for node in calls:
            if (node in forward) == (phase is Phase.FORWARD):
                builder.add_call(node, phase)
    inputs = tuple(builder.tensor_of.get(node) for node in primals)
    made = tuple(builder.tensor_of.get(r) if isinstance(r, fx.Node) else None for r in results)
    lost = [r for r, t in zip(results, made, strict=True) if t is None and _is_tensor(r)]
    assert not lost, lost
    outputs, gradients = made[:num_outputs], made[num_outputs:]
    owners = owners_of_gradients(primals, results[num_outputs:])
    updated = [builder.tensor_of[node] for node in _updated(nodes[-1], primals) if node in builder.tensor_of]
    updated += builder.written
    sums = {k: summed_over(node) for k, node in zip(owners, results[num_outputs:], strict=False)}
    summed = {t: wires for k, wires in sums.items() if wires and (t := inputs[k]) is not None}
    joint = Joint(
        graph=builder.graph([inputs[k] for k in (*owners, *apart)], outputs, gradients, updated),
        calls=tuple(builder.calls),
        tensor_of=builder.tensor_of,
        values=tuple(builder.values),
        inputs=inputs,
        tangents=tuple(builder.tensor_of[node] for node in tangents),
        outputs=outputs,
        gradients=gradients,
        constants=builder.constants,
        plain={k: r for k, r in enumerate(results[:num_outputs]) if not isinstance(r, fx.Node)},
        stopped=_stopped(calls, builder, summed) if tangents else frozenset(),
        overwritten=_overwritten(calls, builder) if tangents else {},
        marks=marks or _talks(calls),
        summed=summed,
        apart=tuple(apart),
        tangents_of=tuple(_result_of(node) for node in tangents),
        objects={k: objects[r] for k, r in enumerate(results) if r in objects},
        passed={k: places[r] for k, r in enumerate(results) if made[k] is None and r in places},
    )
    return ReadStep(joint, tuple(builder.nodes), tuple(builder.sizes))


def forward_nodes(nodes: Sequence[fx.Node], num_outputs: int, *, again: bool = False) -> set[fx.Node]:
    """The nodes of a joint graph that run in forward: what its results and its effects need.

    ``again`` as in ``read_joint``.
    """
    tangents = [node for node in nodes if _is_tangent(node)]
    results: Any = nodes[-1].args[0]
    returned = [r for r in results[:num_outputs] if isinstance(r, fx.Node)]
    after_loss = _reached(tangents, lambda node: node.users)
    if again:
        return {node for node in nodes if traced_in_forward(node) and node not in after_loss}
    effects = [n for n in nodes if _has_effect(n) and (not tangents or traced_in_forward(n))]
    writes = [n for n in nodes if n not in after_loss and written_arguments(n)]
    return _reached([*returned, *effects, *writes], lambda node: node.all_input_nodes)


def _is_tangent(node: fx.Node) -> bool:
    """Whether a node is the incoming gradient of a result."""
    return node.op == "placeholder" and node.name.startswith("tangents")


def _is_tensor(one: object) -> bool:
    return isinstance(one, fx.Node) and isinstance(one.meta.get("val"), torch.Tensor)


def _is_returned_object(node: fx.Node, value: object) -> bool:
    """Whether this is no tensor and no function, and the step does nothing but return it."""
    used = all(user.op == "output" for user in node.users)
    return used and not isinstance(value, torch.Tensor | torch.nn.Module) and value is not None


def _talks(nodes: Sequence[fx.Node]) -> str | None:
    """Whether other processes take part in the gradients, in words."""
    talks = any(is_collective(node.target) and not is_of_a_share(node) for node in nodes)
    return "other processes take part in it (collectives)" if talks else None


def _is_held(tangent: fx.Node) -> bool:
    """Whether an incoming gradient counts throughout: autograd holds it until the backward of the step ends.

    One number, the gradient of a loss, is left to the plan.
    """
    return bool(tangent.meta["val"].dim())


def _result_of(tangent: fx.Node) -> int | None:
    """Which result of the function an incoming gradient is of."""
    return getattr(getattr(whole(tangent.meta.get("desc")), "output", None), "idx", None)


def _stopped(nodes: Iterable[fx.Node], builder: Builder, summed: Collection[int]) -> frozenset[int]:
    """Those that gradients do not go through; they do where an operator of Lowtide says how."""
    known = builder.tensor_of
    made = (node for node in nodes if traced_in_forward(node) and node.meta.get(NO_GRAD))
    made = (node for node in made if not is_of_a_share(node))
    made = (node for node in made if known.get(next(iter(node.all_input_nodes), node)) not in summed)
    return frozenset(known[node] for node in made if node in known)


def _overwritten(nodes: Iterable[fx.Node], builder: Builder) -> dict[int, int]:
    known = builder.tensor_of
    some = (node for node in nodes if traced_in_forward(node) and node.meta.get(WRITTEN_OVER))
    return {known[n]: known[n.args[0]] for n in some if n in known and n.args[0] in known}  # type: ignore[index]


def _has_effect(node: fx.Node) -> bool:
    """Whether it matters when the operator runs, though nobody may read what it gives."""
    return node.op == "call_function" and (is_random(node) or node.meta.get("val") is None)


def _updated(output: fx.Node, primals: Sequence[fx.Node]) -> list[fx.Node]:
    """Inputs that the step writes a new value into once forward has run."""
    written = [getattr(one, "mutated_input", None) for one in output.meta.get("desc") or ()]
    return [node for node in primals if node.meta.get("desc") in [w for w in written if w is not None]]


def _reached(roots: Iterable[fx.Node], onward: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    """The roots and whatever one gets to from them."""
    found: set[fx.Node] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += onward(node)
    return found


def _refuse_unknown_collectives(node: fx.Node) -> None:
    if lacks_joined_form(node.target):
        raise CaptureError(
            f"{where(node)}: {kind_of(node.target)} talks to other processes in a way that is not supported "
            f"in a planned step. Supported are {', '.join(COLLECTIVES)}; leave this part out of the compiled "
            "function"
        )


def _refuse_what_depends_on_values(node: fx.Node) -> None:
    """A number read from a tensor, or a selection by mask: what follows has no shape before the step runs."""
    values = node.meta.get("val")
    for value in values if isinstance(values, tuple | list) else (values,):
        if isinstance(value, torch.Tensor) and any(isinstance(d, torch.SymInt) for d in value.shape):
            problem = f"the shape of what {kind_of(node.target)} gives depends on values"
        elif isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool) and node.users:
            problem = f"the step depends on the number that {kind_of(node.target)} reads from a tensor"
        else:
            continue
        raise CaptureError(
            f"{where(node)}: {problem}, so no plan can be made for it. Keep it in tensors of a fixed shape "
            "(torch.where, a mask that is multiplied), or leave this part out of the compiled function"
        )
