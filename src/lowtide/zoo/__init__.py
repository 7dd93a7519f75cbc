"""The networks of the seeds and of the benchmarks, and steps from the user's own files."""

from lowtide.zoo.base import Built, Input, Key, Network, Settings, TargetError, sgd
from lowtide.zoo.target import CodeTarget, NetworkTarget, Target, build, names, network, parse, small

__all__ = [
    "Built",
    "CodeTarget",
    "Input",
    "Key",
    "Network",
    "NetworkTarget",
    "Settings",
    "Target",
    "TargetError",
    "build",
    "names",
    "network",
    "parse",
    "sgd",
    "small",
]
