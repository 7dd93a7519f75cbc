"""The examples run, and print what they promise."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import lowtide
from tests.scripts import printed_by

FOLDER = Path(__file__).parent.parent / "examples"
PRINTED = {
    "compile_backend": "lowtide  0.",
    "read_a_dump": "budget  3.41 GiB: kept",
    "tiles_on_a_large_image": " tiles\nloss ",
    "hugging_face": "step 2: loss ",
}
SMALLER = {
    "tiles_on_a_large_image": {
        "size": ("SIZE = 256", "SIZE = 128"),
        "budget": ('"8MiB"', '"2MiB"'),
        "search": ("time_limit=2", "time_limit=0.5"),
    },
}
"""A quarter of the image in a quarter of the budget."""
HAS_TRANSFORMERS = importlib.util.find_spec("transformers") is not None


def run(name, folder, *paths):
    source = str(Path(lowtide.__file__).parent.parent)  # of the one that is tested
    path = os.pathsep.join([*map(str, paths), source])
    known = os.environ | {"LOWTIDE_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [sys.executable, str(FOLDER / f"{name}.py")]
    return subprocess.run(command, capture_output=True, text=True, env=known, cwd=folder, timeout=300)


@pytest.mark.parametrize("name", PRINTED)
def test_an_example_runs(name, tmp_path, monkeypatch, capsys):
    if name == "hugging_face" and not HAS_TRANSFORMERS:
        pytest.skip("transformers is not installed: pip install transformers")
    printed = printed_by(name, tmp_path, monkeypatch, capsys, **SMALLER.get(name, {}))
    assert PRINTED[name] in printed
    if name == "compile_backend":
        eager, planned = (line.split()[1:] for line in printed.splitlines())
        assert eager == planned


def test_an_example_says_what_it_needs(tmp_path):
    (tmp_path / "transformers.py").write_text("raise ImportError('not here')\n")
    result = run("hugging_face", tmp_path, tmp_path)
    assert result.returncode == 2
    assert result.stderr == "this example needs transformers: pip install transformers\n"


def test_every_example_is_listed():
    text = (FOLDER / "README.md").read_text()
    for path in FOLDER.glob("*.py"):
        assert f"`python examples/{path.name}`" in text
