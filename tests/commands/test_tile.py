"""``lowtide tile``: records, table, picture, JSON, and what it says to a cut that cannot be made."""

import json
import re
import xml.etree.ElementTree as ElementTree

import pytest
import torch
from click.testing import CliRunner

import lowtide
from lowtide import zoo
from lowtide.commands.main import cli, main
from lowtide.commands.tile import _told as told
from tests.conftest import document_path

UNET = "unet:base=1,batch=1,size=188"


@pytest.fixture(scope="module", autouse=True)
def fresh():
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def captured(tmp_path_factory):
    """Steps captured once, in files."""
    folder = tmp_path_factory.mktemp("steps")

    def path(address):
        file = folder / re.sub(r"\W", "_", address)
        if not file.exists():
            built = zoo.build(address)
            lowtide.write(lowtide.capture(built.loss, built.model, *built.batch).step, "native", file)
        return str(file)

    return path


def invoke(*arguments):
    result = CliRunner().invoke(cli, ["tile", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(capsys, *arguments):
    with pytest.raises(SystemExit) as caught:
        main(["tile", *arguments])
    assert caught.value.code == 2
    return capsys.readouterr().err


def test_every_record_of_seed_004_is_printed():
    def records(text):
        """Records with the operators' ids taken out, in order; the log prints some a second time later."""
        text = re.sub(r"\d{10,}|(?<=d)\d(?=\[)|(?<=next_id )\d(?=\))", "ID", text)
        return re.findall(r"(?:fake|conv|maxpool|bk-)[^\n]* PI\(.*?next_id [-\w]+\)", text, re.DOTALL)

    printed = invoke("convpool", "--grid", "4x4", "--own", "input", "--records")
    log = document_path("004").read_text()
    assert len(records(printed)) == 160
    assert records(printed) == records(log)[:160]
    assert re.findall(r"^coord \[\d, \d\]$", printed, re.M) == re.findall(r"^coord \[\d, \d\]$", log, re.M)
    assert printed.count("f_info {-11: fake[") == printed.count("b_info {-11: fake-bp[") == 16


def test_a_table_and_a_picture_of_the_input():
    text = invoke("convpool", "--grid", "4x4", "--own", "input")
    lines = [line.split() for line in text.splitlines()]
    assert ["conv1", "convolution", "forward", "16x16", "4x4", "14x14"] in [line[:6] for line in lines]
    assert "overlap: 4.352 times the elements, 3.751 times the FLOP" in text
    drawn = [line.strip() for line in text.splitlines() if "█" in line][:-1]
    assert len(drawn) == 4
    assert {line.count("█") for line in drawn} == {8}


def test_json_has_the_same_numbers():
    view = json.loads(invoke("convpool", "--grid", "4x2", "--json"))
    assert (view["own"], view["grid"], view["dims"]) == ("output", [4, 2], [2, 3])
    assert view["tensor"] == view["end"] == {"name": "pool2", "shape": [1, 1, 4, 4]}
    first = view["layers"][0]
    assert first["operator"] == "conv1"
    assert (first["output"], first["share"], first["tile"]) == ([16, 16], [4, 8], [8, 10])
    assert (first["halo"], first["padding"]) == ([[1, 1], [1, 1]], [[1, 1], [1, 1]])
    assert first["source"].endswith("convpool.py:25")
    assert len(view["tiles"]) == 8
    computed = sum(
        (hi - lo) * (right - left)
        for tile in view["tiles"]
        for (_, _, lo, left), (_, _, hi, right) in [tile["parts"]["convolution"].values()]
    )
    assert first["overlap"] == computed / 256
    assert view["overlap"]["elements"] > 1


def test_the_picture_stands_alone(tmp_path):
    path = tmp_path / "tiles.svg"
    text = invoke("convpool", "--grid", "4x4", "--own", "input", "--svg", str(path))
    assert text.endswith(f"Wrote {path}\n")
    svg = path.read_text()
    root = ElementTree.fromstring(svg)
    name = "{http://www.w3.org/2000/svg}"
    panels = root.findall(f"{name}g")
    assert [panel.find(f"{name}title").text for panel in panels][:2] == [
        "image (input): needs 15x15 of 16x16",
        "conv1 (forward): needs 14x14 of 16x16",
    ]
    for panel in panels:
        boxes = {box.get("class"): box for box in panel.findall(f"{name}rect")}
        assert set(boxes) == {"whole", "needed", "share"}
        whole, needed, part = (boxes[key] for key in ("whole", "needed", "share"))
        assert float(part.get("width")) <= float(needed.get("width")) <= float(whole.get("width"))
    assert "href" not in svg
    assert svg.count("http") == 1  # the name of the format


def test_a_file_is_cut_where_tiles_of_a_network_are(captured):
    text = invoke(captured(UNET), "--grid", "2x2")
    assert "4 tiles (2x2) of _log_softmax, 1x2x4x4" in text
    assert "conv_u0b_c" in text
    upward = next(line for line in text.splitlines() if line.strip().startswith("conv_u0b_c")).split()
    assert upward[3:] == ["6x6", "3x3", "4x4", "1+1", "1+1", "–", "1.78x"]


@pytest.mark.parametrize(
    ("address", "end", "shape"),
    [
        ("vgg19:batch=2,size=64,classes=3", "features.36", [2, 512, 2, 2]),
        ("alexnet:batch=2", "pow_3", [2, 256, 6, 6]),
    ],
)
def test_the_body_of_a_classifier_is_what_is_cut(captured, address, end, shape):
    view = json.loads(invoke(captured(address), "--grid", "2x2", "--json"))
    assert view["end"] == {"name": end, "shape": shape}
    assert {row["phase"] for row in view["layers"]} == {"forward"}


def test_the_batch_has_no_halo(captured):
    view = json.loads(invoke(captured("alexnet:batch=2"), "--grid", "2", "--dims", "batch", "--json"))
    assert view["picture"] is None
    assert view["overlap"]["elements"] <= 1
    assert all(row["halo"] == [[0, 0]] for row in view["layers"])


def test_until_an_earlier_operator(captured):
    view = json.loads(invoke(captured("alexnet:batch=2"), "--grid", "3x3", "--until", "pool2", "--json"))
    assert view["end"] == {"name": "pool2", "shape": [2, 192, 13, 13]}


def test_tiles_are_run_and_compared_with_the_whole(capsys, captured):
    arguments = ("--grid", "2x2", "--own", "input", "--run")
    found = json.loads(invoke("convpool", *arguments, "--json"))["run"]
    assert (found["tiles"], found["gradients"], found["loss_difference"]) == (12, 3, 0)
    assert 0 <= found["largest_difference"] < 1e-4
    assert told(found).startswith(
        "Run in 12 tiles, forward and backward, and as a whole: the loss differs by 0"
    )
    assert "cannot be run" in refused(capsys, captured("convpool"), "--grid", "2x2", "--run")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--grid", "4by4"), "'4by4' is no grid; write rows x columns, as in 4x4"),
        (("--grid", "0x4"), "is no grid"),
        (("--grid", "999x999"), "998,001 tiles"),
        (("--grid", "4"), "1 numbers for 2 dimensions"),
        (("--grid", "4x4", "--dims", "hight,width"), "Did you mean 'height'"),
        (("--grid", "4x4", "--records"), "--own input"),
        (("--grid", "4", "--dims", "width", "--svg", "a.svg"), "a grid of two numbers"),
        (("--grid", "5x4"), "5x4 does not fit"),
        (("--grid", "2x2", "--until", "pool3"), "Did you mean 'pool2'"),
        (("--grid", "2x2", "--own", "sideways"), "not one of output, input"),
    ],
)
def test_cuts_that_cannot_be_made(arguments, words, capsys, captured):
    assert words in refused(capsys, captured("convpool"), *arguments)


def test_the_operator_in_the_way_is_named_with_its_line(capsys, tmp_path):
    code = tmp_path / "net.py"
    code.write_text(
        "import torch\n"
        "from torch import nn\n\n\n"
        "def make():\n"
        "    model = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.ReLU())\n\n"
        "    def loss(model, image):\n"
        "        x = model(image)\n"
        "        x = x - x.mean((2, 3), keepdim=True)\n"
        "        return (x * x).sum()\n\n"
        "    return model, (torch.rand(1, 1, 8, 8),), loss\n"
    )
    said = refused(capsys, f"{code}:make", "--grid", "2x2")
    assert f"{code}:10: aten.mean" in said
    assert "what is in front of it can be cut, until" in said


def test_a_document_that_does_not_tell_arguments(capsys):
    said = refused(capsys, str(document_path("000")), "--grid", "2x2")
    assert "lowtide profile" in said
