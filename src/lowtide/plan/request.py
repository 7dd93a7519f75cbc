"""What is asked of a plan, made once where the user asks for it, and what the device has for the step."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from lowtide.errors import PlanError
from lowtide.graph import Role
from lowtide.plan.budget import Budget, parse_budget
from lowtide.plan.program.copy_lanes import Link
from lowtide.suggest import did_you_mean

__all__ = [
    "AUTO",
    "GRAPHS",
    "KERNELS",
    "METHODS",
    "MOVABLE",
    "ORIGINS",
    "DeviceRoom",
    "Limits",
    "PlanRequest",
    "PlanTask",
    "Progress",
    "parse_offload",
    "usual_methods",
]

METHODS = ("recompute", "offload", "tile")
AUTO = "auto"
KERNELS = ("eager", "fused")
GRAPHS = ("off", "auto")
ORIGINS = ("measured", "estimated")
MOVABLE = {"parameters": Role.PARAMETER, "optimizer": Role.OPTIMIZER}
"""What a user may allow to be offloaded besides activations."""

Progress = Callable[[float, float | None, float, float | None], None]
"""Called with seconds so far, best overhead (or None), bound, and gap; overheads in seconds of the step."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a search may take, where it starts, and who watches."""

    time_limit: float = 10.0
    seed: int = 0
    progress: Progress | None = None

    def __post_init__(self) -> None:
        limit, seed = self.time_limit, self.seed
        if not isinstance(limit, int | float) or isinstance(limit, bool) or not 0 <= limit < inf:
            raise PlanError(f"time_limit={limit!r}: give a number of seconds to search")
        if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed <= 2**48:
            raise PlanError(f"seed={seed!r}: a seed is a whole number from 0 to {2**48}")

    def within(self, seconds: float) -> Limits:
        """The same for so many seconds."""
        return replace(self, time_limit=seconds)


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What a user asks of a plan."""

    budget: Budget
    methods: tuple[str, ...] = ("recompute",)
    cost: str = "measured"
    limits: Limits = field(default_factory=Limits)
    cache: bool = True
    offload: tuple[str, ...] = ()
    """What may be offloaded besides activations."""
    optimizer: Any = None
    crossing: bool = True
    """Whether parameters may be on the host between forward and backward."""
    auto: bool = False
    """Whether methods are chosen here: those that keep all bits, and tiles where nothing else fits.

    With fused kernels, or where bits may differ, tiles also where they are faster.
    """
    kernels: str = "eager"
    """Whether operators run as eager PyTorch's kernels, or fused in groups."""
    exact: bool = True
    """Whether results must be those of eager PyTorch bit for bit wherever a plan can have them so."""
    graphs: str = "off"
    """Whether a step on CUDA is replayed as CUDA graphs where it can be."""
    reserved: int = 0
    """What may be reserved on the device, where the budget is a part of that; 0 for any number of bytes."""
    smallest_seconds: float = 0.0
    """How long to look for the smallest budget once a plan is found."""

    @classmethod
    def of(cls, budget: str | int | Budget, **options: Any) -> PlanRequest:
        """A request from what users write; a PlanError names what is wrong."""
        only = options.pop("only", AUTO)
        options["auto"] = only in (AUTO, (AUTO,), [AUTO])
        chosen = _methods("recompute" if options["auto"] else only)
        options["offload"] = parse_offload(options.get("offload", ()))
        if options["offload"] and "offload" not in chosen:
            chosen = (*chosen, "offload")
        for name, words in (("cost", ORIGINS), ("kernels", KERNELS), ("graphs", GRAPHS)):
            if (word := options.get(name, words[0])) not in words:
                near, plural = did_you_mean(str(word), words), name.removesuffix("s") + "s"
                raise PlanError(f"{plural} are {' or '.join(words)}, not {word!r}.{near}")
        limits = {key: options.pop(key) for key in ("time_limit", "seed", "progress") if key in options}
        found = parse_budget(budget)
        if found.reserved:
            options["reserved"], found = found.bytes, Budget(bytes=found.bytes)
        return cls(found, chosen, limits=Limits(**limits), **options)

    def on(self, device: str) -> PlanRequest:
        """The same with methods chosen for a kind of device, where that is left to us."""
        if not self.auto:
            return self
        chosen = dict.fromkeys([*self.methods, *usual_methods(device), "tile"])
        return replace(self, methods=tuple(chosen))

    def without(self, method: str) -> PlanRequest:
        """The same by the other methods."""
        return replace(self, methods=tuple(one for one in self.methods if one != method))

    def within(self, seconds: float) -> PlanRequest:
        """The same with so many seconds for the search."""
        return replace(self, limits=self.limits.within(seconds))

    @property
    def tiles(self) -> bool:
        """Whether the step may be cut into tiles."""
        return "tile" in self.methods

    @property
    def tiles_compete(self) -> bool:
        """Whether tiles are looked for wherever they may be faster, not only where nothing else fits.

        They change bits, as fused kernels do.
        """
        return self.tiles and (self.kernels == "fused" or not self.auto or not self.exact)


@dataclass(frozen=True, slots=True)
class DeviceRoom:
    """What the device has for a step."""

    outside_bytes: int = 0
    """What is on the device outside the step."""
    free_bytes: int | None = None
    """What the budget ``auto`` stands for."""
    link: Link | None = None
    """How fast copies to the host and back are; needed for offload."""
    pinned: Collection[int] = ()
    """Parameters and inputs that cannot leave the device."""

    def of_tiles(self) -> DeviceRoom:
        """The same for tiles: none of them is a part of its own, which would end with its copies done."""
        return self if self.link is None else replace(self, link=replace(self.link, settles=False))


@dataclass(frozen=True, slots=True)
class PlanTask:
    """What one step is planned for: a request in bytes, on a device."""

    request: PlanRequest
    room: DeviceRoom
    budget: int
    plain_peak: int
    able: tuple[int, ...]
    """Operators that may run in place."""

    @property
    def step_budget(self) -> int:
        """What the step itself may take."""
        return self.budget - self.room.outside_bytes

    @property
    def methods(self) -> tuple[str, ...]:
        """How the plan may save memory; tiles are planned apart."""
        return self.request.without("tile").methods


def usual_methods(device: str) -> tuple[str, ...]:
    """Methods that keep all bits and may help on a kind of device."""
    return ("recompute", "offload") if device == "cuda" else ("recompute",)


def parse_offload(value: object) -> tuple[str, ...]:
    """What may be offloaded besides activations, from ``"parameters,optimizer"`` or a list of such words."""
    listed = value.split(",") if isinstance(value, str) else value
    words = list(listed) if isinstance(listed, list | tuple | set | frozenset) else [listed]
    found = [word.strip() if isinstance(word, str) else word for word in words if word not in (None, "")]
    for word in found:
        if word not in MOVABLE:
            near = did_you_mean(str(word), MOVABLE)
            raise PlanError(f"offload: there is no {word!r}; known: {', '.join(MOVABLE)}.{near}")
    return tuple(name for name in MOVABLE if name in found)


def _methods(only: Any) -> tuple[str, ...]:
    """Methods as users write them."""
    listed = only.split(",") if isinstance(only, str) else only
    chosen = tuple(listed) if isinstance(listed, list | tuple | set | frozenset) else (listed,)
    for method in chosen:
        if method not in METHODS:
            near = did_you_mean(str(method), METHODS)
            raise PlanError(f"there is no method {method!r}; known: {', '.join(METHODS)}, or auto.{near}")
    if set(chosen) == {"tile"}:
        raise PlanError("only='tile': allow another method beside tiles, as in recompute,tile")
    return chosen
