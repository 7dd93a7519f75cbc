"""The page: one self-contained file, with the report inside."""

from __future__ import annotations

from importlib import resources

from lowtide.documents import encode_document
from lowtide.report.page.types import Report

__all__ = ["PLACE", "embedded", "html_page"]

PLACE = "LOWTIDE-REPORT-DATA"
"""Stands in the built page where the document goes."""

_ESCAPED: dict[str, str | int | None] = {
    "<": "\\u003c",
    ">": "\\u003e",
    "&": "\\u0026",
    "\u2028": "\\u2028",
    "\u2029": "\\u2029",
}


def html_page(report: Report) -> bytes:
    """The page of a report; it opens without a network, and no name in it can end the document early."""
    template = resources.files("lowtide.report.page").joinpath("page.html").read_text("utf-8")
    before, found, after = template.partition(PLACE)
    assert found, "the page has no place for a report; build it again by `npm run build` in web/"
    return f"{before}{embedded(report)}{after}".encode()


def embedded(report: Report) -> str:
    """The document as JSON that is safe inside of a script element."""
    text = encode_document(report).decode().rstrip("\n")
    return text.translate(str.maketrans(_ESCAPED))
