import pytest

from lowtide.errors import GraphError
from lowtide.graph import LOOP, Graph, Op, Role, Tensor, check_fields

TENSORS = (Tensor("x", 8, Role.INPUT, shape=(2,)), Tensor("y", 8, shape=(2,)), Tensor("z", 8))


def step(kind="aten.add", of_graph=None, **fields):
    op = Op("op", kind, inputs=(0,), outputs=(1, 2), **fields)
    return Graph(TENSORS, (op,), **(of_graph or {}))


SOUND = [
    step(),
    step(of_graph={"returned": (1,), "updated": (), "updated_early": (0, 2)}),
    step(updates=(0,), short=(1,), overload="default", differentiates="other"),
    step(arguments=({"input": 0}, [{"input": 0}, 3, None], "text"), options={"dim": 1, "out": {"input": 0}}),
    step(strides=((1,),)),
    step(strides=(None,)),
    step(LOOP, axes=(4, 0)),
]


@pytest.mark.parametrize("graph", SOUND, ids=lambda graph: str(graph.ops[0])[-60:])
def test_what_lowtide_writes_is_sound(graph):
    assert check_fields(graph) is graph


DAMAGED = [
    (step(of_graph={"returned": (3,)}), "'returned' of the graph"),
    (step(of_graph={"updated": (-1,)}), "'updated' of the graph"),
    (step(of_graph={"updated_early": (True,)}), "'updated_early' of the graph"),
    (step(updates=(1,)), "'updates' of operator 'op' does not list inputs"),
    (step(short=(2,)), "does not list outputs"),
    (step(LOOP, axes=(-1,)), "does not list lengths"),
    (step(arguments=({"input": 1},)), "does not list arguments"),
    (step(arguments=({"input": 0.0},)), "does not list arguments"),
    (step(arguments=([[{"x": 0}]],)), "does not list arguments"),
    (step(options={"out": {"input": -1}}), "does not hold arguments by name"),
    (step(strides=((1,), (1,))), "does not hold strides"),
    (step(strides=((1, 1),)), "does not hold strides"),
]


@pytest.mark.parametrize(("graph", "message"), DAMAGED, ids=lambda value: str(value)[-60:])
def test_the_first_field_that_refers_to_nothing_is_named(graph, message):
    with pytest.raises(GraphError, match=message):
        check_fields(graph)
