"""What a process says of its communications: the operators of the user's step that they are for."""

import torch

from lowtide.execute.shards.split import SplitStep, cut_model
from lowtide.graph import EXCHANGE, SUM
from lowtide.trace.distributed.wires import connect
from lowtide.trace.shards.local import local_step
from lowtide.trace.step.capture import capture
from tests.trace.shards.devices import Hub, ThreadWire
from tests.trace.shards.test_local import Captured, split


def test_communications_are_called_after_the_operators_of_the_step():
    case = Captured("own")
    shards = split(case, 2, "height")
    connect("labels", ThreadWire(Hub(2), 0))
    try:
        parts = SplitStep(case.joint, local_step(case.joint, shards, 0, ["labels"]), ["labels"])
        cut_model(case.model, parts.boxes)
        pairs = zip(parts.inputs, (torch.float64, torch.int64), strict=True)
        batch = [torch.zeros(box.shape, dtype=dtype) for (_, _, box), dtype in pairs]
        graph = capture(parts.step, case.model, *batch).joint.graph
    finally:
        connect("labels", None)
    labels = {parts.label(graph, op) for op in graph.ops if op.kind in (EXCHANGE, SUM)}
    convolutions = ("first.weight", "first.bias", "second.weight", "second.bias")
    assert {f"the gradient of {name}" for name in convolutions} <= labels
    assert {
        "second (forward)",
        "second (backward)",
    } <= labels  # the first reads its rows of the batch at once
