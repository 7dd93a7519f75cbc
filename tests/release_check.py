"""Checks a release: `python tests/release_check.py [--python PYTHON]... [--torch REQUIREMENT] [--install-torch REQUIREMENT]`.

Builds the source distribution and from it the wheel, looks inside, installs the wheel into a new environment
of each Python, and runs commands there from an empty folder, first without torch and then with it. Torch is that of the
environment that runs this script where the versions of Python agree; else the requirement is installed, without
the packages that it asks for on GPUs. With `--install-torch` it is installed as users do, whatever there is here.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
DOCUMENT = ROOT / "examples" / "documents" / "000_1953327273121cc3.txt"
DEMO = "gpt2:layers=4,width=32,heads=2,length=64,vocab=128"
IN_WHEEL = (
    "lowtide/py.typed",
    "lowtide/report/page/page.html",
    "lowtide/plan/recompute/annealing/_anneal.abi3.so",
    "lowtide/execute/graphs/arena/_segments.abi3.so",
)
IN_SOURCE = (
    "CHANGELOG.md", "LICENSE", "Makefile", "README.md", "docs/quickstart.md", "docs/conf.py", "web/package-lock.json",
    "web/src/app.tsx", "tests/conftest.py", "src/lowtide/plan/recompute/annealing/_anneal.c",
    "src/lowtide/execute/graphs/arena/_segments.c", "src/lowtide/report/page/page.html",
)  # fmt: skip
TORCH_NEEDS = ("filelock", "fsspec", "jinja2", "networkx", "setuptools", "sympy", "typing-extensions")


def main() -> None:
    """Check everything, and say what was found; a check that fails ends it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--python", action="append", help="install for this Python [the one that runs this]")
    parser.add_argument(
        "--torch", default="torch==2.10.0", help="for other Pythons than this [torch==2.10.0]"
    )
    parser.add_argument(
        "--install-torch", metavar="REQUIREMENT", help="install this torch, and what it needs"
    )
    parser.add_argument(
        "--demo", default=DEMO, help=f"what `lowtide demo` runs; '' for its own network [{DEMO}]"
    )
    parser.add_argument("--keep", metavar="FOLDER", help="where to leave the packages")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        wheel = built(folder)
        if given.keep:
            shutil.copytree(folder / "dist", given.keep, dirs_exist_ok=True)
        for k, python in enumerate(given.python or [sys.executable]):
            whole = given.install_torch is not None
            torch = given.install_torch if whole else given.torch
            installed(wheel, folder / f"env{k}", python, torch, given.demo, whole=whole)
    say("the release is good")


def built(folder: Path) -> Path:
    """The wheel, once both packages are found to be whole."""
    dist = folder / "dist"
    run([sys.executable, "-m", "build", "--outdir", str(dist), str(ROOT)])
    run([sys.executable, "-m", "twine", "check", "--strict", *map(str, sorted(dist.iterdir()))])
    (wheel,), (source,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as opened:
        names = opened.namelist()
    missing = [name for name in IN_WHEEL if name not in names]
    stray = [name for name in names if not name.startswith(("lowtide/", "lowtide-"))]
    with tarfile.open(source) as packed:
        held = {name.partition("/")[2] for name in packed.getnames()}
    missing += [name for name in IN_SOURCE if name not in held]
    stray += [name for name in held if name.endswith((".so", ".pyc")) or "node_modules" in name]
    if missing or stray:
        sys.exit(f"packages lack {missing}, and should not have {stray}")
    say(f"{wheel.name}: {wheel.stat().st_size:,} bytes; {source.name}: {source.stat().st_size:,} bytes")
    return wheel


def installed(wheel: Path, env: Path, python: str, torch: str, target: str, *, whole: bool) -> None:
    """Install into a new environment, and run commands there; ``whole``: torch with what it needs."""
    run([python, "-m", "venv", str(env)])
    own, lowtide = str(env / "bin" / "python"), str(env / "bin" / "lowtide")
    run([own, "-m", "pip", "install", "--quiet", str(wheel)])
    work = env / "work"
    work.mkdir()
    view = doctor(lowtide, work)
    where = output([own, "-c", "import lowtide; print(lowtide.__file__)"], work)
    if view["planner"] != "compiled" or view["torch"] is not None or not where.startswith(str(env)):
        sys.exit(f"the environment is not as it should be: {where} {view}")
    run([lowtide, "plan", str(DOCUMENT), "--budget", "50%", "--cost", "unit", "-o", "plan.json"], work)
    run([lowtide, "check", "plan.json"], work)
    run([lowtide, "report", "plan.json", "-o", "plan.html", "--rivals", "0"], work)
    if whole:
        run([own, "-m", "pip", "install", "--quiet", torch])
    else:
        with_torch(env, own, torch)
    run([lowtide, "demo", *([target] if target else []), "-o", "demo.html", "--repeats", "1"], work)
    pages = {name: (work / name).stat().st_size for name in ("plan.html", "demo.html")}
    view = doctor(lowtide, work)
    said = f"Python {view['python']}, torch {view['torch']['version']}"
    say(f"{said}: installed; doctor, plan, check, report and demo ran; pages of {pages} bytes")


def with_torch(env: Path, own: str, requirement: str) -> None:
    """Give an environment a torch."""
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    here = importlib.util.find_spec("torch")
    if (
        here is not None
        and here.origin
        and output([own, "-c", code], env) == "{}.{}".format(*sys.version_info)
    ):
        packages = next((env / "lib").glob("python*")) / "site-packages"
        (packages / "torch_of_another.pth").write_text(f"{Path(here.origin).parents[1]}\n")  # behind its own
        return
    run([own, "-m", "pip", "install", "--quiet", "--no-deps", requirement])
    run([own, "-m", "pip", "install", "--quiet", *TORCH_NEEDS])


def doctor(lowtide: str, work: Path) -> dict[str, Any]:
    """What `lowtide doctor` says."""
    found: dict[str, Any] = json.loads(output([lowtide, "doctor", "--json"], work))
    return found


def run(command: list[str], folder: Path = ROOT) -> None:
    """Run a command; where it fails, so does the check."""
    say("$ " + " ".join(command))
    subprocess.run(command, cwd=folder, env=environment(), check=True, stdout=subprocess.DEVNULL)


def output(command: list[str], folder: Path) -> str:
    """What a command prints."""
    done = subprocess.run(
        command, cwd=folder, env=environment(), check=True, stdout=subprocess.PIPE, text=True
    )
    return done.stdout.strip()


def environment() -> dict[str, str]:
    """Nothing of this clone is found by Python."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}


def say(text: str) -> None:
    """For whoever looks on."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
