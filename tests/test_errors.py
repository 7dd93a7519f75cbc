"""Errors that users meet: each class is in the tree and has a test of its message, each message says what to do."""

import ast
import functools
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

import lowtide
from lowtide import errors, zoo
from lowtide.execute.compare.compare import Comparison
from lowtide.zoo import TargetError

SOURCE = Path(lowtide.__file__).parent
TESTS = Path(__file__).parent

UNSEEN = {"SplitBeforeError"}
"""Raised and caught by Lowtide itself."""
_ADVICE = re.compile(
    r"\b(add|ask|build|call|capture|check|choose|compile|cut|draw|end|fit|free|give|have|install|keep|leave|look|make|"
    r"must|name|pass|pin|plan|profile|raise|read|rename|report|return|run|see|set|sum|supported|take|try|use|wanted|"
    r"mend|allow|write|known|programs|formats|options|networks|at least|whole number|expected)\b",
    re.IGNORECASE,
)
_ELSEWHERE = re.compile(r"HELP|INSTALL|WANTED|wanted|advice|near|did_you_mean|_keys|_said")
"""Values that hold advice, or what the user's own code has raised."""
REASONS = {
    "execute/breaks/subgraph.py": "why a graph is planned otherwise",
    "execute/tiling/": "why the step is not cut, behind `tiles:` in an InfeasibleError",
    "graph/": "what is wrong with a file, in the FormatError that names it",
    "plan/baselines/": "why another planner has no plan, for comparisons",
    "plan/check/": "which rule a Program breaks: docs/valid-programs.md has them",
    "plan/program/": "what a Program does wrong, in the error of the rule that it breaks",
    "trace/operators/": "why an operator is not cut, as above",
    "trace/shapes/": "why the next shape is traced again",
    "trace/shards/": "why an operator is not split",
    "trace/tiles/": "why the step is not cut, as above",
    "trace/eager/layouts.py": "why the next shape is traced again",
    "execute/compare/partitioner.py": "why PyTorch's partitioner has no plan, for comparisons",
    "execute/runtime/fits.py": "what a Program does wrong, as above",
}
"""Modules whose errors are reasons that other errors give, or that steer Lowtide itself."""


@functools.cache
def nodes():
    """Classes and calls of the package, each with its file."""
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        text = path.read_text()
        if "Error" in text:
            tree = ast.parse(text)
            place = path.relative_to(SOURCE).as_posix()
            found += [(place, node) for node in ast.walk(tree) if isinstance(node, ast.ClassDef | ast.Call)]
    return found


@functools.cache
def classes():
    """Every error class of the package by name."""
    found = {
        node.name: [ast.unparse(base).rpartition(".")[2] for base in node.bases]
        for _, node in nodes()
        if isinstance(node, ast.ClassDef)
    }
    names = {"LowtideError"}
    while more := {name for name, bases in found.items() if names & set(bases)} - names:
        names |= more
    return names - {"LowtideError"}


def words(node):
    """The text of a message, as far as it stands in the source."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(words(part) for part in node.values)
    if isinstance(node, ast.BinOp):
        return words(node.left) + words(node.right)
    return f"{{{ast.unparse(node.value)}}}" if isinstance(node, ast.FormattedValue) else ""


def sites():
    """Where errors are made: class, place, message, and whether it says what was expected."""
    for place, node in nodes():
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in classes()
            and node.args
        ):
            keys = {word.arg for word in node.keywords}
            yield node.func.id, f"{place}:{node.lineno}", words(node.args[0]), keys


def test_the_tree_has_every_class_that_users_meet():
    drawn = re.findall(r"(\w+Error)\b", errors.__doc__)
    assert set(drawn) == {name for name in errors.__all__ if name.endswith("Error")} | {"GraphBreakError"}


def test_each_class_has_a_test_of_its_message():
    asserted = set()
    for path in TESTS.rglob("test_*.py"):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "match=" in text else ():
            raises = isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.raises"
            if raises and any(word.arg == "match" for word in node.keywords):
                asserted.update(re.findall(r"\w+", ast.unparse(node.args[0])))
    assert classes() - UNSEEN - asserted == set()


def test_each_message_says_what_to_do():
    silent = []
    for name, place, message, keys in sites():
        if name in UNSEEN or "expected" in keys or place.startswith(tuple(REASONS)):
            continue
        own, values = re.sub(r"{.*?}", "", message), "".join(re.findall(r"{.*?}", message))
        if name in ("GraphError", "InfeasibleError") or not own.strip(
            " :.;"
        ):  # quote others, or say what works
            continue
        if not _ADVICE.search(own) and not _ELSEWHERE.search(values):
            silent.append(f"{name} {place}: {message}")
    assert not silent, "\n".join(silent)


def test_a_target_that_is_not_there():
    with pytest.raises(TargetError, match=r"there is no network 'unett'\. Did you mean 'unet' or "):
        zoo.build("unett")


def test_a_step_above_its_budget():
    side = SimpleNamespace(peak_bytes=2048)
    with pytest.raises(
        errors.BudgetError, match=r"took 2\.00 KiB .* more than its budget of 1\.00 KiB .* report it"
    ):
        Comparison.hold(SimpleNamespace(measured=side), 1024)


@pytest.mark.parametrize("place", REASONS)
def test_modules_with_reasons_exist(place):
    assert (SOURCE / place).exists()


def test_there_are_errors_to_look_at():
    found = list(sites())
    assert len(found) > 400
    assert {name for name, *_ in found} >= {"RunError", "FormatError", "TargetError", "BudgetError"}
