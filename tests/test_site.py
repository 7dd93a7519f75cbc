"""The site is built without a warning, and every link on it leads somewhere."""

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


class Page(HTMLParser):
    """Links of a page, and what links may lead to on it."""

    def __init__(self, text):
        super().__init__()
        self.links, self.names = set(), set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.names.update(given[key] for key in ("id", "name") if given.get(key))
        self.links.update(given[key] for key in ("href", "src") if given.get(key))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    for needed in ("sphinx", "myst_parser", "furo"):
        pytest.importorskip(needed, reason="the site needs Sphinx: pip install 'lowtide[dev]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-E", "-d", str(folder / "state")]
    command += ["-c", str(DOCS), str(ROOT), str(folder / "html")]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return folder / "html"


@pytest.mark.extended
def test_links_of_the_site_lead_somewhere(site):
    pages = {path: Page(path.read_text()) for path in site.rglob("*.html")}
    assert len(pages) > 40
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme in ("http", "https", "data", "mailto"):
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            assert target.is_file(), f"{path.relative_to(site)} links to {link}"
            if parts.fragment and target in pages:
                assert unquote(parts.fragment) in pages[target].names, f"{path.relative_to(site)}: {link}"


@pytest.mark.extended
def test_the_site_loads_nothing_from_elsewhere(site):
    for path in site.rglob("*.html"):
        loaded = re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=\"(https?:[^\"]+)", path.read_text())
        assert not loaded, f"{path.name} loads {loaded}"


def test_the_site_lists_every_page():
    text = (DOCS / "index.md").read_text()
    listed = re.findall(r"^([\w-]+)$", text, re.MULTILINE)
    pages = {path.stem for path in DOCS.glob("*.md")} - {"index"}
    assert set(listed) == pages
    assert len(listed) == len(pages)


def test_the_comparison_has_the_figures_of_its_tables():
    text = (DOCS / "comparison.md").read_text()
    section = text.partition("| step | way | peak | time |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\|(.*)\| (.*) \| ([\d,]+) \| ([\d.]+) \|$", section, re.MULTILINE)
    assert len(rows) == 21
    table = ""
    for step, way, peak, time in rows:
        linked = re.search(r"\]\(\.\./(.*?)\)", step)
        if linked:
            table = (ROOT / linked[1]).read_text()
        figures = [float(one.replace(",", "")) for one in re.findall(r"(?<=\| )[\d,]+\.\d+(?= \|)", table)]
        assert int(peak.replace(",", "")) in {round(one) for one in figures}, f"{way}: {peak}"
        assert time == "1" or f"| {time} |" in table, f"{way}: {time}"
