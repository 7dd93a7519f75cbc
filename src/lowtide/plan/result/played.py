"""A plan, or a run of one, as a Step: an operator for each instruction, with its time, on lanes.

    compute             ▐conv1▌▐relu1▌      ▐conv1 again▌▐backward▌
    compute copies to the host ▐send y▌
    compute copies to the device        ▐fetch y▌
    communication                                                    ▐sum of a gradient▌

So whatever shows or writes steps shows and writes plans. Drops are no operators: they end lifetimes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from lowtide.cost import Note, NoteKind, Span, Step
from lowtide.errors import PlanError
from lowtide.graph import Category, Graph, Lifetime, Op, Phase, Role, Tensor, Timeline
from lowtide.plan.program.copy_lanes import Lanes, Link
from lowtide.plan.program.instructions import Drop, Fetch, Run, Send
from lowtide.plan.program.memory import Memory, saved_for
from lowtide.plan.program.simulate import simulate
from lowtide.plan.result.measured_run import MeasuredRun
from lowtide.plan.result.plan import Plan

__all__ = ["plan_step", "run_step"]

_LANE, _WIRE = "compute", "communication"


def run_step(run: MeasuredRun) -> Step:
    """The plan of a run, played once, with the bytes that were measured."""
    plan = run.plan
    if plan is None:
        raise PlanError(
            "a run of a program without a plan says nothing about times; run a plan (`lowtide run TARGET "
            "--budget B -o FILE`), or see this one with `lowtide report`"
        )
    more = [0] * (len(run.graph.ops) - len(plan.graph.ops))  # the update behind it
    plan = msgspec.structs.replace(
        plan,
        graph=run.graph,
        program=run.program,
        seconds=(*plan.seconds, *map(float, more)) if plan.seconds else (),
        workspace_bytes=(*plan.workspace_bytes, *more) if plan.workspace_bytes else (),
    )
    live = run.recording.timeline.live_bytes
    if len(live) != sum(isinstance(line, Run) for line in run.program.instructions):
        raise PlanError(
            "the timeline of the run is not that of its program: the file is damaged; run it again"
        )
    note = "live bytes are measured; times and lifetimes are those of the plan"
    return _played(plan, "run", [one - plan.beside_bytes for one in live], note)


def plan_step(plan: Plan) -> Step:
    """The plan, played once; a PlanError where it reads what is not there."""
    note = "predicted: the plan as it is simulated; a loop over tiles is one operator"
    return _played(plan, "plan", None, note)


def _played(plan: Plan, format_: str, measured: Sequence[int] | None, note: str) -> Step:
    lanes = _TimedLanes(plan.graph, plan.link, plan.wire_seconds)
    timeline = simulate(
        plan.graph,
        plan.program,
        workspace_bytes=plan.workspace_bytes,
        seconds=plan.seconds,
        short=plan.short,
        link=plan.link,
        lanes=lanes,
    )
    player = _Player(plan)
    live = iter(timeline.live_bytes if measured is None else measured)
    known = timeline.resident_bytes
    bytes_ = []
    for instruction in plan.program.instructions:
        player.play(instruction)
        if not isinstance(instruction, Drop):
            known = next(live) if isinstance(instruction, Run) else known
            bytes_.append(plan.beside_bytes + known)
    spans = [
        Span(k, _WIRE if k in lanes.talks else _LANE, *times)
        for k, times in enumerate(lanes.times[: len(player.ops)])
    ]
    return Step(
        Graph(tuple(player.tensors), tuple(player.ops), name=plan.graph.name),
        format=format_,
        spans=tuple(spans) if plan.seconds and plan.cost != "unit" else (),
        notes=(Note(NoteKind.ASSUMPTION, note),),
        timeline=Timeline(tuple(bytes_), tuple(player.lifetimes()), resident_bytes=timeline.resident_bytes),
    )


class _TimedLanes(Lanes):
    """Lanes that remember when each run and each copy started, ran and ended."""

    def __init__(self, graph: Graph, link: Link | None, wire_seconds: Mapping[int, float]) -> None:
        super().__init__(graph, link, wire_seconds)
        self.times: list[tuple[float, float, float]] = []
        self.talks: set[int] = set()
        """Which of them are communications."""

    def send(self, tensor: int, is_here: Callable[[int], bool]) -> None:
        super().send(tensor, is_here)
        start = self._out - self._seconds(tensor, out=True)
        self.times.append((start, start, self._out))

    def fetch(self, tensor: int) -> None:
        super().fetch(tensor)
        start = self._in - self._seconds(tensor, out=False)
        self.times.append((start, start, self._in))

    def run(self, reads: Iterable[int], seconds: float) -> float:
        taken = super().run(reads, seconds)
        self.times.append((self.now - taken, self.now - seconds, self.now))
        return taken

    def communicate(self, results: Sequence[int], seconds: float, *, waits: bool) -> float:
        taken = super().communicate(results, seconds, waits=waits)
        start = self._wire - seconds
        self.talks.add(len(self.times) - 1)
        self.times[-1] = (start, start, self._wire)  # what it computes before that is next to nothing
        return taken


class _Player:
    """Storages of a program from when they come to when they go, each as a tensor of its own."""

    def __init__(self, plan: Plan) -> None:
        self.graph = plan.graph
        self.memory = Memory(plan.graph)
        self.ops: list[Op] = []
        self.tensors: list[Tensor] = []
        self._runs: Counter[int] = Counter()
        self._made: Counter[str] = Counter()
        self._here: dict[int, int] = {}
        """The tensor that stands for each storage on the device."""
        self._first: list[int] = []
        self._last: list[int | None] = []
        sent = {line.tensor for line in plan.program.instructions if isinstance(line, Send)}
        for tensor, storage in self.memory.storage_of.items():
            self._comes(storage, tensor, stays=tensor not in sent)

    def play(self, instruction: Run | Drop | Send | Fetch) -> None:
        """One more instruction."""
        if isinstance(instruction, Drop):
            self.memory.move(instruction)
            self._goes()
        elif isinstance(instruction, Run):
            self._run(instruction)
        else:
            self._copy(instruction)

    def lifetimes(self) -> Iterable[Lifetime]:
        """Of every storage, once all is played."""
        end = max(0, len(self.ops) - 1)
        for k, tensor in enumerate(self.tensors if self.ops else ()):
            last = self._last[k]
            yield Lifetime(k, tensor.bytes, self._first[k], end if last is None else last)

    def _run(self, instruction: Run) -> None:
        op = self.graph.ops[instruction.op]
        reads = (*op.reads, *(saved_for(op) if instruction.short else ()))
        inputs = [self._here[self.memory.storage_of[t]] for t in reads]
        self.memory.run(instruction)
        outputs = []
        for tensor in op.outputs[:1] if instruction.short else op.outputs:
            storage = self.memory.storage_of[tensor]
            if storage not in self._here:
                self._comes(storage, tensor)
            outputs.append(self._here[storage])
        self._runs[instruction.op] += 1
        again = self._runs[instruction.op] > 1
        self._append(
            op,
            " again" if again else "",
            op.kind,
            op.category,
            tuple(dict.fromkeys(inputs)),
            tuple(dict.fromkeys(outputs)),
        )

    def _copy(self, instruction: Send | Fetch) -> None:
        tensor = self.graph.tensors[instruction.tensor]
        fetch = isinstance(instruction, Fetch)
        self.memory.move(instruction)
        storage = self.memory.storage_of[instruction.tensor]
        if fetch:
            self._comes(storage, instruction.tensor)
        here = (self._here[storage],)
        kind = "fetch HtoD" if fetch else "send DtoH"
        phase = self.ops[-1].phase if self.ops else Phase.FORWARD
        stands = Op(
            f"{kind} {tensor.id}", kind, phase, name=f"{kind.split()[0]} {tensor.label}", device=tensor.device
        )
        self._append(stands, "", kind, Category.COPY, () if fetch else here, here if fetch else ())

    def _append(
        self,
        op: Op,
        more: str,
        kind: str,
        category: Category,
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
    ) -> None:
        self.ops.append(
            Op(
                id=f"{len(self.ops)}: {op.id}",
                kind=kind,
                phase=op.phase,
                inputs=inputs,
                outputs=outputs,
                name=op.label + more,
                category=category,
                device=op.device,
                source=op.source,
            )
        )

    def _comes(self, storage: int, tensor: int, *, stays: bool = False) -> None:
        """A storage with its first tensor. One that leaves the device is no leaf of this step."""
        one = self.graph.tensors[tensor]
        self._made[one.id] += 1
        count = self._made[one.id]
        self._here[storage] = len(self.tensors)
        self.tensors.append(
            msgspec.structs.replace(
                one,
                id=one.id if count == 1 else f"{one.id}#{count}",
                bytes=self.memory.size[storage],
                role=one.role if stays or one.role is Role.GRADIENT else Role.ACTIVATION,
                alias=None,
                gradient_of=None,
            )
        )
        self._first.append(len(self.ops))
        self._last.append(None)

    def _goes(self) -> None:
        """Storages that a drop has freed."""
        memory = self.memory
        for storage in [s for s in self._here if s not in memory.size or s in memory.away]:
            tensor = self._here.pop(storage)
            self._last[tensor] = max(self._first[tensor], len(self.ops) - 1)
