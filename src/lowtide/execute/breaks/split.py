"""A graph in parts: what torch cannot trace runs as it is, and what is before and behind it is planned.

Dynamo takes an operator for one call. AOTAutograd looks into it, and into its backward: where that depends on
values, as in a library's loop over experts, it cannot go on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx, nn
from torch.fx.passes.split_module import split_module

from lowtide.errors import GraphBreakError
from lowtide.graph import Role
from lowtide.trace.refusal import line_of
from lowtide.trace.step.joint import Leaf

__all__ = ["OrInParts", "split_at"]

Made = Callable[[fx.GraphModule, Sequence[Leaf]], Callable[..., Any]]


class _Calls(nn.Module):
    """A function in the place of a module; it gives a list of results, of which a module may give one."""

    def __init__(self, function: Callable[..., Any], *, alone: bool) -> None:
        super().__init__()
        self.function, self.alone = function, alone

    def forward(self, *arguments: Any) -> Any:
        """What the module gives."""
        results = self.function(*arguments)
        return results[0] if self.alone else results


def split_at(
    module: fx.GraphModule, leaves: Sequence[Leaf], line: str, made: Made
) -> Callable[..., Any] | None:
    """The module, parted where it calls what stands in a line of the user's; None where nothing does.

    ``made`` gives the functions that run the parts before, between and behind these calls.
    """
    here = _called_in(module, line)
    if not here:
        return None
    part, parts, apart = 0, dict[fx.Node, int](), set[int]()
    for node in module.graph.nodes:
        if node in here:
            apart.add(part + 1)
            part += 2
        parts[node] = part - 1 if node in here else part
    whole = split_module(module, module, lambda node: parts[node], keep_original_order=True)
    known = dict(zip(whole.graph.find_nodes(op="placeholder"), leaves, strict=True))
    for call in whole.graph.find_nodes(op="call_module"):
        inner: Any = getattr(whole, call.target)
        if int(call.target.rpartition("_")[-1]) in apart:
            continue
        given = [known.get(one) or Leaf(str(one), Role.INPUT) for one in call.args]
        setattr(whole, call.target, _Calls(made(inner, given), alone=_tupled(inner)))
    return whole


def _called_in(module: fx.GraphModule, line: str) -> list[fx.Node]:
    """What is called in a line of the user's: operators of libraries where there are some, else all."""
    calls = [node for node in module.graph.nodes if node.op.startswith("call_")]
    here = [node for node in calls if line_of(node.meta.get("stack_trace") or "") == line]
    return [node for node in here if _of_a_library(node.target)] or here


def _of_a_library(target: Any) -> bool:
    """Whether this is an operator that is not torch's own."""
    operator = type(target).__name__ in ("OpOverload", "OpOverloadPacket")
    return operator and str(target).partition(".")[0] not in ("aten", "prims", "prim")


def _tupled(module: fx.GraphModule) -> bool:
    """Have a module give a tuple; whether it gave a single result before."""
    output = module.graph.output_node()
    if isinstance(output.args[0], tuple | list):
        return False
    output.args = ((output.args[0],),)
    module.recompile()
    return True


class OrInParts:
    """A graph, or what stands for it where torch cannot trace it."""

    def __init__(
        self, graph: Callable[..., Any], parted: Callable[[GraphBreakError], Callable[..., Any]]
    ) -> None:
        self._runs, self._parted = graph, parted
        self._whole = True

    def __call__(self, *arguments: Any) -> Any:
        """The results for these arguments."""
        try:
            return self._runs(*arguments)
        except GraphBreakError as error:
            if not self._whole:
                raise
            self._whole, self._runs = False, self._parted(error)
        return self._runs(*arguments)
