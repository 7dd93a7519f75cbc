"""What a release is made of; `make release-check` builds and installs it."""

import re
import shutil
import subprocess
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


def ci(folder, **programs):
    """What `.ci/run` prints, and how it ends, where nothing but the shell's tools and these programs is there."""
    (folder / ".ci").mkdir()
    script = folder / ".ci" / "run"
    script.write_text((ROOT / ".ci" / "run").read_text())
    tools = folder / "bin"
    tools.mkdir()
    for name in ("bash", "sh", "dirname", "mktemp", "rm", "tee", "grep", "tail", "timeout", "cat"):
        (tools / name).symlink_to(shutil.which(name))
    for name, text in programs.items():
        program = tools / name.replace("_", "-")
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
    return subprocess.run(
        ["bash", str(script)],
        env={"PATH": str(tools)},
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def make(tests=0, wheel=0):
    """A ``make`` that ends as it is told to."""
    return (
        f'[ "$1" = test ] && echo "3 passed in 1.00s" && exit {tests}\n'
        f'[ "$1" = wheel-check ] && echo "1 failed: a package" && exit {wheel}\n'
        "exit 9"
    )


needs_ci = pytest.mark.skipif(not (ROOT / ".ci" / "run").exists(), reason="the source distribution has no CI")


@needs_ci
@pytest.mark.parametrize(("tests", "wheel"), [(0, 0), (2, 0), (0, 2), (1, 2)])
def test_ci_fails_where_tests_or_packages_do(tests, wheel, tmp_path):
    done = ci(tmp_path, make=make(tests, wheel))
    assert done.returncode == (tests or wheel)
    assert "a package" in done.stdout, "both run"
    assert done.stdout.splitlines()[-1] == "3 passed in 1.00s"


@needs_ci
@pytest.mark.parametrize(("user", "there", "fails"), [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1000, 0, 0)])
def test_ci_installs_what_tests_need_where_it_can(user, there, fails, tmp_path):
    """As root, where something is missing; where that fails, the tests run all the same."""
    asked = tmp_path / "asked"
    programs = {
        "make": make(),
        "id": f"echo {user}",
        "apt_get": f'echo "$@" >> {asked}; exit {fails}',
        **({"chromedriver": "", "ip": ""} if there else {}),
    }
    done = ci(tmp_path, **programs)
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "3 passed in 1.00s"
    assert ("cannot be installed here" in done.stdout) == bool(fails)
    wanted = ["update"] if fails else ["update", "install -y chromium chromium-driver iproute2"]
    assert (asked.read_text().splitlines() if asked.exists() else []) == ([] if user or there else wanted)
