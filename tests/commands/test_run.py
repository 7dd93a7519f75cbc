import json

import pytest
import torch
from click.testing import CliRunner

from lowtide.commands.main import cli, main


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


def test_run_prints_the_keys_that_are_promised():
    result = CliRunner().invoke(cli, ["run", "convpool", "--repeats", "1", "--json"])
    assert result.exit_code == 0, result.output
    view = json.loads(result.stdout)
    assert set(view["eager"]) == set(view["measured"]) == {"peak_bytes", "seconds"}
    assert set(view["predicted"]) == {"peak_bytes"}
    assert view["loss_equal"] is view["bitwise"] is True
    assert view["max_rel_grad_diff"] == 0


def test_run_says_that_nothing_changed():
    result = CliRunner().invoke(cli, ["run", "convpool", "--repeats", "1", "--program", "recompute-all"])
    assert "bitwise equal" in result.stdout


def test_a_program_in_a_file_runs(tmp_path):
    program, timeline = tmp_path / "program.json", tmp_path / "timeline.json"
    arguments = ["--program", "recompute-all", "--save-program", str(program), "--timeline", str(timeline)]
    first = CliRunner().invoke(cli, ["run", "convpool", "--repeats", "1", "--json", *arguments])
    assert first.exit_code == 0, first.output
    assert len(json.loads(timeline.read_text())["operators"]) == json.loads(first.stdout)["runs"]
    again = CliRunner().invoke(
        cli, ["run", "convpool", "--repeats", "1", "--json", "--program", str(program)]
    )
    assert again.exit_code == 0, again.output
    views = [json.loads(result.stdout) for result in (first, again)]
    assert views[0]["runs"] == views[1]["runs"] > views[0]["operators"]
    assert views[1]["bitwise"]


def test_a_program_of_another_step_exits_2(tmp_path, capsys):
    path = tmp_path / "program.json"
    path.write_text('{"forward":[{"type":"run","op":0}],"backward":[],"lowtide":"program","version":1}')
    with pytest.raises(SystemExit) as caught:
        main(["run", "convpool", "--program", str(path)])
    assert caught.value.code == 2
    assert "never ran" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["unett"], "Did you mean 'unet'"),
        (["unet:size=100"], "size="),
        (["convpool", "--program", "plane"], "Did you mean 'plain'"),
        (["nowhere.py:step"], "nowhere.py"),
    ],
)
def test_bad_targets_exit_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["run", *arguments])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
