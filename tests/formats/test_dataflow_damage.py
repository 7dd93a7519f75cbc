"""Data-flow pictures of other networks, with other damage: repaired where it can be proved, refused otherwise."""

from __future__ import annotations

import json
import random
import re

import msgspec
import pytest

from lowtide.cost import NoteKind, Step
from lowtide.errors import FormatError
from lowtide.formats import dataflow
from lowtide.formats.dataflow.scan import Use
from lowtide.graph import Graph, Rect, Role, validate
from tests.conftest import document_path
from tests.mutate import mutated

TEXT = document_path("002").read_text()
LINES = TEXT.split("\n")
SEED = dataflow.read(TEXT.encode())


def read(text: str) -> Step:
    return dataflow.read(text.encode())


def plain(graph: Graph) -> dict:
    """The graph as plain values, without the lines that its nodes stand on."""
    values = msgspec.to_builtins(graph)
    for item in values["tensors"] + values["ops"]:
        attributes = item.pop("attributes", {})
        item["result_dim"] = attributes.get("result_dim")
    return json.loads(json.dumps(values))


def renamed(graph: Graph, names: dict[str, str]) -> dict:
    """The plain values of the graph with layers called otherwise."""
    text = json.dumps(plain(graph))
    for before, after in names.items():
        text = text.replace(f"{before}.", f"{after}.")
    return json.loads(text)


def changed(line: int, before: str, after: str) -> str:
    """The document with one place of a line changed."""
    assert before in LINES[line - 1]
    return "\n".join([*LINES[: line - 1], LINES[line - 1].replace(before, after, 1), *LINES[line:]])


def without(*numbers: int) -> str:
    return "\n".join(line for number, line in enumerate(LINES, 1) if number not in numbers)


def box(rect: Rect | None) -> str:
    if rect is None:
        return "None"
    arrays = (f"array([{', '.join(map(str, bounds))}], dtype=int32)" for bounds in (rect.lo, rect.hi))
    return f"Rect({', '.join(arrays)})"


def drawn(graph: Graph) -> str:
    """The picture of a graph as text that nothing happened to, one node below the other."""
    blocks = []
    for item in sorted((*graph.tensors, *graph.ops), key=lambda item: item.attributes["line"]):
        boxes = [f"{key}={box(rect)}" for key, rect in item.boxes.items()]
        if item in graph.tensors:
            lines = [item.name, f"dim=[{' '.join(map(str, item.shape))}]", *boxes]
        else:
            result = item.attributes.get("result_dim")
            dims = [f"result_dim=[{' '.join(map(str, result))}]"] if result else []
            ins = [f"->{port}" for port in item.input_ports if port != "accumulate"]
            outs = [f"{port}->" for port in item.output_ports if port != "params"]
            lines = [" ".join(ins), item.name, *dims, *boxes, " ".join(outs)]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


CLEAN = drawn(SEED.graph)


def test_a_picture_without_damage_needs_no_repair():
    step = read(CLEAN)
    assert plain(step.graph) == plain(SEED.graph)
    kinds = {note.kind for note in step.notes}
    assert kinds == {NoteKind.ASSUMPTION}
    assert not any("rests on the names" in note.text for note in step.notes)


def test_other_layers():
    text = TEXT.replace("LO0O", "L22").replace("LO0", "L22").replace("LO", "L2")
    text = re.sub(r"\bL1l", "L3l", text).replace("Ll1", "L33").replace("Ll", "L3")
    text = re.sub(r"(?<![A-Za-z])L1\b|(?<=update_)L1\b", "L3", text)
    assert plain(read(text).graph) == renamed(SEED.graph, {"L1": "L3", "L0": "L2"})


def test_layers_with_numbers_that_look_alike():
    text = CLEAN.replace("L1.", "L8.").replace("L0.", "L5.")
    assert plain(read(text).graph) == renamed(SEED.graph, {"L1": "L8", "L0": "L5"})


def test_other_dimensions():
    text = TEXT.replace("33", "31").replace("27", "123").replace("256", "2048")
    step = read(text)
    shapes = {t.id: t.shape for t in step.graph.tensors}
    assert shapes["L1.W"] == (64, 1, 1, 64, 7, 7, 123, 123)
    assert shapes["classifier.linear1.output"] == (2048, 3034, 1, 1)
    assert shapes["L0.b.grad"] == (1, 64, 31, 31)
    assert {t.id for t in step.graph.tensors} == {t.id for t in SEED.graph.tensors}


def test_a_device_that_holds_a_part():
    text = CLEAN.replace(
        "array([0, 0, 0, 0], dtype=int32), array([256,", "array([128, 0, 0, 0], dtype=int32), array([256,"
    )
    step = read(text)
    raw = next(t for t in step.graph.tensors if t.id == "data.raw_output")
    assert raw.shape == (256, 1, 41, 41)
    assert raw.boxes["read_rect"] == Rect((128, 0, 0, 0), (256, 1, 41, 41))


def test_a_part_settles_no_damaged_dimensions():
    text = CLEAN.replace(
        "array([0, 0, 0, 0], dtype=int32), array([256,", "array([128, 0, 0, 0], dtype=int32), array([256,"
    )
    with pytest.raises(FormatError, match="data.raw_output"):
        read(text.replace("data.raw_output\ndim=[256 1 41 41]", "data.raw_output\ndim=[256 141 41]"))


def layers(count: int) -> str:
    """A picture of this many layers without a classifier, drawn without damage."""
    whole, filters = Rect((0,) * 4, (2, 3, 4, 4)), Rect((0,) * 4, (3, 3, 1, 1))
    out: list[str] = []

    def add(name: str, key: str, boxes: dict[str, Rect | None]) -> None:
        shape = (
            next(b for b in reversed(boxes.values()) if b).hi
            if key == "result_dim"
            else boxes["read_rect"].hi
        )
        dims = [f"{key}=[{' '.join(map(str, shape))}]"] if key else []
        out.extend([name, *dims, *(f"{k}={box(b)}" for k, b in boxes.items()), ""])

    held = {"read_rect": whole, "write_rect": whole}
    add("data", "result_dim", {"dist_result": whole})
    add("data.raw_output", "dim", held)
    for k in range(count):
        add(f"L{k}.W", "dim", {"read_rect": filters, "write_rect": None})
        op = {"dist_input": whole, "dist_filters": filters, "dist_result": whole}
        add(f"L{k}.filter", "result_dim", op)
        add(f"L{k}.filter.output", "dim", held)
    out.append(f"L{count - 1}.filter.output.grad.set_zero")
    add(f"L{count - 1}.filter.output.grad", "dim", held)
    for k in reversed(range(count)):
        below = [f"L{k}.W.grad"] + ([f"L{k - 1}.filter.output.grad"] if k else [])
        out.append(" ".join(f"{name}.set_zero" for name in below))
        add(f"L{k}.filter.grad", "result_dim", op)
        add(f"L{k}.W.grad", "dim", {"read_rect": filters, "write_rect": filters})
        if k:
            add(f"L{k - 1}.filter.output.grad", "dim", held)
        add(f"update_L{k}.W", "result_dim", {"dist_result": filters})
    return "\n".join(out)


@pytest.mark.parametrize("count", [1, 2, 11, 110])
def test_a_network_of_any_depth(count):
    step = read(layers(count))
    assert len(step.graph.tensors) == 1 + 4 * count
    assert len(step.graph.ops) == 1 + 3 * count + 2 * count
    assert not [n for n in step.notes if n.kind is not NoteKind.ASSUMPTION]
    validate(step.graph)
    step.lifetimes()


def test_too_many_nodes_are_refused():
    with pytest.raises(FormatError, match="more than 1000 names"):
        read(layers(200))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("L0.filterA.output\n", "L0.fi1terA.0utput\n"),
        ("classifier.softmax.grad\n", "c1assifier.softrnax.grad\n"),
        ("classifier.linear1.output\n", "classifier.linear1.output\n"),
        ("L1.filterNL.output.grad\n", "L1.filterNI..output.grad\n"),
        ("update_L1.W\n", "updale_L1.W\n"),
        ("L1.a.grad.set_zero\n", "L1.a grad set_ zerO\n"),
        ("->gradient", ">gradlent"),
        ("dim=[1 64 27 27]", "dim=[1 642727]"),
        ("dim=[1 64 27 27]", "dim=[l 64 27 27"),
        ("result_dim=[256 64 33 33]", "resu1t_dim=[256 64 3333]"),
        ("array([1, 64, 27, 27], dtype=int32)", "array([l, 64, 27,27], dtype=int32)"),
        ("array([1, 64, 27, 27], dtype=int32)", "arrav([1, 64, 27, 27], dtyqe=int32)"),
    ],
)
def test_damage_that_the_rest_of_the_document_undoes(before, after):
    assert before in CLEAN
    step = read(CLEAN.replace(before, after, 1))
    assert plain(step.graph) == plain(SEED.graph)
    if before != after:
        assert any(n.kind is NoteKind.REPAIR for n in step.notes)


def test_a_node_without_a_box_and_with_damaged_dimensions_is_refused():
    text = without(41)  # read_rect of L1.W and of its neighbour
    with pytest.raises(FormatError, match=r"L1\.W has dim=\[64 1 164 7 727 27\]") as caught:
        read(text)
    assert caught.value.line == 40


def test_dimensions_without_a_box_are_taken_only_when_other_boxes_have_as_many():
    undamaged = CLEAN.replace(f"read_rect={box(Rect((0,), (1,)))}\nwrite_rect=None", "write_rect=None", 1)
    assert plain(read(undamaged).graph)["tensors"][0] == plain(SEED.graph)["tensors"][0]
    with pytest.raises(FormatError, match=r"L0\.a has dim=\[1 1\]"):
        read(undamaged.replace("L0.a\ndim=[1]", "L0.a\ndim=[1 1]"))


def test_an_empty_box_settles_nothing_and_the_other_box_does():
    step = read(TEXT)
    why = next(n.text for n in step.notes if n.line == 97 and n.after == "[1 1 1 1]")
    assert "write_rect of classifier.softmax.output.grad" in why
    with pytest.raises(FormatError, match=r"classifier\.softmax\.output\.grad has dim=\[111 1\]"):
        read(changed(100, "array([1, 1, 1, 1]", "array([0, 0, 0, 0]"))


@pytest.mark.parametrize(
    ("line", "before", "after", "problem"),
    [
        (31, "dim=[256 64 33 33]", "dim=[256 64 39 33]", r"L0\.filterA\.output is \[256 64 39 33\]"),
        (31, "dim=[256 64 33 33]", "dim=[128 64 33 33]", r"L0\.filterA\.output has 'dim=\[128 64 33 33\]'"),
        (36, "[256 64 33 33]", "[256 64 33 34]", r"the result of L0\.filterNL is \[256 64 33 34\]"),
        (172, "[256 64 33 33]", "[256 64 33 99]", r"L0\.filterNL\.grad has 'result_dim=\[256 64 33 99\]'"),
        (17, "array([256, 1", "array([257, 1", r"dist_input of L0\.filter ends at \[257 1 41 41\]"),
        (33, "array([256", "array([999", r"write_rect of L0\.filterA\.output ends at \[999 64 33 33\]"),
        (4, "array([0, 0, 0, 0]", "array([0, 0, 0]", r"dist_result of data has 3 lower and 4 upper bounds"),
        (4, "array([0, 0, 0, 0]", "array([300, 0, 0, 0]", "dist_result ends before it starts"),
        (4, "array([256", "array([-256", "is no bound of a box"),
        (4, "array([256", "array([99999999999", "the bound 99999999999"),
        (4, "array([256", "array([" + "9" * 400, "is no bound of a box"),
        (3, "[256 1", "[" + "9" * 400, "is no dimension"),
        (4, "Rect(", "Rect", "cut off or damaged"),
        (4, "dist_result=", "elsewhere=", "'elsewhere' is no box of a node"),
        (12, "write_rect=None", "", r"no operator of the text writes L0\.W"),
        (
            71,
            "write_rect=None write_rect",
            "write_rect",
            r"no operator of the text writes classifier\.weights1",
        ),
        (42, "write_rect=None", "write_rect=Rect(array([0], dtype=int32), array([1], dtype=int32))", "L1.W"),
        (26, "LO.filterA", "LO.blur", r"no operator of the text writes L0\.filterA\.output"),
        (
            68,
            "classifier.weightsl",
            "elsewhere.weightsl",
            r"classifier\.weights1\.grad is the gradient of no",
        ),
        (142, "Ll.filter.grad", "", "that belongs to no node"),
    ],
)
def test_contradictions_are_refused_with_the_node_and_the_line(line, before, after, problem):
    with pytest.raises(FormatError, match=problem) as caught:
        read(changed(line, before, after))
    assert caught.value.line is not None
    assert caught.value.expected


def test_a_tensor_of_absurd_size_is_refused():
    text = CLEAN.replace("256", "2147483647").replace("3034", "2147483647")
    with pytest.raises(FormatError, match="would take more than 2\\^60 bytes"):
        read(text)


@pytest.mark.parametrize(
    ("data", "place"),
    [
        (b"", "line 1"),
        (b"\n\n\n", "line 1"),
        (b"hello", "line 1"),
        (b"\xff\xfe\x00", "byte 0"),
        ("ü".encode("latin-1"), "byte 0"),
        (b"data\0", "byte 4"),
        (TEXT.encode("utf-16"), "byte 0"),
        (b"read_rect=None", "line 1"),
        (b"dim=[1]", "line 1"),
    ],
)
def test_what_is_no_picture_at_all(data, place):
    with pytest.raises(FormatError, match=place):
        dataflow.read(data)


def test_noise_changes_nothing():
    rng = random.Random(4)
    rows = []
    for line in LINES:
        rows.append(line + rng.choice(["", "", " ~", " 1% J —", " §§ g", " qq.zz", " |", " 7"]))
        rows.extend(rng.choice([[], [], [], ["Y"], ["< = -"], ["¢ £"], ["->"], ["foo bar"]]))
    step = read("\n".join(rows))
    assert plain(step.graph) == plain(SEED.graph)


def test_a_set_zero_that_nothing_settles_is_left_out_with_a_note():
    text = changed(182, "<:::::::§§.filter.output.grad.set_zeg§:::::::>", "")
    text = text.replace("output-> output-> result_dim=[256 64 33 33] output->", "result_dim=[256 64 33 33]")
    step = read(text)
    notes = {n.line: n.text for n in step.notes if n.kind is NoteKind.SKIPPED}
    assert "could not be proven" in notes[182]
    assert "L0.b.grad, L0.filter.output.grad, L0.a.grad" in notes[182]
    left = {op.id for op in SEED.graph.ops} - {op.id for op in step.graph.ops}
    assert left == {f"L0.{name}.grad.set_zero" for name in ("a", "b", "filter.output")}
    lost = [n.text for n in step.notes if "no set_zero of" in n.text]
    assert len(lost) == 3
    grad = next(op for op in step.graph.ops if op.id == "L0.filterA.grad")
    assert "accumulate" not in grad.input_ports


def test_place_is_no_proof_where_whole_names_do_not_bear_it_out():
    frames = re.findall(r"\S*\.set_zero\n", CLEAN)
    text = "".join(frames) + re.sub(r"\S*\.set_zero\n", "", CLEAN)
    assert plain(read(text).graph) == plain(SEED.graph)
    torn = text.replace("L1.filterA.output.grad.set_zero", ".filterA.output.grad.set_zero")
    assert plain(read(torn).graph) == plain(SEED.graph)  # only one is left that ends so
    both = torn.replace("L0.filterA.output.grad.set_zero", ".filterA.output.grad.set_zero")
    skipped = [n for n in read(both).notes if n.kind is NoteKind.SKIPPED and "set_zero" in n.before]
    assert len(skipped) == 2
    assert all("L1.filterA.output.grad, L0.filterA.output.grad" in n.text for n in skipped)


def test_an_update_that_could_be_of_two_parameters_is_refused():
    text = CLEAN.replace("update_L0.a", "update_x").replace("update_L1.a", "update_y")
    with pytest.raises(FormatError, match="update_[xy] updates none of the parameters, or more than one"):
        read(text)


def test_an_update_whose_dimensions_contradict_its_name_is_refused():
    text = CLEAN.replace("update_L1.b", "update_tmp").replace("update_L1.W", "update_L1.b")
    with pytest.raises(FormatError, match=r"update_L1\.[bW] has result_dim"):
        read(text.replace("update_tmp", "update_L1.W"))
    text = CLEAN.replace("update_W1", "update_tmp").replace("update_L1.W", "update_classifier.weightsX")
    with pytest.raises(FormatError, match=r"update_classifier\.weightsX updates none"):
        read(text)


def test_an_operator_of_unknown_kind_is_refused():
    with pytest.raises(FormatError, match=r"L0\.filterXY is an operator of unknown kind"):
        read(TEXT.replace("filterNL", "filterXY"))


@pytest.mark.parametrize(
    "text",
    [
        "a " * 200_000 + "=",
        "x.y " * 100_000 + "=",
        TEXT + "->input " * 50_000,
        TEXT + "->inqut " * 50_000,
        TEXT + "\n->input " + "probabizity " * 30_000,
        TEXT + "foo.bar.grad.set zero\n" * 20_000,
        TEXT + "0" * 200_000 + ".grad.set zero",
        "read_rect=Rect(" * 50_000,
        "x=Rect" + "(" * 500_000,
        "dim=" * 200_000,
        " ".join(f"L{k}.W" for k in range(900)) + "\n" + "dim=[1 1] " * 800,
    ],
    ids=range(11),
)
def test_work_stays_in_proportion(text):
    try:
        read(text)
    except FormatError as error:
        assert len(str(error)) < 1000


@pytest.mark.parametrize("seed", range(2))
def test_damage_of_any_kind_is_read_or_refused(seed):
    for number in range(75):
        data = mutated(random.Random(f"dataflow {seed} {number}"), TEXT.encode())
        try:
            step, pieces = dataflow.read_pieces(data)
        except FormatError as error:
            assert error.expected
            assert error.line is not None or error.byte is not None
            continue
        assert all(piece.use is not Use.OPEN for piece in pieces)
        validate(step.graph)
        assert sum(t.role is Role.PARAMETER for t in step.graph.tensors) <= 7
