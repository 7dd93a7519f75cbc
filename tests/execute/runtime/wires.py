"""A wire that a test looks at."""

from contextlib import contextmanager

import torch

from lowtide.trace.distributed.wires import connect

NAME = "a wire that tests look at"


@contextmanager
def looked_at(wire):
    """The wire has its name inside."""
    torch._dynamo.reset()
    connect(NAME, wire)
    try:
        yield wire
    finally:
        connect(NAME, None)
