"""The page that ships is the one that its source makes, and it needs nothing from outside."""

import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import lowtide
from lowtide.report.page.html import PLACE

PAGE = Path(lowtide.__file__).parent / "report" / "page" / "page.html"
WEB = Path(__file__).parents[3] / "web"

source_tree = pytest.mark.skipif(not WEB.exists(), reason="the source of the page is not part of the package")


def source_hash():
    """As web/build.mjs computes it."""
    found = hashlib.sha256()
    sources = sorted((path for path in (WEB / "src").rglob("*") if path.is_file()), key=str)
    for path in [*sources, WEB / "build.mjs", WEB / "package-lock.json"]:
        found.update(path.relative_to(WEB).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()


@source_tree
def test_the_page_is_built_from_this_source():
    (said,) = re.findall(r'<meta name="lowtide-source" content="(\w+)">', PAGE.read_text())
    assert said == source_hash(), "web/ was changed: run `npm ci && npm run build` there"


def test_the_page_is_small_and_has_one_place_for_data():
    text = PAGE.read_text()
    assert len(text.encode()) < 1_000_000
    assert text.count(PLACE) == 1


def test_the_page_asks_nobody_for_anything():
    text = PAGE.read_text()
    assert "default-src 'none'" in text
    assert not re.findall(
        r"<(?:script|link|img|iframe)[^>]+(?:src|href)\s*=\s*(?:[\"'](?!data:)|[^\"'\s])", text
    )
    for word in ("fetch(", "XMLHttpRequest", "WebSocket", "import(", "sendBeacon", "innerHTML=", "eval("):
        found = text.count(word)
        allowed = 2 if word == "innerHTML=" else 0  # preact has it for `dangerouslySetInnerHTML`
        assert found <= allowed, word
    for path in (WEB / "src").rglob("*.tsx"):
        assert "dangerouslySetInnerHTML" not in path.read_text()


@source_tree
def test_versions_of_libraries_are_pinned():
    package = json.loads((WEB / "package.json").read_text())
    for name, version in {**package["dependencies"], **package["devDependencies"]}.items():
        assert re.fullmatch(r"\d+\.\d+\.\d+", version), f"{name} {version}"


@source_tree
@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node")
@pytest.mark.skipif(not (WEB / "node_modules").exists(), reason="run `npm ci` in web/ first")
def test_functions_of_the_page():
    result = subprocess.run(["npm", "test"], cwd=WEB, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
