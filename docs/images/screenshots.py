"""Makes the pictures of docs/report.md from a page.

    make demo && python docs/images/screenshots.py .demo/memory.html
    lowtide shard unet:base=4,batch=2,size=188 --devices 4 --cut width --run --compare -o shards.json
    lowtide report shards.json -o shards.html
    python docs/images/screenshots.py shards.html shards

Views may be named; else all that the page has are pictured. Needs Chromium, chromedriver and selenium.
"""

from __future__ import annotations

import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent.parent))

from tests.report.page.browser import missing, started  # noqa: E402

PICTURES = {
    "report-overview": ("overview", 960, 1000),
    "report-decisions": ("decisions", 960, 560),
    "report-budgets": ("budgets", 960, 760),
    "report-layout": ("layout", 960, 760),
    "report-graph": ("graph", 960, 760),
    "report-shards": ("shards", 960, 1500),
}
"""The view, and how wide and how high its picture is at most."""


def main(page: str, *views: str) -> None:
    """One PNG for each picture, beside this script."""
    if missing():
        sys.exit(missing())
    with started() as browser:
        for name, (view, width, height) in PICTURES.items():
            browser.size(width, 800)
            browser.open(Path(page))
            if view not in browser.tabs() or (views and view not in views):
                continue
            browser.view(view)
            (FOLDER / f"{name}.png").write_bytes(browser.picture(most=height))


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(*sys.argv[1:])
