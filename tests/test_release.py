"""What a release is made of; `make release-check` builds and installs it."""

import re
from pathlib import Path

import pytest

import lowtide

ROOT = Path(__file__).parent.parent
PROJECT = (ROOT / "pyproject.toml").read_text() if (ROOT / "pyproject.toml").exists() else ""


def test_the_version_is_the_same_everywhere():
    assert re.search(r'^version = "(.*)"$', PROJECT, re.MULTILINE)[1] == lowtide.__version__
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1]
    assert newest == lowtide.__version__


def test_every_file_of_the_package_is_in_the_wheel():
    source = ROOT / "src" / "lowtide"
    others = {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()}
    others = {name for name in others if not name.endswith((".py", ".pyc", ".so", ".c", ".pyi"))}
    listed = re.search(r"^lowtide = \[(.*)\]$", PROJECT, re.MULTILINE)[1]
    assert others == set(re.findall(r'"(.*?)"', listed))
    for name in re.findall(r'^name = "(lowtide\..*)"$', PROJECT, re.MULTILINE):
        assert (ROOT / "src" / name.replace(".", "/")).with_suffix(".c").exists()


def test_the_pythons_that_are_promised_are_listed():
    assert 'requires-python = ">=3.10"' in PROJECT
    assert re.findall(r"Python :: (3\.\d+)", PROJECT) == ["3.10", "3.11", "3.12", "3.13"]


@pytest.mark.extended
def test_both_packages_are_built_and_whole(tmp_path):
    for needed in ("build", "twine"):
        pytest.importorskip(needed)
    from tests.release_check import built

    wheel = built(tmp_path)
    assert wheel.name.startswith(f"lowtide-{lowtide.__version__}-cp310-abi3-")
