"""The page of the demo."""

from dataclasses import replace

from lowtide.report.page import Case, page

EAGER = Case("eager", None, None, 2048, 1.0, True, (), 0)
AFTER = Case("planned", 1024, 1000, 1000, 1.5, True, (400, 1000, 400), 100)


def test_what_was_not_followed_has_a_row_and_no_picture():
    text = page("title", "about", [EAGER, AFTER], "command")
    assert text.count("<tr><td>") == 2
    assert text.count("<figure>") == 1
    assert "3 operator runs" in text
    assert "0 operator runs" not in text


def test_times_are_told_over_those_of_eager_beside_them():
    beside = replace(AFTER, eager_seconds=0.5)
    assert beside.over_eager == "3.00 ×"
    assert AFTER.over_eager == "–"
    assert "<td>3.00 ×</td>" in page("title", "about", [EAGER, beside], "command")
