"""Code blocks of the pages, and what their source says about running them.

A block is told how to run by a comment in the line above it, whose parts are separated by semicolons:

| part | meaning |
| --- | --- |
| `with NAME` | it runs behind the lines that PREAMBLES has under this name |
| `needs NAME` | it is skipped where this module, or a CUDA device (`cuda`), is missing |
| `session` | of Python: it runs in the folder of the page's commands, in their order |
| `saved NAME` | the same, and it is written to a file of this name, for the commands behind it |
| `printed` | of a text: what the block before it prints |
| `figures vary` | of what is printed: numbers are not compared |
| `outline` | of what is printed: only the first word of each line that is not indented is compared |
| `extended` | it takes long: `make test-extended` runs it |
| `parsed` | its commands are read by the command line, and do not run |
| `file NAME` | it is the code of this file, which a test runs |
| `not run: REASON` | it is compiled or read, and does not run |
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["PAGES", "PREAMBLES", "ROOT", "Block", "Command", "blocks_of", "commands_of"]

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "examples" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]

_BLOCK = re.compile(r"^(?P<indent> *)```(?P<language>[^\n`]*)\n(?P<code>.*?)^(?P=indent)```$", re.M | re.S)
_MARK = re.compile(r"<!-- test: (.*?) -->\s*$")
_PARTS = {
    "with",
    "needs",
    "session",
    "saved",
    "printed",
    "figures vary",
    "outline",
    "extended",
    "parsed",
    "file",
    "not run:",
}

_MODEL = """
import torch
from torch import nn
import lowtide

torch.manual_seed(0)
model = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(16, 16), nn.Tanh())))
batch = torch.randn(2048, 16)


def loss_of(model, batch):
    return model(batch).square().mean()
"""
PREAMBLES = {
    "torch": "import torch\nfrom torch import nn\nimport lowtide\n",
    "a model": _MODEL,
    "a class": _MODEL + "MyModel = lambda: nn.Linear(4, 1)\n",
    "three lengths": _MODEL + "longer, longest = torch.randn(3000, 16), torch.randn(4000, 16)\n",
    "a fitted step": _MODEL
    + """
from types import SimpleNamespace
step = lowtide.fit(lambda model, batch: SimpleNamespace(loss=loss_of(model, batch)), model, batch, budget="8GiB")
""",
    "a graph break": _MODEL
    + """
x = batch


def loss_of(model, x):
    hidden = model(x)
    return (hidden * 2 if hidden.sum().item() > 0 else hidden).square().mean()
""",
    "a mask": "import torch\nmask = torch.zeros(3)\n",
    "a rule": "from lowtide.graph.access import Relation, Whole\nfrom lowtide.graph.access.call import AccessCall, same\n",
}


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    page: str
    line: int
    language: str
    code: str
    marks: dict[str, str] = field(default_factory=dict)
    before: Block | None = None
    """The block above it, on the same page."""

    @property
    def name(self) -> str:
        """Where it is."""
        return f"{self.page}:{self.line}"

    @property
    def in_session(self) -> bool:
        """Whether it runs with the commands of its page."""
        return self.language in ("console", "sh") or "session" in self.marks or "saved" in self.marks


@dataclass(frozen=True)
class Command:
    """A line of a shell, and what is printed below it."""

    line: str
    printed: str = ""


def blocks_of(page: Path) -> list[Block]:
    """All blocks of a page, in order."""
    text = page.read_text()
    found: list[Block] = []
    for match in _BLOCK.finditer(text):
        if match["language"].startswith("{"):  # a directive of the site
            continue
        above, indent = text[: match.start()], len(match["indent"])
        mark = _MARK.search(above.rpartition("\n\n")[2])
        code = "".join(line[indent:] or "\n" for line in match["code"].splitlines(keepends=True))
        found.append(
            Block(
                str(page.relative_to(ROOT)),
                above.count("\n") + 1,
                match["language"],
                code,
                _parts(mark[1]) if mark else {},
                found[-1] if found else None,
            )
        )
    return found


def _parts(mark: str) -> dict[str, str]:
    """`with a model; extended` as {"with": "a model", "extended": ""}."""
    rest, not_run, why = mark.partition("not run:")
    found = {"not run:": why.strip()} if not_run else {}
    for part in rest.strip("; ").split("; ") if rest else ():
        name = next((one for one in _PARTS if part == one or part.startswith(f"{one} ")), None)
        if name is None:
            raise ValueError(f"a block has no mark {part!r}; marks are {sorted(_PARTS)}")
        found[name] = part[len(name) :].strip()
    return found


def commands_of(block: Block) -> list[Command]:
    """The commands of a shell block; in a console they stand behind `$`, with what they print below."""
    lines = block.code.replace("\\\n", "").splitlines()
    if block.language == "sh":
        return [Command(line) for line in lines if line and not line.startswith("#")]
    found: list[Command] = []
    for line in lines:
        if line.startswith("$ "):
            found.append(Command(line[2:]))
        elif not found:
            raise ValueError(f"{block.name}: a console begins with a command behind `$ `")
        else:
            found[-1] = Command(found[-1].line, f"{found[-1].printed}{line}\n")
    return found
