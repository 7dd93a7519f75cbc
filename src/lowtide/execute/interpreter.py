"""Runs a Program: each part is a straight line over a table of tensors."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from lowtide.capture.joint import Joint
from lowtide.capture.updates import without_update
from lowtide.cost.watch import Marker
from lowtide.execute.in_place import in_place_variant
from lowtide.execute.random_state import random_state, replayed
from lowtide.execute.snapshot import Snapshot
from lowtide.graph import Role
from lowtide.plan.program import Drop, Instruction, Program, Run

__all__ = ["Interpreter"]


class Interpreter:
    """The forward and the backward part of one Program, ready to run.

    Tensors live in a table with a place for each tensor of the graph. A Run fills places, a Drop clears
    them, so that memory is given back at the instruction that says so.
    """

    def __init__(self, joint: Joint, program: Program) -> None:
        self.joint = joint
        self.program = program
        again = _run_again(program)
        self.states = tuple(op for op in sorted(again) if joint.graph.ops[op].attributes.get("random"))
        """Random operators that run more than once: the state before their first run is kept."""
        self.saved = _needed_by_backward(joint, program)
        updated = joint.graph.attributes.get("updated", ())
        self.copied = frozenset(
            t for t in self.saved if joint.graph.tensors[t].role is Role.BUFFER or t in updated
        )
        """Buffers and other updated inputs that backward reads: their value before the step is copied."""
        self.marker: Marker | None = None
        """Told before and after each operator runs, while somebody watches."""
        place = {op: k for k, op in enumerate(self.states)}
        self._early: tuple[int, ...] = tuple(joint.graph.attributes.get("updated_early", ()))
        self._undisturbed = _before_first_update(joint, program)
        seen: set[int] = set()
        self._forward = [_prepared(joint, line, place, seen) for line in program.forward]
        self._backward = [_prepared(joint, line, place, seen) for line in program.backward]

    def forward(self, arguments: list[Any]) -> list[Any]:
        """Results of the step, then what backward needs: tensors and random states. Empties ``arguments``."""
        joint = self.joint
        table = self._table()
        for tensor, value in zip(joint.inputs, arguments, strict=True):
            if tensor is not None:
                table[tensor] = value
        arguments.clear()
        states: list[torch.Tensor | None] = [None] * len(self.states)
        before = {t: table[t].clone() for t in self.copied}
        snapshot = Snapshot()
        try:
            self._run(self._forward[: self._undisturbed], table, states)
            snapshot.take([table[t] for t in self._early])
            self._run(self._forward[self._undisturbed :], table, states)
        except BaseException:
            snapshot.restore()
            before.clear()
            raise
        outputs = [joint.plain.get(k) if t is None else table[t] for k, t in enumerate(joint.outputs)]
        saved = [before.get(t, table[t]) for t in self.saved]
        return [*outputs, *saved, *(state for state in states if state is not None)]

    def backward(self, arguments: list[Any]) -> list[Any]:
        """Gradients, one an input of the step, from what forward saved and the incoming gradients."""
        joint = self.joint
        table = self._table()
        kept = len(self.saved)
        for tensor, value in zip(self.saved, arguments[:kept], strict=True):
            table[tensor] = value
        states = list(arguments[kept : kept + len(self.states)])
        for tensor, value in zip(joint.tangents, arguments[kept + len(self.states) :], strict=True):
            table[tensor] = value
        arguments.clear()
        self._run(self._backward, table, states)
        return [None if t is None else table[t] for t in joint.gradients]

    def _table(self) -> list[Any]:
        table: list[Any] = [None] * len(self.joint.graph.tensors)
        for tensor, value in self.joint.constants.items():
            table[tensor] = value
        return table

    def _run(self, lines: Sequence[_Line], table: list[Any], states: list[torch.Tensor | None]) -> None:
        marker = self.marker
        try:
            for line in lines:
                if marker is None or not isinstance(line, _Running):
                    line(table, states)
                    continue
                marker.before(line.op)
                try:
                    line(table, states)
                finally:
                    marker.after(line.op)
                marker.left({t: table[t] for t in line.outputs if t >= 0})
        except BaseException as error:
            # whoever keeps the error keeps its frames: they must not keep the tensors of the step
            traceback.clear_frames(error.__traceback__)
            table.clear()
            states.clear()
            raise


def _before_first_update(joint: Joint, program: Program) -> int:
    """How many instructions of forward run before one that updates a buffer on its way."""
    for position, line in enumerate(program.forward):
        if isinstance(line, Run) and "updates" in joint.graph.ops[line.op].attributes:
            return position
    return len(program.forward)


def _run_again(program: Program) -> set[int]:
    seen: set[int] = set()
    again: set[int] = set()
    for line in program.instructions:
        if isinstance(line, Run):
            (again if line.op in seen else seen).add(line.op)
    return again


def _needed_by_backward(joint: Joint, program: Program) -> tuple[int, ...]:
    """Tensors that the backward part reads or returns before it makes them."""
    needed = {t for t in joint.gradients if t is not None}
    ran = {line.op for line in program.forward if isinstance(line, Run)}
    for line in reversed(program.backward):
        if isinstance(line, Run):
            op = joint.graph.ops[line.op]
            needed.difference_update(t for t in op.outputs if t not in op.inputs)
            needed.update(op.reads_again if line.op in ran else op.reads)
    return tuple(sorted(needed.difference(joint.tangents, joint.constants)))


class _Line:
    """One prepared instruction."""

    __slots__ = ()

    def __call__(self, table: list[Any], states: list[torch.Tensor | None]) -> None:
        """Change the table as the instruction says; random states are kept in, or taken from, ``states``."""
        raise NotImplementedError(f"{type(self).__name__}: {len(table)} tensors, {len(states)} states")


class _Dropping(_Line):
    """Clears places of the table."""

    __slots__ = ("tensors",)

    def __init__(self, tensors: tuple[int, ...]) -> None:
        self.tensors = tensors

    def __call__(self, table: list[Any], states: list[torch.Tensor | None]) -> None:  # noqa: ARG002
        for tensor in self.tensors:
            table[tensor] = None


class _Running(_Line):
    """Calls an operator with its arguments filled in, and puts the results into the table."""

    __slots__ = ("args", "fill", "function", "kwargs", "op", "outputs", "several", "state", "store_state")

    def __init__(self, joint: Joint, run: Run, state: int | None, first: bool) -> None:
        call = joint.calls[run.op]
        self.op = run.op
        self.function = call.target if run.in_place is None else in_place_variant(call.target)
        self.args, self.kwargs = list(call.args), dict(call.kwargs)
        self.fill = tuple(_fill(joint, enumerate(call.args))), tuple(_fill(joint, call.kwargs.items()))
        op = joint.graph.ops[run.op]
        if not first and "updates" in op.attributes:
            updates = {op.inputs[k] for k in op.attributes["updates"]}
            likes = {place: joint.values[t] for place, t, _ in self.fill[0] if t in updates}
            self.function = without_update(self.function, list(likes), list(likes.values()))
            self.fill = tuple(one for one in self.fill[0] if one[1] not in updates), self.fill[1]
        self.outputs, self.several = call.results, call.several
        self.state = state
        self.store_state = first

    def __call__(self, table: list[Any], states: list[torch.Tensor | None]) -> None:
        args, kwargs = self.args.copy(), self.kwargs
        for position, tensor, items in self.fill[0]:
            args[position] = table[tensor] if items is None else _filled(items, table)
        if self.fill[1]:
            kwargs = kwargs.copy()
            for name, tensor, items in self.fill[1]:
                kwargs[name] = table[tensor] if items is None else _filled(items, table)
        if self.state is None:
            result = self.function(*args, **kwargs)
        elif self.store_state:
            states[self.state] = random_state(args, kwargs)
            result = self.function(*args, **kwargs)
        else:
            state = states[self.state]
            assert state is not None
            with replayed(state, args, kwargs):
                result = self.function(*args, **kwargs)
        if not self.several:
            tensor = self.outputs[0]
            if tensor >= 0 and table[tensor] is None:
                table[tensor] = result
            return
        for tensor, value in zip(self.outputs, result, strict=True):
            if tensor >= 0 and table[tensor] is None:
                table[tensor] = value


def _prepared(joint: Joint, line: Instruction, place: dict[int, int], seen: set[int]) -> _Line:
    if isinstance(line, Drop):
        return _Dropping(line.tensors)
    first = line.op not in seen
    seen.add(line.op)
    return _Running(joint, line, place.get(line.op), first)


def _fill(joint: Joint, arguments: Iterable[tuple[Any, Any]]) -> Iterator[tuple[Any, int, list[Any] | None]]:
    """Which arguments are tensors, or lists with tensors in them: place, tensor, and the list."""
    for place, value in arguments:
        if isinstance(value, fx.Node):
            yield place, joint.tensor_of[value], None
        elif isinstance(value, list | tuple) and any(isinstance(item, fx.Node) for item in value):
            yield place, -1, [(joint.tensor_of[i],) if isinstance(i, fx.Node) else i for i in value]


def _filled(items: list[Any], table: list[Any]) -> list[Any]:
    return [table[item[0]] if type(item) is tuple else item for item in items]
