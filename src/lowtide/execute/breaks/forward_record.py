"""What is on the device while forward of a step runs in several graphs: noted once, in a rehearsal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import compiler, nn
from torch.autograd.graph import saved_tensors_hooks

from lowtide.cost.watch import watch_cpu
from lowtide.execute.breaks.boundary import Crossing
from lowtide.execute.compile.bits import same_bits
from lowtide.execute.compile.trial import registered_buffers, untouched
from lowtide.execute.memory.device import Room
from lowtide.plan.program.memory import rounded
from lowtide.torch_internals import storage_id, tree_leaves

__all__ = ["ForwardRecord", "RecordedCall", "has_storage", "storage_bytes"]


@dataclass(slots=True, eq=False)
class RecordedCall:
    """A call of a graph while the step was rehearsed."""

    graph: Any
    """The graph that was called."""
    allocated: int
    """What was on a CUDA device when it began."""
    given: dict[int, int]
    """Storages that go in, with their bytes."""
    leaves: set[int]
    """Those among them that no graph of this step has made: parameters, buffers, the batch."""
    trained: set[int]
    """Those among them that get a gradient."""
    results: dict[int, int] = field(default_factory=dict)
    saved: frozenset[int] = frozenset()
    """Storages that autograd had saved outside of graphs when it began."""
    alive: list[Any] = field(default_factory=list)
    """What went in and came out: its memory is not given to others meanwhile."""


class ForwardRecord:
    """The calls of graphs in forward of a step, and what is on the device meanwhile."""

    def __init__(self, modules: Sequence[nn.Module], batch: Sequence[torch.Tensor] = ()) -> None:
        self.modules, self.batch = modules, batch
        self.calls: list[RecordedCall] = []
        self.crossings: list[Crossing] = []
        """The ways of gradients into these calls and out of them."""
        self.python_bytes = 0
        """What is saved for backward by code that torch did not capture."""
        tensors = [tensor for module in modules for tensor in module.state_dict(keep_vars=True).values()]
        tensors += batch
        self._devices = {tensor.device for tensor in tensors}
        self._resident = {
            storage_id(tensor): (storage_bytes(tensor), tensor.requires_grad)
            for tensor in tensors
            if has_storage(tensor)
        }
        """Parameters, buffers and the batch by their storage: bytes, and whether they are trained."""
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """What the step updates meanwhile, and its value before."""
        self.changed: dict[int, torch.Tensor] = {}
        """What it was seen to change, by identity."""
        self._inside = False
        """Whether a graph runs now."""
        self._saved: dict[int, int] = {}
        """Storages that autograd has saved meanwhile outside of graphs, with their bytes."""
        self._alive: list[torch.Tensor] = []
        """What is on them: their memory is not given to others meanwhile."""
        self._buffers = [tensor for module in modules for tensor in module.buffers()]
        leaves = [*(p for module in modules for p in module.parameters()), *batch]
        self._trained = [leaf for leaf in leaves if leaf.requires_grad]
        self.listening = False
        """Whether calls are noted."""
        self.trained_bytes = sum(storage_bytes(leaf) for leaf in self._trained if has_storage(leaf))
        """The gradients of all leaves."""
        self.leaf_bytes = 0
        """Parameters, buffers and the batch."""

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Inside, forward runs and is noted; afterwards buffers and random states are what they were."""
        self.listening = True
        try:
            with self.undone(), saved_tensors_hooks(_uncompiled(self._save), _uncompiled(_as_it_is)):
                yield
        finally:
            self.listening = False

    def backward(self, results: Any) -> list[torch.Tensor]:
        """Backward of what a step gives, which leaves no gradients; says what it begins with."""
        self.listening = False
        self._let_go()
        outputs = [t for t in tree_leaves(results) if isinstance(t, torch.Tensor) and t.requires_grad]
        if outputs and self._trained:
            ones = [torch.ones_like(one) for one in outputs]
            torch.autograd.grad(outputs, self._trained, ones, allow_unused=True)
        return outputs

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """Afterwards buffers, what the step updates, and random states are what they were."""
        self.restore(self._buffers)
        assigned = registered_buffers(part for module in self.modules for part in module.modules())
        with untouched([], self._devices):
            try:
                yield
            finally:
                assigned()
                self._put_back()

    def measured(self, run: Callable[[], Any]) -> int:
        """What one step takes, with parameters, buffers and the batch; it leaves no trace."""

        def step() -> None:
            self.backward(run())

        with self.undone():
            if self.cuda is None:
                _, seen = watch_cpu(lambda _: step())
                return seen.peak_bytes + self.leaf_bytes
            torch.cuda.synchronize(self.cuda)
            torch.cuda.reset_peak_memory_stats(self.cuda)
            step()
            torch.cuda.synchronize(self.cuda)
            return torch.cuda.max_memory_allocated(self.cuda)

    @property
    def cuda(self) -> torch.device | None:
        """The CUDA device that the step runs on."""
        return next((device for device in self._devices if device.type == "cuda"), None)

    def _save(self, tensor: torch.Tensor) -> torch.Tensor:
        """Note what autograd saves outside of graphs.

        What it saves is detached: a result that its own node saves would hold that node, and so itself.
        """
        alone = tensor.detach()
        if not self._inside and has_storage(tensor):
            self._saved[storage_id(tensor)] = storage_bytes(tensor)
            self._alive.append(alone)
        return alone

    def clear(self) -> None:
        """Hold nothing of the step any more."""
        self._let_go()
        for crossing in self.crossings:
            crossing.clear()
        self._before.clear()

    def _let_go(self) -> None:
        """Forward has ended: hold none of its tensors."""
        for call in self.calls:
            call.alive.clear()
        self._alive.clear()

    def restore(self, tensors: Sequence[torch.Tensor]) -> None:
        """Put the values that these tensors have now back when the rehearsal ends."""
        for tensor in tensors:
            if id(tensor) not in self._before:
                self._before[id(tensor)] = tensor, tensor.detach().clone()

    def _put_back(self) -> None:
        with torch.no_grad():
            for tensor, value in self._before.values():
                if not same_bits(tensor, value):
                    tensor.copy_(value)
                    self.changed[id(tensor)] = tensor
        self._before.clear()

    @contextlib.contextmanager
    def call(self, graph: Any, arguments: Sequence[Any]) -> Iterator[Callable[[Any], None]]:
        """A call of a graph while the step is rehearsed; is told what comes of it."""
        self._inside = True
        passed = {s for one in self.calls for s in one.results}
        tensors = [a for a in arguments if has_storage(a)]
        given = {storage_id(a): storage_bytes(a) for a in tensors}
        leaves = {storage_id(a) for a in tensors if a.grad_fn is None} - passed
        trained = {storage_id(a) for a in tensors if a.is_leaf and a.requires_grad}
        saved = frozenset(self._saved)
        one = RecordedCall(graph, Room(arguments).allocated_bytes(), given, leaves, trained, saved=saved)
        one.alive += tensors
        self.calls.append(one)
        crossing = Crossing.of(graph, arguments)
        self.crossings.append(crossing)

        def told(results: Any) -> None:
            found = [r for r in results if has_storage(r)] if isinstance(results, tuple | list) else []
            one.results = {storage_id(r): storage_bytes(r) for r in found}
            one.alive += found
            crossing.watch(results if found else ())

        try:
            yield told
        except BaseException:
            self.calls.remove(one)
            self.crossings.remove(crossing)
            raise
        finally:
            self._inside = False

    def around(self, held_by: Mapping[Any, int]) -> tuple[list[int], int]:
        """For each call what is on the device besides what graphs hold for themselves and what goes in.

        Also the same at the end of forward. ``held_by`` says what each graph has held.
        """
        leaves = {s: size for s, (size, _) in self._resident.items()}
        leaves |= {s: call.given[s] for call in self.calls for s in call.leaves}
        self.leaf_bytes = sum(leaves.values())
        trained = {s for call in self.calls for s in call.trained}
        by_python = {s for s, (_, wanted) in self._resident.items() if wanted and s in self._saved} - trained
        known: dict[int, int] = dict(leaves)
        held = 0
        found: list[int] = []
        for k, call in enumerate(self.calls):
            known |= call.given
            later = {s for other in self.calls[k + 1 :] for s in other.trained} - call.trained
            gradients = sum(leaves.get(s, 0) for s in later | by_python)
            there = sum(known.values())
            others = max(self._by_python(call.saved, known), call.allocated - there - held)
            found.append(there - sum(call.given.values()) + gradients + others)
            held += held_by[call.graph]
            known |= call.results
        self.python_bytes = self._by_python(self._saved, known)
        return found, sum(known.values()) + self.python_bytes

    def _by_python(self, saved: Collection[int], known: dict[int, int]) -> int:
        """What autograd has saved outside of graphs, but for what goes in and out of them."""
        return sum(self._saved[s] for s in saved if s not in known)


def _uncompiled(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The function, which torch does not compile where the user's code makes it run."""
    disabled: Callable[[Any], Any] = compiler.disable(function)  # type: ignore[no-untyped-call]
    return disabled


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def has_storage(value: Any) -> bool:
    """Whether this is a tensor in memory of its own or another's."""
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def storage_bytes(tensor: torch.Tensor) -> int:
    """What the storage of a tensor takes."""
    return rounded(tensor.untyped_storage().nbytes(), tensor.device.type)
