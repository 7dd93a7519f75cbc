"""The nouns of a step: Tensor, Op and Graph.

Tensors and operators are referred to by their position in the graph. Sizes are bytes. Everything is
immutable; ``attributes`` holds plain JSON values that a document has and Lowtide does not interpret.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from lowtide.errors import GraphError
from lowtide.graph.rect import Rect

__all__ = [
    "ACCUMULATE",
    "DENSE",
    "GROUP",
    "LOOP",
    "RESIDENT_ROLES",
    "Category",
    "Graph",
    "Kernel",
    "Op",
    "Phase",
    "Role",
    "Source",
    "Tensor",
]

Attributes = dict[str, Any]
"""JSON values by name; treated as immutable like the object that carries them."""


class Role(str, enum.Enum):
    """What a tensor is for."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    CONSTANT = "constant"
    INPUT = "input"
    OPTIMIZER = "optimizer"
    ACTIVATION = "activation"
    GRADIENT = "gradient"
    WORKSPACE = "workspace"


RESIDENT_ROLES = frozenset({Role.PARAMETER, Role.BUFFER, Role.CONSTANT, Role.INPUT, Role.OPTIMIZER})
"""Leaves: they take memory for the whole step, whoever reads them. Their gradients stay once written."""


LOOP = "lowtide.loop"
"""The kind of an operator that stands for a region of a step, which is run tile after tile."""
GROUP = "lowtide.group"
"""The kind of an operator that runs a body of others as compiled kernels."""
ACCUMULATE = "lowtide.accumulate"
"""The kind of an operator that adds its second input, or the product of two more, to its first."""
EXCHANGE, SUM = "lowtide.exchange", "lowtide.add_up"
"""Kinds of operators that talk to other processes."""
DENSE = "lowtide.dense"
"""The kind of an operator that copies a gradient into the strides that autograd keeps it in."""


class Phase(str, enum.Enum):
    """Which part of the step an operator belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"


class Category(str, enum.Enum):
    """Whether an operator computes, only rearranges memory, or moves data between devices."""

    COMPUTE = "compute"
    LAYOUT = "layout"
    COPY = "copy"


class Source(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, gc=False):
    """The line of somebody's file that made a tensor or an operator; lines count from 1."""

    file: str
    line: int


class Tensor(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, gc=False):
    """One value of the step, or a view of one."""

    id: str
    """Unique in the graph; the identifier that the source document uses, where it has one."""
    bytes: int
    role: Role = Role.ACTIVATION
    name: str = ""
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    device: str = ""
    alias: int | None = None
    """Position of the tensor whose storage this one is a view of; that one owns the bytes."""
    gradient_of: int | None = None
    address: int | None = None
    """First byte in device memory, where the source says it."""
    boxes: dict[str, Rect | None] = {}
    """Parts of the tensor by name, as ``read_rect``; None stands for "none" spelt out."""
    source: Source | None = None
    attributes: Attributes = {}

    @property
    def label(self) -> str:
        """How to call the tensor in front of a person."""
        return self.name or self.id


class Kernel(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, gc=False):
    """A device kernel that an operator launched."""

    name: str
    device: str = ""
    attributes: Attributes = {}


class Op(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, gc=False):
    """One operator of the step. A tensor in both ``inputs`` and ``outputs`` is updated in place."""

    id: str
    """Unique in the graph."""
    kind: str
    phase: Phase = Phase.FORWARD
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    name: str = ""
    category: Category = Category.COMPUTE
    device: str = ""
    input_ports: tuple[str, ...] = ()
    """A name for each input, or nothing at all."""
    output_ports: tuple[str, ...] = ()
    shape_only: tuple[int, ...] = ()
    """Positions in ``inputs`` whose shape is asked for but whose value is not read."""
    after: tuple[int, ...] = ()
    """Operators that must have run before, though no tensor passes between."""
    kernels: tuple[Kernel, ...] = ()
    boxes: dict[str, Rect | None] = {}
    source: Source | None = None
    attributes: Attributes = {}
    random: bool = False
    """Whether it draws from the generator of its device."""
    once: bool = False
    """Whether it may run once alone: nobody knows what else it does."""
    updates: tuple[int, ...] = ()
    """Positions in ``inputs`` that its first run updates in passing, as BatchNorm does its statistics."""
    short: tuple[int, ...] = ()
    """Positions in ``outputs`` from which a short rerun makes the first output."""
    differentiates: str = ""
    """Of an operator of backward: the ``id`` of the one of forward that it belongs to."""
    axes: tuple[int, ...] = ()
    """Of a loop: the lengths of the axes that its tiles cover."""
    overload: str = ""
    """Which overload of the kind was called."""
    arguments: tuple[Any, ...] | None = None
    """What it was called with, as JSON; an input is ``{"input": position}``. None: not known."""
    options: dict[str, Any] = {}
    """The same for arguments by name."""
    strides: tuple[tuple[int, ...] | None, ...] = ()
    """How each input lies in memory, where that is known."""
    in_place: bool = False
    """Whether the user's step runs it in place."""
    body: Graph | None = None
    """Of a group: what it computes. Its first tensors are the inputs, those that it returns the outputs."""

    @property
    def repeatable(self) -> bool:
        """Whether a later run does the same as the first, and nothing else."""
        return not (self.random or self.once or self.updates)

    @property
    def label(self) -> str:
        """How to call the operator in front of a person."""
        return self.name or self.id

    @property
    def reads(self) -> tuple[int, ...]:
        """The inputs whose values are read."""
        if not self.shape_only:
            return self.inputs
        skip = set(self.shape_only)
        return tuple(t for k, t in enumerate(self.inputs) if k not in skip)

    @property
    def changes(self) -> tuple[int, ...]:
        """Tensors that are there before, and that its first run writes to."""
        found = [t for t in self.outputs if t in self.inputs]
        found += [self.inputs[k] for k in self.updates]
        found += self.inputs[:1] if self.kind == ACCUMULATE else ()
        return tuple(dict.fromkeys(found))

    @property
    def reads_again(self) -> tuple[int, ...]:
        """The inputs that a later run reads; what the first one updated in passing is not among them."""
        updates = {self.inputs[k] for k in self.updates}
        return tuple(t for t in self.reads if t not in updates) if updates else self.reads


class Graph(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A step: its tensors, and its operators in program order.

    ``ordered`` is False for documents that list operators without saying in which order they ran or
    which tensor each one read; nothing can be said about lifetimes there.
    """

    tensors: tuple[Tensor, ...] = ()
    ops: tuple[Op, ...] = ()
    name: str = ""
    ordered: bool = True
    attributes: Attributes = {}
    returned: tuple[int, ...] = ()
    """Tensors that the step gives back."""
    updated: tuple[int, ...] = ()
    """Parameters, buffers and inputs that the step changes."""
    updated_early: tuple[int, ...] = ()
    """Those among them that forward changes on its way."""

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from lowtide.graph.shown import graph_html

        return graph_html(self)

    def storages(self) -> list[int]:
        """For every tensor the position of the tensor that owns its bytes."""
        owners = [k if t.alias is None else -1 for k, t in enumerate(self.tensors)]
        for k in range(len(owners)):
            chain: dict[int, None] = {}
            at = k
            while owners[at] < 0:
                if at in chain:
                    raise GraphError(f"tensor {self.tensors[at].id!r} is a view of itself", tensor=at)
                chain[at] = None
                at = self.tensors[at].alias or 0
            for member in chain:
                owners[member] = owners[at]
        return owners

    def saved_for_backward(self) -> list[int]:
        """Tensors written by the forward phase whose value a later phase reads, in the order written."""
        forward = {t: None for op in self.ops if op.phase is Phase.FORWARD for t in op.outputs}
        later = {t for op in self.ops if op.phase is not Phase.FORWARD for t in op.reads}
        return [t for t in forward if t in later]
