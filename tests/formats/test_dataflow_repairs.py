"""The data-flow picture: every kind of repair, and the proof that its note names."""

from __future__ import annotations

import pytest

from lowtide.cost import NoteKind, Step
from lowtide.formats import dataflow
from tests.conftest import document_path


@pytest.fixture(scope="module")
def step() -> Step:
    return dataflow.read(document_path("002").read_bytes())


@pytest.fixture(scope="module")
def repairs(step):
    return [(n.line, n.before, n.after) for n in step.notes if n.kind is NoteKind.REPAIR]


@pytest.mark.parametrize(
    ("line", "before", "after"),
    [
        (8, "LO.W", "L0.W"),
        (44, "Ll.filter", "L1.filter"),
        (68, "classifier.weightsl", "classifier.weights1"),
        (73, "classifier.linearl", "classifier.linear1"),
        (102, "cla881f1ertsoftmax.grad", "classifier.softmax.grad"),
        (143, "update_Ll1.Db", "update_L1.b"),
        (206, "update_LO0.Db", "update_L0.b"),
        (206, "update_LO0O.a", "update_L0.a"),
        (220, "update_LO.W", "update_L0.W"),
    ],
)
def test_names(repairs, line, before, after):
    assert (line, before, after) in repairs


@pytest.mark.parametrize(
    ("line", "before", "after"),
    [
        (40, "[64 1 164 7 727 27]", "[64 1 1 64 7 7 27 27]"),
        (78, "[ 2563034 1 1]", "[256 3034 1 1]"),
        (83, "[1 11 1]", "[1 1 1 1]"),
        (87, "[111 1]", "[1 1 1 1]"),
        (93, "[4 11 1]", "[4 1 1 1]"),
        (97, "[411 1]", "[4 1 1 1]"),
        (97, "[111 1]", "[1 1 1 1]"),
        (103, "[111 1]", "[1 1 1 1]"),
        (167, "[64 1 164 7 727 27]", "[64 1 1 64 7 7 27 27]"),
        (222, "[64 1 1 1 9 933 33]", "[64 1 1 1 9 9 33 33]"),
        (116, "", "dim=[3034 64 27 27]"),
        (116, "", "dim=[256 64 27 27]"),
        (149, "", "dim=[64 1 1 64 7 7 27 27]"),
        (103, "result dim", "result_dim"),
        (107, "im", "dim"),
        (222, "result_ dim", "result_dim"),
    ],
)
def test_dimensions(repairs, line, before, after):
    assert (line, before, after) in repairs


@pytest.mark.parametrize(
    ("line", "before", "after"),
    [
        (57, "0, O, 0, 0", "0, 0, 0, 0"),
        (168, "0, O, 0, 0, 0, 0, 0, 0", "0, 0, 0, 0, 0, 0, 0, 0"),
        (47, "64, 1, 1,64, 7, 7,27, 27", "64, 1, 1, 64, 7, 7, 27, 27"),
        (153, "64, 1, 64, 7, 7, 27, 27", "64, 1, 1, 64, 7, 7, 27, 27"),
    ],
)
def test_boxes(repairs, line, before, after):
    assert (line, before, after) in repairs


@pytest.mark.parametrize(
    ("line", "before", "after"),
    [
        (20, "utput->", "output->"),
        (34, ">input", "->input"),
        (43, "=>1npyt", "->input"),
        (91, "A)robability", "->probability"),
        (91, "|[->input", "->input"),
        (91, "|>a", "->a"),
        (95, "->pa msprLbability", "->params ->probability"),
        (95, "F>params", "->params"),
        (147, "Iters.delta->", "filters.delta->"),
    ],
)
def test_labels_of_edges(repairs, line, before, after):
    assert (line, before, after) in repairs


@pytest.mark.parametrize(
    ("line", "before", "gradient"),
    [
        (88, "classifiler.softmax.output.grad.set zero", "classifier.softmax.output.grad"),
        (98, "classifilier.linearl.output.grad.set zero", "classifier.linear1.output.grad"),
        (108, "classifier.weightsl.grad.set ze{§:::::::>", "classifier.weights1.grad"),
        (108, "<:::::::§§.fllterNL.out ut.grad.set ze%E:::::::>", "L1.filterNL.output.grad"),
        (117, ".filterA.output.grad.set zero", "L1.filterA.output.grad"),
        (126, "L1l.a.grad.set_zero", "L1.a.grad"),
        (126, "Ll.b.grad.set_zero", "L1.b.grad"),
        (126, "<:::::::§£.filter.output.grad.set zeg§:::::::>", "L1.filter.output.grad"),
        (137, ".W.grad.set_ zero", "L1.W.grad"),
        (137, "LO.filterNL.output.grad.set zero", "L0.filterNL.output.grad"),
        (152, ".filterA.output.grad.set zero", "L0.filterA.output.grad"),
        (182, "<::::§§Z§.grad.Set_%Egg::::>", "L0.b.grad"),
        (182, "<:::::::§§.filter.output.grad.set_zeg§:::::::>", "L0.filter.output.grad"),
        (195, "LO.W grad set zero", "L0.W.grad"),
        (189, "output->", "L0.a.grad"),
    ],
)
def test_the_gradient_of_every_set_zero(repairs, line, before, gradient):
    assert (line, before, f"{gradient}.set_zero") in repairs


def test_the_proof_is_named(step):
    why = {(n.line, n.after): n.text for n in step.notes if n.kind is NoteKind.REPAIR}
    torn = why[117, "L1.filterA.output.grad.set_zero"]
    assert "L1.filterNL.grad on line 121" in torn
    assert "all 6 whose names came through" in torn
    order = why[182, "L0.b.grad.set_zero"]
    assert "one of L0.b.grad, L0.a.grad" in order
    assert "lines 108, 126, 137" in order
    label = why[189, "L0.a.grad.set_zero"]
    assert "only the label of its edge is left" in label
    dims = why[143, "update_L1.b"]
    assert "[1 64 27 27] are those of L1.b" in dims
    assert "write_rect of L1.W.grad" in why[153, "64, 1, 1, 64, 7, 7, 27, 27"]
