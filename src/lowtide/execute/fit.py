"""``fit(model_or_loss_fn, *example, budget="8GiB")``: the same step inside a budget."""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, overload

import torch
from torch import fx, nn

from lowtide.errors import CaptureError, GraphBreakError, LowtideError, RunError
from lowtide.execute.backend import compile_planned
from lowtide.execute.breaks.subgraphs import Subgraphs
from lowtide.execute.compile.family import Shapes
from lowtide.execute.compile.sharded import refuse_distributed_parts, refuse_sharded, refuse_unfinished
from lowtide.execute.compile.trial import Rehearsal, Rehearsed
from lowtide.execute.compile.user_code import all_leaves, in_the_users_terms, is_given, modules_in, tensors_of
from lowtide.execute.compile.warm_up import run_once
from lowtide.execute.memory import reserved
from lowtide.execute.memory.optimizer_state import check_optimizer
from lowtide.execute.planning.other_shapes import Bucket, ShapePlans, parse_bucket, parse_examples
from lowtide.execute.runtime.parameter_offload import bring_back
from lowtide.execute.shards.mesh_step import MeshLike, MeshStep, fit_on_mesh
from lowtide.plan.request import PlanRequest
from lowtide.plan.result.plan import Plan
from lowtide.plan.result.shown import plans_html
from lowtide.torch_internals import TorchDynamoException, inside_transform, tree_leaves
from lowtide.trace.branches.branches import Branches
from lowtide.trace.eager.dynamo import fresh, lowtides
from lowtide.trace.eager.is_compiling import Answers
from lowtide.trace.refusal import translated
from lowtide.trace.step.one_graph import one_graph, with_answers

__all__ = ["Fitted", "fit", "fitted"]


class Fitted:
    """A step that stays inside its budget: called as the function or module that it was made from.

    Other shapes than the example's are planned at their first call.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        request: PlanRequest,
        *,
        fullgraph: bool = True,
        bucket: Bucket = None,
    ) -> None:
        self.function, self._request, self._fullgraph = function, request, fullgraph
        self._shapes = Shapes(ShapePlans(bucket))
        self._subgraphs: Subgraphs | None = None
        self._rehearsal = Rehearsal()
        self.on_retry: Callable[[], None] | None = None
        """Called where a step in several graphs is run once more in a call, as for another branch."""
        self._arguments: tuple[Sequence[Any], Mapping[str, Any]] = (), {}
        """Those of the call that runs, of a step in several graphs."""
        self._answers = Answers()
        self._warm = False
        """Whether the function was run as it is once, for what it sets up at its first call."""
        self._compiled = self._whole()

    def _whole(self) -> Callable[..., Any]:
        """The step as one graph. What torch keeps of it does not hold this."""
        asked, rehearsal, shapes = self._request, self._rehearsal, self._shapes

        def backend(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            seen = rehearsal.planned
            return compile_planned(module, inputs, asked, seen, rehearsal=rehearsal, shapes=shapes)

        self._branches = Branches()
        return one_graph(self.function, self._branches.given_to(backend), self._answers, dynamic=None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the function gives for these arguments; call ``backward`` on the loss as always."""
        bring_back()  # of a step whose backward is still to come
        if inside_transform():
            warnings.warn(
                "a fitted step is called inside a transform of torch.func: it runs as it is there, and no "
                "budget holds. Fit the function that applies the transform",
                stacklevel=2,
            )
            return self.function(*args, **kwargs)
        if self._subgraphs is not None:
            return self._in_parts(args, kwargs)
        try:
            return self._compiled(*args, **kwargs)
        except (TorchDynamoException, GraphBreakError) as error:
            broken = error if isinstance(error, LowtideError) else translated(error)
        if not isinstance(broken, GraphBreakError):
            if not isinstance(broken, TorchDynamoException):  # one of ours comes as both
                self.function(*args, **kwargs)  # its way ends in an error of the user's: this
            raise broken
        if self._fullgraph:
            raise self._branches.told(broken)
        self._rehearse_subgraphs(broken, args, kwargs, verify=False)
        return self._in_parts(args, kwargs)

    def _in_parts(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The same, for a step that may be in several graphs."""
        self._arguments = args, kwargs
        try:
            if self._subgraphs is None:
                return self._compiled(*args, **kwargs)
            self._subgraphs.on_retry = self.on_retry
            return self._subgraphs.call(
                lambda: self._compiled(*args, **kwargs),
                lambda: modules_in(self.function, *args, *kwargs.values()),
                tensors_of((args, kwargs)),
            )
        finally:
            self._arguments = (), {}

    def __reduce__(self) -> NoReturn:
        raise RunError(
            "a fitted step cannot be pickled or copied: it holds compiled code and memory of this process. "
            "Pickle or copy the model, and call lowtide.fit again for it"
        )

    def rehearse(self, example: Sequence[Any], keywords: Mapping[str, Any], *, verify: bool = False) -> None:
        """Plan for arguments like these, run a step once without a trace, and ``verify`` it if asked."""
        bring_back()
        if self._subgraphs is not None:
            self._rehearse_parts(self._subgraphs, example, keywords, verify=verify)
            return
        self._rehearsal.now, self._rehearsal.verify = True, verify
        try:
            self._rehearse_warm(example, keywords)
        except GraphBreakError as error:
            if self._fullgraph:
                raise self._branches.told(error) from error
            self._rehearsal.now = False
            self._rehearse_subgraphs(error, example, keywords, verify=verify)
        finally:
            self._rehearsal.now = False
            bring_back()

    def _parts(self) -> Subgraphs:
        """The step as several graphs."""
        subgraphs = Subgraphs(self._request)

        def backend(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            return compile_planned(module, inputs, self._request, subgraphs=subgraphs)

        self._branches = Branches(lambda tensor: is_given(tensor, self.function, *self._arguments))
        ours = self._branches.given_to(self._answers.given_to(lowtides(backend)))
        self._compiled = torch.compile(fresh(self.function), backend=ours)
        return subgraphs

    def _rehearse_warm(self, example: Sequence[Any], keywords: Mapping[str, Any]) -> None:
        """The same as one graph, where need be behind a first call that sets something up."""
        try:
            self._rehearse_whole(example, keywords)
        except GraphBreakError:
            modules = modules_in(self.function, *example, *keywords.values())
            if self._warm or not run_once(self.function, example, keywords, modules):
                raise
            self._warm, self._compiled = True, self._whole()
            self._rehearse_whole(example, keywords)

    def _rehearse_whole(self, example: Sequence[Any], keywords: Mapping[str, Any]) -> None:
        """The same as one graph: as eager runs it, or as libraries are written to be compiled."""
        last = self._answers

        def attempt(answers: Answers) -> None:
            nonlocal last
            if answers is not self._answers:
                self._answers, last = answers, last if answers.everybody else answers
                self._compiled = self._whole()
            with contextlib.suppress(Rehearsed), in_the_users_terms():
                self._in_parts(example, keywords)

        try:
            with_answers(attempt, self._answers)
        except CaptureError:
            self._answers = last
            raise

    def _rehearse_subgraphs(
        self, whole: GraphBreakError, example: Sequence[Any], keywords: Mapping[str, Any], *, verify: bool
    ) -> None:
        """The same for a step in several graphs, where it cannot be captured as a whole."""
        if self._request.offload or self._request.optimizer is not None:
            raise CaptureError(
                f"{whole}. A step in several graphs counts no state of an optimizer, and offloads "
                "activations alone: leave out `offload` and `optimizer`, and take what they need off the "
                "budget"
            ) from whole
        modules = modules_in(self.function, *example, *keywords.values())
        refuse_distributed_parts((p for module in modules for p in module.parameters()), why=str(whole))
        subgraphs = self._parts()
        try:
            self._rehearse_parts(subgraphs, example, keywords, verify=verify)
        except CaptureError:
            if not self._answers.asked:
                raise
            self._answers = Answers(everybody=True)
            subgraphs = self._parts()
            self._rehearse_parts(subgraphs, example, keywords, verify=verify)
        if not subgraphs.plans:
            raise whole
        if not subgraphs.breaks:  # torch has left out whole functions
            subgraphs.breaks[str(whole).partition(" Move it out")[0]] = None
        self._subgraphs = subgraphs

    def _rehearse_parts(
        self, subgraphs: Subgraphs, example: Sequence[Any], keywords: Mapping[str, Any], *, verify: bool
    ) -> None:
        """Plan the graphs of a call, beside those of calls before."""
        modules = modules_in(self.function, *example, *keywords.values())
        self._arguments = example, keywords
        try:
            with in_the_users_terms():
                subgraphs.rehearse(
                    lambda: self._compiled(*example, **keywords),
                    modules,
                    tensors_of((example, keywords)),
                    verify=verify,
                )
        finally:
            self._arguments = (), {}

    @property
    def name(self) -> str:
        """What the function or module is called."""
        return str(getattr(self.function, "__name__", type(self.function).__name__))

    @property
    def planned(self) -> bool:
        """Whether any shapes were met."""
        return self._rehearsal.plan is not None or self._subgraphs is not None

    @property
    def plan(self) -> Plan:
        """The plan that was made last: for the example, or for the latest shapes that were new.

        Of a step in several graphs, that of the largest one.
        """
        if self._subgraphs is not None:
            return max(self._subgraphs.plans, key=lambda plan: plan.plain.peak_bytes)
        if self._rehearsal.plan is None:
            raise RunError("the step has not been planned yet: call it once")
        return self._rehearsal.plan

    @property
    def plans(self) -> list[Plan]:
        """The plans of all graphs of the step."""
        return [self.plan] if self._subgraphs is None else self._subgraphs.plans

    def explain(self) -> str:
        """What is kept, recomputed and offloaded; of a step in several graphs also where and why they end."""
        told = [self.plan.explain() if self._subgraphs is None else self._subgraphs.explain()]
        told += [*self.explain_graphs(), *reserved.told(self._request.reserved), *self._branches.explain()]
        return "\n".join(told)

    def explain_graphs(self) -> list[str]:
        """What is replayed as CUDA graphs, or why nothing is; nothing where they were not asked for."""
        return sorted({one.explain() for one in self._shapes.graphs})

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return plans_html(self.name, self.plans if self.planned else [])

    @property
    def graph_bytes(self) -> int:
        """Memory that CUDA graphs of the step hold for themselves."""
        return self._shapes.graph_bytes

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # as where the process ends
            self._shapes.leave()


@overload
def fit(step: Callable[..., Any], /, *example: Any, mesh: None = None, **options: Any) -> Fitted: ...
@overload
def fit(step: Callable[..., Any], /, *example: Any, mesh: MeshLike, **options: Any) -> MeshStep: ...
def fit(
    model_or_loss_fn: nn.Module | Callable[..., Any],
    /,
    *example: Any,
    budget: str | int = "auto",
    only: str | tuple[str, ...] = "auto",
    cost: str = "measured",
    time_limit: float = 10.0,
    seed: int = 0,
    cache: bool = True,
    progress: Callable[[float, float | None, float, float | None], None] | None = None,
    offload: str | tuple[str, ...] = (),
    optimizer: torch.optim.Optimizer | None = None,
    verify: bool = True,
    fullgraph: bool = False,
    examples: Sequence[Sequence[Any]] = (),
    bucket: int | Sequence[int] | None = None,
    kernels: str = "eager",
    exact: bool = True,
    graphs: str = "off",
    mesh: MeshLike | None = None,
    **keywords: Any,
) -> Fitted | MeshStep:
    """The step ``model_or_loss_fn(*example)`` inside a budget: bytes, a share of the plain peak, or ``auto``.

    The step is captured, its operators are measured (or estimated), and the fastest Program inside the budget
    is searched for ``time_limit`` seconds at most. Nothing of the model changes: parameters, gradients,
    buffers and random state are what they were. An InfeasibleError names the smallest budget that
    works without tiles. ``"8GiB reserved"`` counts what PyTorch's allocator reserves on a CUDA device.

    ``only`` says what a plan may do: ``recompute``, ``offload`` and ``tile``, with commas. By default it
    recomputes, on CUDA it sends to the host as well, and it cuts into tiles where nothing else fits; with
    fused kernels, or unless results must be ``exact``, also where tiles are faster: they round otherwise.

    ``offload`` says what may wait on the host besides activations: ``"parameters"``, ``"optimizer"``, or both
    with a comma. The state of the ``optimizer`` counts as part of the step.

    With ``verify`` the first planned step is compared with eager PyTorch on the example, where that fits the
    device: loss, gradients and buffers, bit for bit or (tiles) up to rounding. A RunError names what differs.

    A branch on values of the arguments goes the way that eager goes; each way is planned when it comes. A
    step that cannot be captured as one graph is planned graph by graph inside the one budget, and Python runs
    between the graphs: forward of it then runs a few times while it is planned. With ``fullgraph`` it is
    refused with the line that breaks the graph.

    ``kernels`` is ``"eager"``: each operator runs the kernel of eager PyTorch, and results are the same bit
    for bit. With ``"fused"`` runs of pointwise operators and reductions are compiled by Inductor into a few
    kernels: faster, in less memory, and equal up to rounding.

    With ``graphs="auto"`` a step on CUDA replays forward and backward as CUDA graphs from the fourth step on,
    where everything in them can be captured and their memory fits into the budget.

    Other shapes are planned when they come. ``examples`` are the arguments of further calls, each in a tuple,
    which are planned at once. Shapes whose sizes lie in one ``bucket`` share a plan where it fits: sizes are
    rounded up to multiples of a number, or to the next of several; by default to an eighth of a power of two.

    With a ``mesh``, a number of devices or a DeviceMesh, processes that torchrun has started run the step
    together (docs/shards.md). The model then holds the parts of this process, and the budget is its own.
    """
    if not callable(model_or_loss_fn):
        kind = type(model_or_loss_fn).__name__
        raise CaptureError(f"a step is a module or a function that gives the loss; give one, not a {kind}")
    request = PlanRequest.of(
        budget,
        only=only,
        cost=cost,
        time_limit=time_limit,
        seed=seed,
        cache=cache,
        progress=progress,
        offload=offload,
        optimizer=optimizer,
        kernels=kernels,
        exact=exact,
        graphs=graphs,
    )
    check_optimizer(request.optimizer, request.offload)
    ends, more = parse_bucket(bucket), parse_examples(examples)
    plan, most = partial(fitted, request=request, verify=verify), request.budget.bytes
    if mesh is not None:
        reserved.refuse_shared(request.reserved)
        return fit_on_mesh(mesh, model_or_loss_fn, [example, *more], keywords, plan, time_limit, most)
    return plan(model_or_loss_fn, example, keywords=keywords, fullgraph=fullgraph, bucket=ends, more=more)


def fitted(
    function: Callable[..., Any],
    example: Sequence[Any],
    request: PlanRequest,
    keywords: Mapping[str, Any] | None = None,
    *,
    verify: bool = True,
    fullgraph: bool = True,
    bucket: Bucket = None,
    more: Sequence[Sequence[Any]] = (),
) -> Fitted:
    """The step ``function(*example)`` as a request asks for it, and further calls with ``more``."""

    def made(asked: PlanRequest) -> Fitted:
        step = Fitted(function, asked, fullgraph=fullgraph, bucket=bucket)
        _rehearsed(step, example, keywords or {}, verify=verify)
        for other in more:
            step.rehearse(other, keywords or {}, verify=verify)
        return step

    return reserved.inside(made, request, all_leaves(function, *example, *(keywords or {}).values()))


def _rehearsed(step: Fitted, example: Sequence[Any], keywords: Mapping[str, Any], *, verify: bool) -> None:
    refuse_sharded(modules_in(step.function, *example, *keywords.values()))
    refuse_unfinished(tree_leaves((example, keywords)))
    if torch.cuda.is_available():
        gc.collect()  # what a step before this one has left on the device would count
    step.rehearse(example, keywords, verify=verify)
    if not step.planned:
        raise CaptureError(
            f"{step.name} runs no operator on a tensor: pass the tensors of the step as arguments"
        )
