"""Report: everything that the page draws, as one versioned document.

Tables are stored by column, so that a large step stays a small file. A name, a place in a file or a reason is
a position in ``Report.words``; a row of operators or tensors is a position in the tables of a StepTables.
What is not known is None, or an empty column.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from lowtide.report.page.shard_types import Column, MoveTable, Reals, ShardDecisions, ShardNodes, SplitRow

__all__ = [
    "BlockTable",
    "DecisionTable",
    "DeviceLimits",
    "Figures",
    "GradientCheck",
    "Lane",
    "LoopView",
    "MeasuredCurve",
    "Moments",
    "OperatorTable",
    "PartRead",
    "Proof",
    "Report",
    "Rival",
    "RunView",
    "Settled",
    "ShardView",
    "StepTables",
    "TensorTable",
    "TradeoffCurve",
]


class OperatorTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One row an operator, those of tiles and groups behind those of the step."""

    name: Column = ()
    kind: Column = ()
    module: Column = ()
    """The path of the module that it belongs to; the empty word where there is none."""
    phase: Column = ()
    source: Column = ()
    """``file:line``."""
    annotation: Column = ()
    """What the user called this part of the step, where they did."""
    parent: Column = ()
    """The row of the loop or of the group that it is inside of; -1 for operators of the step."""
    differentiates: Column = ()
    """Of an operator of backward: the row of the one of forward that it belongs to; else -1."""
    inputs: tuple[Column, ...] = ()
    """Rows of tensors."""
    outputs: tuple[Column, ...] = ()
    seconds: Reals = ()
    flop: Reals = ()
    counted: Column = ()
    """1 where ``flop`` is counted, 0 where it is one operation an element by convention."""
    moved: Reals = ()
    """Bytes read and written."""


class TensorTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One row a tensor."""

    name: Column = ()
    role: Column = ()
    shape: Column = ()
    source: Column = ()
    module: Column = ()
    maker: Column = ()
    """The row of the operator that writes it first; -1 for what comes in from outside."""
    owner: Column = ()
    """The row of the tensor that owns its storage."""
    bytes: Column = ()


class StepTables(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Operators and tensors that the ways to run a step refer to."""

    name: str
    operators: OperatorTable
    tensors: TensorTable
    origin: str = ""
    """Where seconds come from: measured, estimated, unit or the name of a file."""
    operators_in_all: int = 0
    """Of the step and of its tiles; more than there are rows where the table is thinned."""


class Figures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one way to run a step takes."""

    peak_bytes: int | None = None
    seconds: float | None = None


class GradientCheck(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How loss, gradients and buffers compare with those of eager PyTorch."""

    bitwise: bool
    loss_equal: bool
    difference: float | None
    """The largest difference of an element over the largest element of its gradient; None: not finite."""


class Moments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Runs of operators one after the other, tile after tile; ``live`` is the most while each runs."""

    operator: Column = ()
    live: Column = ()
    event: Column = ()
    """The instant at which blocks are asked for who is live."""
    start: Reals = ()
    """Seconds since the step began; empty where no times are known."""
    again: Column = ()
    """1 for a second or later run."""
    tile: Column = ()
    """The number of the tile, counted from 0; -1 outside of loops."""
    seconds: float | None = None
    """When the last one ends."""
    in_all: int = 0
    """More than there are rows where the moments are thinned."""
    peak: int = 0
    """The row at which ``live`` is largest."""


class MeasuredCurve(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Live bytes as they were measured; ``at`` is a place on the axis of the moments, not always whole."""

    at: tuple[float, ...] = ()
    live: Column = ()
    aligned: bool = True
    """Whether each figure stands at its operator; else each stands where as many bytes have come and gone."""


class BlockTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Memory from one event to another: ``birth <= event < death``. Leaves that stay are not among it."""

    tensor: Column = ()
    """-1 for memory that is no tensor's."""
    operator: Column = ()
    """Who takes it; -1 where nobody of the step does."""
    use: Column = ()
    bytes: Column = ()
    birth: Column = ()
    death: Column = ()
    offset: Column = ()
    """The place in the arena; empty without a layout."""
    in_all: int = 0
    bytes_left_out: int = 0
    """The largest of those that are left out, where the table is thinned."""
    events: int = 0


class Settled(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One arena for all blocks, and what their places cost."""

    arena_bytes: int
    live_bytes: int
    """No arena is smaller."""
    greedy_bytes: int
    method: str
    optimal: bool
    alignment: int


class Lane(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one unit does over time, in seconds since the step began."""

    name: str
    what: Literal["operator", "tensor"]
    """Which table ``row`` is a row of."""
    row: Column
    start: Reals
    end: Reals
    measured: bool = False
    in_all: int = 0
    """More than there are rows where the lane is thinned."""


class DecisionTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What becomes of each storage, why, and what that costs."""

    tensor: Column = ()
    decision: Column = ()
    reason: Column = ()
    price: Reals = ()
    """Seconds that are spent for it."""
    instead: Reals = ()
    """Seconds that making it again would take, where it is kept."""
    in_all: int = 0
    """More than there are rows where the table is thinned."""


class PartRead(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What tiles read of one input."""

    name: str
    whole: tuple[int, ...]
    part: tuple[int, ...]
    """Of the largest tile."""
    halo: tuple[int, ...]
    """How much longer the part is in each dimension than an equal share of the whole."""
    times: float
    """Elements that all tiles read together, over those of the whole."""


class LoopView(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A region of the step that runs tile after tile."""

    operator: int
    axes: tuple[int, ...]
    lo: tuple[tuple[int, ...], ...]
    """Where each tile begins, axis by axis."""
    hi: tuple[tuple[int, ...], ...]
    body: Column
    """Which step each tile runs."""
    body_bytes: Column
    """The most that a tile of each body takes besides what goes in."""
    body_operators: Column
    reads: tuple[PartRead, ...] = ()


class Proof(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a plan came about, and what is proven of it."""

    method: str
    overhead: float
    bound_overhead: float | None
    gap: float
    words: str
    smallest_budget_bytes: int
    solve_seconds: float
    only: tuple[str, ...]
    decisions: str = ""
    """How many storages are kept, recomputed and sent away, in words."""


class RunView(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One way to run a step: what is predicted, what was measured, and every detail that is known."""

    name: str
    step: int
    """Which StepTables it refers to."""
    group: int = 0
    """Ways with the same number run the same step, by its parameters; 0: nothing tells them from others."""
    note: str = ""
    budget_bytes: int | None = None
    predicted: Figures | None = None
    measured: Figures | None = None
    eager: Figures | None = None
    """Eager PyTorch, measured in turns with it."""
    resident_bytes: int = 0
    """Leaves that stay on the device, part of every moment."""
    beside_bytes: int = 0
    """What is on the device besides the step."""
    leaves: Column = ()
    """Rows of the tensors that are resident."""
    moments: Moments = Moments()
    curve: MeasuredCurve | None = None
    blocks: BlockTable = BlockTable()
    layout: Settled | None = None
    lanes: tuple[Lane, ...] = ()
    decisions: DecisionTable | None = None
    check: GradientCheck | None = None
    loops: tuple[LoopView, ...] = ()
    proof: Proof | None = None


class Rival(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The plans of another planner."""

    name: str
    peak_bytes: Column
    seconds: tuple[float, ...]


class TradeoffCurve(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What every budget costs in time, from the largest to the smallest."""

    budget_bytes: Column
    peak_bytes: Column
    seconds: tuple[float, ...]
    bound_seconds: tuple[float | None, ...]
    plain_bytes: int
    plain_seconds: float
    smallest_bytes: int
    floor_bytes: int
    """No plan exists below; 0 where that is not known."""
    cost: str
    words: str
    rivals: tuple[Rival, ...] = ()


class DeviceLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the device does at most, as ``lowtide doctor`` measured it."""

    name: str
    flop_per_second: dict[str, float]
    bytes_per_second: float


class ShardView(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A step over several devices."""

    name: str
    step: int
    """Which StepTables its tensors and operators are of: the step on one device."""
    runs: Column
    """The way on one device, and that of the largest device where its plan is known."""
    mesh: Column
    ranks: Column
    """The devices that are shown."""
    largest: int
    budget_bytes: int | None
    one: Figures
    split: SplitRow
    messages: int
    bound_seconds: float
    gap: float
    bytes_per_second: float
    latency: float
    compared: tuple[SplitRow, ...] = ()
    planned_bytes: Column = ()
    """By device, where processes were run."""
    measured_bytes: Column = ()
    sent_bytes: Column = ()
    planned_sent_bytes: Column = ()
    check: GradientCheck | None = None
    update_difference: float | None = None
    decisions: ShardDecisions = ShardDecisions()
    moves: MoveTable = MoveTable()
    nodes: ShardNodes = ShardNodes()


class Report(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Ways to run a step, the one before first."""

    title: str
    about: str
    words: tuple[str, ...]
    steps: tuple[StepTables, ...]
    runs: tuple[RunView, ...]
    target: str = ""
    """What ``lowtide plan`` and ``lowtide run`` call the step, where that is known."""
    tradeoff: TradeoffCurve | None = None
    limits: DeviceLimits | None = None
    shards: tuple[ShardView, ...] = ()
    notes: tuple[str, ...] = ()
    """What was left out or thinned, in words."""
    made_by: str = ""
    lowtide: Literal["report"] = "report"
    version: Literal[1] = 1
