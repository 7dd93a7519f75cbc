import json

import pytest

from lowtide.cost import Cost, Figure, Note, NoteKind, Origin, Span, Step
from lowtide.errors import FormatError
from lowtide.formats import native
from lowtide.graph import Category, Graph, Kernel, Lifetime, Op, Phase, Rect, Role, Source, Tensor, Timeline

FULL = Step(
    graph=Graph(
        tensors=(
            Tensor("x", 8, Role.INPUT, "image", (2, 1), "float32", "cuda:0", address=512),
            Tensor(
                "y",
                8,
                Role.ACTIVATION,
                alias=0,
                boxes={"read_rect": Rect((0,), (2,)), "write_rect": None},
                source=Source("model.py", 12),
                attributes={"stride": [1, None, {"deep": 1.5}]},
            ),
            Tensor("g", 8, Role.GRADIENT, gradient_of=0),
        ),
        ops=(
            Op(
                "f",
                "conv",
                Phase.FORWARD,
                (0,),
                (1,),
                "layer1.conv",
                Category.LAYOUT,
                "cuda:0",
                ("input",),
                ("output",),
                kernels=(Kernel("cudnn", "cuda:0", {"time": 3}),),
                boxes={"dist_result": Rect((0, 0), (1, 2))},
                source=Source("model.py", 14),
            ),
            Op("b", "conv.grad", Phase.BACKWARD, (1, 0), (2,), shape_only=(1,), after=(0,)),
        ),
        name="tiny",
        attributes={"seed": 1},
    ),
    format="capture",
    costs=(
        Cost(Figure(1e-3, Origin.MEASURED), Figure(10, Origin.ESTIMATED), None, Figure(64, Origin.MEASURED)),
        Cost(),
    ),
    spans=(Span(0, "cuda:0", 0.0, 0.5, 1.0), Span(0, "main", 0.0, 0.1, 0.2, host=True)),
    notes=(Note(NoteKind.REPAIR, "because", 3, "O", "0"),),
    timeline=Timeline((8, 16), (Lifetime(0, 8, 0, 1),), (0, 4), (0.5, 0.25)),
)


def test_every_field_comes_back():
    assert native.read(native.write(FULL).data) == FULL


def test_the_file_says_what_it_is():
    document = json.loads(native.write(FULL).data)
    assert document["lowtide"] == "step"
    assert document["version"] == native.VERSION == 2


def test_writing_is_deterministic():
    assert native.write(FULL).data == native.write(native.read(native.write(FULL).data)).data


def altered(change):
    document = json.loads(native.write(FULL).data)
    change(document)
    return json.dumps(document).encode()


CHANGES = {
    "a later version": (lambda d: d.update(version=3), "version 2"),
    "another kind of file": (lambda d: d.update(lowtide="plan"), "enum value 'plan'"),
    "an unknown field": (lambda d: d["step"]["graph"]["ops"][0].update(knd=1), "unknown field"),
    "text for bytes": (lambda d: d["step"]["graph"]["tensors"][1].update(bytes="8"), "Expected `int`"),
    "an unknown role": (lambda d: d["step"]["graph"]["tensors"][1].update(role="boss"), "enum value 'boss'"),
    "a missing id": (lambda d: d["step"]["graph"]["tensors"][1].pop("id"), "required field `id`"),
    "a dangling tensor": (lambda d: d["step"]["graph"]["ops"][0].update(inputs=[9]), "refers to tensor 9"),
    "a negative size": (lambda d: d["step"]["graph"]["tensors"][1].update(bytes=-8), "-8 bytes"),
    "too few costs": (lambda d: d["step"]["costs"].pop(), "1 costs for 2 operators"),
    "a negative cost": (lambda d: d["step"]["costs"][0]["seconds"].update(value=-1), "cost of operator 0"),
    "a span of nobody": (lambda d: d["step"]["spans"][0].update(op=5), "operator 5"),
    "a span out of order": (lambda d: d["step"]["spans"][0].update(end=0.1), "out of order"),
    "a short timeline": (lambda d: d["step"]["timeline"]["seconds"].pop(), "1 seconds for 2 steps"),
    "a lifetime outside": (
        lambda d: d["step"]["timeline"]["lifetimes"][0].update(last=9),
        "outside the timeline",
    ),
    "a box of two ranks": (
        lambda d: d["step"]["graph"]["ops"][0]["boxes"]["dist_result"].update(lo=[0]),
        "as many upper",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_broken_files_say_where_and_what_is_wrong(name):
    change, message = CHANGES[name]
    data = altered(change)
    with pytest.raises(FormatError) as caught:
        native.read(data)
    assert message in str(caught.value)
    assert 0 <= caught.value.byte <= len(data)


def test_the_byte_points_at_the_field_to_blame():
    data = altered(lambda d: d["step"]["graph"]["tensors"][1].update(bytes="eight"))
    with pytest.raises(FormatError) as caught:
        native.read(data)
    assert data[caught.value.byte :].startswith(b'"eight"')
    data = altered(lambda d: d["step"]["graph"]["tensors"][1].update(bytes=-8))
    with pytest.raises(FormatError) as caught:
        native.read(data)
    assert json.loads(data[caught.value.byte :].split(b"}")[0].split(b",")[0] + b"}") == {"id": "y"}


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff", b"null", b'{"lowtide":' * 3000])
def test_what_is_no_step_is_refused(data):
    with pytest.raises(FormatError):
        native.read(data)


def test_every_truncation_is_noticed():
    data = native.write(FULL).data.rstrip()
    for count in range(len(data)):
        with pytest.raises(FormatError):
            native.read(data[:count])
