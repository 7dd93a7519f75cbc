"""Steps and Programs written as text, for tests that need small ones.

    step("x:input w:parameter", "f: x w -> a", "g: a -> y", "dg: dy a -> da @backward")
    program(graph, "f, g, drop a | dg")

A program is runs by the names of their operators, ``f*`` in place and ``f~`` short; ``drop``, ``send`` and ``fetch`` with
tensors; ``|`` is where backward begins.
"""

import re

from lowtide.graph import Graph, Op, Phase, Role, Tensor
from lowtide.plan.program.instructions import Drop, Fetch, Program, Run, Send

_LINE = re.compile(r"(?P<name>\S+): ?(?P<reads>[^>@]*?) ?-> ?(?P<makes>[^@]*?)(?: @(?P<marks>.*))?")


def step(leaves, *lines, returned="y", updated="", gradients="", sizes=()):
    """A graph. Marks behind ``@``: backward, view, and fields as ``random`` or ``updates=1``.

    ``gradients`` says which tensor is the gradient of which leaf, as ``dw:w``.
    """
    tensors, ops, number = [], [], {}

    def tensor(name, role=Role.ACTIVATION, alias=None):
        if name not in number:
            number[name] = len(tensors)
            tensors.append(Tensor(name, dict(sizes).get(name, 4), role, alias=alias, device="cpu"))
        return number[name]

    for one in leaves.split():
        name, _, role = one.partition(":")
        tensor(name, Role(role))
    for line in lines:
        found = _LINE.fullmatch(line)
        marks = (found["marks"] or "").split()
        reads = [tensor(name, Role.GRADIENT) for name in found["reads"].split()]
        alias = reads[0] if "view" in marks else None
        makes = [tensor(name, alias=alias) for name in found["makes"].split()]
        fields = {}
        for mark in set(marks) - {"backward", "view"}:
            name, _, value = mark.partition("=")
            fields[name] = tuple(int(k) for k in value.split(",")) if value else True
        phase = Phase.BACKWARD if "backward" in marks else Phase.FORWARD
        kind = found["name"] if "." in found["name"] else "view" if alias is not None else "f"
        ops.append(Op(found["name"], kind, phase, tuple(reads), tuple(makes), device="cpu", **fields))
    for pair in gradients.split():
        name, _, leaf = pair.partition(":")
        old = tensors[number[name]]
        tensors[number[name]] = Tensor(
            old.id, old.bytes, Role.GRADIENT, gradient_of=number[leaf], alias=old.alias, device="cpu"
        )
    listed = {"returned": returned, "updated": updated}
    lists = {name: tuple(sorted(number[t] for t in text.split())) for name, text in listed.items() if text}
    return Graph(tuple(tensors), tuple(ops), **lists)


def program(graph, text, bodies=()):
    """A Program of the graph."""
    op = {one.id: k for k, one in enumerate(graph.ops)}
    tensor = {one.id: t for t, one in enumerate(graph.tensors)}
    parts = []
    for part in (*text.split("|"), "")[:2]:
        lines = []
        for words in filter(None, (line.split() for line in part.split(","))):
            if words[0] == "drop":
                lines.append(Drop(tuple(tensor[name] for name in words[1:])))
            elif words[0] in ("send", "fetch"):
                lines.append((Send if words[0] == "send" else Fetch)(tensor[words[1]]))
            else:
                name = words[0].rstrip("*~")
                lines.append(Run(op[name], 0 if "*" in words[0] else None, short="~" in words[0]))
        parts.append(tuple(lines))
    return Program(*parts, bodies)
