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
