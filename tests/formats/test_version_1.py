"""Files of the version before, in which what operators mean stood among their attributes, give the same graphs."""

import json
from pathlib import Path

import pytest

from lowtide.documents import decode_document, encode_document
from lowtide.errors import FormatError
from lowtide.formats import native
from lowtide.formats.registry import read_file
from lowtide.graph import upgraded
from lowtide.plan.program.instructions import Loop, Program
from lowtide.plan.result.plan import Plan
from lowtide.plan.result.validate import valid_plan

FILES = Path(__file__).parent / "version_1"
MEANT = {
    "random",
    "once",
    "updates",
    "short",
    "differentiates",
    "overload",
    "arguments",
    "options",
    "strides",
}


@pytest.mark.parametrize("name", ["step.json", "step.dot"])
def test_steps_have_fields_in_the_place_of_attributes(name):
    graph = read_file(FILES / name).step.graph
    kinds = {op.kind: op for op in graph.ops}
    norm = next(op for kind, op in kinds.items() if "batch_norm" in kind and op.updates)
    assert {graph.tensors[norm.inputs[k]].name for k in norm.updates} >= {"1.running_mean", "1.running_var"}
    assert norm.short == (1, 2)
    assert sum(op.random for op in graph.ops) == 1
    assert kinds["aten.convolution"].arguments[3:5] == ([1, 1], [1, 1])
    assert len(graph.returned) == 1
    assert {graph.tensors[t].name for t in graph.updated} >= {"1.running_mean"}
    assert all(not MEANT & op.attributes.keys() for op in graph.ops)
    assert not graph.attributes


def test_a_step_is_written_as_this_version_writes_it():
    step = native.read((FILES / "step.json").read_bytes())
    written = json.loads(native.write(step).data)
    assert written["version"] == native.VERSION
    assert native.read(native.write(step).data) == step
    assert not any("attributes" in op for op in written["step"]["graph"]["ops"])


def test_plans_and_programs_in_tiles_are_valid_still():
    plan = decode_document((FILES / "plan.json").read_bytes(), Plan)
    assert plan.version == plan.program.version == 2
    assert plan.decisions.tiles
    assert valid_plan(plan) is plan
    loop = next(line for line in plan.program.forward if isinstance(line, Loop))
    assert plan.graph.ops[loop.op].axes
    assert all(
        op.arguments is not None for op in plan.program.bodies[0].graph.ops if op.kind == "aten.convolution"
    )
    program = decode_document((FILES / "program.json").read_bytes(), Program)
    assert program == plan.program
    assert decode_document(encode_document(plan), Plan) == plan


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("updates", 0),
        ("short", ["1"]),
        ("overload", 1),
        ("arguments", None),
        ("options", []),
        ("strides", [3]),
    ],
)
def test_an_attribute_that_is_something_else_is_named(name, value):
    document = json.loads((FILES / "step.json").read_text())
    op = document["step"]["graph"]["ops"][0]
    op.setdefault("attributes", {})[name] = value
    with pytest.raises(FormatError, match=f"an attribute of operator '{op['id']}' is not what lowtide wrote"):
        native.read(json.dumps(document).encode())
    plan = json.loads((FILES / "plan.json").read_text())
    plan["graph"]["ops"][0].setdefault("attributes", {})[name] = value
    with pytest.raises(FormatError, match="is not what lowtide wrote"):
        decode_document(json.dumps(plan).encode(), Plan)


def test_words_of_other_programs_stay_attributes():
    document = json.loads((FILES / "step.json").read_text())
    document["step"]["graph"]["ops"][0]["attributes"] = {"axes": [1, 0], "rank": 3}
    step = native.read(json.dumps(document).encode())
    assert step.graph.ops[0].attributes == {"axes": [1, 0], "rank": 3}
    assert upgraded(step.graph) == step.graph


def test_the_environment_of_costs_is_a_field():
    file = json.loads((FILES / "step.json").read_bytes())
    where = {"name": "a device", "kind": "cuda", "versions": {"torch": "2.10"}, "settings": {}}
    file["step"]["graph"]["attributes"]["environment"] = where
    step = native.read(json.dumps(file).encode())
    assert step.environment.versions == {"torch": "2.10"}
    assert "environment" not in step.graph.attributes
    assert native.read(native.write(step).data) == step
    where["kind"] = 3
    with pytest.raises(FormatError, match="environment of the costs"):
        native.read(json.dumps(file).encode())
