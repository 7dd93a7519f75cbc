"""Code blocks of pages that stand alone run as they are printed."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
BLOCKS = {
    (
        "running.md",
        "## Watching memory while training runs",
    ): "watched    4 steps on cpu\nbudget     ",
    ("integrations.md", "## Notebooks"): "",
    ("formats.md", "## `profiler`: traces of `torch.profiler`, read only"): "",
}
"""Each with the beginning of what it prints."""


@pytest.mark.parametrize(("page", "heading"), BLOCKS)
def test_the_block_below_a_heading_runs(page, heading, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = (DOCS / page).read_text().partition(f"\n{heading}\n")[2]
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]
    exec(compile(code, page, "exec"), {"__name__": "block"})
    assert capsys.readouterr().out.startswith(BLOCKS[page, heading])
