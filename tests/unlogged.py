"""What torch computes for its logs alone, at every compilation."""

from torch import fx
from torch._dynamo import guards, utils

UNLOGGED = (
    (guards, "profile_guard_manager", lambda *_: 0.0),  # empties the processor's caches to time the guards
    (fx.GraphModule, "print_readable", lambda *_, **__: ""),  # AOTAutograd prints each graph, logged or not
    (utils, "record_compilation_metrics", lambda *_: None),  # writes down every setting of the compiler
)
"""An owner, a name in it, and what takes its place."""
