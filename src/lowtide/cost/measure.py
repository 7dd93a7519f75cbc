"""What operators take on the device at hand: measured in the middle of a step, on the values it has there.

The step runs once. Whenever the turn comes to an operator with a signature that is not known, it is called a
few more times on its real inputs; those results are thrown away and the random state is put back, so that the
step goes on as if nothing had happened. Operators that write into their inputs are repeated on copies. What a
busy machine disturbs is measured again; what stays disturbed is marked, and not kept.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from lowtide.cost.cache import CostCache
from lowtide.cost.clock import Clock, clock_of
from lowtide.cost.samples import HostTimer, Sample, Timed, Timer, settled
from lowtide.cost.short import ALONE, TAILS, joins, saved_results, short_run
from lowtide.cost.signature import signature
from lowtide.cost.types import Cost, Figure, Origin
from lowtide.cost.watch import Marker
from lowtide.cost.work import flop, touched_bytes, traffic
from lowtide.graph import GROUP, Graph
from lowtide.pace import Pace
from lowtide.printable import printable
from lowtide.torch_internals import OpOverload, TorchDispatchMode, schema_of, tree_leaves

__all__ = ["Measured", "measure"]

_LOG = logging.getLogger(__name__)
_ENOUGH_VALUES = 1000
"""A short second run must give so many values like the first one at least, to be trusted."""
_AGAIN = 0.25
"""Of the time limit, for measuring again what was disturbed; the rest is for operators still to come."""
_MOST_AGAIN = 5.0
"""Seconds for that at most: a machine that is busy for longer is not waited for."""
MeasureProgress = Callable[[int, int], None]
"""Told how many operators have run, of how many."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A cost for every operator of a graph, and where they come from, in numbers of operators."""

    costs: tuple[Cost, ...]
    signatures: int
    """How many operators differ."""
    from_cache: int
    once: int
    """Timed on a single run, on CUDA after a first: there was no time, or no way to repeat it."""
    disturbed: int = 0
    """Measured while something else kept the machine busy, try after try."""


def measure(
    graph: Graph,
    targets: Sequence[Any],
    run: Callable[[Marker], object],
    *,
    cache: CostCache | None = None,
    time_limit: float = 60.0,
    progress: MeasureProgress | None = None,
    timer: Timer | None = None,
    names: Sequence[str] | None = None,
) -> Measured:
    """The cost of every operator of a step, while ``run`` runs it once; what is new is added to the cache.

    ``targets`` are the functions behind the operators; ``run`` tells the marker before and after each of
    them. Repeats stop after ``time_limit`` seconds: operators that are left are timed as the step runs them;
    on CUDA in one more call each, as their first one loads kernels. With 0 seconds nothing is called again:
    that takes more memory than the step. What was measured on a busy machine is marked (``Cost.disturbed``),
    and not added to the cache. The ``timer`` is that of the operating system, unless told. ``names`` are the
    signatures of the operators.
    """
    names = names or [signature(graph, op) for op in range(len(graph.ops))]
    meter = _Meter(graph, targets, names, cache, time_limit, progress, timer or HostTimer())
    run(meter)
    return meter.measured()


class _Meter(Marker):
    """Steps in at operators whose signature is not known yet."""

    def __init__(
        self,
        graph: Graph,
        targets: Sequence[Any],
        names: Sequence[str],
        cache: CostCache | None,
        time_limit: float,
        progress: MeasureProgress | None,
        timer: Timer,
    ) -> None:
        self.graph, self.targets, self.cache = graph, targets, cache
        self.timer, self.progress = timer, progress
        self.deadline = timer.now() + time_limit
        self._repeats = time_limit > 0
        self._spare = min(_MOST_AGAIN, _AGAIN * time_limit)
        """Seconds that are left to measure again what was disturbed."""
        self.signatures = names
        known = {name: cache.get(name) if cache is not None else None for name in set(self.signatures)}
        self.cached = {name for name, cost in known.items() if cost is not None}
        self.costs = {name: cost for name, cost in known.items() if cost is not None}
        self.once: set[str] = set()
        self._clocks: dict[torch.device, Clock] = {}
        self._catch: Any = None
        self._started = 0.0
        self._done, self._pace = 0, Pace()

    def before(self, op: int) -> None:
        if self.signatures[op] in self.costs:
            return
        self._started = self.timer.now()
        if self.graph.ops[op].kind == GROUP:
            self.targets[op].measured = functools.partial(self.take_group, op)
        elif isinstance(self.targets[op], OpOverload):
            self._catch = _Catch(self, op)
            self._catch.__enter__()

    def after(self, op: int) -> None:
        if self._catch is not None:
            self._catch.__exit__(None, None, None)
            self._catch = None
        if self.graph.ops[op].kind == GROUP:
            self.targets[op].measured = None
        name = self.signatures[op]
        if name not in self.costs:
            # no call of its own to repeat: all that is known is how long it took here
            device = _device(self.graph.ops[op].device)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds = Figure(self.timer.now() - self._started, Origin.MEASURED)
            count, exact = flop(self.graph, self.graph.ops[op])
            self.costs[name] = Cost(seconds, _figure(count, exact))
            self.once.add(name)
        self._done += 1
        total = max(self._done, len(self.signatures))
        if self.progress is not None:
            self.progress(self._done, total)
        elif self._pace.due():
            _LOG.info("measured %d of %d operators", self._done, total)

    def take_group(self, op: int, function: Any, args: Sequence[Any]) -> Any:
        """The same of a group, whose results are new."""
        return self.take(op, function, args, {})

    def take(self, op: int, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run the operator for the step, then again for the clock; what the step gets is the first result."""
        one = self.graph.ops[op]
        device = _device(one.device)
        clock = self._clocks.get(device)
        if clock is None:
            clock = self._clocks[device] = clock_of(device, self.timer)
        result, seconds, workspace = clock.first(lambda: function(*args, **kwargs))
        moved, view = _moved(one.kind, function, args, kwargs, result)
        samples: list[Sample] = []
        hasty = self.timer.now() + seconds >= self.deadline
        repeat = functools.partial(_repeated, clock, function, args, kwargs, device, self.deadline)
        if view and device.type == "cuda":
            samples, workspace, hasty = [Sample(0.0)], 0, False  # nothing reaches the device
        elif not hasty or (self._repeats and device.type == "cuda"):  # a first call loads kernels there
            samples, again = repeat()
            workspace = workspace if again is None else again
        count, exact = flop(self.graph, one)
        if not exact:
            count, exact = _registered(function, args, kwargs, result, count)
        disturbed, short = False, dict[str, Timed]()
        if samples:
            figure = settled(samples, functools.partial(self._again, repeat))
            seconds = figure.seconds
            short = self._short(clock, function, args, result)
            short = short if short and short[ALONE].seconds < seconds else {}
            disturbed = figure.disturbed or any(run.disturbed for run in short.values())
        cost = Cost(
            seconds=Figure(seconds, Origin.MEASURED),
            flop=_figure(count, exact),
            bytes_moved=Figure(moved, Origin.MEASURED),
            workspace_bytes=Figure(workspace, Origin.MEASURED),
            short_seconds={tail: Figure(run.seconds, Origin.MEASURED) for tail, run in short.items()},
            disturbed=disturbed,
        )
        self.costs[self.signatures[op]] = cost
        if hasty or not samples:
            self.once.add(self.signatures[op])
        elif self.cache is not None and not disturbed:
            self.cache.add(self.signatures[op], cost)
        return result

    def _again(self, repeat: Callable[[], tuple[list[Sample], int | None]]) -> list[Sample]:
        """More samples of what was disturbed, as long as there is time for that."""
        now = self.timer.now()
        if self._spare <= 0 or now >= self.deadline:
            return []
        samples, _ = repeat()
        self._spare -= self.timer.now() - now
        return samples

    def _short(self, clock: Clock, function: Any, args: Sequence[Any], result: Any) -> dict[str, Timed]:
        """What second runs take from what the first one saved, if they give the very bits of the first."""
        saved = [result[k] for k in saved_results(function, args)]
        found: dict[str, Timed] = {}
        if not saved or result[0].numel() < _ENOUGH_VALUES:
            return found
        source, weight, bias = args[:3]
        call = functools.partial(short_run, source, weight, bias, saved[0], saved[1], args[-1])
        for tail in (ALONE, *(TAILS if joins(args[0]) else ())):
            more = args[0] if "add" in tail else None, "relu" in tail
            if self.timer.now() >= self.deadline:
                break
            try:
                if not _same(call(*more), _followed(result[0], *more)):
                    break
                repeat = functools.partial(clock.again, functools.partial(call, *more), self.deadline)
                found[tail] = settled(repeat()[0], functools.partial(self._again, repeat))
            except RuntimeError:  # no room for a second result, or no such kernel
                break
            except Exception as error:  # a compiler's: whatever it says, the step runs without it
                said = printable(str(error), lines=True)
                warnings.warn(f"BatchNorm runs again as a whole, its short form fails: {said}", stacklevel=2)
                break
        return found

    def measured(self) -> Measured:
        return Measured(
            costs=tuple(self.costs.get(name, Cost()) for name in self.signatures),
            signatures=len(set(self.signatures)),
            from_cache=sum(name in self.cached for name in self.signatures),
            once=sum(name in self.once for name in self.signatures),
            disturbed=sum(self.costs[name].disturbed for name in self.signatures if name in self.costs),
        )


class _Catch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hands the first call of an operator, with its real arguments, to the meter."""

    def __init__(self, meter: _Meter, op: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._meter, self._op, self._open = meter, op, True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not self._open or func is not self._meter.targets[self._op]:
            return func(*args, **(kwargs or {}))
        self._open = False
        return self._meter.take(self._op, func, args, kwargs or {})


def _repeated(
    clock: Clock,
    function: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    device: torch.device,
    deadline: float,
) -> tuple[list[Sample], int | None]:
    """What calls took whose results nobody sees; none where there is no memory to make them."""
    state = torch.get_rng_state()
    cuda_state = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        own_args, own_kwargs = _own_copies(function, args, kwargs)
        return clock.again(lambda: function(*own_args, **own_kwargs), deadline)
    except RuntimeError:  # it worked a moment ago: there is no room for a second result
        return [], None
    finally:
        torch.set_rng_state(state)
        if cuda_state is not None:
            torch.cuda.set_rng_state(cuda_state, device)


def _own_copies(
    function: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Sequence[Any], dict[str, Any]]:
    """The arguments, with a copy in place of each tensor that the operator writes into."""
    schema = schema_of(function)
    if schema is None or not schema.is_mutable:  # a group writes to nothing that it is given
        return args, kwargs
    written = {
        place
        for k, argument in enumerate(schema.arguments)
        if argument.is_write
        for place in (k, argument.name)
    }

    def own(place: int | str, value: Any) -> Any:
        return value.clone() if place in written and isinstance(value, torch.Tensor) else value

    return [own(k, value) for k, value in enumerate(args)], {k: own(k, value) for k, value in kwargs.items()}


def _moved(
    kind: str, function: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any
) -> tuple[int, bool]:
    """Bytes read and written by a call, and whether all it gave are views of what it was given."""
    read = {id(leaf): leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
    given = {_address(tensor) for tensor in read.values()} - {0}
    made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    schema = schema_of(function)
    if schema is None or not schema.is_mutable:
        fresh = [tensor for tensor in made if _address(tensor) not in given]
        if made and not fresh and read:
            return 0, True
        made = fresh
    return traffic(kind, [_bytes(t) for t in read.values()], [_bytes(t) for t in made]), False


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are the same bit by bit, and lie in memory alike."""
    alike = one.dtype == other.dtype and one.stride() == other.stride()
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[one.itemsize]
    return alike and torch.equal(one.view(bits), other.view(bits))


def _followed(value: torch.Tensor, other: torch.Tensor | None, relu: bool) -> torch.Tensor:
    """A value with what follows it, by the operators themselves."""
    value = value if other is None else value + other
    return value.relu() if relu else value


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


def _bytes(tensor: torch.Tensor) -> int:
    strides = tensor.stride() if tensor.layout is torch.strided else None
    return touched_bytes(tensor.shape, strides, tensor.itemsize)


def _registered(
    function: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any, otherwise: int
) -> tuple[int, bool]:
    """FLOP by a formula that torch, or the author of the operator, registered; else the convention."""
    formula = flop_registry.get(getattr(function, "overloadpacket", None))
    if formula is None:
        return otherwise, False
    try:
        return int(formula(*args, **kwargs, out_val=result)), True
    except Exception:  # a stranger's formula: any failure means that it does not know this call
        return otherwise, False


def _figure(count: int, exact: bool) -> Figure:
    return Figure(count, Origin.MEASURED if exact else Origin.ESTIMATED)


def _device(name: str) -> torch.device:
    return torch.device(name or "cpu")
