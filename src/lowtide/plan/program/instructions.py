"""Program: a plan as a straight line of instructions.

A Program is data. It names operators and tensors by their position in the graph; a tensor that was
dropped may be made again by running its producer again. Storing everything is just the longest-lived
Program.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from lowtide.graph import Graph, Rect, upgraded

__all__ = ["Body", "Drop", "Fetch", "Instruction", "Loop", "Program", "Run", "Send", "Tile"]


class Run(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag="run", gc=False):
    """Run an operator: its outputs exist from here on, for the first time or again."""

    op: int
    in_place: int | None = None
    """Position in the operator's inputs of the tensor whose storage the first output takes over."""
    short: bool = False
    """Make the first output alone again, from others that the first run gave: a BatchNorm's statistics."""
    beside: int = 0
    """Go on with what follows while this exchange is on its way, which takes so many bytes; 0: wait for it.

    It ends before the next communication, before whatever reads, sends or drops its result, and with its part
    of the Program."""


class Tile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """One turn of a loop: which body, and for which box of the axes that are cut."""

    body: int
    over: Rect


class Loop(Run, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag="loop", gc=False):
    """Run an operator that stands for a region of the step, tile after tile.

    Each tile runs a body of the Program on its parts of the operator's inputs, and adds to the outputs or
    makes its part of them.
    """

    tiles: tuple[Tile, ...] = ()
    cut: tuple[str, ...] = ()
    """Tensors of the captured step at which the region begins; none: its inputs."""
    end: str = ""
    """The tensor of the captured step at which the region ends; none: the loss. It is two loops then: one
    that computes the boxes of this tensor, and one in backward that adds to gradients."""
    channels_last: bool = False
    """Whether images lie in memory with the channels of a pixel side by side, inside tiles."""
    own: str = ""
    """The input of the captured step whose gradient tiles make side by side; none: they add to gradients."""


class Drop(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="drop", gc=False):
    """Let go of tensors; a storage is free once no tensor on it is held."""

    tensors: tuple[int, ...]


class Send(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="send", gc=False):
    """Start to copy a tensor, with all of its storage, to the host.

    It stays on the device until it is dropped, and the drop waits for the copy to end.
    """

    tensor: int


class Fetch(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="fetch", gc=False):
    """Start to copy a tensor back from the host: its memory is taken here, and who reads it first waits."""

    tensor: int


Instruction = Run | Loop | Drop | Send | Fetch


class Program(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Instructions of the forward part, and of the backward part, which autograd may ask for later."""

    forward: tuple[Instruction, ...]
    backward: tuple[Instruction, ...] = ()
    bodies: tuple[Body, ...] = ()
    """What loops run, a step of its own each."""
    split: tuple[str, ...] = ()
    """Which convolutions of the step run in less memory, by their ids: it has other operators then.

    A ``*`` stands for every one that can. Files of older versions do not say it."""
    lowtide: Literal["program"] = "program"
    version: Literal[1, 2] = 2

    @property
    def instructions(self) -> tuple[Instruction, ...]:
        """Both parts, one after the other."""
        return self.forward + self.backward

    def upgraded(self) -> Program:
        """The same as this version writes it, where it is from a file of the version before."""
        bodies = tuple(
            msgspec.structs.replace(body, graph=upgraded(body.graph), program=body.program.upgraded())
            for body in self.bodies
        )
        return msgspec.structs.replace(self, bodies=bodies, version=2)


class Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The step of one tile, and the Program that runs it."""

    graph: Graph
    program: Program
    workspace_bytes: tuple[int, ...] = ()
    seconds: tuple[float, ...] = ()
    """What each of its operators was taken to cost."""
    able: tuple[int, ...] = ()
    """Its operators that may run in place. Files of older versions say of none that it may."""
