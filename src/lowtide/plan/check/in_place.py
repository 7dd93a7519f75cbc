"""What the checker asks of an operator that writes its result over its first input."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from lowtide.plan.check.graph import Facts
from lowtide.plan.check.held import Storage
from lowtide.plan.check.rules import Rule
from lowtide.plan.program.instructions import Run

__all__ = ["wrong_in_place"]


def wrong_in_place(
    facts: Facts, line: Run, held: Mapping[int, Storage], able: Collection[int] | None
) -> tuple[Rule, str] | None:
    """The rule that a run in place breaks while these tensors are held, and how; None where it may run.

    ``able`` names the operators that have such a form; None where that is looked at elsewhere.
    """
    problem = _wrong_form(facts, line, held, able)
    if problem is not None:
        return Rule.IN_PLACE_FORM, problem
    op = facts.graph.ops[line.op]
    storage = held[op.inputs[0]]
    if storage.fixed or storage.tensors & facts.stay:
        label = facts.graph.tensors[op.inputs[0]].label
        return Rule.IN_PLACE_STORAGE, f"{op.label!r} writes over {label!r}, which must stay"
    return None


def _wrong_form(
    facts: Facts, line: Run, held: Mapping[int, Storage], able: Collection[int] | None
) -> str | None:
    op = facts.graph.ops[line.op]
    if line.in_place != 0 or not op.inputs or 0 in op.shape_only or op.inputs[0] not in held:
        return (
            f"writes over input {line.in_place} of {op.label!r}, which has {len(op.inputs)}: only the first "
            "can be written over"
        )
    source, storage = op.inputs[0], held[op.inputs[0]]
    if not op.outputs or op.outputs[0] in op.inputs:
        return f"{op.label!r} has no result to write over its input"
    made = op.outputs[0]
    one, other = facts.graph.tensors[source], facts.graph.tensors[made]
    if other.alias is not None:
        return f"{op.label!r} gives a view, which is written over nothing"
    if able is not None and line.op not in able:
        return f"{op.label!r} is not among the operators that have a form in place; take in_place out"
    if sum(held.get(t) is storage for t in op.inputs) > 1:
        return f"{op.label!r} writes over an input that it reads twice"
    if made in held:
        return f"{op.label!r} runs in place though its result is there"
    if storage.bytes != facts.size[made]:
        return f"{op.label!r} writes over a storage of another size"
    pairs = ((one.shape, other.shape), (one.dtype, other.dtype), (one.device or None, other.device or None))
    if any(a is not None and b is not None and a != b for a, b in pairs):
        return f"{op.label!r} writes over a tensor of another shape or type"
    return None
