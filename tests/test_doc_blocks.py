"""Code blocks of README and docs/ run, and print what the pages show. Marks: tests/doc_blocks.py."""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lowtide.commands.main import main
from tests.doc_blocks import CHECKS, PAGES, PREAMBLES, ROOT, Block, blocks_of, commands_of
from tests.doc_files import FILES
from tests.scripts import printed_by, torchrun

BLOCKS = [block for page in PAGES for block in blocks_of(page)]
_TIMES = re.compile(r"\d[\d.,]* (?:ns|µs|ms|s|min)\b")
_FIGURES = re.compile(r"[+-]?\d[\d.,]*(?:e[+-]?\d+)? ?(?:(?:[KMGT]i?)?B\b|ns\b|µs\b|ms\b|s\b|%)?")
STAND_INS = {
    "transformers": SimpleNamespace(Trainer=type("Trainer", (), {"compute_loss": None})),
    "lightning": SimpleNamespace(Callback=object, Trainer=lambda callbacks: callbacks),
}
"""What the pages use of libraries that are not installed everywhere; tests/integrations/ runs them where they are."""
_CODE = re.compile(r"^(\$ |lowtide |python3? |pip |make |import |from \w+ import |def |class )", re.MULTILINE)


def cases():
    """Parameters: blocks of Python that run by themselves."""
    for block in BLOCKS:
        if block.language == "python" and not block.in_session:
            yield pytest.param(block, id=block.name, marks=_long("extended" in block.marks))


def sessions():
    """Parameters: blocks with commands, and what runs between them, page by page; the long ones apart."""
    for page in dict.fromkeys(block.page for block in BLOCKS):
        found = [block for block in BLOCKS if block.page == page and block.in_session]
        for long in (False, True):
            chosen = [one for one in found if long == ("extended" in one.marks) or "saved" in one.marks]
            if any("saved" not in one.marks for one in chosen):
                yield pytest.param(chosen, id=f"{page}{', long' * long}", marks=_long(long))


def _long(long):
    return [pytest.mark.extended] if long else []


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where blocks run: a clone, as far as they see it, with a file that gives a step."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "train.py").write_text(
        f"{PREAMBLES['a model']}\n\ndef step():\n    return loss_of, model, batch\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("train", None)


def skip_what_is_not_here(block, monkeypatch):
    """A library that is missing has a stand-in, a CUDA device has none."""
    name = block.marks.get("needs")
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if name in STAND_INS and importlib.util.find_spec(name) is None:
        monkeypatch.setitem(sys.modules, name, STAND_INS[name])


def below(block):
    """What the page says that a block prints: the text behind it, where one is marked so."""
    behind = next((one for one in BLOCKS if one.before is block), None)
    return behind if behind is not None and "printed" in behind.marks else None


def same(printed, shown, marks=()):
    """Whether a page shows what is printed: without times and line breaks, and `...` stands for anything."""
    if "outline" in marks:
        first = re.compile(r"^[^\W\d]\S*", re.MULTILINE)
        left = iter(first.findall(printed))
        return all(word in left for word in first.findall(shown))
    if "figures vary" in marks:
        printed, shown = _FIGURES.sub("#", printed), _FIGURES.sub("#", shown)
    printed, shown = (" ".join(_TIMES.sub("#", text).split()) for text in (printed, shown))
    pattern = ".*".join(re.escape(part) for part in re.split(r"\.\.\.|…", shown))
    return re.fullmatch(pattern, printed) is not None


@pytest.mark.parametrize("block", list(cases()))
def test_python_runs(block, folder, capsys, monkeypatch):
    if "file" in block.marks:
        script = (ROOT / block.marks["file"]).read_text()
        assert script.endswith(block.code), f"{block.name} is not the end of {block.marks['file']}"
        assert Path(block.marks["file"]).stem in _tested(), "no test runs it"
        return
    skip_what_is_not_here(block, monkeypatch)
    if "ranks" in block.marks:
        _processes(block, folder)
    else:
        _python(block, capsys)


def _processes(block, folder):
    name, script = block.marks["with"], folder / "script.py"
    ended = "\nprint('ended', flush=True)\ntorch.distributed.destroy_process_group()\n"
    script.write_text(PREAMBLES[name] + block.code + CHECKS[name] + ended)
    done = torchrun(folder, str(script), processes=int(block.marks["ranks"]))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ended") == int(block.marks["ranks"])


def _python(block, capsys):
    names = {"__name__": "block"}
    torch._dynamo.reset()
    exec(compile(PREAMBLES[block.marks["with"]] if "with" in block.marks else "", "preamble", "exec"), names)
    exec(compile(block.code, block.name, "exec"), names)
    shown, printed = below(block), capsys.readouterr().out
    if shown is not None:
        assert same(printed, shown.code, shown.marks), f"{block.name} prints\n{printed}"


def _tested():
    """Examples that tests run, by name."""
    texts = [(ROOT / "tests" / name).read_text() for name in ("test_docs.py", "test_examples.py")]
    return {name for text in texts for name in re.findall(r'"(\w+)"', text)}


@pytest.mark.parametrize("blocks", list(sessions()))
def test_commands_run(blocks, folder, capsys, monkeypatch):
    for block in blocks:
        skip_what_is_not_here(block, monkeypatch)
        if "given" in block.marks:
            FILES[block.marks["given"]](folder)
        if "saved" in block.marks:
            (folder / block.marks["saved"]).write_text(block.code)
        elif block.language == "python":
            _python(block, capsys)
        else:
            for command in commands_of(block):
                _command(block, command, folder, capsys, monkeypatch)


def _command(block, command, folder, capsys, monkeypatch):
    words = shlex.split(command.line, comments=True)
    if words[0] == "make":
        _makes(words[1:], folder)
    elif words[:2] == ["pip", "install"]:
        _installs(words[2:], folder)
    elif words[0] == "python" and words[1].startswith("examples/"):
        _compared(block, command, printed_by(Path(words[1]).stem, folder, monkeypatch, capsys))
    elif words[0] == "lowtide":
        _lowtide(block, command, words[1:], capsys)
    else:
        pytest.fail(f"{block.name}: nobody knows how to test `{command.line}`; mark the block")


def _lowtide(block, command, words, capsys):
    rest = words[words.index("|") :] if "|" in words else []
    quiet = words[-2:] == [">", "/dev/null"]
    words = words[: len(words) - len(rest) - 2 * quiet]
    with pytest.raises(SystemExit) as caught:
        main(words)
    out, err = capsys.readouterr()
    refuses = command.printed.startswith("Error:")
    assert (caught.value.code in (2, 3)) if refuses else caught.value.code == 0, f"{block.name}: {err}"
    printed = err if refuses else out
    if rest:
        assert rest[:2] == ["|", "head"], f"{block.name}: only `| head -N` is understood"
        printed = "".join(printed.splitlines(keepends=True)[: -int(rest[2])])
    if command.printed:
        _compared(block, command, printed)


def _compared(block, command, printed):
    if command.printed:
        told = f"{block.name}: `{command.line}` prints\n{printed}"
        assert same(printed, command.printed, block.marks), told


def _makes(words, folder):
    """As in a clone where `make setup` has run, with the environment of these tests as its own."""
    ready = ["-f", str(ROOT / "Makefile"), f"VENV={sys.prefix}", "-o", f"{sys.prefix}/ready"]
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    known = os.environ | {"PYTHONPATH": path, "LOWTIDE_CACHE": str(folder / "cache")}
    done = subprocess.run(["make", *ready, *words], cwd=folder, env=known, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def _installs(words, folder):
    """From a copy of the clone, without what it depends on; the extras that are asked for exist."""
    text = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]\n")[2]
    extras = re.findall(r"^(\w+) = \[", text.partition("\n[")[0], re.MULTILINE)
    for word in words:
        for named in re.findall(r"\[(.*?)\]", word):
            assert set(named.split(",")) <= set(extras), f"pyproject.toml has no extra {named}"
    clone, site = folder / "clone", folder / "site"
    left_out = shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", clone / "src", ignore=left_out)
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, clone)
    alone = ["--quiet", "--no-deps", "--no-build-isolation", "--target", str(site)]
    pip = [sys.executable, "-m", "pip", "install", *alone, *words]
    done = subprocess.run(pip, cwd=clone, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    doctor = [sys.executable, "-m", "lowtide", "doctor", "--json"]
    known = os.environ | {"PYTHONPATH": str(site), "LOWTIDE_CACHE": str(folder / "cache")}
    done = subprocess.run(doctor, cwd=folder, env=known, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.name)
def test_a_block_says_what_it_is(block):
    assert block.language in ("python", "console", "sh", "text", "json"), "give the language behind ```"
    if block.language == "text":
        assert not _CODE.search(block.code), "this is code: give its language"
    if "printed" in block.marks:
        assert block.language == "text"
        assert block.before is not None
        assert block.before.language == "python"
    if "with" in block.marks:
        assert block.marks["with"] in PREAMBLES
    if "ranks" in block.marks:
        assert block.marks["with"] in CHECKS


def test_every_preamble_is_used():
    assert {block.marks["with"] for block in BLOCKS if "with" in block.marks} == set(PREAMBLES)
    assert {block.marks["with"] for block in BLOCKS if "ranks" in block.marks} == set(CHECKS)
    assert {block.marks["given"] for block in BLOCKS if "given" in block.marks} == set(FILES)


@pytest.mark.parametrize("mark", ["not run: it needs a GPU", "parsed", "skipped"])
def test_no_mark_leaves_a_block_out(mark, tmp_path, monkeypatch):
    monkeypatch.setattr("tests.doc_blocks.ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(f"<!-- test: {mark} -->\n```python\nx = 1\n```\n")
    with pytest.raises(ValueError, match="a block has no mark"):
        blocks_of(page)


def test_a_text_is_compared_without_its_times():
    assert same("took 3.1 ms\n  in 7 B\n", "took 12 ms\nin 7 B")
    assert not same("took 3.1 ms in 7 B", "took 12 ms in 8 B")
    assert same("took 3.1 ms in 7 B", "took 12 ms in 8 B", ["figures vary"])
    assert same("a\nb\nc\nd", "a\n...\nd")
    assert not same("a\nb", "a\nc")
    assert same("one 1\n  x\ntwo 2\nthree", "one 9\nthree 4\n", ["outline"])
    assert not same("one\ntwo", "two\none", ["outline"])


def test_marks_are_read(tmp_path):
    page = ROOT / "docs" / "running.md"
    assert isinstance(blocks_of(page)[0], Block)
    text = "text\n\n<!-- test: with a model; needs cuda -->\n```python\nx = 1\n```\n"
    made = tmp_path / "page.md"
    made.write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.doc_blocks.ROOT", tmp_path)
        (block,) = blocks_of(made)
    assert block.marks == {"with": "a model", "needs": "cuda"}
    assert (block.code, block.line, block.language) == ("x = 1\n", 4, "python")
