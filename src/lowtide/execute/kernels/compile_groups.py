"""Compiles the groups of a captured step, equal ones once."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
import torch
from torch import fx

from lowtide.graph import LOOP
from lowtide.inductor_internals import compile_kernels, without_records
from lowtide.pace import Pace
from lowtide.printable import printable
from lowtide.torch_internals import storage_id
from lowtide.trace.step.group import Group
from lowtide.trace.step.joint import Joint

__all__ = ["compile_groups", "stand_in"]

Compiled = Callable[[list[Any]], Sequence[Any]]
_LOG = logging.getLogger(__name__)
_SAID_EVERY = 1.0
"""Seconds from one word about progress to the next."""


def compile_groups(
    joint: Joint, known: dict[bytes, Compiled | None] | None = None
) -> dict[bytes, Compiled | None]:
    """Give every group of a step, and of the tiles in its loops, its compiled kernels.

    Those that are ``known`` are not compiled again; all are returned. A group that cannot be compiled, or
    whose kernels do not give what the capture says, runs operator by operator, and a warning names it.
    """
    known = {} if known is None else known
    found = [
        (owner, label, group, msgspec.json.encode(group.graph)) for owner, label, group in _unfinished(joint)
    ]
    missing = {key for *_, key in found} - known.keys()
    done, pace = 0, Pace(_SAID_EVERY)
    for owner, label, group, key in found:
        if key not in known:
            known[key] = _compiled(group.body, label, owner)
            done += 1
            if pace.due():
                _LOG.info("compiled %d of %d kernels", done, len(missing))
        _give(group, label, owner, known)
    return known


def stand_in(joint: Joint, known: dict[bytes, Compiled | None]) -> None:
    """Give the groups whose kernels are ``known`` these, and others something that looks like their results.

    That is for comparing ways to run a step: what is not taken need not be compiled.
    """
    for owner, label, group in _unfinished(joint):
        if msgspec.json.encode(group.graph) in known:
            _give(group, label, owner, known)
        else:
            group.run, group.over = partial(_zeros, group), _as_it_is


def _unfinished(joint: Joint) -> Iterator[tuple[Joint, str, Group]]:
    """Groups that have no kernels yet, in the loops of a step too, with the step and the name of each."""
    for call, op in zip(joint.calls, joint.graph.ops, strict=True):
        if op.kind == LOOP:
            for body in call.target.bodies:
                yield from _unfinished(body)
        elif isinstance(call.target, Group) and not call.target.final:
            yield joint, op.label, call.target


def _give(group: Group, label: str, joint: Joint, known: dict[bytes, Compiled | None]) -> None:
    """The kernels that are known of a group, which may be none."""
    compiled = known[msgspec.json.encode(group.graph)]
    group.run = _Operators(group) if compiled is None else _FirstRun(group, label, compiled)
    group.replaces = group.replaces and compiled is not None  # operators need memory for each result
    group.over = _Over(group, label, joint, known) if group.replaces else group.by_operators_over
    group.final = True


def _zeros(group: Group, arguments: list[Any]) -> Sequence[Any]:
    """Zeros in place of the results: operators behind it take as long on them."""
    arguments.clear()
    return [
        torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device).zero_()
        for like in group.promised
    ]


def _as_it_is(arguments: list[Any]) -> Sequence[Any]:
    """The first argument in place of a result that would be written over it."""
    return (arguments[0],)


def _compiled(body: fx.GraphModule, label: str, joint: Joint, *, over: bool = False) -> Compiled | None:
    mode = next(value.fake_mode for value in joint.values if hasattr(value, "fake_mode"))
    try:
        return compile_kernels(_written_over(body) if over else body, mode)
    except Exception as error:  # whatever a compiler says, the operators can run one by one
        _warn(label, f"cannot be compiled: {(str(error).splitlines() or [type(error).__name__])[0]}")
        return None


def _warn(label: str, why: str) -> None:
    warnings.warn(
        f"the group {printable(label)!r} {printable(why)}. Its operators run one by one", stacklevel=2
    )


class _FirstRun:
    """Holds what the kernels of a group give, the first time, against the capture."""

    __slots__ = ("compiled", "group", "label")

    def __init__(self, group: Group, label: str, compiled: Compiled) -> None:
        self.group, self.label, self.compiled = group, label, compiled

    def __call__(self, arguments: list[Any]) -> Sequence[Any]:
        given = list(arguments)
        results = self.compiled(arguments)
        wrong = _differs(results, given, self.group.promised)
        if not wrong:
            self.group.run = without_records(self.compiled)
            return results
        _warn(self.label, f"does not give what the capture says: {wrong}")
        self.group.run = _Operators(self.group)
        return self.group.run(given)


class _Over:
    """Runs a group in the memory of its first argument; compiled when a plan first does so."""

    __slots__ = ("group", "joint", "known", "label")

    def __init__(self, group: Group, label: str, joint: Joint, known: dict[bytes, Compiled | None]) -> None:
        self.group, self.label, self.joint, self.known = group, label, joint, known

    def __call__(self, arguments: list[Any]) -> Sequence[Any]:
        key = b"over " + msgspec.json.encode(self.group.graph)
        if key not in self.known:
            self.known[key] = _compiled(self.group.body, self.label, self.joint, over=True)
        compiled = self.known[key]
        if compiled is None:
            self.group.over = self.group.by_operators_over
            return self.group.over(arguments)
        first = arguments[0]
        compiled(arguments)
        run = without_records(compiled)

        def over(given: list[Any]) -> Sequence[Any]:
            here = given[0]
            run(given)
            return (here,)

        self.group.over = over
        return (first,)


def _written_over(body: fx.GraphModule) -> fx.GraphModule:
    """A body that writes its one result over its first input, and gives nothing."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in body.graph.nodes:
        if node.op != "output":
            copies[node] = graph.node_copy(node, copies.__getitem__)
    results: Any = body.graph.output_node().args[0]
    first = next(iter(graph.nodes))
    graph.call_function(torch.ops.aten.copy_.default, (first, copies[results[0]]))
    graph.output(())
    return fx.GraphModule(body, graph)


class _Operators:
    """Runs a group operator by operator; what each gives lies in memory as the capture says.

    What torch says of a kernel's results while it traces is not always what the kernel gives, and those of a
    group are not learned from (``trace/eager/layouts.py``): an operator behind it would find something else.
    """

    __slots__ = ("body", "promised")

    def __init__(self, group: Group) -> None:
        self.body, self.promised = _as_captured(group.body), group.promised

    def __call__(self, arguments: list[Any]) -> Sequence[Any]:
        results = self.body(*arguments)
        return [_alone(one, like.stride()) for one, like in zip(results, self.promised, strict=True)]


def _as_captured(body: fx.GraphModule) -> fx.GraphModule:
    """A body that copies a result where it does not lie as captured."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in body.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        if node.op == "call_function" and isinstance(node.meta.get("val"), torch.Tensor):
            copies[node] = graph.call_function(_laid_out, (copies[node], node.meta["val"].stride()))
    return fx.GraphModule(body, graph)


def _laid_out(value: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    return value if value.stride() == stride else _copied(value, stride)


def _alone(value: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """The same, without the larger piece of memory that some operators leave behind a result (means do)."""
    whole = _span(value) == value.untyped_storage().nbytes()
    return _laid_out(value, stride) if whole else _copied(value, stride)


def _copied(value: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    once = value[tuple(slice(0, 1) if step == 0 else slice(None) for step in stride)]
    found = torch.empty_strided(once.shape, stride, dtype=value.dtype, device=value.device).copy_(once)
    return found.expand(value.shape)  # what is written once may be read many times


def _span(value: torch.Tensor) -> int:
    """Bytes from the first element to the last."""
    if not value.numel():
        return 0
    last = sum((size - 1) * step for size, step in zip(value.shape, value.stride(), strict=True))
    return (last + 1) * value.itemsize


def _differs(results: Sequence[Any], given: Sequence[Any], promised: Sequence[torch.Tensor]) -> str:
    """What is not as promised, in words; each result has memory of its own."""
    taken = {storage_id(value) for value in given if isinstance(value, torch.Tensor)}
    for k, (one, like) in enumerate(zip(results, promised, strict=True)):
        real, said = (one.shape, one.dtype, one.stride()), (like.shape, like.dtype, like.stride())
        if real != said:
            return f"result {k} is {real}, not {said}"
        if storage_id(one) in taken:
            return f"result {k} shares its memory"
        if one.untyped_storage().nbytes() != _span(one):
            return f"result {k} has {one.untyped_storage().nbytes()} bytes of memory, not {_span(one)}"
        taken.add(storage_id(one))
    return ""
