"""Steps from a user's own file, in every command that takes one: batches of every form."""

import json
import textwrap

import pytest
import torch
from click.testing import CliRunner

from lowtide.commands.main import cli
from tests.commands.refusal import refused

OWN = """
    import torch
    from torch import nn

    def loss_of(model, batch):
        return (model(batch["image"]) - batch["more"]["wanted"][0]).square().mean() * batch["scale"]

    def step():
        layers = [layer for _ in range(3) for layer in (nn.Conv2d(2, 2, 3, padding=1), nn.ReLU())]
        more = {"wanted": [torch.randn(4, 2, 16, 16)]}
        batch = {"image": torch.randn(4, 2, 16, 16), "more": more, "scale": 2.0}
        return loss_of, nn.Sequential(*layers), batch

    def pair():
        return lambda model, batch: (model(batch[0]) - batch[1]).square().mean(), step()[1], (
            torch.randn(4, 2, 16, 16), torch.randn(4, 2, 16, 16)
        )
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path / "cache"))
    torch._dynamo.reset()
    path = tmp_path / "own.py"
    path.write_text(textwrap.dedent(OWN))
    return path


def told(*arguments):
    result = CliRunner().invoke(cli, [*map(str, arguments), "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize("function", ["step", "pair"])
def test_run_takes_a_nested_batch(function, own):
    view = told("run", f"{own}:{function}", "--repeats", "1")
    assert view["bitwise"]
    # 3 layers, 2 tensors of the batch, and what backward keeps
    assert view["eager"]["peak_bytes"] > 2 * 4 * 4 * 2 * 16 * 16


def test_plan_takes_a_nested_batch(own, tmp_path):
    path = tmp_path / "plan.json"
    options = ["--budget", "100%", "--only", "recompute", "--device", "cpu", "--time-limit", "1"]
    view = told("plan", f"{own}:step", *options, "-o", path)
    assert view["predicted"]["peak_bytes"] <= view["budget_bytes"]
    assert told("check", path)["checked"]


def test_profile_takes_a_nested_batch(own, tmp_path):
    view = told("profile", f"{own}:step", "-o", tmp_path / "step.json", "--device", "cpu")
    assert view["operators"] > 6
    assert view["peak_bytes"] > 2 * 4 * 4 * 2 * 16 * 16


@pytest.mark.parametrize("side", ["output", "input"])
def test_tile_takes_a_nested_batch(side, own):
    view = told("tile", f"{own}:step", "--grid", "2x2", "--own", side, "--run")
    assert view["run"]["gradients"] == 8  # of parameters and of both tensors of the batch
    assert view["run"]["largest_difference"] < 1e-4


def test_demo_takes_a_nested_batch(own, tmp_path, monkeypatch):
    monkeypatch.setattr("lowtide.commands.demo.SHARES", ("100%",))
    view = told("demo", f"{own}:step", "--repeats", "1", "-o", tmp_path / "page.html")
    assert [run["bitwise"] for run in view["runs"]] == [True]


@pytest.mark.parametrize("command", ["run", "plan", "profile", "tile", "demo"])
def test_help_says_what_a_function_returns(command):
    text = CliRunner().invoke(cli, [command, "--help"]).stdout
    assert "path/to/file.py:function" in text
    assert "    return loss_of, model, batch" in text


COMMANDS = {
    "run": ["--repeats", "1"],
    "plan": ["--budget", "90%", "--device", "cpu"],
    "profile": ["-o", "out.json", "--device", "cpu"],
    "tile": ["--grid", "2", "--dims", "batch"],
    "demo": ["-o", "page.html"],
}
MISTAKES = """
    import torch
    from torch import nn

    def fails():
        return 1 / 0

    def nothing():
        pass

    def loss_fails():
        def loss_of(model, batch):
            return model(batch["y"]).sum()
        return loss_of, nn.Linear(4, 4), {"x": torch.randn(3, 4)}

    def wrong_shape():
        return lambda model, x: model(x).sum(), nn.Linear(4, 4), torch.randn(3, 5)
"""


@pytest.fixture
def mistakes(own, monkeypatch):
    monkeypatch.chdir(own.parent)
    path = own.parent / "mistakes.py"
    path.write_text(textwrap.dedent(MISTAKES))
    return path


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("fails", "mistakes.py:6: fails() failed: ZeroDivisionError: division by zero\n"),
        ("nothing", "mistakes.py:8: nothing() returned a NoneType; wanted (loss_of, model, batch)"),
        ("missing", "mistakes.py: 'missing' does not exist there."),
        ("loss_fails", "mistakes.py:13: "),
        ("wrong_shape", "mistakes.py:17: the step fails on these inputs: "),
    ],
)
def test_a_mistake_in_the_users_file_exits_2(command, function, said, mistakes, capfd):
    message = refused(command, f"{mistakes}:{function}", *COMMANDS[command], capsys=capfd)
    assert said in message
    assert message.startswith("Error: ") or "…\nError: " in message
    if function == "loss_fails":
        assert "KeyError" in message
    assert not list(mistakes.parent.glob("out.json"))


@pytest.mark.parametrize("command", COMMANDS)
def test_a_file_that_python_cannot_read_exits_2(command, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "broken.py"
    path.write_text("def step():\n    return (\n")
    message = refused(command, f"{path}:step", *COMMANDS[command], capsys=capsys)
    assert message.startswith(f"Error: {path}:2: the file cannot be run: SyntaxError: ")
    assert message.count("\n") == 1


def test_leaving_inside_the_step_is_a_mistake_too(tmp_path, capsys):
    path = tmp_path / "leaves.py"
    path.write_text(
        "import sys\nimport torch\n\ndef loss_of(model, x):\n    sys.exit(3)\n\n"
        "def step():\n    return loss_of, torch.nn.Linear(2, 2), torch.ones(2, 2)\n"
    )
    message = refused("run", f"{path}:step", capsys=capsys)
    assert "leaves.py:5: the step fails on these inputs: SystemExit: 3" in message
