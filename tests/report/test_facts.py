"""The facts that the five documents are known to hold, as ``lowtide show --json`` prints them."""

import json

import pytest
from click.testing import CliRunner

from lowtide.commands.main import cli
from tests.conftest import document_path


def shown(number):
    result = CliRunner().invoke(cli, ["show", "--json", str(document_path(number))])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def views():
    return {number: shown(number) for number in ("000", "001", "002", "003", "004")}


def test_formats_are_recognised_by_content(views):
    assert {n: v["format"] for n, v in views.items()} == {
        "000": "chainer", "001": "megengine", "002": "dataflow", "003": "tensorflow", "004": "tilelog",
    }  # fmt: skip


def test_000_a_training_graph(views):
    view = views["000"]
    assert view["ops"] == {"forward": 60, "backward": 60}
    assert view["tensors"]["count"] == 108
    assert view["tensors"]["bytes"]["parameter"] == 124_401_416
    assert view["tensors"]["bytes"]["input"] == 10_469_888 + 4_817_408
    assert view["tensors"]["bytes"]["activation"] == 11_781_604_356
    assert view["peak"]["bytes"] == 7_329_956_112
    assert (view["peak"]["phase"], view["peak"]["number"]) == ("backward", 6)
    assert view["peak"]["op"] == "Convolution2DFunction.50.backward"
    assert view["peak"]["every_input_bytes"] == 7_948_484_880
    assert view["after_forward_bytes"] == 6_698_385_160
    assert view["document"] == {
        "variables": 108,
        "functions": 120,
        "parameters": 46,
        "inputs": [4_817_408, 10_469_888],
        "activations": 60,
    }
    assert view["flop"] is view["traffic_bytes"] is view["seconds"]["device"] is None


def test_001_an_execution_profile(views):
    view = views["001"]
    assert view["ops"] == {"forward": 234}
    assert view["tensors"]["count"] == 299
    assert view["flop"] == 81_954_092_640
    assert view["traffic_bytes"] == 2_551_250_656
    seconds = view["seconds"]
    assert round(seconds["device"] * 1e3, 3) == 22.051
    assert round(seconds["wait"] * 1e3, 3) == 0.379
    assert round(seconds["span"] * 1e3, 3) == 22.797
    assert round(seconds["host_span"] * 1e3, 3) == 3.895
    assert view["addresses"]["live_bytes"] == 96_337_920
    assert view["addresses"]["touched_bytes"] == 102_443_008
    assert round(view["addresses"]["fragmentation"], 3) == 0.063
    assert view["peak"]["op"] == "ADD(conv[557],conv[560])[563]"
    assert view["peak"]["bytes"] == 96_337_920 + 102_106_528
    sizes = view["tensors"]["bytes"]
    assert sizes["parameter"] == 102_106_528
    assert sizes["activation"] + sizes["workspace"] == 1_155_778_960
    assert view["document"] == {
        "operators": 234,
        "operators_not_run": 6,
        "variables": 299,
        "chunks": {"count": 104, "bytes": 102_106_528},
        "operators_without_flop": 107,
        "activations_and_workspaces": {"count": 182, "bytes": 1_155_778_960},
        "workspaces": {"count": 53, "largest_bytes": 26_216_960},
    }


def test_003_a_list_of_placed_operators(views):
    view = views["003"]
    assert view["document"] == {
        "lines": 178,
        "nodes": 106,
        "kernels": 62,
        "copies": 10,
        "devices": {"GPU": 168, "CPU": 10},
    }
    assert view["ops"]["forward"] + view["ops"]["backward"] == 106 + 10
    assert view["transposes"] == {"count": 18, "bytes": 1_122_598_912}
    assert view["host_copies"] == {"count": 10, "bytes": 9_878_784}
    assert view["flop"] == 168_485_191_680
    assert view["peak"]["bytes"] is view["peak"]["op"] is view["after_forward_bytes"] is None


KEYS = {
    "format", "origin", "ops", "kinds", "tensors", "peak", "after_forward_bytes", "flop", "flop_by_phase",
    "traffic_bytes", "seconds", "addresses", "transposes", "host_copies", "repairs", "tiles", "largest", "slowest",
    "curve", "estimated", "document", "notes",
}  # fmt: skip


def test_every_document_has_the_same_keys(views):
    for number, view in views.items():
        assert set(view) == KEYS, number
        assert set(view["tensors"]) == {"count", "gradients", "bytes", "storage_bytes"}
        assert set(view["peak"]) == {
            "bytes", "op", "phase", "number", "every_input_bytes", "live_count", "live",
        }  # fmt: skip
        assert set(view["seconds"]) == {"device", "wait", "span", "host_span"}
        assert set(view["addresses"]) == {"touched_bytes", "live_bytes", "fragmentation"}
        assert set(view["transposes"]) == set(view["host_copies"]) == {"count", "bytes"}
        assert set(view["tiles"]) == {"count", "mismatches", "elements"}


def test_kinds_count_every_operator(views):
    for view in views.values():
        assert sum(view["kinds"].values()) == sum(view["ops"].values())


def test_002_a_distributed_step(views):
    view = views["002"]
    assert view["ops"] == {"backward": 23, "forward": 11, "update": 7}
    assert view["tensors"]["count"] == 19
    assert view["tensors"]["gradients"] == 15
    assert view["document"]["parameters"] == 7
    assert view["document"]["updates"] == 7
    assert len(view["repairs"]) == 109
    assert {"line", "before", "after", "why"} == set(view["repairs"][0])
    dims = [repair for repair in view["repairs"] if "64 1 164 7 727 27" in repair["before"]]
    assert dims
    assert all("64 1 1 64 7 7 27 27" in repair["after"] for repair in dims)
    skipped = [note for note in view["notes"] if note["kind"] == "skipped"]
    assert len(skipped) == 27
    assert all(note["line"] and note["before"] for note in skipped)


def test_004_a_tile_log(views):
    view = views["004"]
    assert view["tiles"] == {"count": 16, "mismatches": 0, "elements": 256}
    assert view["ops"] == {"forward": 4, "backward": 4}
    assert view["document"]["records"] == 256
    assert view["document"]["operators"] == 4
    for other in ("000", "001", "002", "003"):
        assert views[other]["tiles"] == {"count": None, "mismatches": None, "elements": None}
        assert (views[other]["repairs"] is None) == (other != "002")
