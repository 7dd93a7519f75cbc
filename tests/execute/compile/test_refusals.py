"""What a compiled step cannot do is refused by name, with the way out."""

import functools
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import CaptureError, PlanError, RunError
from lowtide.execute.backend import backend
from lowtide.execute.compile.aot import KeepsGraphError

PROJECT = Path(lowtide.__file__).parent.parent.parent


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function, **options):
    return torch.compile(function, backend=backend, options=options or None)


def line_of(function, text):
    """Where in this file the function says so."""
    lines = Path(__file__).read_text().splitlines()
    first = function.__code__.co_firstlineno
    return next(k for k, line in enumerate(lines, 1) if k >= first and text in line)


def loss_of(model, x):
    return model(x).square().mean()


# Backward more than once.


@pytest.mark.parametrize("program", ["plain", "recompute-all"])
@pytest.mark.parametrize(
    "again",
    [
        lambda loss, model: loss.backward(retain_graph=True),
        lambda loss, model: loss.backward(create_graph=True),
        lambda loss, model: torch.autograd.grad(loss, model.weight, create_graph=True),
        lambda loss, model: torch.autograd.grad(loss, model.weight, create_graph=True, retain_graph=False),
    ],
)
def test_a_graph_that_is_kept_is_refused(again, program):
    model = nn.Linear(3, 2)
    step = compiled(loss_of, program=program)
    loss = step(model, torch.randn(4, 3))
    with pytest.raises(
        KeepsGraphError, match="retain_graph=True and create_graph=True are not possible.*Add the losses up"
    ):
        again(loss, model)
    assert model.weight.grad is None
    step(model, torch.randn(4, 3)).backward()
    assert model.weight.grad is not None


def test_a_second_backward_is_refused_as_in_eager():
    loss = compiled(loss_of)(nn.Linear(3, 2), torch.randn(4, 3))
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_several_losses_of_one_call_are_told_to_be_added_up():
    def losses(model, x):
        y = model(x)
        return y.sum(), y.square().sum()

    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    one, other = compiled(losses)(model, x)
    one.backward()
    with pytest.raises(RuntimeError, match="Specify retain_graph=True"):
        other.backward()
    one, other = compiled(losses)(model, x)
    with pytest.raises(RunError, match="several losses from one call: add them up before backward"):
        one.backward(retain_graph=True)


# What cannot be captured.


def branches(model, x):
    y = model(x)
    if y.sum() > 0:
        y = y * 2
    return y


def reads_a_number(model, x):
    y = model(x)
    return y * y.max().item()


def selects(model, x):
    y = model(x)
    return y[y > 0].sum()


def calls_backward(model, x):
    loss = model(x).sum()
    loss.backward()
    return loss


@pytest.mark.parametrize(
    ("function", "text", "reason"),
    [
        (branches, "if y.sum()", "the value of a tensor"),
        (reads_a_number, ".item()", "item"),
        (selects, "y[y > 0]", "(?i)dynamic shape|nonzero|depend"),
        (calls_backward, "loss.backward()", "Return the loss and call its backward outside"),
    ],
)
def test_a_graph_break_names_the_line_and_the_way_out(function, text, reason):
    with pytest.raises(CaptureError, match=reason) as caught:
        compiled(function)(nn.Linear(3, 2), torch.randn(4, 3))
    message = str(caught.value)
    assert message.startswith(
        f"{__file__}:{line_of(function, text)}: the step cannot be captured as one graph here."
    )
    assert "outside of the compiled function" in message or "out of the compiled function" in message
    assert "TORCHDYNAMO" not in message
    # torch shows it as it is, and the model goes on without it
    assert type(caught.value).__name__ == "GraphBreakError"
    assert type(caught.value).__module__ == "lowtide.errors"
    nn.Linear(3, 2)(torch.randn(4, 3)).sum().backward()


def selects_in_one_piece(x):
    return x[x > 0].exp().sum()


def conditional(x):
    return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))


@pytest.mark.parametrize(
    ("function", "text", "reason"),
    [
        (selects_in_one_piece, "x[x > 0]", "the shape of what getitem gives depends on values"),
        (conditional, "torch.cond", "cond runs a function of its own"),
    ],
)
def test_what_torch_captures_but_no_plan_can_hold(function, text, reason):
    with pytest.raises(CaptureError, match=reason) as caught:
        torch.compile(function, backend=backend, fullgraph=True)(torch.randn(4))
    assert str(caught.value).startswith(f"{__file__}:{line_of(function, text)}: ")


def sparse_with_padding(indices):
    table = nn.Embedding(10, 4, sparse=True, padding_idx=0)

    def loss(table, indices):
        rows = table(indices)
        return rows.square().sum()

    return loss, (table, indices)


def distinct(x):
    def loss(model, x):
        y = model(x)
        return torch.unique(y).sum()

    return loss, (nn.Linear(3, 2), x)


@pytest.mark.parametrize("way", ["backend", "capture", "fit"])
@pytest.mark.parametrize(
    ("make", "argument", "text"),
    [
        (sparse_with_padding, torch.tensor([1, 0, 2]), "rows = table"),
        (distinct, torch.randn(4, 3), "torch.unique"),
    ],
)
def test_what_torch_cannot_trace_names_the_line(make, argument, text, way):
    function, arguments = make(argument)
    run = {
        "backend": torch.compile(function, backend=backend, fullgraph=True),
        "capture": functools.partial(lowtide.capture, function),
        "fit": functools.partial(lowtide.fit, function, fullgraph=True),
    }[way]
    for _ in range(2):  # the second time too, though warnings are shown once
        with pytest.raises(CaptureError, match="cannot be captured as one graph|depends on values") as caught:
            run(*arguments)
        assert str(caught.value).startswith(f"{__file__}:{line_of(function, text)}: ")


def test_a_fault_of_ours_while_torch_traces_is_no_capture_error(monkeypatch):
    monkeypatch.setattr("lowtide.execute.compile.aot.as_eager", None)
    with pytest.raises(TypeError, match="'NoneType'"):
        compiled(lambda model, x: model(x).exp().sum())(nn.Linear(3, 2), torch.randn(4, 3))


def test_with_fullgraph_torch_explains_itself():
    with pytest.raises(torch._dynamo.exc.Unsupported, match="Data-dependent branching"):
        torch.compile(branches, backend=backend, fullgraph=True)(nn.Linear(3, 2), torch.randn(4, 3))


def test_a_function_that_torch_skips_is_told():
    def skipped(x):
        return torch._dynamo.disable(torch.nn.functional.gelu)(x)

    whole = compiled(torch._dynamo.disable(skipped))
    with pytest.warns(UserWarning, match="captured no graph.*no budget holds"):
        whole(torch.randn(3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole(torch.randn(3))  # once is enough
        compiled(loss_of)(nn.Linear(3, 2), torch.randn(4, 3))
        compiled(loss_of)(nn.Linear(3, 2), torch.randn(4, 3))  # nothing is compiled again, but a Program runs


# Options.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"program": "recompute_all"}, "there is no program 'recompute_all'.* Did you mean 'recompute-all'?"),
        ({"program": 3}, "there is no program 3; programs: plain, recompute-all"),
        (
            {"progam": "plain"},
            "there is no option 'progam'; options: budget, program, .*bucket. Did you mean 'program'?",
        ),
        ({"program": ["plain"]}, "there is no program .'plain'.; programs: plain"),
        ({1: 2}, "there is no option 1; options: "),
        ({"remember": 0}, "remember=0: .* a whole number from 1"),
        ({"remember": "8"}, "remember='8'"),
        ({"remember": True}, "remember=True"),
    ],
)
def test_a_wrong_option_is_refused(options, message):
    with pytest.raises(RunError, match=message):
        torch.compile(loss_of, backend=backend, options=options)(nn.Linear(3, 2), torch.randn(4, 3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"only": 3}, "there is no method 3; known: recompute, offload"),
        ({"only": [["recompute"]]}, "there is no method .'recompute'.; known"),
        ({"time_limit": "long"}, "time_limit='long'"),
        ({"seed": "x"}, "seed='x'"),
        ({"seed": 10**30}, "seed=1000"),
        ({"bucket": 0}, "bucket=0: sizes are rounded up"),
    ],
)
def test_a_wrong_option_of_a_plan_is_refused(options, message):
    step = torch.compile(loss_of, backend=backend, options={"budget": "100%", **options})
    with pytest.raises(PlanError, match=message):
        step(nn.Linear(3, 2), torch.randn(4, 3))


def test_a_mode_of_another_backend_is_refused():
    with pytest.raises(RunError, match="mode='reduce-overhead'.*options="):
        torch.compile(loss_of, backend=backend, mode="reduce-overhead")(nn.Linear(3, 2), torch.randn(4, 3))


def test_the_backend_is_found_by_name(tmp_path, forks):
    """As installed: torch looks for entry points of distributions on the path."""
    entry = 'lowtide = "lowtide.execute.backend:backend"'
    lines = (PROJECT / "pyproject.toml").read_text().splitlines()
    assert lines[lines.index('[project.entry-points."torch_dynamo_backends"]') + 1] == entry
    installed = tmp_path / "lowtide_here-0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: lowtide-here\nVersion: 0\n")
    (installed / "entry_points.txt").write_text("[torch_dynamo_backends]\n" + entry.replace('"', "") + "\n")
    code = (
        "import torch\n"
        "model, x = torch.nn.Linear(3, 2), torch.randn(4, 3)\n"
        "step = torch.compile(model, backend='lowtide', options={'program': 'recompute-all'})\n"
        "assert torch.equal(step(x), model(x))\n"
        "step(x).sum().backward()\n"
        "assert model.weight.grad is not None\n"
        "assert 'lowtide' in torch._dynamo.list_backends()\n"
    )
    paths = [str(tmp_path), str(PROJECT / "src")]
    program = f"import sys; sys.path[:0] = {paths!r}\n{code}"
    result = forks.run(program)
    assert result.returncode == 0, result.stderr
