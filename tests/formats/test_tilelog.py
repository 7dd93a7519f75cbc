"""The tile log: read whole, written back byte for byte."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import msgspec
import numpy as np
import pytest

from lowtide.cost import NoteKind, Step
from lowtide.errors import ConvertError, FormatError
from lowtide.formats import tilelog
from lowtide.formats.tilelog.model import Log, PrintedTensor
from lowtide.formats.tilelog.records import format_record, parse_record
from lowtide.formats.tilelog.recover import recover
from lowtide.formats.tilelog.tensors import format_tensor, parse_tensor
from lowtide.graph import Graph, Phase, Rect, Role, validate

DOCUMENTS = Path(__file__).parents[2] / "examples" / "documents"
SEED = DOCUMENTS / "004_45d0f2a7989644f5.txt"
DATA = SEED.read_bytes()
TEXT = DATA.decode()
LINES = TEXT.split("\n")
CONV1, POOL1, CONV2, POOL2 = 139784840008080, 139784840008224, 139783032421920, 139784839957760
ENGINE = re.compile(r"\[torch/csrc/autograd/engine\.cpp\] call_function \S+\n")
RECORD = re.compile(
    r"(?:fake-bp|fake|(?:bk-)?(?:conv2d|maxpool2d)\d+)\[-?\d+,-?\d+\] PI\(.*?next_id -?\d+\)", re.DOTALL
)


@pytest.fixture(scope="module")
def step() -> Step:
    return tilelog.read(DATA)


@pytest.fixture(scope="module")
def log(step: Step) -> Log:
    return tilelog.log_of(step)


def array(printed: PrintedTensor) -> np.ndarray:
    return np.array(printed.values).reshape(printed.shape[2:])


def through_json(step: Step) -> Step:
    return msgspec.json.decode(msgspec.json.encode(step), type=Step)


# --- what is read -------------------------------------------------------------------------------


def test_facts(step):
    assert tilelog.facts(step) == {
        "tiles": {"count": 16, "mismatches": 0, "elements": 256},
        "records": 256,
        "distinct_records": 160,
        "printed_tensors": 155,
        "operators": 4,
        "engine_calls": 118,
    }
    assert TEXT.count(" PI(") == 256
    assert TEXT.count("tensor(") == 155
    assert TEXT.count("call_function") == 118


def test_the_chain_of_operators(log):
    assert log.input_shape == (1, 1, 16, 16)
    assert [(one.id, one.kind, one.output_shape[2:]) for one in log.operators] == [
        (CONV1, "conv2d", (16, 16)),
        (POOL1, "maxpool2d", (8, 8)),
        (CONV2, "conv2d", (8, 8)),
        (POOL2, "maxpool2d", (4, 4)),
    ]
    assert [LINES[one.line - 1] for one in log.operators] == [
        f"L-->R current op {one.id}" for one in log.operators
    ]


def test_tiles_come_row_by_row_and_cover_the_input_once(step):
    tiles = tilelog.tiles(step)
    assert [tile.coord for tile in tiles] == list(itertools.product(range(4), range(4)))
    assert [LINES[tile.line - 1] for tile in tiles] == [f"coord {list(tile.coord)}" for tile in tiles]
    covered = np.zeros((16, 16), dtype=int)
    for tile in tiles:
        covered[tile.part.slices()] += 1
        assert tile.forward.of(CONV1).region.contains(tile.part)
    assert (covered == 1).all()


def test_boxes_of_a_tile_are_half_open_rows_first(step):
    tile = tilelog.tiles(step)[4 * 1 + 3]
    assert tile.coord == (1, 3)
    assert tile.part == Rect((4, 12), (8, 16))
    first = tile.forward.of(CONV1)
    assert (first.inpslidx, first.realidx) == ((5, 15, 0, 14), (5, 16, -1, 14))
    assert first.region == Rect((0, 5), (15, 16))
    assert first.unclamped == Rect((-1, 5), (15, 17))
    assert (first.padding, first.internal, first.ndtsize) == ((0, 1, 1, 0), (1, 0, 0, 1), (4, 4))
    assert (first.otileshape, first.local_first, first.next_id) == ((10, 14), True, POOL1)
    assert tile.output == tile.backward.of(POOL2).region == Rect((0, 2), (3, 4))
    assert tile.backward.of(CONV1).ndtsize is None
    with pytest.raises(KeyError):
        tile.forward.of(7)


def test_records_printed_again_in_the_backward_part(log):
    assert len(log.reprints) == 96
    for again in log.reprints:
        tile = next(tile for tile in log.tiles if tile.coord == again.coord)
        record = (tile.forward if again.info == "f_info" else tile.backward).of(again.key)
        assert (
            f"{record.name}[{record.depth},{record.index}] PI( <{again.coord[0]},{again.coord[1]},>"
            in (LINES[again.line - 1])
        )


def test_printed_tensors_have_label_line_shape_and_device(log):
    counts = {label: len(log.printed(label)) for label in dict.fromkeys(one.label for one in log.tensors)}
    assert counts == {
        "ref grad_output": 4,
        "ref grad_input": 4,
        "grad_out": 32,
        "grad_in in maxp": 32,
        "local last ++ input": 16,
        "grad_in in conv2d": 32,
        "input grad ++ input": 16,
        "TiledSplitFunction bwd": 16,
        "TiledSplitFunction.big_grad_in": 1,
        "input ref grad": 1,
        "input grad": 1,
    }
    for one in log.tensors:
        if not one.label.startswith("ref "):
            assert one.label in LINES[one.line - 1]
        assert len(one.values) == one.shape[2] * one.shape[3]
    on_host = [one.label for one in log.tensors if not one.device]
    assert on_host == ["TiledSplitFunction.big_grad_in", "input grad"]
    assert {one.device for one in log.tensors} == {"cuda:0", ""}
    assert {one.style for one in log.tensors} == {"integer", "fixed", "scientific"}


def test_a_print_cut_by_the_engine_is_whole(log):
    cut = [k for k, line in enumerate(LINES, 1) if "[torch" in line and not line.startswith("[torch")]
    assert len(cut) == 14
    tensors = {one.line: one for one in log.tensors}
    assert tensors[2022].label == "ref grad_output"  # 22 messages lie between its label and its values
    assert tensors[2022].values == log.printed("ref grad_input", operator=POOL1)[0].values
    assert tensors[2022].values[:6] == (0.2054, 0.0, 0.2210, 0.0, 0.0, -0.0533)
    assert len([line for line in cut if line in tensors]) == 12


def test_a_message_inside_the_rows_of_a_tensor_changes_nothing(step):
    at = TEXT.index("           -0.0689,  0.2054")
    for place in (at, at + 15, at + 19):  # before a row's second line, between values, inside one
        message = "[torch/csrc/autograd/engine.cpp] call_function Somewhere\n"
        other = tilelog.read((TEXT[:place] + message + TEXT[place:]).encode())
        values = [one.values for one in tilelog.log_of(other).tensors]
        assert values == [one.values for one in tilelog.log_of(step).tensors]
        assert tilelog.write(other).data.decode() == TEXT[:place] + message + TEXT[place:]


def test_the_comparison_agrees_with_the_printed_gradients(log):
    assert (log.comparison.mismatches, log.comparison.elements, log.comparison.ratio) == (0, 256, 0.0)
    ours, reference = log.printed("input grad")[0], log.printed("input ref grad")[0]
    assert ours.values == reference.values
    whole = np.zeros((16, 16))
    for tile in log.tiles:
        whole[tile.part.slices()] = array(log.printed("TiledSplitFunction bwd", tile=tile.coord)[0])
    assert (whole == array(ours)).all()


def test_line_ends_and_trailing_blanks_do_not_matter(step):
    stripped = "\r\n".join(line.rstrip() for line in LINES).encode()
    assert tilelog.log_of(tilelog.read(stripped)).tiles == tilelog.log_of(step).tiles
    assert tilelog.write(tilelog.read(stripped)).data == DATA


# --- the graph ----------------------------------------------------------------------------------


def test_graph_in_program_order(step):
    graph = validate(step.graph)
    assert step.format == "tilelog"
    assert graph.ordered
    names = [t.id for t in graph.tensors]
    flow = [
        (op.id, op.kind, [names[t] for t in op.inputs], [names[t] for t in op.outputs]) for op in graph.ops
    ]
    out = {one: f"{one}.output" for one in (CONV1, POOL1, CONV2, POOL2)}
    grad = {one: f"{one}.output.gradient" for one in out}
    w1, w2 = f"{CONV1}.weight", f"{CONV2}.weight"
    assert flow == [
        (f"{CONV1}", "conv2d", ["input", w1], [out[CONV1]]),
        (f"{POOL1}", "maxpool2d", [out[CONV1]], [out[POOL1]]),
        (f"{CONV2}", "conv2d", [out[POOL1], w2], [out[CONV2]]),
        (f"{POOL2}", "maxpool2d", [out[CONV2]], [out[POOL2]]),
        (f"bk-{POOL2}", "maxpool2d", [grad[POOL2], out[CONV2]], [grad[CONV2]]),
        (f"bk-{CONV2}", "conv2d", [grad[CONV2], out[POOL1], w2], [grad[POOL1], f"{w2}.gradient"]),
        (f"bk-{POOL1}", "maxpool2d", [grad[POOL1], out[CONV1]], [grad[CONV1]]),
        (f"bk-{CONV1}", "conv2d", [grad[CONV1], "input", w1], ["input.gradient", f"{w1}.gradient"]),
    ]
    assert [op.phase for op in graph.ops] == [Phase.FORWARD] * 4 + [Phase.BACKWARD] * 4


def test_tensors_of_the_graph(step):
    graph = step.graph
    size = {t.id: t.bytes for t in graph.tensors}
    assert size["input"] == size[f"{CONV1}.output"] == size["input.gradient"] == 16 * 16 * 4
    assert size[f"{CONV1}.weight"] == 3 * 3 * 4
    assert size[f"{POOL2}.output"] == 4 * 4 * 4
    assert [t.id for t in graph.tensors if t.role is Role.PARAMETER] == [f"{CONV1}.weight", f"{CONV2}.weight"]
    for t in graph.tensors:
        assert (t.role is Role.GRADIENT) == (t.gradient_of is not None)
        if t.gradient_of is not None:
            assert t.id == f"{graph.tensors[t.gradient_of].id}.gradient"
            assert t.shape == graph.tensors[t.gradient_of].shape
        assert (t.dtype, t.device) == ("float32", "cuda:0")
    assert step.lifetimes().peak_bytes > 0
    assert graph.ops[0].attributes == {"kernel": [3, 3], "stride": [1, 1], "padding": [[1, 1], [1, 1]]}


def test_notes_say_what_is_assumed_and_put_together(step):
    kinds = [note.kind for note in step.notes]
    assert kinds.count(NoteKind.REPAIR) == 1
    assert kinds.count(NoteKind.ASSUMPTION) == 6
    assert step.notes[0].line == 1874
    assert step.notes[0].text.startswith("14 lines")


def test_everything_survives_json(step):
    back = through_json(step)
    assert back == step
    assert tilelog.tiles(back) == tilelog.tiles(step)
    assert tilelog.facts(back) == tilelog.facts(step)
    assert tilelog.write(back).data == DATA
    assert (recover(back).input == recover(step).input).all()

    def plain(value: object) -> bool:
        if isinstance(value, dict):
            return all(type(key) is str and plain(one) for key, one in value.items())
        if isinstance(value, list):
            return all(map(plain, value))
        return value is None or type(value) in (int, float, str, bool)

    assert plain(step.graph.attributes)


# --- what is written ----------------------------------------------------------------------------


def test_all_32_infos_character_for_character(step):
    blocks = re.findall(r"^[fb]_info \{.*?^\}$", TEXT, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 32
    infos = [info for tile in tilelog.tiles(step) for info in (tile.forward, tile.backward)]
    assert [tilelog.format_info(info) for info in infos] == blocks


def test_all_256_records_one_by_one():
    printed = RECORD.findall(ENGINE.sub("", TEXT))
    assert len(printed) == 256
    for text in printed:
        assert format_record(parse_record(text)) == text


def test_the_whole_document_byte_for_byte(step):
    written = tilelog.write(step)
    assert written.data == DATA
    assert written.losses == ()
    assert tilelog.read(written.data) == step


def test_text_comes_from_the_records_and_not_from_a_copy(step, log):
    shifted = {CONV1: 1, POOL1: 2, CONV2: 3, POOL2: 4}
    text = TEXT
    for old, new in shifted.items():
        text = text.replace(str(old), str(new))
    other = tilelog.read(text.encode())
    assert [op.id for op in other.graph.ops[:4]] == ["1", "2", "3", "4"]
    assert tilelog.write(other).data.decode() == text
    assert "139784840008080" not in msgspec.json.encode(other).decode()


def test_a_step_without_tiles_cannot_be_written():
    with pytest.raises(ConvertError, match=r"no tile records.*read the step from a tile log"):
        tilelog.write(Step(Graph()))
    with pytest.raises(ConvertError, match="no tile records"):
        tilelog.tiles(Step(Graph()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda plain: plain.pop("tiles"), "damaged.*tiles"),
        (lambda plain: plain["tiles"].pop(), "some are missing"),
        (lambda plain: plain["tiles"][0]["forward"]["records"].pop(), "4 records in f_info"),
        (lambda plain: plain["tiles"][0]["forward"].update(name="b_info"), "b_info and b_info"),
        (lambda plain: plain["tiles"][0]["forward"]["records"][1].update(key=5), "expected maxpool2d"),
        (lambda plain: plain["tensors"].pop(3), "154 printed tensors"),
        (lambda plain: plain["tensors"][0]["values"].pop(), "15 values"),
        (lambda plain: plain["tensors"][0].update(device="x'\n"), "damaged"),
        (lambda plain: plain["engine_calls"][0].update(function="a b"), "damaged"),
        (lambda plain: plain["comparison"].update(elements=7), "7 elements"),
        (lambda plain: plain["operators"].pop(), "3 operators"),
    ],
)
def test_damaged_records_cannot_be_written(step, change, message):
    back = through_json(step)
    change(back.graph.attributes["tilelog"])
    with pytest.raises(ConvertError, match=message):
        tilelog.write(back)


def test_what_the_log_cannot_hold_is_named(step):
    graph = msgspec.structs.replace(step.graph, ops=step.graph.ops[:4])
    assert "changes to the graph" in tilelog.write(msgspec.structs.replace(step, graph=graph)).losses[0]


# --- printed tensors ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "tensor([[[[1., 0.]]]])",
        "tensor([[[[ 0.2054, -0.0533],\n          [ 0.0000, 10.2210]]]], device='cuda:0')",
        "tensor([[[[ 0.0000e+00, -2.1459e-04]]]])",
        "tensor([[[[-0.0000, 0.5000]]]], device='cpu')",
        "tensor([[[[ 1., -1.]]]])",
    ],
)
def test_a_tensor_is_printed_as_it_was(text):
    lines = text.split("\n")
    printed = parse_tensor(lines, range(1, len(lines) + 1), "x", (1, 1, len(lines), 2))
    assert format_tensor(printed) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tensor([[[1., 0.]]])", "four brackets"),
        ("tensor([[[[1., 0.]]]]", r"`\)`"),
        ("tensor([[[[1., 0.]]]], device='a b')", "device"),
        ("tensor([[[[1., 0.5]]]])", "integer notation"),
        ("tensor([[[[nan, 0.5]]]])", "as torch prints it"),
        ("tensor([[[[1., 0., 1.]]]])", "2 values"),
        ("tensor([[[[1., 0.], [1., 0.]]]])", "1 rows"),
        ("tensor([[[[]]]])", "as torch prints it"),
        ("tensor([[[[1.0000e+999, 0.0000e+00]]]])", "as torch prints it"),
        ("tensor([[[[1., 0.], [1., ..., 0.]]]])", "1 rows"),
        ("tensor([[[[1., [0.]]]])", "integer notation"),
    ],
)
def test_a_tensor_that_torch_would_not_print(text, message):
    with pytest.raises(FormatError, match=message):
        parse_tensor([text], [9], "x", (1, 1, 1, 2))


# --- recognition --------------------------------------------------------------------------------


def test_recognised_by_content_alone():
    others = [path.read_bytes() for path in DOCUMENTS.iterdir() if path != SEED]
    assert len(others) >= 4
    assert tilelog.recognise(DATA)
    assert tilelog.recognise(DATA[:200])
    assert not any(map(tilelog.recognise, others))
    for data in (b"", b"\xff\xfe", b"Input 1x1x16x16", b"\0" * 10_000):
        assert not tilelog.recognise(data)
