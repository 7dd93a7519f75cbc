"""A branch on a value goes the way that eager goes, and the step stays one graph.

Dynamo ends a graph where Python asks whether a tensor is true. Where the answer follows from what the step is
given, it is computed while the step is traced, and again before each later call. If it is another one then,
Dynamo traces the function again, as for another shape, and knows both ways from there on. What follows from
constants alone is computed once, and what follows from sizes once for each size.

A graph ends as always where the answer depends on a parameter, on random numbers or on what the step changes,
and where too many ways were met.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from lowtide.dynamo_internals import change_instructions, guard_on, in_a_function_of_a_graph
from lowtide.errors import GraphBreakError
from lowtide.torch_internals import BuiltinVariable, ConstantVariable, TensorVariable
from lowtide.trace.branches.condition import NotKnown, always, condition_of

__all__ = ["WAYS", "Branches", "follow_branches"]

WAYS = 8
"""So many ways through its branches a step is captured for."""

_BRANCHES = "lowtide_branches"
_JUMPS = ("POP_JUMP_IF_", "POP_JUMP_FORWARD_IF_", "POP_JUMP_BACKWARD_IF_")
_ASKING = (
    *(f"{jump}{truth}" for jump in _JUMPS for truth in ("TRUE", "FALSE")),
    *("JUMP_IF_TRUE_OR_POP", "JUMP_IF_FALSE_OR_POP", "UNARY_NOT"),
)
"""Instructions that ask whether a value is true, in all versions of Python."""
_ASSERTING = ("LOAD_ASSERTION_ERROR", "LOAD_COMMON_CONSTANT")
"""What comes behind the condition of an assert."""

Found = Callable[[Any], Any]
"""Gives the backend of ours that a backend is or stands in front of, or None."""
Step = tuple[str, bool]


@dataclass(slots=True)
class Branches:
    """The ways that were met through the branches of a function."""

    given: Callable[[torch.Tensor], bool] = lambda _: True
    """Whether an input of a graph is one that the step is given: in a step of one graph, all are."""
    met: dict[str, set[bool]] = field(default_factory=dict)
    """The lines of branches that were followed, and what their conditions were."""
    ended: dict[str, str] = field(default_factory=dict)
    """The lines of branches where a graph ends, and why they were not followed."""
    _seen: set[tuple[Any, tuple[Step, ...], bool]] = field(default_factory=set)
    """The code, the way to a branch, and the way on from there."""
    _ways: int = 1
    _path: tuple[Step, ...] = ()
    _tracing: Callable[[], Any] = field(default=lambda: None)
    """What Dynamo traces now, held weakly: the path is one through it."""

    def given_to(self, backend: Callable[..., Any]) -> Callable[..., Any]:
        """The backend, for which branches are followed."""
        setattr(backend, _BRANCHES, self)
        return backend

    def way(self, tx: Any, value: Any) -> bool | None:
        """Whether a tensor is true; None where that is not known before the step runs."""
        summary = tx.frame_summary()
        line = f"{summary.filename}:{summary.lineno}"
        try:
            return self._way(tx, value, line)
        except NotKnown as why:
            self.ended[line] = str(why)
        except Exception as error:  # what is computed is of any code, and may raise anything
            self.ended[line] = f"it cannot be computed alone: {type(error).__name__}"
        return None

    def _way(self, tx: Any, value: Any, line: str) -> bool:
        output, node = tx.output, value.as_proxy().node
        if in_a_function_of_a_graph(output):
            raise NotKnown("it is inside of a part that is checkpointed, or taken by another operator")
        known = always(node)
        if known is not None:
            return known
        condition = condition_of(node, output)
        found = condition.first(output, self.given)
        if condition.sources:
            self._follow(output, line, found)
            holds = condition.holds if found else condition.fails
            guard_on(output, condition.sources, holds, f"{line}: the condition is {found}")
        return found

    def _follow(self, output: Any, line: str, found: bool) -> None:
        """Go on this way; NotKnown where too many others were gone."""
        if self._tracing() is not output:
            self._tracing, self._path = weakref.ref(output), ()
        code = output.root_tx.f_code
        another = (code, self._path, not found) in self._seen
        if (code, self._path, found) not in self._seen:
            if another and self._ways >= WAYS:
                raise NotKnown(f"{WAYS} ways through branches are planned, and this would be one more")
            self._ways += another
            self._seen.add((code, self._path, found))
        self._path = (*self._path, (line, found))
        self.met.setdefault(line, set()).add(found)

    def told(self, error: GraphBreakError) -> GraphBreakError:
        """The error, with the reason why a branch was not followed where that is what it tells of."""
        if error.line not in self.ended:
            return error
        broken = GraphBreakError(
            f"{error} (the condition is not known before the step runs: {self.ended[error.line]})"
        )
        broken.line = error.line
        return broken

    def explain(self) -> list[str]:
        """The branches that were followed, a line for each."""
        ways = {line: " and ".join(str(one) for one in sorted(found)) for line, found in self.met.items()}
        return [f"branch     {line}: planned where it is {found}" for line, found in ways.items()]


def follow_branches(found: Found, mark: str) -> None:
    """Have Dynamo follow branches in functions that are compiled for a backend with :class:`Branches`."""

    def asking(translate: Callable[..., Any]) -> Callable[..., Any]:
        return translate if hasattr(translate, mark) else _marked(_answered(translate, found), mark)

    change_instructions(_ASKING, asking)
    for variable, name, change in (
        (BuiltinVariable, "call_bool", _bool),
        (TensorVariable, "method_item", _item),
    ):
        method = getattr(variable, name, None)
        if method is not None and not hasattr(method, mark):
            setattr(variable, name, _marked(change(method, found), mark))


def _marked(function: Callable[..., Any], mark: str) -> Callable[..., Any]:
    setattr(function, mark, True)
    return function


def _branches(tx: Any, found: Found) -> Branches | None:
    followed: Branches | None = getattr(found(tx.output.compiler_fn), _BRANCHES, None)
    return None if tx.export else followed


def _answered(translate: Callable[..., Any], found: Found) -> Callable[..., Any]:
    """What translates an instruction, which is shown True or False in the place of a tensor."""

    def translated(self: Any, instruction: Any) -> Any:
        branches = _branches(self, found)
        if branches is None or _is_assert(self):
            return translate(self, instruction)
        value = self.stack[-1].realize()
        way = branches.way(self, value) if isinstance(value, TensorVariable) else None
        if way is None:
            return translate(self, instruction)
        self.stack[-1] = shown = ConstantVariable.create(way)
        done = translate(self, instruction)
        if self.stack and self.stack[-1] is shown and instruction.opname.endswith("_OR_POP"):
            self.stack[-1] = value  # `a or b` is a itself
        return done

    return translated


def _is_assert(tx: Any) -> bool:
    """Whether a condition is that of an assert with a constant message: Dynamo makes an operator of it."""
    behind = tx.instructions[tx.instruction_pointer : tx.instruction_pointer + 4]
    first, *then = [one.opname for one in behind if one.opname != "NOT_TAKEN"] or [""]
    called = then[:1] == ["LOAD_CONST"] and then[1:2] in (["PRECALL"], ["CALL"])
    return first in _ASSERTING and (called or then[:1] == ["RAISE_VARARGS"])


def _bool(method: Callable[..., Any], found: Found) -> Callable[..., Any]:
    def call_bool(self: Any, tx: Any, value: Any) -> Any:
        branches = _branches(tx, found)
        tensor = branches is not None and isinstance(value, TensorVariable)
        way = branches.way(tx, value) if branches is not None and tensor else None
        return method(self, tx, value) if way is None else ConstantVariable.create(way)

    return call_bool


def _item(method: Callable[..., Any], found: Found) -> Callable[..., Any]:
    """``item`` of a tensor that is true or false; numbers are left to torch, as they have too many values."""

    def method_item(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        branches = _branches(tx, found)
        truth = getattr(self, "dtype", None) is torch.bool and not args and not kwargs
        way = branches.way(tx, self) if branches is not None and truth else None
        return method(self, tx, *args, **kwargs) if way is None else ConstantVariable.create(way)

    return method_item
