import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.errors import GraphError
from lowtide.graph import RESIDENT_ROLES, Graph, Op, Phase, Role, Tensor, liveness, validate


@st.composite
def steps(draw):
    """Random training steps: leaves, views, in-place updates, shape-only inputs, leaf gradients, workspaces."""
    tensors = [
        Tensor(f"leaf{k}", draw(st.integers(0, 50)), draw(st.sampled_from([Role.PARAMETER, Role.INPUT])))
        for k in range(draw(st.integers(1, 3)))
    ]
    leaves = len(tensors)
    ops, readable = [], list(range(leaves))
    for k in range(draw(st.integers(1, 8))):
        inputs = draw(st.lists(st.sampled_from(readable), max_size=3))
        shape_only = tuple(p for p in range(len(inputs)) if draw(st.booleans()) and draw(st.booleans()))
        outputs = []
        for _ in range(draw(st.integers(0, 2))):
            how = draw(st.sampled_from(["new", "new", "view", "leaf gradient", "again"]))
            if how == "again" and len(readable) > leaves:
                outputs.append(draw(st.sampled_from(readable[leaves:])))
                continue
            tensor = Tensor(f"t{len(tensors)}", draw(st.integers(0, 50)))
            if how == "view" and len(readable) > leaves:
                tensor = Tensor(tensor.id, tensor.bytes, alias=draw(st.sampled_from(readable[leaves:])))
            if how == "leaf gradient":
                tensor = Tensor(
                    tensor.id, tensor.bytes, Role.GRADIENT, gradient_of=draw(st.integers(0, leaves - 1))
                )
            outputs.append(len(tensors))
            tensors.append(tensor)
        readable += [t for t in outputs if t not in readable]
        ops.append(Op(f"op{k}", "k", Phase.FORWARD, tuple(inputs), tuple(outputs), shape_only=shape_only))
    workspace = draw(st.lists(st.integers(0, 40), min_size=len(ops), max_size=len(ops)))
    return validate(Graph(tuple(tensors), tuple(ops))), workspace


def owner(graph, t):
    while graph.tensors[t].alias is not None:
        t = graph.tensors[t].alias
    return t


def slow_live_bytes(graph, workspace, every_input):
    """What is live at each operator, asked storage by storage and operator by operator."""
    live = []
    for now in range(len(graph.ops)):
        total = workspace[now]
        for k, tensor in enumerate(graph.tensors):
            if tensor.alias is not None:
                continue
            members = [m for m in range(len(graph.tensors)) if owner(graph, m) == k]
            uses = [
                step
                for step, op in enumerate(graph.ops)
                for t in ((*op.inputs, *op.outputs) if every_input else (*op.reads, *op.outputs))
                if t in members
            ]
            forever = tensor.role in RESIDENT_ROLES
            kept = any(
                graph.tensors[m].gradient_of is not None
                and graph.tensors[graph.tensors[m].gradient_of].role in RESIDENT_ROLES
                for m in members
            )
            if forever or (uses and min(uses) <= now and (kept or now <= max(uses))):
                total += tensor.bytes
        live.append(total)
    return live


@settings(max_examples=100, deadline=None)
@given(steps(), st.booleans())
def test_live_bytes_equal_the_definition_spelt_out(case, every_input):
    graph, workspace = case
    timeline = liveness(graph, workspace_bytes=workspace, every_input=every_input)
    expected = slow_live_bytes(graph, workspace, every_input)
    assert list(timeline.live_bytes) == expected
    assert timeline.peak_bytes == max(expected)
    assert timeline.peak_step == expected.index(max(expected))
    at = timeline.peak_step
    assert sum(one.bytes for one in timeline.live_at(at)) == timeline.peak_bytes - workspace[at]


def test_views_share_their_storage():
    tensors = (Tensor("a", 8), Tensor("view", 8, alias=0), Tensor("b", 4))
    ops = (
        Op("1", "k", outputs=(0,)),
        Op("2", "view", inputs=(0,), outputs=(1,)),
        Op("3", "k", inputs=(1,), outputs=(2,)),
    )
    timeline = liveness(Graph(tensors, ops))
    assert timeline.live_bytes == (8, 8, 12)


def test_a_view_may_stand_before_what_it_views():
    tensors = (Tensor("view", 8, alias=1), Tensor("a", 8))
    ops = (Op("1", "k", outputs=(1,)), Op("2", "view", inputs=(1,), outputs=(0,)))
    assert liveness(validate(Graph(tensors, ops))).live_bytes == (8, 8)


def test_leaf_gradients_stay_once_written():
    tensors = (
        Tensor("w", 10, Role.PARAMETER),
        Tensor("w.grad", 10, Role.GRADIENT, gradient_of=0),
        Tensor("x", 1),
    )
    ops = (Op("1", "k", outputs=(2,)), Op("2", "k", inputs=(2,), outputs=(1,)), Op("3", "k"))
    assert liveness(Graph(tensors, ops)).live_bytes == (11, 21, 20)


def test_between_operators_only_what_is_needed_later_stays():
    tensors = (Tensor("w", 10, Role.PARAMETER), Tensor("x", 1), Tensor("y", 2))
    ops = (Op("1", "k", outputs=(1, 2)), Op("2", "k", inputs=(2,)))
    assert liveness(Graph(tensors, ops)).bytes_between(0) == 12


def test_a_graph_without_order_has_no_lifetimes():
    with pytest.raises(GraphError, match="order"):
        liveness(Graph(ordered=False))


def test_an_empty_graph_has_an_empty_timeline():
    timeline = liveness(Graph())
    assert timeline.peak_step is None
    assert timeline.peak_bytes == 0
