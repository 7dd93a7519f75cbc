"""Traces of ``torch.profiler``, as ``export_chrome_trace`` writes them, compressed or not.

An operator is the outermost call of one: what it calls in turn is part of it. Python functions, annotations
and autograd's own calls around it say where it belongs:

    train.py(31): forward         the user's line
      nn.Module: Conv2d_0         the module
        aten::conv2d              the operator
          aten::convolution …     parts of it, with the kernels that they launch
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from lowtide.cost import Cost, Figure, Note, NoteKind, Origin, Span, Step, validate_step
from lowtide.errors import FormatError, GraphError
from lowtide.formats.base import Format
from lowtide.formats.pytorch.frames import is_library
from lowtide.formats.pytorch.profiler_events import (
    Thread,
    ThreadCall,
    TraceEvent,
    nested_calls,
    read_events,
    recognise_events,
)
from lowtide.formats.pytorch.profiler_memory import Allocated, allocations
from lowtide.graph import Category, Graph, Kernel, Lifetime, Op, Phase, Source, Tensor, Timeline

__all__ = ["PROFILER_FORMAT", "read_profile"]

_EXPECTED = "a trace, as export_chrome_trace of torch.profiler writes it"
_ON_THREADS = frozenset({"cpu_op", "user_annotation", "python_function"})
_ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_ENGINE = "autograd::engine::evaluate_function"
_AROUND = re.compile(r"autograd::|torch::autograd::|(?!.*::)")
"""Calls of autograd and of the compiler, which only call operators."""
_FRAME = re.compile(r"(.{1,4096})\((\d{1,9})\): (.{1,500})")
_MODULE = "nn.Module: "
_BETWEEN_DEVICES = re.compile(r"HtoD|DtoH|PtoP|Pageable|Pinned")
_BEFORE, _END = "before the recording", "end of the recording"


@dataclass(frozen=True, slots=True)
class _Context:
    """What the calls around an operator say about it."""

    op: int | None = None
    """The operator that it is part of."""
    phase: Phase = Phase.FORWARD
    module: str = ""
    node: str = ""
    """The node of autograd's graph."""
    sequence: int | None = None
    source: Source | None = None


@dataclass(slots=True)
class _Operator:
    """An operator to be."""

    name: str
    thread: Thread
    start: float
    end: float
    context: _Context
    on_device: list[TraceEvent] = field(default_factory=list)
    forward: _Context | None = None
    """Of backward: what is known of the operator that it differentiates."""


def read_profile(data: bytes) -> Step:
    """Operators with their times, their kernels on streams, and the memory that they allocate."""
    events = read_events(data)
    operators = _operators(events)
    if not operators:
        raise FormatError(f"no operator among {len(events)} events", expected=_EXPECTED, byte=0)
    held = allocations(events, [(one.thread, one.start, one.end) for one in operators])
    step = _step(_ops(operators), operators, held)
    try:
        return validate_step(step)
    except GraphError as error:
        raise FormatError(str(error), expected=_EXPECTED, byte=0) from None


def _operators(events: Sequence[TraceEvent]) -> list[_Operator]:
    """The operators in the order in which they start, those that only have a kernel among them."""
    found: list[_Operator] = []
    by_id: dict[int, int] = {}
    made: dict[int, _Context] = {}
    for call in nested_calls(event for event in events if event.ph == "X" and event.cat in _ON_THREADS):
        call.facts = context = _context(call)
        event = call.event
        if event.cat != "cpu_op":
            continue
        if context.op is None and not (call.called and _AROUND.match(event.name)):
            call.facts = context = replace(context, op=len(found))
            found.append(_Operator(event.name, event.thread, event.ts, event.end, context))
        number, sequence = event.whole("External id"), event.whole("Sequence number")
        if context.op is not None and number is not None:
            by_id[number] = context.op
        if context.op is not None and sequence is not None and context.phase is Phase.FORWARD:
            made.setdefault(sequence, context)
    for event in events:
        if event.ph == "X" and event.cat in _ON_DEVICE:
            op = by_id.get(event.whole("External id") or -1)
            if op is None:  # nobody knows who launched it
                found.append(_Operator(event.name, event.thread, event.ts, event.end, _Context()))
                op = len(found) - 1
            found[op].on_device.append(event)
    for one in found:
        if one.context.phase is Phase.BACKWARD and one.context.sequence in made:
            one.forward = made[one.context.sequence]
    return sorted(found, key=lambda one: one.start)


def _context(call: ThreadCall) -> _Context:
    """What is known from the calls around, and from this one."""
    around: _Context = call.parent.facts if call.parent is not None else _Context()
    event = call.event
    if event.cat == "python_function":
        if event.name.startswith(_MODULE):
            return replace(around, module=event.name.removeprefix(_MODULE))
        frame = _FRAME.fullmatch(event.name)
        if frame is None or is_library(frame[1]) or int(frame[2]) < 1:
            return around
        return replace(around, source=Source(frame[1], int(frame[2])))
    if event.cat == "user_annotation":
        return replace(around, phase=Phase.UPDATE) if event.name.startswith("Optimizer.") else around
    if event.name.startswith(_ENGINE):
        return replace(
            around,
            phase=Phase.BACKWARD,
            node=event.name.removeprefix(_ENGINE).lstrip(": "),
            sequence=event.whole("Sequence number"),
        )
    return around


def _ops(operators: Sequence[_Operator]) -> list[Op]:
    """Operators of backward get the module and the line of those that they differentiate."""
    position = {one.context.op: k for k, one in enumerate(operators) if one.context.op is not None}
    ops = []
    for k, one in enumerate(operators):
        context, forward = one.context, one.forward or one.context
        where = context.module or forward.module or context.node
        ops.append(
            Op(
                id=f"call {k}",
                kind=one.name.replace("::", "."),
                phase=context.phase,
                name=f"{one.name} ({where})" if where else one.name,
                category=_category(one),
                kernels=tuple(Kernel(event.name, _lane(event)) for event in one.on_device),
                source=forward.source or context.source,
                differentiates=f"call {position[forward.op or 0]}" if one.forward else "",
            )
        )
    return ops


def _category(one: _Operator) -> Category:
    copies = [e.cat == "gpu_memcpy" and _BETWEEN_DEVICES.search(e.name) is not None for e in one.on_device]
    return Category.COPY if copies and all(copies) else Category.COMPUTE


def _step(ops: list[Op], operators: Sequence[_Operator], held: Allocated | None) -> Step:
    origin = min(
        min(one.start, *(e.ts for e in one.on_device)) if one.on_device else one.start for one in operators
    )
    on_gpu = any(one.on_device for one in operators)
    tensors: list[Tensor] = []
    shift = 0
    timeline = None
    if held is not None:
        shift = int(any(one.first < 0 for one in held.held))
        ops, tensors = _with_memory(ops, held, shift)
        timeline = _timeline(held, len(ops), shift)
    costs = [Cost(bytes_moved=_written(op, tensors)) for op in ops]
    for k, one in enumerate(operators):
        copied = sum(event.whole("bytes") or 0 for event in one.on_device)
        if ops[k + shift].category is Category.COPY and copied > 0:
            costs[k + shift] = Cost(bytes_moved=Figure(copied, Origin.IMPORTED))
    return Step(
        Graph(tuple(tensors), tuple(ops), ordered=held is not None),
        format="profiler",
        costs=tuple(costs),
        spans=tuple(
            span for k, one in enumerate(operators) for span in _spans(k + shift, one, origin, on_gpu)
        ),
        notes=tuple(_notes(held)),
        timeline=timeline,
    )


def _written(op: Op, tensors: Sequence[Tensor]) -> Figure:
    """What it allocates: that much it writes, whatever else it moves."""
    made = 0 if op.kind in (_BEFORE, _END) else sum(tensors[t].bytes for t in op.outputs)
    return Figure(made, Origin.ESTIMATED)


def _with_memory(ops: Sequence[Op], held: Allocated, shift: int) -> tuple[list[Op], list[Tensor]]:
    """The operators with what they allocate, and what they are the last to hold."""
    tensors = []
    end = len(ops) + shift
    outputs: list[list[int]] = [[] for _ in range(end + 1)]
    inputs: list[list[int]] = [[] for _ in range(end + 1)]
    for k, one in enumerate(held.held):
        maker = ops[one.first].name if one.first >= 0 else _BEFORE
        source = ops[one.first].source if one.first >= 0 else None
        tensors.append(
            Tensor(
                f"block {k}",
                one.bytes,
                name=maker,
                device=held.device,
                address=one.address or None,
                source=source,
            )
        )
        first, last = one.first + shift, end if one.last is None else one.last + shift
        outputs[first].append(k)
        if last > first:
            inputs[last].append(k)
    whole = [Op(_BEFORE, _BEFORE)] * shift + list(ops)
    if inputs[end]:
        whole.append(Op(_END, _END, phase=whole[-1].phase))
    found = [
        msgspec.structs.replace(op, inputs=tuple(inputs[k]), outputs=tuple(outputs[k]))
        for k, op in enumerate(whole)
    ]
    return found, tensors


def _timeline(held: Allocated, ops: int, shift: int) -> Timeline:
    """What was really live: freed memory counts until it is freed, in the middle of an operator too."""
    live = held.live_bytes[1 - shift :]
    live += live[-1:] * (ops - len(live))
    lifetimes = [
        Lifetime(k, one.bytes, one.first + shift, ops - 1 if one.last is None else one.last + shift)
        for k, one in enumerate(held.held)
    ]
    return Timeline(tuple(max(0, one) for one in live), tuple(lifetimes))


def _lane(event: TraceEvent) -> str:
    return f"cuda:{event.whole('device') or 0} stream {event.whole('stream') or 0}"


def _spans(op: int, one: _Operator, origin: float, on_gpu: bool) -> Iterator[Span]:
    """The times of its kernels; of the call itself where there is one, on the host if kernels do the work."""
    for event in one.on_device:
        start, end = (event.ts - origin) * 1e-6, (event.end - origin) * 1e-6
        yield Span(op, _lane(event), start, start, max(start, end))
    if one.on_device and one.on_device[0].thread == one.thread:
        return
    start, end = (one.start - origin) * 1e-6, (one.end - origin) * 1e-6
    yield Span(op, f"thread {one.thread[1]}", start, start, max(start, end), host=on_gpu)


def _notes(held: Allocated | None) -> Iterator[Note]:
    yield Note(
        NoteKind.ASSUMPTION, "an operator is the outermost call of one; what it calls in turn is part of it"
    )
    if held is None:
        text = "memory was not recorded: export a trace with profile_memory=True to see who takes it"
    else:
        text = f"memory is that of {held.device}; an operator holds what is freed while it runs or behind it"
    yield Note(NoteKind.ASSUMPTION, text)


PROFILER_FORMAT = Format(
    name="profiler",
    title="trace of torch.profiler",
    recognise=recognise_events,
    read=read_profile,
)
