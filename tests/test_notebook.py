"""What a notebook shows of graphs, plans and fitted steps: well-formed, whole, and harmless whatever names are."""

from html.parser import HTMLParser
from xml.etree import ElementTree

import msgspec
import pytest
import torch

import lowtide
from lowtide.cost import Step
from lowtide.graph import Graph, Op, Source, Tensor
from lowtide.notebook import Curve, curves_svg, shown_html
from tests.conftest import document_path

EVIL = "</script><img src=x onerror=alert(1)>\x1b[31m\"'&"
VOID = {"img", "br", "hr", "input", "meta", "link"}


class Page(HTMLParser):
    """Tags in their order, and that each is closed."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.open, self.text = [], [], []
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        assert not any(name.startswith("on") for name, _ in attributes)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def page(value):
    found = Page(value._repr_html_())
    assert set(found.tags) <= {
        "div", "strong", "table", "tbody", "tr", "td", "svg", "polygon", "polyline", "line", "rect", "text",
        "details", "summary", "pre",
    }  # fmt: skip
    return " ".join(found.text), found


def test_a_file_shows_its_summary_and_curve():
    text, found = page(lowtide.read(document_path("000")))
    assert "Chainer" in text
    assert "60 forward, 60 backward" in text
    assert "6.83 GiB at" in text
    assert found.tags.count("polygon") == 1


def test_a_graph_and_a_step_show_the_same_peak():
    step = lowtide.read(document_path("001")).step
    for value in (step, step.graph):
        text, _ = page(value)
        assert "189.25 MiB at" in text


def test_a_document_without_order_has_no_peak():
    text, found = page(lowtide.read(document_path("003")).step)
    assert "peak not known" in text
    assert "svg" not in found.tags


def test_an_empty_graph_is_shown():
    text, _ = page(Graph())
    assert "operators none" in text


def test_names_are_escaped():
    graph = Graph((Tensor(EVIL, 10, source=Source(EVIL, 1)),), (Op(EVIL, EVIL, outputs=(0,)),), name=EVIL)
    for value in (graph, Step(graph, format=EVIL)):
        html = value._repr_html_()
        assert "<img" not in html
        assert "\x1b" not in html
        text, _ = page(value)
        assert "onerror=alert(1)" in text


def test_curves_are_drawn_on_one_scale():
    svg = ElementTree.fromstring(curves_svg([Curve("a", [0, 50, 100]), Curve("b", [200, 0])], limit=100))
    name = "{http://www.w3.org/2000/svg}"
    (area,), (line,) = svg.iter(f"{name}polygon"), svg.iter(f"{name}polyline")
    ys = [float(point.split(",")[1]) for point in area.get("points").split()]
    assert min(ys) == pytest.approx(14 + 75)  # 100 of 200
    assert min(float(point.split(",")[1]) for point in line.get("points").split()) == pytest.approx(14)
    (limit,) = svg.iter(f"{name}line")
    assert float(limit.get("y1")) == pytest.approx(14 + 75)
    assert [one.text for one in svg.iter(f"{name}text")] == ["200 B", "0 B", "a", "b", "budget 100 B"]
    assert curves_svg([Curve("a", [])]) == ""


def test_a_long_curve_is_thinned_and_keeps_its_peak():
    values = [1] * 100_000
    values[77_777] = 1000
    svg = curves_svg([Curve("a", values)])
    assert len(svg) < 20_000
    assert ",14.0" in svg


def test_text_to_unfold_keeps_its_lines():
    assert "<pre" in shown_html("t", [], more=("words", "a\nb"))
    assert "a\nb</pre>" in shown_html("t", [], more=("words", "a\nb"))
    assert "details" not in shown_html("t", [])


@pytest.fixture(scope="module")
def fitted():
    def loss_of(model, x):
        return model(x).square().mean()

    model = torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()) for _ in range(6))
    )
    return lowtide.fit(
        loss_of, model, torch.randn(256, 64), budget="70%", cost="estimated", time_limit=1.0, verify=False
    )


def test_a_plan_and_a_fitted_step_show_before_and_after(fitted):
    plan = fitted.plan
    for value in (plan, fitted):
        text, found = page(value)
        assert f"{plan.decisions.recomputed} recomputed" in text
        assert "planned" in found.text
        assert "plain" in found.text
        assert found.tags.count("polygon") == found.tags.count("polyline") == 1
        assert plan.explain().splitlines()[0] in text
    assert "loss_of" in page(fitted)[0]


def test_the_highest_point_of_the_planned_curve_is_the_predicted_peak(fitted):
    plan = fitted.plan
    _, found = page(plan)
    from lowtide.plan.result.shown import _curves

    planned, plain = _curves(plan)
    assert max(planned.bytes) == plan.predicted.peak_bytes
    assert max(plain.bytes) == plan.plain.peak_bytes
    assert found.text[0] == "Plan"


def test_a_plan_that_cannot_be_run_is_shown_all_the_same(fitted):
    program = fitted.plan.program
    broken = msgspec.structs.replace(
        fitted.plan, program=msgspec.structs.replace(program, backward=program.backward[3:])
    )
    text, found = page(broken)
    assert "This plan cannot be run:" in text
    assert "svg" not in found.tags


def test_ipython_takes_it(fitted):
    formatters = pytest.importorskip("IPython.core.formatters")
    shown, _ = formatters.DisplayFormatter().format(fitted.plan)
    assert shown["text/html"] == fitted.plan._repr_html_()
