"""Small steps whose costs can be worked out by hand, captured and run with a marker."""

import functools

import torch

from lowtide.execute.backend import compile_with
from lowtide.plan.program.simple import store_all


class Captured:
    """A captured step: ``run(marker)`` runs it once, forward and backward."""

    def __init__(self, function, *example, trains=True):
        made = []
        backend = functools.partial(compile_with, planner=store_all, watch=made.append, in_place=False)
        torch._dynamo.reset()
        self.compiled = torch.compile(function, backend=backend, dynamic=False)
        self.example, self.trains = example, trains
        self.step()
        self.interpreter = made[0]
        self.graph = made[0].joint.graph
        self.targets = [call.target for call in made[0].joint.calls]

    def step(self):
        with torch.set_grad_enabled(self.trains):
            result = self.compiled(*self.example)
        if self.trains:
            result.backward()
        return result

    def run(self, marker):
        self.interpreter.marker = marker
        try:
            return self.step()
        finally:
            self.interpreter.marker = None

    def op(self, kind, number=0):
        """The position of an operator of this kind, counted from 0."""
        return [k for k, op in enumerate(self.graph.ops) if op.kind == f"aten.{kind}"][number]


def parameter(*shape):
    return torch.randn(*shape, requires_grad=True)
