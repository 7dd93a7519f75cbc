"""Plans that were made before, kept in files."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import msgspec

from lowtide.cost.device import cache_folder
from lowtide.cost.probe import environment
from lowtide.documents import read_document, write_document
from lowtide.errors import InfeasibleError, LowtideError
from lowtide.execute.memory.optimizer_state import with_state
from lowtide.execute.runtime.fits import refuse_invalid
from lowtide.graph import Graph
from lowtide.plan.request import DeviceRoom, PlanRequest
from lowtide.plan.result.plan import Plan
from lowtide.plan.result.validate import valid_plan
from lowtide.trace.step.joint import Joint

__all__ = ["Kept"]


class Kept:
    """A plan that was made before for the same step, device, versions and budget, if it still holds."""

    def __init__(
        self,
        graph: Graph,
        able: frozenset[int],
        request: PlanRequest,
        kind: str,
        room: DeviceRoom,
        whole: Callable[[Plan], Joint] | None = None,
        state: Sequence[Any] = (),
    ) -> None:
        """``whole`` gives the step that a plan in tiles is for, made from the same step.

        ``state`` is that of an optimiser.
        """
        outside, free = room.outside_bytes, room.free_bytes
        self.whole, self.state = whole, state
        self.graph, self.able, self.outside, self.free = graph, able, outside, free
        self.budget, self.offload = request.budget, request.offload
        self.wanted = request.cache
        self._asked = repr((request.budget, request.limits.time_limit, request.limits.seed, free))
        self._seconds = repr(request.limits.time_limit)
        self._step = [
            repr((request.methods, request.tiles_compete, request.auto, request.cost)),
            repr(sorted(able)),
            environment(kind).key,
            str(outside),
            repr(request.offload),
            str(request.crossing),
            repr(sorted(room.pinned)),
            str(whole is not None),
            *([repr(room.link)] if room.link is not None and room.link.settles else []),
        ]

    def _name(self, kind: str, *parts: str) -> str:
        """The file of a plan."""
        digest = hashlib.sha256(self._encoded + "\0".join([*parts, *self._step]).encode())
        return f"{kind}-{digest.hexdigest()[:32]}.json"

    @cached_property
    def _encoded(self) -> bytes:
        return msgspec.json.encode(self.graph)

    @cached_property
    def name(self) -> str:
        """The file of the plan for what is asked for."""
        return self._name("plan", self._asked)

    @cached_property
    def smallest_name(self) -> str:
        """The file of the plan with the smallest peak."""
        return self._name("smallest")

    @cached_property
    def first_name(self) -> str:
        """The file of the plan with the smallest peak that was found first."""
        return self._name("first", self._seconds)

    @cached_property
    def split_name(self) -> str:
        """The file of the plan with split convolutions."""
        return self._name("split", self._asked)

    def load(self) -> Plan | None:
        """The plan, or None where there is none, or where it is damaged, not valid, or for something else."""
        plan = self._read(self.name) if self.wanted else None
        with contextlib.suppress(LowtideError):
            if plan is not None and self._asked_for(plan) and self._fits(plan):
                return plan
        return None

    def load_split(self) -> Plan | None:
        """The plan to run instead, with split convolutions; or the one for whole ones, if that is faster."""
        return self._read(self.split_name) if self.wanted else None

    def store_split(self, plan: Plan) -> None:
        """Keep such a plan for the step with whole convolutions."""
        if self.wanted and not plan.disturbed:
            self._write(self.split_name, plan)

    def smallest(self, error: InfeasibleError) -> Plan:
        """The plan with the smallest peak, where it keeps the budget; else the error, which has that plan.

        It is kept: a budget that an error has named works, however little a search finds the next time.
        """
        known = self._read(self.smallest_name) if self.wanted else None
        found = error.plan
        if known is not None and not (self._fits(known) and set(known.offload) <= set(self.offload)):
            known = None
        if isinstance(found, Plan) and (known is None or _peak(found) < _peak(known)):
            known = found
            if self.wanted:
                self._write(self.smallest_name, found)
        error.plan = known
        size = self.budget.resolve(error.plain_peak, self.free)
        if known is None or _peak(known) > size:
            raise error
        return msgspec.structs.replace(known, budget_bytes=size)

    def load_first(self) -> Plan | None:
        """The plan with the smallest peak that was found first, in as much time."""
        plan = self._read(self.first_name) if self.wanted else None
        return plan if plan is not None and self._fits(plan) else None

    def first(self, error: InfeasibleError) -> Plan:
        """The plan with the smallest peak, which is kept; else the error."""
        if not isinstance(error.plan, Plan):
            raise error
        if self.wanted:
            self._write(self.first_name, error.plan)
        return error.plan

    def _read(self, name: str) -> Plan | None:
        """A valid plan for this step and device."""
        with contextlib.suppress(LowtideError):
            plan = read_document(cache_folder() / "plans" / name, Plan)
            if plan.beside_bytes == self.outside and not plan.interrupted:
                valid_plan(plan)
                return plan
        return None

    def _asked_for(self, plan: Plan) -> bool:
        """Whether a plan keeps the budget that is asked for now, with leaves away that may leave."""
        size = self.budget.resolve(plan.plain.peak_bytes, self.free)
        return plan.budget_bytes == size and set(plan.offload) <= set(self.offload)

    def _fits(self, plan: Plan) -> bool:
        """Whether a valid plan is for this step; in tiles that is looked at once it is cut as planned."""
        if self.whole is None:
            return plan.graph == self.graph and set(plan.able) <= self.able
        joint = self.whole(plan)
        refuse_invalid(joint, plan.program, self.state)
        return plan.graph == with_state(joint.graph, self.state)

    def store(self, plan: Plan) -> None:
        """Keep the plan, but none from times that a busy machine disturbed: they are measured again."""
        if self.wanted and not plan.disturbed:
            self._write(self.name, plan)

    def _write(self, name: str, plan: Plan) -> None:
        """Write a plan, whole or not at all; a folder that cannot be written is no reason to fail."""
        with contextlib.suppress(LowtideError, OSError):
            path = cache_folder() / "plans" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            write_document(path, plan)


def _peak(plan: Plan) -> int:
    return plan.predicted.peak_bytes
