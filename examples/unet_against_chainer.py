"""The U-Net of the zoo, captured from PyTorch, against the training graph that Chainer wrote of it.

python examples/unet_against_chainer.py     (seconds; nothing of the step is run)
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import lowtide
from lowtide import zoo
from lowtide.graph import Graph, Op, Phase, Role

DOCUMENT = Path(__file__).parent / "documents" / "000_1953327273121cc3.txt"
SAME = {
    "Convolution2DFunction": "aten.convolution",
    "Deconvolution2DFunction": "aten.convolution",
    "ReLU": "aten.relu",
    "MaxPooling2D": "aten.max_pool2d_with_indices",
    "GetItem": "aten.slice",
    "Concat": "aten.cat",
    "Dropout": "aten.mul",
}
"""Functions of Chainer, and the PyTorch operator that writes the same value."""


def layers(graph: Graph, kind: str) -> list[Op]:
    """Forward operators of a kind of Chainer's, in the order in which they run, in either graph."""
    ops = [op for op in graph.ops if op.phase is Phase.FORWARD]
    if any(op.kind == kind for op in ops):
        return [op for op in ops if op.kind == kind]
    ours = [op for op in ops if op.kind == SAME[kind]]
    if SAME[kind] == "aten.convolution":  # the seventh argument says whether it is transposed
        return [op for op in ours if op.arguments[6] == (kind == "Deconvolution2DFunction")]
    if kind == "GetItem":  # rows, then columns: the second slice is the crop
        return [op for op in ours if op.arguments[1] == 3]
    return ours


def written(graph: Graph, ops: Sequence[Op]) -> list[int]:
    """Bytes of the first result of each."""
    return [graph.tensors[op.outputs[0]].bytes for op in ops]


def parameters(graph: Graph) -> list[int]:
    """Bytes of the parameters, in the order in which forward first reads them."""
    read = dict.fromkeys(t for op in graph.ops if op.phase is Phase.FORWARD for t in op.reads)
    return [graph.tensors[t].bytes for t in read if graph.tensors[t].role is Role.PARAMETER]


def differences(ours: Graph, theirs: Graph) -> list[tuple[str, str, str]]:
    """What differs, in either framework."""

    def of(graph: Graph, phase: Phase, *kinds: str) -> list[Op]:
        return [op for op in graph.ops if op.phase is phase and op.kind in kinds]

    def size(graph: Graph, ops: Sequence[Op], result: int = 0) -> str:
        tensors = [graph.tensors[op.outputs[result]] for op in ops]
        return f"{len(ops)}, {sum(t.bytes for t in tensors if t.alias is None):,} bytes"

    def gradients(graph: Graph, op: Op) -> int:
        return sum(graph.tensors[t].role in (Role.GRADIENT, Role.ACTIVATION) for t in op.outputs)

    def of_inputs(graph: Graph) -> str:
        owners = [graph.tensors[t.gradient_of] for t in graph.tensors if t.gradient_of is not None]
        return str(sum(owner.role is Role.INPUT for owner in owners))

    forward, backward = Phase.FORWARD, Phase.BACKWARD
    masks = of(ours, forward, "aten.empty_like", "aten.bernoulli", "aten.div")
    pools = of(ours, forward, "aten.max_pool2d_with_indices")
    loss = of(ours, forward, "aten._to_copy", "aten._log_softmax", "aten.nll_loss2d_forward")
    products = of(ours, backward, "aten.convolution_backward")
    their_products = of(theirs, backward, "Convolution2DFunction", "Deconvolution2DFunction")
    split = [t for op in of(theirs, backward, "Concat") for t in op.outputs]
    parts = f"{len(split)}, {sum(theirs.tensors[t].bytes for t in split):,} bytes"
    sums = [op for op in theirs.ops if "accumulate" in op.input_ports]
    return [
        ("crops", size(theirs, layers(theirs, "GetItem")), size(ours, of(ours, forward, "aten.slice"))),
        ("gradients of crops", size(theirs, of(theirs, backward, "GetItem")),
         size(ours, of(ours, backward, "aten.slice_backward"))),
        ("gradients of concatenated parts", parts,
         size(ours, of(ours, backward, "aten.slice"))),
        ("gradients added up", f"{len(sums)}, in place", size(ours, of(ours, backward, "aten.add"))),
        ("places of the largest of a pool", "not listed", size(ours, pools, 1)),
        ("masks of dropout", "not listed", size(ours, masks)),
        ("loss in forward", size(theirs, of(theirs, forward, "SoftmaxCrossEntropy")), size(ours, loss)),
        ("gradients a convolution's backward gives",
         f"{sum(gradients(theirs, op) for op in their_products)} by {len(their_products)}",
         f"{sum(gradients(ours, op) for op in products)} by {len(products)}"),
        ("gradients of the inputs", of_inputs(theirs), of_inputs(ours)),
    ]  # fmt: skip


def main() -> None:
    """Print both sides."""
    theirs = lowtide.read(DOCUMENT).step
    built = zoo.build("unet")
    ours = lowtide.capture(built.loss, built.model, *built.batch).step
    same = parameters(ours.graph) == parameters(theirs.graph)
    count, total = len(parameters(ours.graph)), sum(parameters(ours.graph))
    print(f"{count} parameters of {total:,} bytes: {'equal' if same else 'DIFFERENT'}")
    for kind, operator in SAME.items():
        a, b = (written(step.graph, layers(step.graph, kind)) for step in (theirs, ours))
        word = "equal" if a == b else "DIFFERENT"
        print(f"{len(b):3} {operator} write what {kind} writes, {sum(b):,} bytes: {word}")
    print()
    rows = differences(ours.graph, theirs.graph)
    for name, step in (("Chainer", theirs), ("PyTorch", ours)):
        peak = step.lifetimes()
        phases = [
            sum(op.phase is phase for op in step.graph.ops) for phase in (Phase.FORWARD, Phase.BACKWARD)
        ]
        print(f"{name}: {phases[0]} forward, {phases[1]} backward operators, peak {peak.peak_bytes:,} bytes")
    print()
    print(f"{'':41} {'Chainer':25} PyTorch")
    for what, chainer, pytorch in rows:
        print(f"{what:41} {chainer:25} {pytorch}")


if __name__ == "__main__":
    main()
