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
| `given NAME` | its commands find the file that FILES of `tests/doc_files.py` makes under this name |
| `ranks N` | torchrun runs it in N processes; what CHECKS has for its preamble runs behind it |
| `extended` | it takes long: `make test-extended` runs it |
| `file NAME` | it is the code of this file, which a test runs |

No mark leaves a block out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["CHECKS", "PAGES", "PREAMBLES", "ROOT", "Block", "Command", "blocks_of", "commands_of"]

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
    "given",
    "ranks",
    "extended",
    "file",
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
_RANKS = """
import copy
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
import lowtide

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)
"""
_IMAGES = """
import copy
import torch
from torch import nn
import lowtide

torch.manual_seed(0)


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 2, 3, padding=1)

    def forward(self, image):
        return self.last(self.first(image).relu())


def loss_of(model, image, labels):
    return nn.functional.cross_entropy(model(image), labels)

"""
_SAME_GRADIENTS = """
for one, other in zip(model.parameters(), alone.parameters(), strict=True):
    torch.testing.assert_close(one.grad.full_tensor() if hasattr(one.grad, "full_tensor") else one.grad, other.grad)
"""
CHECKS = {
    "blocks to shard": f"""
model(x).square().mean().backward()
alone(x).square().mean().backward()
{_SAME_GRADIENTS}""",
    "a network on a mesh": f"""
for batch in batches:
    loss_of(alone, batch).backward()
{_SAME_GRADIENTS}""",
    "images": """
optimizer = torch.optim.Adam(alone.parameters())
for image, labels in images:
    loss_of(alone, image, labels).backward()
    optimizer.step()
    optimizer.zero_grad()
with torch.no_grad():
    torch.testing.assert_close(step(model, *first), loss_of(alone, *first))
""",
    "a step on a mesh": "assert start == 8",
    "a checkpoint": "torch.testing.assert_close(step(model, image, labels).detach(), expected)",
}
"""What must be true behind a block that runs in several processes."""
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
    "blocks to shard": _RANKS
    + """
from torch.distributed.fsdp import fully_shard


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        layers = lambda: nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        self.blocks = nn.ModuleList(layers() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


model, x = Network(), torch.randn(64, 16, requires_grad=True)
alone = copy.deepcopy(model)
""",
    "a network on a mesh": _RANKS
    + """
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return self.down(nn.functional.gelu(self.up(x)))


def loss_of(model, batch):
    return model(batch).square().mean()


model, batch = Network(), torch.randn(64, 16)
batches, alone = [batch, 2 * batch], copy.deepcopy(model)
""",
    "images": _IMAGES
    + """
model, image = Network(), torch.randn(1, 3, 64, 64)
labels = torch.randint(0, 2, (1, 64, 64))
images, alone, first = [(image, labels), (2 * image, 1 - labels)], copy.deepcopy(model), (image, labels)
""",
    "a step on a mesh": _IMAGES
    + """
from pathlib import Path
model, image, labels = Network(), torch.randn(1, 3, 32, 32), torch.randint(0, 2, (1, 32, 32))
step = lowtide.fit(loss_of, model, image, labels, budget="1GiB", mesh=2)
optimizer, number = torch.optim.Adam(model.parameters()), 7
step(model, image, labels).backward()
optimizer.step()
""",
    "a checkpoint": _IMAGES
    + """
model, image, labels = Network(), torch.randn(1, 3, 64, 64), torch.randint(0, 2, (1, 64, 64))
step = lowtide.fit(loss_of, model, image, labels, budget="1GiB", mesh=4)
expected = step(model, image, labels).detach()
step.save("checkpoints", model)
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
    found = {}
    for part in mark.split("; "):
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
