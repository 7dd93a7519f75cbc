"""Makes the pictures of docs/report.md from a page.

    make demo && python docs/images/screenshots.py .demo/memory.html

Needs Chromium, chromedriver and selenium.
"""

from __future__ import annotations

import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent.parent))

from tests.report.page.browser import missing, started  # noqa: E402

PICTURES = {
    "report-overview": ("overview", 1000, False),
    "report-overview-dark": ("overview", 1000, True),
    "report-phone": ("overview", 390, False),
    "report-decisions": ("decisions", 1000, False),
    "report-budgets": ("budgets", 1000, False),
    "report-layout": ("layout", 1000, False),
    "report-graph": ("graph", 1000, False),
}


def main(page: str) -> None:
    """One PNG for each picture, beside this script."""
    if missing():
        sys.exit(missing())
    with started() as browser:
        for name, (view, width, dark) in PICTURES.items():
            browser.size(width, 800, dark=dark)
            browser.open(Path(page))
            browser.view(view)
            browser.settle()
            (FOLDER / f"{name}.png").write_bytes(browser.picture(most=1100 if width > 600 else 900))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
