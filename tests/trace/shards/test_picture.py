"""Pictures of a split step: on one device that of document 002, node by node."""

import pytest
import torch

from lowtide import zoo
from lowtide.formats import dataflow
from lowtide.graph import Rect, Role
from lowtide.graph.shards import Mesh, OperatorShare, Shards, box_of
from lowtide.trace.shards.picture import picture, pictures
from lowtide.trace.step.capture import capture
from lowtide.zoo.locallyconnected import DRAWN, LocallyConnected


@pytest.fixture(scope="module")
def joint():
    """The step of the document; its values are never looked at."""
    batch = [torch.empty(256, 1, 41, 41), torch.empty(256, 1, 1, 1, dtype=torch.int32)]
    return capture(zoo.network("locallyconnected").loss, LocallyConnected(), *batch).joint


def ends(graph, op):
    return (
        [(port, graph.tensors[t].id) for port, t in zip(op.input_ports, op.inputs, strict=True)],
        [(port, graph.tensors[t].id) for port, t in zip(op.output_ports, op.outputs, strict=True)],
    )


def test_one_device_is_document_002(joint, documents):
    drawn = picture(joint, Shards(Mesh((1,)), {}, {}), 0, DRAWN)
    document = dataflow.read(documents["002"]).graph
    ours, theirs = ({one.id: one for one in graph.tensors} for graph in (drawn, document))
    assert ours.keys() == theirs.keys()
    for name, one in theirs.items():
        assert list(ours[name].boxes.items()) == list(one.boxes.items()), name
        for key in ("shape", "role", "bytes"):
            assert getattr(ours[name], key) == getattr(one, key), name
    ours, theirs = ({one.id: one for one in graph.ops} for graph in (drawn, document))
    assert ours.keys() == theirs.keys()
    for name, one in theirs.items():
        assert list(ours[name].boxes.items()) == list(one.boxes.items()), name
        assert ours[name].attributes.get("result_dim") == one.attributes.get("result_dim"), name
        assert (ours[name].kind, ours[name].phase) == (one.kind, one.phase), name
        if name != "classifier.softmax.grad":  # the document's needs no scores; a drawing has all inputs
            assert ends(drawn, ours[name]) == ends(document, one), name


def test_rows_of_the_second_layer_on_four_devices(joint):
    """Each device computes some rows, and reads six more of the layer before."""
    graph, mesh = joint.graph, Mesh((4,))
    own = [k for k, op in enumerate(graph.ops) if op.phase.value == "forward" and op.name.startswith("L1.")]
    shares = {}
    for k in own:
        shape = graph.tensors[graph.ops[k].outputs[0]].shape
        if 27 in shape and len(shape) == 4:
            shares[k] = OperatorShare((shape.index(27),), (None,))
    weight = next(t for t, one in enumerate(graph.tensors) if one.label == "L1.W")
    shards = Shards(mesh, {weight: (6,)}, shares)
    for rank in range(4):
        drawn = picture(joint, shards, rank, DRAWN)
        tensors = {one.id: one for one in drawn.tensors}
        rows = box_of((27,), (0,), mesh, rank)
        lo, hi = rows.lo[0], rows.hi[0]
        written = Rect((0, 0, lo, 0), (256, 64, hi, 27))
        assert tensors["L1.filterNL.output"].boxes["write_rect"] == written
        assert tensors["L1.filterNL.output"].boxes["read_rect"] == Rect.of_shape((256, 64, 27, 27))
        assert tensors["L1.W"].bytes == 64 * 64 * 49 * (hi - lo) * 27 * 4
        update = next(op for op in drawn.ops if op.id == "update_L1.W")
        assert update.boxes["dist_result"].shape[6] == hi - lo


def test_several_devices_side_by_side(joint):
    drawn = pictures(joint, Shards(Mesh((2,)), {}, {}), range(2), DRAWN)
    assert len(drawn.ops) == 2 * 41
    assert {one.id.partition("/")[0] for one in drawn.tensors} == {"0", "1"}
    assert sum(one.role is Role.PARAMETER for one in drawn.tensors) == 14
