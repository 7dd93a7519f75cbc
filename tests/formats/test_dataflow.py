"""The data-flow picture: what the recovered text holds, what was repaired, and why."""

from __future__ import annotations

import json
from collections import Counter

import msgspec
import pytest

from lowtide.cost import NoteKind, Step
from lowtide.formats import dataflow, native
from lowtide.formats.dataflow.scan import Use
from lowtide.graph import Phase, Rect, Role, liveness, validate
from tests.conftest import document_path

DATA = document_path("002").read_bytes()
LINES = DATA.decode().split("\n")

PARAMETERS = {
    "L0.W": (64, 1, 1, 1, 9, 9, 33, 33),
    "L0.a": (1,),
    "L0.b": (1, 64, 33, 33),
    "L1.W": (64, 1, 1, 64, 7, 7, 27, 27),
    "L1.a": (1,),
    "L1.b": (1, 64, 27, 27),
    "classifier.weights1": (3034, 64, 27, 27),
}
ACTIVATIONS = {
    "L0.filter.output": (256, 64, 33, 33),
    "L0.filterA.output": (256, 64, 33, 33),
    "L0.filterNL.output": (256, 64, 33, 33),
    "L1.filter.output": (256, 64, 27, 27),
    "L1.filterA.output": (256, 64, 27, 27),
    "L1.filterNL.output": (256, 64, 27, 27),
    "classifier.linear1.output": (256, 3034, 1, 1),
    "classifier.softmax.probability": (256, 3034, 1, 1),
    "classifier.softmax.output": (1, 1, 1, 1),
    "classifier.evaluate.ouptut": (4, 1, 1, 1),
}
INPUTS = {"data.raw_output": (256, 1, 41, 41), "data.labels_output": (256, 1, 1, 1)}
WITHOUT_GRADIENT = {"classifier.softmax.probability", "classifier.evaluate.ouptut"}
FORWARD = [
    "data", "L0.filter", "L0.filterA", "L0.filterNL", "L1.filter", "L1.filterA", "L1.filterNL",
    "classifier.linear1", "classifier.softmax", "classifier.evaluate", "classifier.evaluate.accuracy",
]  # fmt: skip
BACKWARD = [
    "classifier.softmax", "classifier.linear1", "L1.filterNL", "L1.filterA", "L1.filter", "L0.filterNL",
    "L0.filterA", "L0.filter",
]  # fmt: skip


@pytest.fixture(scope="module")
def step() -> Step:
    return dataflow.read(DATA)


@pytest.fixture(scope="module")
def tensors(step):
    return {tensor.id: tensor for tensor in step.graph.tensors}


@pytest.fixture(scope="module")
def ops(step):
    return {op.id: op for op in step.graph.ops}


def ends(step, op, *, outputs=False):
    """The names at the ports of an operator."""
    ports, tensors = (op.output_ports, op.outputs) if outputs else (op.input_ports, op.inputs)
    return [(port, step.graph.tensors[t].id) for port, t in zip(ports, tensors, strict=True)]


def test_every_variable_has_its_name_dimensions_and_role(tensors):
    gradients = {f"{name}.grad": shape for name, shape in {**PARAMETERS, **ACTIVATIONS}.items()
                 if name not in WITHOUT_GRADIENT}  # fmt: skip
    for role, expected in (
        (Role.PARAMETER, PARAMETERS),
        (Role.ACTIVATION, ACTIVATIONS),
        (Role.INPUT, INPUTS),
        (Role.GRADIENT, gradients),
    ):
        assert {name: t.shape for name, t in tensors.items() if t.role is role} == expected
    assert len(tensors) == 7 + 10 + 2 + 15


def test_gradients_point_at_their_variable(step, tensors):
    for name, tensor in tensors.items():
        if name.endswith(".grad"):
            assert step.graph.tensors[tensor.gradient_of].id == name.removesuffix(".grad")
        else:
            assert tensor.gradient_of is None


def test_bytes_are_those_of_float32_and_a_note_says_that_it_is_assumed(step, tensors):
    assert tensors["L1.W"].bytes == 4 * 64 * 64 * 7 * 7 * 27 * 27
    assert tensors["L0.a"].bytes == 4
    assert {t.dtype for t in tensors.values()} == {"float32"}
    assert any("float32" in n.text for n in step.notes if n.kind is NoteKind.ASSUMPTION)


def test_boxes_of_variables(tensors):
    whole = Rect((0,) * 8, (64, 1, 1, 64, 7, 7, 27, 27))
    assert tensors["L1.W"].boxes == {"read_rect": whole, "write_rect": None}
    assert tensors["L1.W.grad"].boxes == {"read_rect": whole, "write_rect": whole}
    nobody = Rect((0,) * 4, (0,) * 4)
    assert tensors["classifier.softmax.output.grad"].boxes["read_rect"] == nobody
    assert all(list(t.boxes) == ["read_rect", "write_rect"] for t in tensors.values())


def test_boxes_and_results_of_operators(ops):
    assert ops["L1.filter.grad"].boxes == {
        "dist_input": Rect((0,) * 4, (256, 64, 33, 33)),
        "dist_filters": Rect((0,) * 8, (64, 1, 1, 64, 7, 7, 27, 27)),
        "dist_result": Rect((0,) * 4, (256, 64, 27, 27)),
    }
    assert ops["classifier.linear1"].boxes == {
        "read_rect": Rect((0,) * 4, (256, 64, 27, 27)),
        "write_rect": Rect((0,) * 4, (256, 3034, 1, 1)),
    }
    assert ops["classifier.softmax.grad"].boxes == {"dist_result": Rect((0,) * 4, (256, 3034, 1, 1))}
    assert ops["classifier.softmax.grad"].attributes["result_dim"] == [1, 1, 1, 1]
    assert ops["update_L1.W"].attributes["result_dim"] == [64, 1, 1, 64, 7, 7, 27, 27]
    assert ops["classifier.evaluate.accuracy"].attributes["result_dim"] == [1]
    assert ops["classifier.evaluate.accuracy"].boxes == {}


def test_operators_stand_in_program_order(step):
    by_phase = {phase: [op.id for op in step.graph.ops if op.phase is phase] for phase in Phase}
    assert [op.id for op in step.graph.ops] == [name for names in by_phase.values() for name in names]
    assert by_phase[Phase.FORWARD] == FORWARD
    grads = [name for name in by_phase[Phase.BACKWARD] if not name.endswith(".set_zero")]
    assert grads == [f"{name}.grad" for name in BACKWARD]
    assert sorted(by_phase[Phase.UPDATE]) == [
        "update_L0.W", "update_L0.a", "update_L0.b", "update_L1.W", "update_L1.a", "update_L1.b", "update_W1",
    ]  # fmt: skip


def test_every_gradient_is_set_to_zero_before_it_is_touched(step, tensors):
    cleared: set[int] = set()
    for op in step.graph.ops:
        if op.kind == "set_zero":
            assert op.id == step.graph.tensors[op.outputs[0]].id + ".set_zero"
            cleared.update(op.outputs)
        for t in (*op.inputs, *op.outputs):
            assert step.graph.tensors[t].role is not Role.GRADIENT or t in cleared
    assert len(cleared) == 15


def test_kinds(step):
    assert Counter(op.kind for op in step.graph.ops) == {
        "data": 1, "filter": 2, "filterA": 2, "filterNL": 2, "linear": 1, "softmax": 1, "evaluate": 1, "accuracy": 1,
        "filter.grad": 2, "filterA.grad": 2, "filterNL.grad": 2, "linear.grad": 1, "softmax.grad": 1,
        "set_zero": 15, "update": 7,
    }  # fmt: skip


def test_edges_carry_the_ports_of_the_picture(step, ops):
    assert ends(step, ops["data"], outputs=True) == [
        ("raw_data", "data.raw_output"),
        ("labels", "data.labels_output"),
    ]
    assert ends(step, ops["L1.filter"]) == [("input", "L0.filterNL.output"), ("filters", "L1.W")]
    assert ends(step, ops["classifier.softmax"]) == [
        ("input", "classifier.linear1.output"),
        ("labels", "data.labels_output"),
    ]
    assert ends(step, ops["classifier.softmax"], outputs=True) == [
        ("probability", "classifier.softmax.probability"),
        ("output", "classifier.softmax.output"),
    ]
    assert ends(step, ops["classifier.evaluate.accuracy"]) == [("input", "classifier.evaluate.ouptut")]
    assert ends(step, ops["L0.filterA.grad"]) == [
        ("output.delta", "L0.filterA.output.grad"),
        ("input", "L0.filter.output"),
        ("a", "L0.a"),
        ("b", "L0.b"),
        ("accumulate", "L0.filter.output.grad"),
        ("accumulate", "L0.a.grad"),
        ("accumulate", "L0.b.grad"),
    ]
    assert ends(step, ops["L0.filterA.grad"], outputs=True) == [
        ("input.delta", "L0.filter.output.grad"),
        ("a.delta", "L0.a.grad"),
        ("b.delta", "L0.b.grad"),
    ]
    assert ends(step, ops["L0.filter.grad"], outputs=True) == [("filters.delta", "L0.W.grad")]
    assert ("output", "L1.filterNL.output") in ends(step, ops["L1.filterNL.grad"])
    assert ("probability", "classifier.softmax.probability") in ends(step, ops["classifier.softmax.grad"])


def test_updates_change_their_parameter_in_place(step, ops):
    for name, op in ops.items():
        if op.kind == "update":
            parameter = "classifier.weights1" if name == "update_W1" else name.removeprefix("update_")
            assert ends(step, op) == [("params", parameter), ("gradient", f"{parameter}.grad")]
            assert ends(step, op, outputs=True) == [("params", parameter)]


def test_a_gradient_that_nobody_reads_is_read_for_its_shape_only(step, ops):
    grad = ops["classifier.softmax.grad"]
    assert [step.graph.tensors[grad.inputs[k]].id for k in grad.shape_only] == [
        "classifier.softmax.output.grad"
    ]
    assert not any(op.shape_only for name, op in ops.items() if op is not grad)


def test_the_graph_is_valid_and_has_lifetimes(step):
    validate(step.graph)
    timeline = liveness(step.graph)
    parameters = sum(t.bytes for t in step.graph.tensors if t.role is Role.PARAMETER)
    assert timeline.peak_bytes > 2 * parameters - 2 * 22_581_504
    assert min(timeline.live_bytes) >= parameters


def test_spellings_of_the_picture_itself_are_kept(step, ops, tensors):
    assert "update_W1" in ops
    assert "classifier.evaluate.ouptut" in tensors
    kept = {n.before for n in step.notes if n.kind is NoteKind.ASSUMPTION and n.before}
    assert kept == {"update_W1", "classifier.evaluate.ouptut"}


def test_noise_is_listed(step):
    skipped = {(n.line, n.before) for n in step.notes if n.kind is NoteKind.SKIPPED}
    assert {
        (87, "< ="), (89, "1% J —"), (97, "< = -"), (107, "=g :"), (108, "dim=["), (109, "< I I -"),
        (135, "L1.W"), (147, "¢"), (151, "arr dmelon 11527 721 27 Q £ — >"), (184, "->"), (185, "4"), (193, "Y"),
        (196, "T ) -"),
    } <= skipped  # fmt: skip
    assert all(n.line and n.before and n.text for n in step.notes if n.kind is NoteKind.SKIPPED)


def test_edges_without_a_label_are_listed(step):
    text = [n.text for n in step.notes if n.kind is NoteKind.ASSUMPTION and "rests on the names" in n.text]
    missing = {t.split("; it rests on the names: ")[1] for t in text}
    assert {"->a from L0.a", "->a from L1.a", "->weights from classifier.weights1"} <= missing
    assert "output-> to classifier.softmax.output" in missing
    assert not any("params" in way for way in missing)


def test_every_character_is_accounted_for_once():
    _, pieces = dataflow.read_pieces(DATA)
    for number, line in enumerate(LINES, 1):
        text = "".join(p.text for p in pieces if p.line == number)
        assert "".join(text.split()) == "".join(line.split())
    uses = Counter(piece.use for piece in pieces)
    assert uses[Use.OPEN] == 0
    assert min(uses[use] for use in (Use.NODE, Use.PORT, Use.REPAIR, Use.SKIPPED)) > 30
    places = [(p.line, p.column) for p in pieces]
    assert places == sorted(set(places))


def test_every_skipped_piece_has_its_note(step):
    _, pieces = dataflow.read_pieces(DATA)
    skipped = Counter(p.line for p in pieces if p.use is Use.SKIPPED for _ in p.text.split())
    noted = Counter(n.line for n in step.notes if n.kind is NoteKind.SKIPPED for _ in n.before.split())
    assert skipped == noted
    repaired = {p.line for p in pieces if p.use is Use.REPAIR}
    assert {n.line for n in step.notes if n.kind is NoteKind.REPAIR} <= repaired


def test_facts_are_plain_json(step):
    facts = dataflow.facts(step)
    assert json.loads(json.dumps(facts)) == facts
    assert {key: facts[key] for key in ("variables", "parameters", "inputs", "gradients", "set_zero", "updates")} == {
        "variables": 34, "parameters": 7, "inputs": 2, "gradients": 15, "set_zero": 15, "updates": 7,
    }  # fmt: skip
    assert (facts["operators"], facts["forward"], facts["backward"]) == (41, 11, 8)
    assert facts["set_zero_restored"] == ["L0.a.grad.set_zero"]
    repair = next(r for r in facts["repairs"] if r["line"] == 40)
    assert repair["before"] == "[64 1 164 7 727 27]"
    assert repair["after"] == "[64 1 1 64 7 7 27 27]"
    assert "read_rect of L1.W" in repair["why"]
    assert {"line": 193, "text": "Y", "why": "no part of the document"} in facts["skipped"]


def test_the_step_survives_its_own_file(step):
    assert native.read(native.write(step).data) == step
    assert msgspec.json.decode(msgspec.json.encode(step), type=Step) == step


def test_recognised_by_content(documents):
    assert {n for n, data in documents.items() if dataflow.recognise(data)} == {"002"}
    assert not dataflow.recognise(b"")
    assert not dataflow.recognise(b"\xff\x00Rect(array([")
