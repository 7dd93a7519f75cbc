"""``lowtide report``: files of every kind, errors that say what to do, nothing half-written."""

import json
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from lowtide.commands.main import EXIT_BAD_INPUT, cli, main
from lowtide.cost.device import store_device
from lowtide.documents import decode_document, write_document
from lowtide.formats.registry import write_file
from lowtide.graph import Recording, Timeline
from lowtide.report.page.types import Report
from tests.report.page.cases import measured, offloading, recomputing
from tests.steps import DEVICE, families


@pytest.fixture
def files(tmp_path):
    write_document(tmp_path / "plan.json", recomputing())
    write_document(tmp_path / "other.json", offloading())
    write_document(tmp_path / "device.json", DEVICE)
    write_document(tmp_path / "timeline.json", Recording(("nothing",), Timeline((1,))))
    write_file(families(), "native", tmp_path / "profile.json")
    return tmp_path


def invoke(*arguments):
    return CliRunner().invoke(cli, ["report", *map(str, arguments)], catch_exceptions=False)


def test_a_plan_and_a_profile_are_compared_on_one_page(files):
    page = files / "report.html"
    result = invoke(files / "profile.json", files / "plan.json", files / "device.json", "-o", page)
    assert result.exit_code == 0
    assert "profile: predicted" in result.stdout
    assert "plan: predicted" in result.stdout
    assert "Wrote" in result.stdout
    assert page.read_text().startswith("<!doctype html>")


def test_ways_are_called_by_the_names_of_their_files(files):
    recorded = Path(__file__).parents[1] / "formats" / "h200" / "profiler.json.gz"
    result = invoke(recorded, "-o", files / "report.html", "--json")
    assert [run["name"] for run in json.loads(result.stdout)["runs"]] == ["profiler"]


def test_the_document_alone_is_written_for_other_programs(files):
    out = files / "report.json"
    result = invoke(files / "plan.json", files / "other.json", "-o", out, "--json", "--rivals", 0)
    view = json.loads(result.stdout)
    assert [run["name"] for run in view["runs"]] == ["storing everything", "plan", "other"]
    assert view["bytes"] == out.stat().st_size
    report = decode_document(out.read_bytes(), Report)
    assert report.title == "plan and other"
    assert view["runs"][1]["predicted"]["peak_bytes"] == recomputing().predicted.peak_bytes


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["timeline.json"], "give the plan that ran too"),
        (["plan.json", "timeline.json"], "timeline: its operators are not those of a plan"),
        (["device.json"], "nothing to report on: give a step, a plan, a sweep or a measured run"),
        (["nothing.json"], "nothing.json"),
    ],
)
def test_bad_input_is_refused(files, names, says, capsys):
    page = files / "page.html"
    with pytest.raises(SystemExit) as ended:
        main(["report", *(str(files / name) for name in names), "-o", str(page)])
    assert ended.value.code == EXIT_BAD_INPUT
    assert says in capsys.readouterr().err
    assert not page.exists()


def test_a_damaged_plan_is_refused(files, capsys):
    plan = json.loads((files / "plan.json").read_text())
    plan["predicted"]["peak_bytes"] -= 1
    (files / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(SystemExit) as ended:
        main(["report", str(files / "plan.json"), "-o", str(files / "page.html")])
    assert ended.value.code == EXIT_BAD_INPUT
    assert "plan again" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command", [["report", "-o", "{}"], ["plan", "--budget", "50%", "-o", "{}"], ["tile", "--grid", "1x1"]]
)
def test_a_damaged_field_of_a_step_is_told_with_its_file(files, command, capsys):
    path = files / "profile.json"
    found = json.loads(path.read_text())
    found["step"]["graph"]["returned"] = [10**6]
    found["step"]["graph"]["ops"][0]["arguments"] = []
    path.write_text(json.dumps(found))
    with pytest.raises(SystemExit) as ended:
        main([command[0], str(path), *(word.format(files / "out.json") for word in command[1:])])
    assert ended.value.code == EXIT_BAD_INPUT
    said = " ".join(capsys.readouterr().err.split())
    assert "profile.json: the field 'returned' of the graph does not list tensors" in said
    assert "make it again by `lowtide profile`" in said
    assert not (files / "out.json").exists()


def test_the_device_of_a_run_is_found_where_it_was_measured(files, monkeypatch):
    folder, out = files / "cache", files / "report.json"
    monkeypatch.setenv("LOWTIDE_CACHE", str(folder))
    ran = msgspec.structs.replace(measured(), environment=DEVICE.environment)
    for name, value in (("run.json", ran), ("elsewhere.json", measured())):
        write_document(files / name, value)
    for name, stored in (("run.json", False), ("elsewhere.json", True), ("run.json", True)):
        if stored:
            store_device(folder, DEVICE)
        assert invoke(files / name, "-o", out, "--rivals", 0).exit_code == 0
        limits = decode_document(out.read_bytes(), Report).limits
        assert (limits is not None) == (stored and name == "run.json")
    assert limits.bytes_per_second == DEVICE.bytes_per_second


def test_more_bytes_than_can_be_counted_are_refused(files, capsys):
    path = files / "profile.json"
    found = json.loads(path.read_text())
    for one in found["step"]["graph"]["tensors"]:
        one["bytes"] = 2**60
    path.write_text(json.dumps(found))
    with pytest.raises(SystemExit) as ended:
        main(["report", str(path), "-o", str(files / "page.html")])
    assert ended.value.code == EXIT_BAD_INPUT
    said = capsys.readouterr().err
    assert "profile: its tensors and workspaces take" in said
    assert "make it again" in said
    assert not (files / "page.html").exists()


def test_an_input_is_not_written_over(files, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["report", str(files / "plan.json"), "-o", str(files / "plan.json")])
    assert ended.value.code == EXIT_BAD_INPUT
    assert decode_document((files / "plan.json").read_bytes(), type(recomputing())) == recomputing()
