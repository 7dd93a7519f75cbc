import json
import textwrap
from contextlib import contextmanager

import pytest
import torch
from click.testing import CliRunner

from lowtide import zoo
from lowtide.commands.main import cli, main
from lowtide.cost.probe import environment
from lowtide.documents import read_document
from lowtide.errors import PlanError
from lowtide.execute.compile.user_code import users_step
from lowtide.execute.runtime.interpreter import Interpreter
from lowtide.execute.tiling.plan_tiles import with_loop
from lowtide.plan.program.instructions import Program
from lowtide.plan.result.measured_run import MeasuredRun
from tests.commands.refusal import refused
from tests.fuzz_commands import document, joint


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


def test_run_prints_the_keys_that_are_promised():
    result = CliRunner().invoke(cli, ["run", "convpool", "--repeats", "1", "--json"])
    assert result.exit_code == 0, result.output
    view = json.loads(result.stdout)
    assert set(view["eager"]) == set(view["measured"]) == {"peak_bytes", "seconds", "host_seconds"}
    assert all(view[way]["host_seconds"] == view[way]["seconds"] for way in ("eager", "measured")), "on a CPU"
    assert set(view["predicted"]) == {"peak_bytes"}
    assert view["loss_equal"] is view["bitwise"] is True
    assert view["max_rel_grad_diff"] == 0


def test_run_says_that_nothing_changed():
    result = CliRunner().invoke(cli, ["run", "convpool", "--repeats", "1", "--program", "recompute-all"])
    assert "bitwise equal" in result.stdout
    assert result.stdout.count("  host ") == 2


def test_a_plan_runs_where_eager_runs_out_of_memory(tmp_path, monkeypatch):
    @contextmanager
    def full():
        with users_step():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        yield

    monkeypatch.setattr("lowtide.execute.compare.compare.users_step", full)
    out, page = tmp_path / "run.json", tmp_path / "report.html"
    result = CliRunner().invoke(cli, ["run", "convpool", "--budget", "90%", "--repeats", "1", "-o", str(out)])
    assert result.exit_code == 0, result.output
    assert "  eager     out of memory" in result.stdout
    assert "gradients and buffers: not compared, as eager PyTorch ran out of memory" in result.stdout
    shown = CliRunner().invoke(cli, ["report", str(out), "-o", str(page)])
    assert shown.exit_code == 0, shown.output
    assert "not compared: eager PyTorch ran out of memory" in page.read_text()
    refused = CliRunner().invoke(cli, ["run", "convpool"])
    assert "--budget auto" in str(refused.exception)


def test_the_file_of_a_run_says_where_it_ran(tmp_path):
    path = tmp_path / "run.json"
    result = CliRunner().invoke(cli, ["run", "convpool", "--repeats", "1", "-o", str(path)])
    assert result.exit_code == 0, result.output
    assert read_document(path, MeasuredRun).environment == environment("cpu")


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
        (["convpool", "--budget", "90%", "--offload", "parameter"], "Did you mean 'parameters'"),
        (["convpool", "--offload", "parameters"], "give a --budget too"),
        (
            [zoo.small("locallyconnected"), "--budget", "90%", "--offload", "optimizer"],
            "an update of its own",
        ),
    ],
)
def test_bad_targets_exit_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["run", *arguments])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


OWN = """
    import torch
    from torch import nn

    def step(loss, model=None, batch=None):
        return model or nn.Linear(4, 4), batch or (torch.randn(3, 4),), loss

    def branches():
        def loss(model, x):
            y = model(x)
            if y.sum() > 0:
                y = y * 2
            return y.sum()
        return step(loss)

    def raises():
        def loss(model, x):
            y = model(x)
            raise ValueError("my own")
        return step(loss)

    def cannot_open():
        def loss(model, x):
            open("/nonexistent/file")
            return model(x).sum()
        return step(loss)

    def wrong_shape():
        return step(lambda model, x: model(x).sum(), batch=(torch.randn(3, 5),))

    def recurrent():
        return step(lambda model, x: model(x)[0].sum(), nn.LSTM(4, 4), (torch.randn(3, 2, 4),))

    def none(): return step(lambda model, x: None)
    def number(): return step(lambda model, x: 3.0)
    def pair(): return step(lambda model, x: (model(x).sum(), model(x)))
    def vector(): return step(lambda model, x: model(x))
    def whole(): return step(lambda model, x: model(x).argmax())
    def imaginary(): return step(lambda model, x: (model(x) * 1j).sum())
    def apart(): return step(lambda model, x: x.sum())
    def nothing(): return step(lambda model, x: None, nn.ReLU())

    def nan(): return step(lambda model, x: model(x).sum(), batch=(torch.full((3, 4), float("nan")),))
    def sparse():
        table = nn.Embedding(10, 4, sparse=True)
        return step(lambda model, x: model(x).square().sum(), table, (torch.tensor([1, 2, 1]),))
    def ok():
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        return step(lambda model, x: model(x).square().mean(), model)
"""

BAD = {
    "branches": "own.py:11: the step cannot be captured as one graph",
    "raises": "own.py:19: the step fails on these inputs: ValueError: my own",
    "cannot_open": "own.py:24: the step fails on these inputs: FileNotFoundError: ",
    "wrong_shape": "own.py:29: the step fails on these inputs: RuntimeError: ",
    "recurrent": "cannot be captured as one graph",
    "none": "the loss must be a tensor to have a backward pass; it is a NoneType",
    "number": "it is a float",
    "pair": "it is a tuple",
    "vector": "must be a single number to have a backward pass; it is a tensor of shape (3, 4)",
    "whole": "must be a real number to have a backward pass; it is of type int64",
    "imaginary": "must be a real number to have a backward pass; it is of type complex64",
    "apart": "the loss does not depend on any parameter",
    "nothing": "the function must return a tensor; it returns a NoneType",
}


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(textwrap.dedent(OWN))
    return path


@pytest.mark.parametrize("function", BAD)
def test_mistakes_of_the_users_own_code_exit_2(function, own, capsys):
    assert BAD[function] in refused("run", f"{own}:{function}", "--repeats", "1", capsys=capsys)


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        ("branches", "own.py:11: the step cannot be captured as one graph"),
        ("raises", "own.py:19: "),
        ("cannot_open", "own.py:24: "),
        ("wrong_shape", "own.py:29: "),
        ("none", "runs no operator on a tensor"),
    ],
)
def test_so_they_do_where_a_budget_is_given(function, problem, own, capsys):
    assert problem in refused("run", f"{own}:{function}", "--budget", "100%", capsys=capsys)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--save-program", "a.json", "--timeline", "none/x.json"), "none/x.json: cannot be written: there is no folder"),
        (("--save-program", "a.json", "--timeline", "./a.json"), "two outputs would be written to this file"),
        (("--save-program", "."), "not a regular file"),
        (("--timeline", ""), "no file to write was named"),
        (("--device", "meta"), "a step runs on cpu or cuda, not on 'meta'"),
        (("--device", "cud"), "Did you mean 'cuda'"),
        (("--seed", "99999999999999999999999"), "--seed"),
        (("--seed", "x"), "--seed"),
        (("--only", "recompute"), "--only is for plans: give a --budget too"),
        (("--offload", "parameters"), "--offload is for plans: give a --budget too"),
        (("--budget", "50%", "--program", "plain"), "give a --budget or a --program, not both"),
    ],
)  # fmt: skip
def test_bad_usage_exits_2_before_anything_runs(arguments, problem, own, capsys, monkeypatch):
    monkeypatch.chdir(own.parent)
    monkeypatch.setattr("lowtide.execute.compare.compare.compare", None)
    assert problem in refused("run", f"{own}:ok", *arguments, capsys=capsys)
    assert list(own.parent.glob("*.json")) == []


@pytest.mark.parametrize("function", ["nan", "sparse"])
def test_equal_bits_are_equal_whatever_they_stand_for(function, own):
    result = CliRunner().invoke(cli, ["run", f"{own}:{function}", "--repeats", "1", "--json"])
    assert result.exit_code == 0, result.output
    view = json.loads(result.stdout)
    assert view["loss_equal"] is view["bitwise"] is True
    assert view["max_rel_grad_diff"] == 0


def test_a_program_in_a_file_runs_as_it_is_written(own, tmp_path):
    first, plain, ran = (tmp_path / f"{name}.json" for name in ("first", "plain", "ran"))
    command = ["run", f"{own}:ok", "--repeats", "1"]
    assert CliRunner().invoke(cli, [*command, "--save-program", str(first)]).exit_code == 0
    program = json.loads(first.read_text())
    lines = program["forward"] + program["backward"]
    assert any("in_place" in line for line in lines)
    for given in (first, plain):
        if given is plain:
            for line in lines:
                line.pop("in_place", None)
            plain.write_text(json.dumps(program, separators=(",", ":")) + "\n")
        result = CliRunner().invoke(cli, [*command, "--program", str(given), "--save-program", str(ran)])
        assert result.exit_code == 0, result.output
        assert "bitwise equal" in result.stdout
        assert ran.read_text() == given.read_text()


def test_an_operator_that_has_no_form_in_place_is_refused(tmp_path, capsys):
    own = tmp_path / "own.py"
    own.write_text(
        "import torch\n"
        "def make():\n"
        "    model = torch.nn.Linear(4, 4, bias=False)\n"
        "    return model, (torch.randn(4, 4),), lambda model, x: (model(x) @ x).sum()\n"
    )
    path = tmp_path / "program.json"
    assert (
        CliRunner()
        .invoke(cli, ["run", f"{own}:make", "--repeats", "1", "--save-program", str(path)])
        .exit_code
        == 0
    )
    program = json.loads(path.read_text())
    runs = [line for line in program["forward"] if line["type"] == "run"]
    assert not any("in_place" in line for line in runs)
    runs[2]["in_place"] = 0  # the second product
    path.write_text(json.dumps(program))
    message = refused("run", f"{own}:make", "--repeats", "1", "--program", path, capsys=capsys)
    assert "cannot write over its input 0" in message


def test_state_of_an_optimiser_may_leave(tmp_path, monkeypatch):
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    path = tmp_path / "own.py"
    text = """
        import torch
        from torch import nn

        def step():
            layers = [layer for _ in range(3) for layer in (nn.Linear(128, 128), nn.Tanh())]
            return nn.Sequential(*layers), (torch.randn(256, 128),), lambda model, x: model(x).square().mean()
    """
    path.write_text(textwrap.dedent(text))
    options = ["--budget", "80%", "--offload", "optimizer", "--repeats", "1", "--json"]
    result = CliRunner().invoke(cli, ["run", f"{path}:step", *options])
    assert result.exit_code == 0, result.output
    view = json.loads(result.stdout)
    assert view["bitwise"]
    assert view["offload"] == ["optimizer"]
    assert view["only"] == ["recompute", "offload"]
    state = 2 * 3 * (128 * 128 + 128) * 4
    assert view["resident_bytes"] > state
    assert view["eager"]["peak_bytes"] > view["resident_bytes"]
    assert view["measured"]["peak_bytes"] <= view["budget_bytes"] * 1.005


LOOPS = [
    ({"cut": ["nope"]}, "a tensor that forward makes, and 'nope' is none"),
    ({"tiles": []}, "it has no tiles"),
    ({"tiles": [{"body": 0, "over": {"lo": [0], "hi": [1]}}]}, "is no part of axes of (1, 1, 4, 4)"),
    (
        {"tiles": [{"body": 0, "over": {"lo": [0, 0, 0, 0], "hi": [1, 1, 4, 5]}}]},
        "[0:1, 0:1, 0:4, 0:5], which is no part of axes of (1, 1, 4, 4)",
    ),
    ({"end": "nope"}, "here is none of that name"),
    ({"tiles": [{"body": 7, "over": {"lo": [0, 0, 0, 0], "hi": [1, 1, 4, 4]}}]}, "turns body 7"),
]


@pytest.mark.parametrize(("change", "message"), LOOPS)
def test_a_damaged_loop_is_refused(change, message, tmp_path, capsys):
    path = tmp_path / "program.json"
    program = json.loads(document("loop"))
    loop = next(line for line in program["forward"] if line["type"] == "loop")
    loop |= change
    path.write_text(json.dumps(program))
    said = refused("run", "convpool", "--repeats", "1", "--program", path, capsys=capsys)
    assert message in said


@pytest.mark.parametrize(("kind", "message"), [("run", "without a loop"), ("loop", "stands for none")])
def test_a_loop_and_an_operator_are_told_apart(kind, message, tmp_path):
    program = json.loads(document("loop"))
    forward = program["forward"]
    if kind == "run":
        forward[:] = [
            {"type": "run", "op": line["op"]} if line["type"] == "loop" else line for line in forward
        ]
    else:
        first = next(line for line in program["backward"] if line["type"] == "run")
        first |= {"type": "loop", "tiles": [{"body": 0, "over": {"lo": [], "hi": []}}]}
    path = tmp_path / "program.json"
    path.write_text(json.dumps(program))
    read = read_document(path, Program)
    whole = with_loop(joint(), read_document(_written(tmp_path), Program))
    with pytest.raises(PlanError, match=message):
        Interpreter(whole, read)


def _written(folder):
    path = folder / "good.json"
    path.write_bytes(document("loop"))
    return path
