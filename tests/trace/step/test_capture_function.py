"""``lowtide.capture`` is a function to whoever calls it, whatever was imported before."""

import inspect
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

import lowtide
import lowtide.trace.step.joint
from lowtide.errors import CaptureError
from lowtide.graph import Phase
from lowtide.trace.step import capture as step

USER = """
import torch

import lowtide
import lowtide.trace.step.joint

def loss(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(model(x).sum())

captured = lowtide.capture(loss, torch.nn.Linear(3, 2), torch.ones(5, 3))
peak: int = captured.step.lifetimes().peak_bytes
lowtide.capture(3)
"""


ROOT = Path(__file__).parents[3]


def run(text, *, path=()):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*map(str, path), *sys.path])}
    command = [sys.executable, "-c", textwrap.dedent(text)]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_a_step_is_captured():
    model = nn.Linear(3, 2)
    captured = lowtide.capture(lambda model, x: model(x).square().sum(), model, torch.randn(5, 3))
    assert isinstance(captured, step.Captured)
    assert isinstance(captured.step, lowtide.Step)
    assert {op.phase for op in captured.step.graph.ops} == {Phase.FORWARD, Phase.BACKWARD}
    assert captured.joint.graph is captured.step.graph


def test_it_has_the_signature_of_the_function():
    ours, theirs = (inspect.signature(one).parameters.values() for one in (lowtide.capture, step.capture))
    assert [(p.name, p.kind) for p in ours] == [(p.name, p.kind) for p in theirs]


def test_what_was_imported_before_does_not_matter():
    """In one process that imports torch, and one forked from it for each that is imported first."""
    result = run("""
        import os
        import sys
        import lowtide
        assert "torch" not in sys.modules
        import torch, torch._dynamo, torch._functorch.aot_autograd
        for first in ("lowtide.trace.step.joint", "lowtide.zoo"):
            assert not any(name.startswith("lowtide.trace") for name in sys.modules)
            child = os.fork()
            if child:
                assert os.waitpid(child, 0)[1] == 0, first
                continue
            __import__(first)
            from lowtide import capture
            assert capture is lowtide.capture
            assert len(lowtide.capture(lambda x: x + 1, torch.ones(3)).step.graph.ops) == 1
            print(first)
            sys.stdout.flush()
            os._exit(0)
    """)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["lowtide.trace.step.joint", "lowtide.zoo"]


def test_without_torch_it_says_how_to_get_it(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')\n")
    text = "import lowtide\ntry:\n lowtide.capture(len)\nexcept lowtide.LowtideError as e: print(e)"
    result = run(text, path=[tmp_path])
    assert (
        'capturing a step needs PyTorch, which cannot be imported (no torch here): pip install "lowtide[torch]"'
        in (result.stdout)
    ), result.stderr


def test_a_step_without_values_is_refused():
    with pytest.raises(CaptureError, match="meta device.*build it on cpu"):
        lowtide.capture(nn.Linear(3, 2, device="meta"), torch.ones(5, 3, device="meta"))


def test_it_type_checks_as_the_function(tmp_path):
    (tmp_path / "user.py").write_text(USER)
    command = [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml", str(tmp_path / "user.py")]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    error, *_, summary = result.stdout.splitlines()
    assert "user.py:12: error: Argument 1" in error
    assert "Found 1 error in 1 file" in summary


@pytest.mark.parametrize("function", [3, None, "model", torch.ones(2)])
def test_what_cannot_be_called_is_refused(function):
    with pytest.raises(CaptureError, match="a step is a module or a function.*give one, not a"):
        lowtide.capture(function)
