"""``torch.compile(model, backend="lowtide")``: the user's loop stays as it is, a Program runs the step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from lowtide.errors import GraphBreakError, LowtideError, RunError
from lowtide.execute.breaks.beside_loss import LossAlone, PlannedAlone, beside_loss
from lowtide.execute.breaks.live import LiveGraph, LiveStep, live_step
from lowtide.execute.breaks.subgraphs import Subgraphs
from lowtide.execute.compile.aot import State, Watch
from lowtide.execute.compile.family import Family, Shapes
from lowtide.execute.compile.first_call import Unplanned
from lowtide.execute.compile.planned import Planned
from lowtide.execute.compile.shape_cache import REMEMBERED, Remembering, alive
from lowtide.execute.compile.trial import Rehearsal
from lowtide.execute.memory.optimizer_state import check_optimizer
from lowtide.execute.planning.other_shapes import Bucket, parse_bucket
from lowtide.execute.runtime.in_place import able_in_place
from lowtide.execute.tiling.plan_tiles import has_loop
from lowtide.graph import Graph
from lowtide.plan.program.in_place import with_in_place
from lowtide.plan.program.instructions import Program
from lowtide.plan.program.simple import offload_all, recompute_all, store_all
from lowtide.plan.request import PlanRequest
from lowtide.plan.result.plan import Plan
from lowtide.suggest import did_you_mean
from lowtide.torch_internals import trust_no_dict_versions
from lowtide.trace.eager.dynamo import adapt_dynamo, lowtides
from lowtide.trace.eager.layouts import learned
from lowtide.trace.refusal import (
    raise_through,
    refuse_graph_breaks,
    refuse_what_depends_on_values,
)
from lowtide.trace.step.boundary import silenced
from lowtide.trace.step.joint import Joint, Leaf
from lowtide.trace.step.leaves import leaves_of
from lowtide.trace.step.sizes import has_numbers, has_symbols

__all__ = ["PROGRAMS", "backend", "compile_planned", "compile_with"]

Planner = Callable[[Graph], Program]

PROGRAMS: dict[str, Planner] = {
    "plain": store_all,
    "recompute-all": recompute_all,
    "offload-all": offload_all,
}


def backend(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: Any = None,
) -> Callable[..., Any]:
    """What ``torch.compile`` calls with a captured function.

    ``options``: ``budget`` with ``only``, ``cost``, ``time_limit``, ``seed``, ``cache``, ``kernels``,
    ``exact``, ``offload``, ``optimizer`` and ``bucket`` for a plan, or ``program``, the name of a Program;
    ``remember``, for how many shapes a plan is kept.
    """
    asked = options or {}
    try:
        chosen, remember, bucket = _options(asked, mode)
    except LowtideError as error:
        raise_through(error)
    if isinstance(chosen, PlanRequest):
        return _live(module, inputs, live_step(asked, chosen, bucket), remember)
    return compile_with(module, inputs, chosen, remember=remember)


lowtides(backend)
adapt_dynamo()

_OF_PLANS = (
    "only",
    "offload",
    "optimizer",
    "cost",
    "time_limit",
    "seed",
    "cache",
    "kernels",
    "exact",
    "graphs",
    "bucket",
)


def _options(options: Mapping[str, Any], mode: Any) -> tuple[Planner | PlanRequest, int, Bucket]:
    if mode is not None:
        raise RunError(f"mode={mode!r} is none of Lowtide's; it takes options={{'budget': '8GiB'}}")
    known: dict[str, Any] = {"budget": None, "program": "plain", "remember": REMEMBERED}
    known |= dict.fromkeys(_OF_PLANS)
    for name in options:
        if name not in known:
            raise RunError(
                f"there is no option {name!r}; options: {', '.join(known)}.{did_you_mean(str(name), known)}"
            )
    chosen = {**known, **options}
    name, remember = chosen["program"], chosen["remember"]
    if not isinstance(name, str) or name not in PROGRAMS:
        near = did_you_mean(str(name), PROGRAMS)
        raise RunError(f"there is no program {name!r}; programs: {', '.join(PROGRAMS)}.{near}")
    if not isinstance(remember, int) or isinstance(remember, bool) or remember < 1:
        raise RunError(f"remember={remember!r}: how many shapes to remember is a whole number from 1")
    extra = {key: options[key] for key in _OF_PLANS if key in options}
    if chosen["budget"] is None:
        if extra:
            raise RunError(f"{', '.join(map(repr, extra))} is for plans: give a budget too, such as '8GiB'")
        return PROGRAMS[name], remember, None
    if "program" in options:
        raise RunError("give a budget or the name of a program, not both")
    bucket = parse_bucket(extra.pop("bucket", None))
    request = PlanRequest.of(chosen["budget"], crossing=False, **extra)
    if request.reserved:
        raise RunError("a budget of reserved bytes is tried before it is promised: give it to lowtide.fit")
    check_optimizer(request.optimizer, request.offload)
    return request, remember, bucket


def compile_with(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    planner: Planner,
    watch: Watch | None = None,
    *,
    remember: int = REMEMBERED,
    in_place: bool = True,
    state: State = tuple,
    fused: bool = False,
) -> Callable[..., Any]:
    """The function with its forward and backward run by the Program that the planner gives.

    ``watch`` is shown each interpreter once it is made: one for every shape that is met. The plans of the
    ``remember`` last used shapes are kept. With ``in_place`` operators write over inputs that die with them.
    ``state`` gives that of an optimiser. Groups of operators run ``fused``, if asked. A PlanError says that a
    Program is not valid for the step.
    """
    trust_no_dict_versions()
    try:
        refuse_graph_breaks(module)
        refuse_what_depends_on_values(module)
        leaves = leaves_of(module)

        def plainly(joint: Joint) -> Program:
            return planner(joint.graph)

        def in_place_too(joint: Joint) -> Program:
            program = planner(joint.graph)
            if has_loop(program):  # of another graph, in which tiles are planned already
                return program
            return with_in_place(joint.graph, program, able_in_place(joint))

        def compiled(
            static: fx.GraphModule, leaves: Sequence[Leaf], family: Family | None = None
        ) -> Callable[..., Any]:
            program = in_place_too if in_place else plainly
            return Unplanned(static, leaves, learned(), program, watch, state, family, fused=fused)

        if has_symbols(module) or has_numbers(module):
            return Remembering(module, leaves, compiled, (planner, watch, in_place, fused), remember)
        asked = planner, watch, in_place, fused
        return alive(module, leaves, inputs, asked, lambda: compiled(module, leaves))
    except LowtideError as error:
        raise_through(error)


def compile_planned(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    request: PlanRequest,
    seen: Callable[[Plan], None] | None = None,
    *,
    remember: int = REMEMBERED,
    rehearsal: Rehearsal | None = None,
    subgraphs: Subgraphs | None = None,
    shapes: Shapes | None = None,
) -> Callable[..., Any]:
    """The function with its forward and backward inside a budget; each shape is planned at its first call.

    ``seen`` is shown each plan. What is known of other ``shapes`` helps with new ones. The ``rehearsal`` says
    whether a call is for a plan alone. Where the module is one of the ``subgraphs`` of a step, it shares the
    budget with the others.
    """
    rehearses = rehearsal or Rehearsal()
    try:
        if subgraphs is not None:
            return _subgraph(module, subgraphs, remember)()
        refuse_graph_breaks(module)
        refuse_what_depends_on_values(module)
        alone = Family(lambda: None, shapes)

        def planned(
            module: fx.GraphModule, inputs: Sequence[Any], kind: type[Planned] = Planned
        ) -> Callable[..., Any]:
            leaves = leaves_of(module)

            def compiled(
                static: fx.GraphModule, leaves: Sequence[Leaf], family: Family = alone
            ) -> Callable[..., Any]:
                return kind(static, leaves, learned(), request, seen, rehearses, family)

            purpose = request, seen, kind
            if has_symbols(module) or has_numbers(module):
                return Remembering(module, leaves, compiled, purpose, remember, shapes)
            return alive(module, leaves, inputs, purpose, lambda: compiled(module, leaves))

        beside = frozenset() if request.offload else beside_loss(module)
        if beside:
            quiet = planned(silenced(module, beside), inputs, PlannedAlone)
            return LossAlone(module, beside, quiet, planned)
        return planned(module, inputs)
    except LowtideError as error:
        raise_through(error)


def _live(module: fx.GraphModule, inputs: Sequence[Any], step: LiveStep, remember: int) -> Callable[..., Any]:
    """A graph of a function that ``torch.compile`` compiles: all of it, or one of several."""
    reason = getattr(module, "compile_subgraph_reason", None)
    broken = reason is not None and getattr(reason, "graph_break", False)
    alone: Callable[..., Any] | None = None
    if broken:
        try:
            step.run_several()
        except LowtideError as error:
            raise_through(error)
    elif not step.several:
        request = step.together.request
        alone = compile_planned(module, inputs, request, remember=remember, shapes=step.shapes)
    return LiveGraph(step, alone, _subgraph(module, step, remember))


def _subgraph(
    module: fx.GraphModule, subgraphs: Subgraphs, remember: int
) -> Callable[[], Callable[..., Any]]:
    """Makes one of the graphs of a step; it runs as it is where it cannot be planned.

    What torch tells of the inputs is read here: it forgets that once the function is compiled.
    """
    leaves = leaves_of(module)

    def compiled(
        static: fx.GraphModule, leaves: Sequence[Leaf], family: Family | None = None
    ) -> Callable[..., Any]:
        return subgraphs.subgraph(static, leaves, learned(), family)

    various: Remembering | None = None
    if has_symbols(module) or has_numbers(module):
        various = Remembering(module, leaves, compiled, id(subgraphs), remember)

    def make() -> Callable[..., Any]:
        subgraphs.note(module)
        try:
            refuse_what_depends_on_values(module)
        except GraphBreakError as error:
            subgraphs.leave(str(error))
            return module
        return various or compiled(module, leaves)

    return make
