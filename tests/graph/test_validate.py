import msgspec
import pytest

from lowtide.errors import GraphError
from lowtide.graph import GROUP, Graph, Op, Phase, Role, Tensor, validate

X = Tensor("x", 4, Role.INPUT)
Y = Tensor("y", 4)

CONTRADICTIONS = {
    "used twice": Graph((X, X)),
    "operator id": Graph((X,), (Op("a", "k"), Op("a", "k"))),
    "sizes lie": Graph((Tensor("x", -1),)),
    "2\\^60": Graph((Tensor("x", 2**61),)),
    "negative dimension": Graph((Tensor("x", 4, shape=(2, -1)),)),
    "is a view of tensor 7": Graph((Tensor("x", 4, alias=7), Y)),
    "view of itself": Graph((Tensor("x", 4, alias=1), Tensor("y", 4, alias=0))),
    "gradient of": Graph((Tensor("x", 4, gradient_of=7),)),
    "refers to tensor": Graph((X,), (Op("a", "k", inputs=(1,)),)),
    "shape-only": Graph((X,), (Op("a", "k", inputs=(0,), shape_only=(1,)),)),
    "waits for": Graph((X,), (Op("a", "k", after=(0,)),)),
    "ports": Graph((X,), (Op("a", "k", inputs=(0,), input_ports=("p", "q")),)),
    "before any operator": Graph((X, Y), (Op("a", "k", inputs=(1,)), Op("b", "k", outputs=(1,)))),
}


@pytest.mark.parametrize("message", CONTRADICTIONS)
def test_contradictions_are_named(message):
    with pytest.raises(GraphError, match=message):
        validate(CONTRADICTIONS[message])


def test_an_operator_cannot_read_what_it_alone_writes():
    with pytest.raises(GraphError, match="cycle"):
        validate(Graph((Y,), (Op("a", "k", inputs=(0,), outputs=(0,)),)))


def test_the_gradient_that_starts_backward_comes_from_outside():
    seed = Tensor("g", 4, Role.GRADIENT)
    graph = Graph((seed,), (Op("a", "k", Phase.BACKWARD, inputs=(0,)),))
    assert validate(graph) is graph


def test_an_unordered_graph_may_read_before_it_writes():
    validate(Graph((X, Y), (Op("a", "k", inputs=(1,)), Op("b", "k", outputs=(1,))), ordered=False))


def test_shape_only_inputs_are_not_read():
    graph = Graph((X, Y), (Op("a", "k", inputs=(0, 1), shape_only=(1,)), Op("b", "k", outputs=(1,))))
    assert validate(graph).ops[0].reads == (0,)


def test_what_backward_needs_is_what_forward_wrote_and_backward_reads():
    tensors = (X, Y, Tensor("z", 4), Tensor("g", 4, Role.GRADIENT))
    ops = (
        Op("f", "k", inputs=(0,), outputs=(1, 2)),
        Op("b", "k", Phase.BACKWARD, inputs=(3, 0, 1, 2), shape_only=(2,)),
    )
    assert validate(Graph(tensors, ops)).saved_for_backward() == [2]


def grouped(**changed):
    """A step of one group, which doubles and then squares."""
    source = Tensor("x", 32, Role.INPUT, shape=(8,), dtype="float32")
    made = [Tensor(name, 32, shape=(8,), dtype="float32") for name in ("a", "b")]
    ops = Op("0", "aten.mul", inputs=(0,), outputs=(1,)), Op("1", "aten.square", inputs=(1,), outputs=(2,))
    body = Graph((source, *made), ops, returned=(2,))
    fields = {"id": "group", "kind": GROUP, "inputs": (0,), "outputs": (1,), "body": body, **changed}
    return Graph((source, made[1]), (Op(**fields),), returned=(1,))


def test_a_group_takes_and_gives_what_its_body_does():
    group = validate(grouped())
    body = group.ops[0].body
    assert body is not None
    nested = msgspec.structs.replace(body, ops=(*body.ops, Op("2", GROUP, body=body)))
    wrong = {
        "takes and gives other tensors": {"inputs": ()},
        "nothing else has one": {"kind": "aten.mul"},
        "a group has a body": {"body": None},
        "a group inside a group": {"body": nested},
        "the body of operator 'group'": {"body": msgspec.structs.replace(body, ops=body.ops[::-1])},
    }
    for message, fields in wrong.items():
        with pytest.raises(GraphError, match=message):
            validate(grouped(**fields))
