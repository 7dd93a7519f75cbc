import json

import pytest

from lowtide.errors import ConvertError, FormatError
from lowtide.formats import chainer, megengine, native, tensorflow
from lowtide.graph import Role


@pytest.fixture(scope="module")
def profile(documents):
    return megengine.read(documents["001"])


def test_the_document_comes_back_as_equal_json(documents, profile):
    assert json.loads(megengine.write(profile).data) == json.loads(documents["001"])
    assert megengine.write(profile).losses == ()


def test_it_is_rebuilt_from_the_graph_through_our_own_file(documents, profile):
    step = native.read(native.write(profile).data)
    assert json.loads(megengine.write(step).data) == json.loads(documents["001"])


def test_operators_variables_and_flags_have_their_place(profile):
    graph = profile.graph
    assert len(graph.ops) == 234
    assert len(graph.tensors) == 299
    conv = next(op for op in graph.ops if op.id == "621")
    assert conv.kind == "ConvolutionForward"
    assert [graph.tensors[t].id for t in conv.inputs] == ["620", "177"]
    assert [graph.tensors[t].role for t in conv.outputs] == [Role.ACTIVATION, Role.WORKSPACE]
    assert graph.tensors[conv.inputs[1]].role is Role.PARAMETER
    assert graph.tensors[conv.outputs[0]].shape == (10, 128, 28, 28)


def test_a_reshape_shares_the_storage_of_its_input(profile):
    graph = profile.graph
    views = [t for t in graph.tensors if t.alias is not None]
    assert [(v.name, graph.tensors[v.alias].name) for v in views] == [
        ("reshape(pooling[831])[840]", "pooling(FUSE_ADD_RELU[829])[831]")
    ]


def test_times_are_imported_and_named_so(profile):
    cost = profile.costs[next(k for k, op in enumerate(profile.graph.ops) if op.id == "621")]
    assert cost.flop is not None
    assert cost.flop.value == 1027604480
    assert cost.flop.origin.value == "imported"
    spans = [s for s in profile.spans if profile.graph.ops[s.op].id == "621"]
    assert {(s.lane, s.host) for s in spans} == {("gpu0:0", False), ("interpreter", True)}


def broken(documents, change):
    document = json.loads(documents["001"])
    change(document)
    return json.dumps(document).encode()


CHANGES = {
    "no variables": (lambda d: d["graph_exec"].pop("var"), "graph_exec.var"),
    "a variable that does not exist": (
        lambda d: d["graph_exec"]["operator"]["621"]["input"].append("nobody"),
        "an id of `graph_exec.var`",
    ),
    "an operator that runs twice": (
        lambda d: d["graph_exec"]["comp_seq"].append("621"),
        "each operator once",
    ),
    "an operator that is not there": (
        lambda d: d["graph_exec"]["comp_seq"].append("nobody"),
        "each operator once",
    ),
    "a negative size": (
        lambda d: d["graph_exec"]["var"]["622"].update(prev_dev_ptr_end=1),
        "behind the start",
    ),
    "a size of minus one": (
        lambda d: d["profiler"]["opr_footprint"]["621"].update(memory=-1),
        "not negative",
    ),
    "times out of order": (lambda d: d["profiler"]["device"]["621"]["gpu0:0"].update(end=0), "start <= kern"),
    "operators out of order": (lambda d: d["graph_exec"]["comp_seq"].reverse(), "an earlier one wrote"),
    "a time for nobody": (lambda d: d["profiler"]["host"].update(nobody={}), "graph_exec.comp_seq"),
    "a chunk without owner": (
        lambda d: d["graph_exec"]["mem_chunk"]["chk200"].update(owner_var="x"),
        "graph_exec.var",
    ),
    "text for a number": (lambda d: d["profiler"]["device"]["621"]["gpu0:0"].update(end="soon"), "a number"),
    "a list for an object": (lambda d: d.update(profiler=[]), "a JSON object"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_broken_profiles_say_where_and_what_was_expected(name, documents):
    change, expected = CHANGES[name]
    data = broken(documents, change)
    with pytest.raises(FormatError) as caught:
        megengine.read(data)
    assert expected in str(caught.value)
    assert 0 <= caught.value.byte < len(data)


def test_the_byte_points_at_the_member_to_blame(documents):
    data = broken(documents, lambda d: d["profiler"]["opr_footprint"]["621"].update(memory="much"))
    with pytest.raises(FormatError) as caught:
        megengine.read(data)
    assert data[caught.value.byte :].startswith(b'"much"')


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b'{"profiler": {"profiler": 1, "profiler": 2}}', "twice"),
        (b'{"profiler": {"x": NaN}}', "NaN"),
        (b'{"profiler": {"x": 1e999}}', "too large"),
        (b'{"profiler": {"x": ' + b"9" * 40 + b"}}", "digits"),
        (b'{"profiler": ' * 200_000 + b"1" + b"}" * 200_000, "deep"),
        (b'{"profiler": {', "damaged"),
    ],
)
def test_json_that_no_profile_has_is_refused(text, problem):
    with pytest.raises(FormatError, match=problem):
        megengine.read(text)


def test_a_training_graph_becomes_a_profile(documents):
    step = chainer.read(documents["000"])
    written = megengine.write(step)
    back = megengine.read(written.data)
    assert [op.kind for op in back.graph.ops] == [op.kind for op in step.graph.ops]
    assert [t.bytes for t in back.graph.tensors] == [t.bytes for t in step.graph.tensors]
    assert any("phases" in loss for loss in written.losses)
    # every input counts as read in this format, and leaf gradients are not kept
    assert any("shape only" in loss for loss in written.losses)


def test_written_records_have_the_keys_of_the_document(documents):
    ours = json.loads(megengine.write(chainer.read(documents["000"])).data)
    theirs = json.loads(documents["001"])

    assert sorted(ours) == sorted(theirs)
    for section in ("profiler", "graph_exec"):
        assert sorted(ours[section]) == sorted(theirs[section])
    for part in ("var", "operator", "mem_chunk"):
        one, other = (next(iter(d["graph_exec"][part].values())) for d in (ours, theirs))
        assert sorted(one) == sorted(other), part
    one, other = (next(iter(d["profiler"]["opr_footprint"].values())) for d in (ours, theirs))
    assert sorted(one) == sorted(other)


def test_a_list_without_edges_cannot_become_a_profile(documents):
    with pytest.raises(ConvertError, match="who reads what"):
        megengine.write(tensorflow.read(documents["003"]))
