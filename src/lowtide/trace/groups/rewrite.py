"""Puts groups into the joint graph of a step: one call each, in an order in which all can run."""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec
from torch import fx

from lowtide.graph import Graph, Phase, Role
from lowtide.trace.groups.decompose import ABOUT
from lowtide.trace.groups.form import Forming, form
from lowtide.trace.groups.fusible import is_part, is_view, owner, readers, tensors_read
from lowtide.trace.groups.save import computed_again, light
from lowtide.trace.step.builder import Builder
from lowtide.trace.step.group import Group, same_form
from lowtide.trace.step.joint import forward_nodes

__all__ = ["in_groups", "put_in"]


def in_groups(module: fx.GraphModule, num_outputs: int, *, again: bool = False) -> fx.GraphModule:
    """The same module, changed in place: operators that are fused are one call.

    Those that are better taken apart were taken apart before (``decompose``). ``again`` as in ``read_joint``.
    """
    nodes = list(module.graph.nodes)
    forward = forward_nodes(nodes, num_outputs, again=again)
    results: Any = nodes[-1].args[0]
    returned = {tensor for tensor in tensors_read(nodes[-1]) if tensor in forward}
    groups = form(nodes, forward)
    inside = computed_again(groups, forward, returned)
    chosen = [group for group in groups if len(group.members) > 1 or _reads_any(group, inside, forward)]
    _Rewriting(module, nodes, chosen, inside, light(chosen, forward), forward).rewrite()
    module.graph.lint()
    module.recompile()
    assert len(module.graph.output_node().args[0]) == len(results)  # type: ignore[arg-type]
    return module


def put_in(module: fx.GraphModule, groups: Sequence[Forming], num_outputs: int) -> None:
    """Make each of these groups of operators one call; the module is changed in place."""
    nodes = list(module.graph.nodes)
    _Rewriting(module, nodes, groups, set(), set(), forward_nodes(nodes, num_outputs)).rewrite()
    module.graph.lint()
    module.recompile()


def _reads_any(group: Forming, again: Collection[fx.Node], forward: Collection[fx.Node]) -> bool:
    """Whether a group of backward reads what is computed again inside."""
    alone = group.members[0]
    return alone not in forward and any(tensor in again for tensor in tensors_read(alone))


@dataclass(frozen=True, slots=True)
class _Shape:
    """A group as it will run: the tensors that go in and come out."""

    group: Forming
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]


class _Rewriting:
    def __init__(
        self,
        module: fx.GraphModule,
        nodes: Sequence[fx.Node],
        groups: Sequence[Forming],
        again: set[fx.Node],
        light: set[fx.Node],
        forward: set[fx.Node],
    ) -> None:
        self.module, self.nodes, self.forward = module, nodes, forward
        self.again, self.light = again, light
        self.groups = sorted(groups, key=lambda group: group.at)
        self.order = {node: k for k, node in enumerate(nodes)}
        self.parts: dict[fx.Node, fx.Node] = {}
        """What stands for each tensor that a group gives."""
        self.inside = {member: group for group in groups for member in group.members}

    def rewrite(self) -> None:
        """Replace the members of all groups."""
        shapes = self._shapes()
        place: dict[fx.Node, tuple[float, int]] = {}
        for k, node in enumerate(self.nodes):
            source = place.get(node.args[0]) if is_view(node) or is_part(node) else None  # type: ignore[arg-type]
            place[node] = max((float(k), 0), source or (0.0, 0))
        bodies = [(shape, *self._body(shape)) for shape in shapes]
        for shape, body, graph in bodies:
            self._insert(shape, body, graph, place)
        for node in reversed(self.nodes):
            gone = node in self.inside or is_view(node) or is_part(node)
            if gone and not node.users:
                self.module.graph.erase_node(node)
                del place[node]
        self._sort(place)

    def _shapes(self) -> list[_Shape]:
        """What goes in and comes out of each group; the last first, which knows its readers."""
        needed: set[fx.Node] = set()
        for node in self.nodes:
            if node not in self.inside and not is_view(node) and not is_part(node):
                needed.update(tensors_read(node))
        shapes = []
        for group in reversed(self.groups):
            mine = set(group.members)
            made = [tensor for member in group.members for tensor in self._tensors(member)]
            outputs = tuple(node for node in made if node in needed)
            if not outputs:
                continue
            inputs: dict[fx.Node, None] = {}
            seen: set[fx.Node] = set()
            stack = [owner(tensor) for tensor in outputs]
            while stack:
                for tensor in tensors_read(stack.pop()):
                    if tensor in seen:
                        continue
                    seen.add(tensor)
                    if owner(tensor) in mine or self._again(group, tensor):
                        stack.append(owner(tensor))
                    else:
                        inputs[tensor] = None
            needed.update(inputs)
            first = [tensor for tensor in inputs if self._makes_room(tensor, outputs, mine)][:1]
            ordered = dict.fromkeys([*first, *inputs])
            shapes.append(_Shape(group, tuple(ordered), outputs))
        return shapes[::-1]

    @staticmethod
    def _makes_room(tensor: fx.Node, outputs: Sequence[fx.Node], mine: Collection[fx.Node]) -> bool:
        """Whether the one result of a group could lie where a tensor does that nobody else reads."""
        made = owner(tensor).op == "call_function" and not any(map(is_view, tensor.users))
        alone = made and all(user in mine for user in readers(tensor))
        return alone and len(outputs) == 1 and same_form(tensor, outputs[0])

    @staticmethod
    def _tensors(member: fx.Node) -> list[fx.Node]:
        """What an operator gives, one by one."""
        return [member, *(user for user in member.users if is_part(user))]

    def _again(self, group: Forming, tensor: fx.Node) -> bool:
        """Whether a group computes a tensor of another one again."""
        return group.members[0] not in self.forward and (tensor in self.again or tensor in self.light)

    def _body(self, shape: _Shape) -> tuple[fx.GraphModule, Graph]:
        """The operators of a group, in the order of the step."""
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        builder = Builder()
        for tensor in shape.inputs:
            copies[tensor] = graph.placeholder(f"x{len(copies)}")
            copies[tensor].meta = {"val": tensor.meta["val"]}
            builder.add_leaf(copies[tensor], "", Role.INPUT)
        wanted: set[fx.Node] = set()
        stack = list(shape.outputs)
        while stack:
            node = stack.pop()
            if node not in copies and node not in wanted:
                wanted.add(node)
                stack += node.all_input_nodes
        for node in sorted(wanted, key=self.order.__getitem__):
            copies[node] = graph.node_copy(node, copies.__getitem__)
            copies[node].name = f"t{len(copies)}"
            copies[node].meta = {"val": node.meta["val"]}
            builder.add_call(copies[node], Phase.FORWARD)
        graph.output(tuple(copies[tensor] for tensor in shape.outputs))
        read = builder.graph(
            [builder.tensor_of[copies[t]] for t in shape.inputs],
            [builder.tensor_of[copies[t]] for t in shape.outputs],
            (),
            (),
        )
        return fx.GraphModule({}, graph), _plain(read)

    def _insert(
        self, shape: _Shape, body: fx.GraphModule, graph: Graph, place: dict[fx.Node, tuple[float, int]]
    ) -> None:
        last = shape.group.members[-1]
        whole = self.module.graph
        with whole.inserting_before(last):
            given = tuple(self.parts.get(tensor, tensor) for tensor in shape.inputs)
            call = whole.call_function(Group(body, graph), given)
            call.meta = {key: value for key, value in last.meta.items() if key in ABOUT}
            call.meta["val"] = tuple(tensor.meta["val"] for tensor in shape.outputs)
            place[call] = shape.group.at, 0
            for k, tensor in enumerate(shape.outputs):
                part = whole.call_function(operator.getitem, (call, k))
                part.meta = {key: value for key, value in tensor.meta.items() if key in ABOUT}
                part.meta["val"] = tensor.meta["val"]
                place[part] = shape.group.at, 1
                self.parts[tensor] = part
                tensor.replace_all_uses_with(part)

    def _sort(self, place: dict[fx.Node, tuple[float, int]]) -> None:
        """Bring all nodes into the order of their places."""
        order = list(self.module.graph.nodes)
        for node in order:  # a view comes behind what it views
            if is_view(node) or is_part(node):
                behind = max(place[source] for source in node.all_input_nodes)
                if behind >= place[node]:
                    place[node] = behind[0], behind[1] + 1
        order.sort(key=place.__getitem__)
        for before, node in pairwise(order):
            before.append(node)


def _plain(graph: Graph) -> Graph:
    """The same without names and lines: equal layers have equal groups."""
    tensors = tuple(msgspec.structs.replace(one, name="", source=None) for one in graph.tensors)
    ops = tuple(msgspec.structs.replace(one, name="", source=None) for one in graph.ops)
    return msgspec.structs.replace(graph, tensors=tensors, ops=ops)
