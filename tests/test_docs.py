"""The pages under docs/ and the README: paths exist, every module is on the map, printed output is what scripts print."""

import ast
import platform
import re
from pathlib import Path

import pytest
import torch

import lowtide
from tests.scripts import printed_by

ROOT = Path(__file__).parent.parent
SOURCE = Path(lowtide.__file__).parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
MAP = ROOT / "docs" / "architecture.md"
MAPPED = ("plan", "execute", "trace", "graph", "cost", "formats", "report", "commands")

_PATH = re.compile(r"`([\w./]+\.(?:py|c)|(?:\w+/)+)`")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_NO_PATHS = {"formats/NAME.py", "formats/NAME/", "gradients/", "train.py"}
"""Names to be chosen by the reader, and names inside of files."""


@pytest.fixture(scope="module")
def files():
    """Names of all files that a page may mention without their folder."""
    folders = (SOURCE, *(ROOT / name for name in ("tests", "benchmarks", "examples")))
    return {path.name for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".c")}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_paths_exist(page, files):
    for name in set(_PATH.findall(page.read_text())) - _NO_PATHS:
        if "/" in name:
            assert (SOURCE / name).exists() or (ROOT / name).exists(), f"{page.name} names {name}"
        else:
            assert name in files, f"{page.name} names {name}"


def anchors(page):
    """What links into a page may end with, as GitHub names headings."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    found = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(page):
    for link in _LINK.findall(page.read_text()):
        if link.startswith("http"):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), f"{page.name} links to {link}"
        assert not anchor or anchor in anchors(target), f"{page.name} links to {link}"


def test_the_readme_links_to_every_page():
    links = _LINK.findall((ROOT / "README.md").read_text())
    pages = {f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")}
    assert pages - {"docs/index.md"} <= set(links)  # that one is the site's own list


def test_every_module_is_on_the_map():
    text = MAP.read_text()
    rows = re.findall(r"^\| `([\w/]+\.py)` \| ", text[text.index("## Every module") :], re.MULTILINE)
    modules = [str(path.relative_to(SOURCE)) for part in MAPPED for path in (SOURCE / part).rglob("*.py")]
    missing = {name for name in modules if not name.endswith("__init__.py")} - set(rows)
    assert not missing, f"docs/architecture.md has no line for {missing}"


def test_each_question_has_one_file_for_an_answer():
    section = MAP.read_text().partition("## Where is ...?")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (Where .*\?) \| (.*) \|$", section, re.MULTILINE)
    assert len(rows) >= 12
    for question, answer in rows:
        assert re.fullmatch(r"`[\w/]+\.py`", answer), question


_MUTABLE = (
    "Library",
    "WeakKeyDictionary",
    "WeakValueDictionary",
    "ContextVar",
    "RLock",
    "Lock",
    "set",
    "dict",
    "list",
)


def keeps_state(path):
    """Whether a module has something at its top level that is there to be changed."""
    tree = ast.parse(path.read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            value = node.value
            empty = isinstance(value, ast.Dict) and not value.keys
            empty = empty or (isinstance(value, ast.List) and not value.elts)
            made = isinstance(value, ast.Call) and ast.unparse(value.func).rpartition(".")[2] in _MUTABLE
            if empty or made:
                return True
        if isinstance(node, ast.FunctionDef):
            cached = (ast.unparse(one).partition("(")[0] for one in node.decorator_list)
            if any(one.rpartition(".")[2] in ("cache", "lru_cache") for one in cached):
                return True
    return any(isinstance(node, ast.Global) for node in ast.walk(tree))


def test_state_that_outlives_a_call_is_listed():
    section = MAP.read_text().partition("## State that outlives a call")[2].partition("\n## ")[0]
    listed = set(_PATH.findall(section))
    for path in SOURCE.rglob("*.py"):
        name = str(path.relative_to(SOURCE))
        assert not keeps_state(path) or name in listed, f"{name} keeps something for the whole process"


tried = pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason="the pages show the operators of torch 2.13"
)


@tried
def test_how_it_works_shows_what_its_script_prints(tmp_path, monkeypatch, capsys):
    page = (ROOT / "docs" / "how-it-works.md").read_text()
    text = printed_by("how_it_works", tmp_path, monkeypatch, capsys)
    parts = re.split(r"^== (\w+) ==\n", text, flags=re.MULTILINE)
    printed = dict(zip(parts[1::2], parts[2::2], strict=True))
    assert list(printed) == ["graph", "costs", "plan", "program", "run"]
    same = ["graph"]
    if platform.machine() == "x86_64":  # workspaces, and so plans and peaks, are those of its libraries
        same += ["costs", "program", "run"]
    for title in same:
        assert f"```text\n== {title} ==\n{printed[title].rstrip()}\n```" in page, title


@tried
def test_the_training_loop_runs_as_the_readme_says(tmp_path, monkeypatch, capsys):
    figures = platform.machine() == "x86_64"  # those of the README; other machines train on smaller images
    smaller = {} if figures else {"size": ("64", "32")}
    printed = printed_by("training_loop", tmp_path, monkeypatch, capsys, **smaller).splitlines()
    readme = (ROOT / "README.md").read_text()
    assert [line.split(":")[0] for line in printed[5:]] == ["step 0", "step 1", "step 2"]
    budget = printed[0].partition(";")[0]
    assert budget in readme or (budget.startswith("budget ") and not figures)
