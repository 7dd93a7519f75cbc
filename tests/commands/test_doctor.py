"""``lowtide doctor``: what this machine can do, measured once."""

import json
import os
import platform
import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner

import lowtide.cost.probe
from lowtide.commands.main import cli, main
from lowtide.cost.device import cache_folder, read_device
from tests.cost.test_device import device


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def measured(monkeypatch):
    """How often the device was measured; the figures are made up."""
    calls = []

    def measure_device(kind):
        calls.append(kind)
        return device(environment=lowtide.cost.probe.environment(kind), bytes_per_second=1e9 * len(calls))

    monkeypatch.setattr(lowtide.cost.probe, "measure_device", measure_device)
    return calls


def doctor(*options):
    result = CliRunner().invoke(cli, ["doctor", *options])
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


def test_it_says_what_is_here(measured):
    view = json.loads(doctor("--json", "--device", "cpu"))
    assert view["python"] == platform.python_version()
    assert view["torch"]["version"] == str(torch.__version__)
    assert view["cache"] == {"folder": str(cache_folder()), "writable": True}
    assert view["device"]["environment"]["kind"] == "cpu"
    text = doctor("--device", "cpu")
    for said in ("torch", "GPU", "Graphviz", str(cache_folder()), "matrices", "launch"):
        assert said in text


@pytest.mark.parametrize("compiled", [True, False])
def test_it_says_whether_the_planner_is_compiled(compiled, measured, monkeypatch):
    monkeypatch.setattr("lowtide.plan.recompute.annealing.kernel.COMPILED", compiled)
    view = json.loads(doctor("--json", "--device", "cpu"))
    assert view["planner"] == ("compiled" if compiled else "in Python")
    assert any("install a C compiler" in one for one in view["missing"]) is not compiled
    assert f"planner     {view['planner']}" in doctor("--device", "cpu")


@pytest.mark.parametrize("compiler", ["/usr/bin/g++", None])
def test_it_says_what_compiles_kernels(compiler, measured, monkeypatch):
    monkeypatch.setattr("lowtide.execute.kernels.compiler.kernel_compiler", lambda kind: compiler)
    view = json.loads(doctor("--json", "--device", "cpu"))
    assert view["kernels"]["cpu"] == compiler
    assert any("C++ compiler" in one for one in view["missing"]) is (compiler is None)
    assert f"cpu: {compiler or 'no compiler'}" in doctor("--device", "cpu")


def test_the_device_is_measured_once_unless_asked_again(measured):
    doctor("--device", "cpu")
    assert json.loads(doctor("--json", "--device", "cpu"))["device"]["bytes_per_second"] == 1e9
    assert measured == ["cpu"]
    assert json.loads(doctor("--json", "--device", "cpu", "--measure"))["device"]["bytes_per_second"] == 2e9
    (path,) = cache_folder().iterdir()
    assert read_device(path).bytes_per_second == 2e9


def test_a_damaged_description_is_measured_again(measured):
    doctor("--device", "cpu")
    (path,) = cache_folder().iterdir()
    path.write_text("{")
    doctor("--device", "cpu")
    assert measured == ["cpu", "cpu"]
    assert read_device(path).bytes_per_second == 2e9


def test_a_cache_that_cannot_be_written_is_said(measured, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path / "file" / "cache"))
    view = json.loads(doctor("--json", "--device", "cpu"))
    assert view["cache"]["writable"] is False
    assert any("LOWTIDE_CACHE" in one for one in view["missing"])
    assert "cannot be written" in doctor("--device", "cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_gpu_that_is_not_there_exits_2(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["doctor", "--device", "cuda"])
    assert caught.value.code == 2
    assert "no CUDA device" in capsys.readouterr().err


def without_torch(tmp_path, *options):
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')\n")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, "-m", "lowtide", "doctor", *options]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_it_works_without_torch_and_says_how_to_get_it(tmp_path):
    result = without_torch(tmp_path)
    assert result.returncode == 0, result.stderr
    assert "torch       missing" in result.stdout
    assert 'pip install "lowtide[torch]"' in result.stdout
    assert "no torch here" in result.stdout
    view = json.loads(without_torch(tmp_path, "--json").stdout)
    assert view["torch"] is None
    assert view["device"] is None


def test_measuring_without_torch_exits_2(tmp_path):
    result = without_torch(tmp_path, "--measure")
    assert result.returncode == 2
    assert 'pip install "lowtide[torch]"' in result.stderr
