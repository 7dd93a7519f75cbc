"""The page in Chromium: every view draws, interactions work, nothing goes wrong, nothing leaves the machine."""

from pathlib import Path

import msgspec
import pytest
import torch

from lowtide import capture
from lowtide.cost import Step
from lowtide.formats.pytorch.snapshot import read_snapshot
from lowtide.formats.registry import read_file
from lowtide.graph import Source
from lowtide.plan.budget import Budget
from lowtide.plan.make.sweep import sweep
from lowtide.plan.program.costs import Costs
from lowtide.plan.request import DeviceRoom, PlanRequest
from lowtide.report.page.html import html_page
from lowtide.report.page.make import Given, report_of
from tests.formats.snapshots import pickled
from tests.planning import plan_for
from tests.report.page.browser import missing, started
from tests.report.page.cases import measured, offloading, recomputing, sharded, tiled
from tests.steps import DEVICE, families

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "there is a browser")

H200 = Path(__file__).parents[2] / "formats" / "h200"
HOSTILE = "</script><img src=x onerror=\"document.title='broken'\"><b>&lt;"
FIELDS = {
    "overview": ["memory-before", "memory-after"],
    "categories": ["categories"],
    "budgets": ["tradeoff"],
    "layout": ["layout"],
    "lanes": ["lanes"],
    "operators": ["roofline"],
    "tiles": ["tiles-0"],
    "graph": ["graph"],
}


COVERED = """
const box = (one) => one.getBoundingClientRect(), chips = [...document.querySelectorAll('.chips button')];
const meet = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
return [...document.querySelectorAll('.zoom button')].flatMap((one) => chips.filter((chip) => meet(box(one), box(chip))).map((chip) => chip.innerText));
"""
"""Buttons that those of a field lie upon."""

WORDS = """
const own = CanvasRenderingContext2D.prototype.fillText;
window.drawn = [];
CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
  const wide = this.measureText(text).width, left = this.textAlign === "right" ? x - wide : this.textAlign === "center" ? x - wide / 2 : x;
  window.drawn.push([text, left, left + wide, y]);
  own.call(this, text, x, y);
};
"""
"""Notes every text that a canvas draws from now on, with its place: left, right, the line that it stands on."""


@pytest.fixture(scope="module")
def browser():
    with started() as found:
        found.size(1200, 900)
        yield found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("pages")


def written(folder, name, *values, **options):
    path = folder / f"{name}.html"
    given = [Given(f"{name} {k}", value) for k, value in enumerate(values)]
    path.write_bytes(html_page(report_of(given, title=name, **options)))
    return path


@pytest.fixture(scope="module")
def planned(folder):
    """A plan that recomputes, one with copies, a curve, and the limits of a device."""
    plan = recomputing()
    costs = Costs(plan.seconds, plan.workspace_bytes, plan.cost)
    request = PlanRequest.of("100%", only="recompute", time_limit=0.3, smallest_seconds=0.0)
    curve = sweep(plan.graph, costs, request, DeviceRoom(), shares=(1.0, 0.9))
    return written(
        folder, "planned", plan, offloading(), curve, DEVICE, rival_seconds=1.0, target="a.py:step"
    )


@pytest.fixture(scope="module")
def ran(folder):
    return written(folder, "ran", measured())


@pytest.fixture(scope="module")
def split(folder):
    """A step over two devices."""
    return written(folder, "split", sharded())


def nothing_wrong(browser):
    assert browser.said() == []
    assert browser.requested() == []


def test_every_view_draws(browser, planned, ran, split):
    for path, more in (
        (planned, {"compare", "decisions", "peak"}),
        (ran, {"tiles", "decisions", "peak"}),
        (split, {"shards", "lanes", "compare"}),
    ):
        browser.open(path)
        views = browser.tabs()
        assert more <= set(views)
        for view in views:
            browser.view(view)
            assert browser.run("return document.querySelector('main section') !== null"), view
            for field in FIELDS.get(view, ()):
                if (view, field, path) == ("overview", "memory-before", ran):
                    continue  # of a plan in tiles, the step without them is not known
                assert browser.colours(field) > 3, f"{field} of {view} is blank"
        nothing_wrong(browser)


def test_the_first_screen_says_what_changed(browser, ran):
    browser.open(ran)
    cards = {
        name: browser.run("return document.querySelector(`[data-card=${arguments[0]}]`).innerText", name)
        for name in ("peak", "budget", "time", "gradients")
    }
    assert "→" in cards["peak"]
    assert "measured" in cards["peak"]
    assert "the peak stays inside" in cards["budget"]
    assert "compared with eager PyTorch" in cards["gradients"]
    assert "within" in cards["gradients"] or "bitwise equal" in cards["gradients"]
    nothing_wrong(browser)


def test_the_first_screen_says_that_eager_ran_out_of_memory(browser, folder):
    alone = msgspec.structs.replace(
        measured(), eager=None, loss_equal=None, bitwise=None, difference=None, eager_bytes=()
    )
    browser.open(written(folder, "alone", alone))
    card = browser.run("return document.querySelector('[data-card=gradients]').innerText")
    assert "not compared" in card
    assert "eager PyTorch ran out of memory" in card
    assert "predicted, then measured" in browser.run(
        "return document.querySelector('[data-card=peak]').innerText.toLowerCase()"
    )
    assert not browser.said()


def test_the_first_screen_says_how_a_step_is_split(browser, split):
    plan = sharded()
    browser.open(split)
    cards = {
        name: browser.run("return document.querySelector(`[data-card=${arguments[0]}]`).innerText", name)
        for name in ("peak", "budget", "devices", "wire", "time", "gradients")
    }
    assert "the largest of 2, predicted" in cards["peak"]
    assert "measured 4.88 KiB with workspaces" in cards["peak"]  # of 5,000 bytes
    assert "as planned" in cards["wire"]
    assert str(plan.messages) in cards["wire"]
    assert "no split below" in cards["time"]
    assert "within 2e-7" in cards["gradients"]
    assert "compared with one device" in cards["gradients"]
    nothing_wrong(browser)


def test_a_share_as_the_budget_of_devices_is_told(browser, folder):
    browser.open(written(folder, "shares", msgspec.structs.replace(sharded("99%"), measured=())))
    card = browser.run("return document.querySelector('[data-card=budget]').innerText")
    assert "none" not in card
    assert "stays inside" in card
    nothing_wrong(browser)


def test_boxes_are_shown_for_a_device_that_is_chosen(browser, split):
    browser.open(split)
    browser.view("shards")
    text = "return document.querySelector('[data-node=conv1]').innerText"
    drawn = {}
    for picture in sharded().pictures:
        browser.click(f"[data-device='{picture.rank}']")
        (conv,) = (op for op in picture.graph.ops if op.id == "conv1")
        box = conv.boxes["dist_input"]
        drawn[picture.rank] = f"dist_input=Rect({list(box.lo)}, {list(box.hi)})"
        assert drawn[picture.rank] in browser.run(text)
    assert drawn[0] != drawn[1]
    browser.click("[data-node=conv1]")
    everywhere = browser.run("return document.querySelector('[data-everywhere]').innerText")
    assert all(one.partition("=")[2] in everywhere for one in drawn.values())
    nothing_wrong(browser)


def test_nodes_fold_and_are_told_by_phase(browser, split):
    browser.open(split)
    browser.view("shards")
    rows = "return Number(document.querySelector('[data-nodes]').dataset.nodes)"
    opened = browser.run(rows)
    browser.click("[data-phase=forward]")
    assert 0 < browser.run(rows) < opened
    browser.click("[data-fold=all]")
    folded = browser.run(rows)
    browser.click("[data-nodes] .module")
    assert browser.run(rows) > folded
    nothing_wrong(browser)


def test_messages_stand_below_the_computation(browser, split):
    browser.open(split)
    browser.view("lanes")
    assert browser.colours("lanes") > 3
    told = {browser.hover("lanes", k / 50, 0.5).partition(" ")[0] for k in range(5, 48)}
    assert told & {"add_up", "exchange"}
    above = {browser.hover("lanes", k / 50, 0.12).partition(" ")[0] for k in range(5, 48)}
    assert "convolution" in above - told
    nothing_wrong(browser)


def test_moves_and_decisions_of_a_split_are_listed(browser, split):
    browser.open(split)
    browser.view("shards")
    moves = browser.run("return document.querySelector('[data-table=moves] tbody').innerText")
    assert "halo" in moves
    assert "gradient of" in moves
    browser.click("[data-decision=sharded]")
    body = browser.run("return document.querySelector('[data-table=sharded] tbody').innerText")
    assert "dimension 2 over 2 devices" in body
    assert "summed" not in body
    nothing_wrong(browser)


def test_a_cursor_is_answered_in_one_line(browser, planned):
    browser.open(planned)
    assert "forward" in browser.hover("memory-after", 0.3, 0.5)
    for view, field in (
        ("categories", "categories"),
        ("budgets", "tradeoff"),
        ("layout", "layout"),
        ("lanes", "lanes"),
        ("operators", "roofline"),
    ):
        browser.view(view)
        text = browser.hover(field, 0.5, 0.6)
        assert text, f"{field} says nothing"
        assert "\n" not in text
    nothing_wrong(browser)


def test_a_long_tip_is_whole(browser, folder):
    """Behind 560 pixels it was cut off, and what stands last was lost: the time."""
    step = families()
    ops = tuple(msgspec.structs.replace(op, id=f"{op.id}_{'of_a_long_name_' * 5}") for op in step.graph.ops)
    step = msgspec.structs.replace(step, graph=msgspec.structs.replace(step.graph, ops=ops))
    browser.open(written(folder, "long", step))
    browser.view("lanes")
    assert " from " in browser.hover("lanes", 0.5, 0.5)
    wide, shown = browser.run(
        "const one = document.querySelector('.tip'); return [one.scrollWidth, one.clientWidth]"
    )
    assert 500 < wide <= shown, "the tip is cut off"
    nothing_wrong(browser)


def test_a_click_on_a_moment_shows_who_is_live_there(browser, planned):
    browser.open(planned)
    browser.hover("memory-after", 0.2, 0.5)
    browser.run(
        """
        const canvas = document.querySelector('[data-field="memory-after"] canvas.top'), box = canvas.getBoundingClientRect();
        const at = { clientX: box.left + box.width * 0.2, clientY: box.top + 60, bubbles: true, pointerId: 1, pointerType: "mouse" };
        canvas.setPointerCapture = () => undefined;
        canvas.dispatchEvent(new PointerEvent("pointerdown", at));
        canvas.dispatchEvent(new PointerEvent("pointerup", at));
        """
    )
    browser.settle()
    assert browser.run("return document.querySelector('h2').innerText").startswith(
        "Who is live at this moment"
    )
    assert "steps.py:" in browser.run("return document.querySelector('[data-table=live] tbody').innerText")
    browser.run("[...document.querySelectorAll('button')].find((x) => x.innerText === 'the peak').click()")
    browser.settle()
    assert browser.run("return document.querySelector('h2').innerText").startswith("Who is live at the peak")
    nothing_wrong(browser)


def test_roles_at_the_peak_are_those_of_the_categories(browser, planned):
    browser.open(planned)
    browser.view("categories")
    legend = "[...document.querySelectorAll('[data-legend=categories] > span')]"
    rows = browser.run(f"return {legend}.map((x) => [x.querySelector('b').innerText, x.innerText])")
    held = {name for name, text in rows if " 0 B" not in " ".join(text.split())}
    assert {"parameter", "activation", "made by backward"} <= held
    browser.view("peak")
    found = set()
    for name in held:
        browser.run(
            "const x = document.querySelector('[data-table=live] input'); x.value = arguments[0];"
            "x.dispatchEvent(new Event('input', { bubbles: true }))",
            name,
        )
        browser.settle()
        if name in browser.run("return document.querySelector('[data-table=live] tbody').innerText"):
            found.add(name)
    assert found == held


def test_tables_are_searched_and_sorted(browser, planned):
    browser.open(planned)
    browser.view("decisions")
    count = "return document.querySelector('[data-table=decisions] [role=status]').innerText"
    whole = browser.run(count)
    browser.run(
        "const x = document.querySelector('[data-table=decisions] input'); x.value = 'convolution';"
        "x.dispatchEvent(new Event('input', { bubbles: true }))"
    )
    browser.settle()
    assert " of " in browser.run(count) != whole
    first = "return document.querySelector('[data-table=decisions] tbody td').innerText"
    browser.run("document.querySelector('[data-table=decisions] th button').click()")
    browser.settle()
    rising = browser.run(first)
    browser.run("document.querySelector('[data-table=decisions] th button').click()")
    browser.settle()
    assert browser.run(first) != rising
    nothing_wrong(browser)


def test_a_row_is_shown_whole_below_its_table(browser, planned):
    from selenium.webdriver.common.keys import Keys

    detail = "return document.querySelector('[data-table=decisions] .detail')?.innerText ?? ''"
    browser.open(planned)
    browser.view("decisions")
    assert browser.run(detail) == ""
    browser.click("[data-table=decisions] tbody tr")
    reason = browser.run("return document.querySelector('[data-table=decisions] tbody td.wide').title")
    assert reason
    assert reason in browser.run(detail)
    rows = browser.driver.find_element("css selector", "[data-table=decisions] .scroll")
    rows.send_keys(Keys.ARROW_DOWN)
    browser.settle()
    second = browser.run("return document.querySelectorAll('[data-table=decisions] tbody tr')[1].innerText")
    assert second.split("\t")[0] in browser.run(detail)
    rows.send_keys(Keys.END)
    browser.settle()
    assert browser.run("return document.querySelector('tr.chosen').getBoundingClientRect().height") > 0
    rows.send_keys(Keys.ESCAPE)
    browser.settle()
    assert browser.run(detail) == ""
    nothing_wrong(browser)


def test_a_budget_is_picked_and_its_code_can_be_copied(browser, planned):
    browser.open(planned)
    browser.view("budgets")
    code = "return document.querySelector('[data-code=python]').innerText"
    picked = "return Number(document.querySelector('[data-picked]').dataset.picked)"
    before = browser.run(picked)
    browser.run(
        "const x = document.querySelector('input[type=range]'); x.value = x.value === x.max ? x.min : x.max;"
        "x.dispatchEvent(new Event('input', { bubbles: true }))"
    )
    browser.settle()
    assert browser.run(picked) != before
    assert browser.run(code).startswith("step = lowtide.fit(loss_of, model, batch, budget=")
    assert "lowtide run a.py:step --budget" in browser.run(
        "return document.querySelector('[data-code=command]').innerText"
    )
    nothing_wrong(browser)


def test_one_budget_says_how_to_get_all(browser, planned, folder):
    sweep = "return document.querySelector('[data-code=sweep]')?.innerText ?? ''"
    browser.open(written(folder, "single", recomputing(), target="a b.py:step"))
    browser.view("budgets")
    assert browser.run(sweep) == "lowtide plan 'a b.py:step' --sweep -o sweep.json"
    browser.open(planned)
    browser.view("budgets")
    few = int(browser.run("return document.querySelector('input[type=range]').max")) < 2
    assert bool(browser.run(sweep)) == few
    nothing_wrong(browser)


def test_modules_open_and_fold(browser, planned):
    browser.open(planned)
    browser.view("graph")
    rows = "return Number(document.querySelector('[data-field=graph]').dataset.rows)"
    browser.click("[data-fold='9']")
    opened = browser.run(rows)
    browser.click("[data-fold='0']")
    folded = browser.run(rows)
    assert folded < opened
    canvas = "document.querySelector('[data-field=graph] canvas')"
    for key in ("ArrowDown", "ArrowDown", "Enter"):
        browser.run(
            f"{canvas}.dispatchEvent(new KeyboardEvent('keydown', {{ key: arguments[0], bubbles: true }}))",
            key,
        )
        browser.settle()
    assert browser.colours("graph") > 3
    nothing_wrong(browser)


def test_it_is_used_by_keyboard(browser, planned):
    from selenium.webdriver.common.keys import Keys

    browser.open(planned)
    tab = browser.driver.find_element("id", "tab-overview")
    tab.send_keys(Keys.ARROW_RIGHT)
    browser.settle()
    assert browser.run("return document.activeElement.id") == "tab-peak"
    browser.view("overview")
    canvas = browser.driver.find_element("css selector", "[data-field=memory-after] canvas.top")
    canvas.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    tip = "return document.querySelector('[data-field=memory-after] .tip').textContent"
    first = browser.run(tip)
    canvas.send_keys(Keys.ARROW_RIGHT)
    assert first
    assert browser.run(tip) != first
    canvas.send_keys("+")
    browser.settle()
    assert browser.run(
        "return document.querySelector('[data-field=memory-after] .zoom').innerText"
    ).startswith("whole")
    nothing_wrong(browser)


def test_light_and_dark(browser, planned):
    ground = "return getComputedStyle(document.body).backgroundColor"
    browser.size(1200, 900, dark=True)
    browser.open(planned)
    dark = browser.run(ground)
    browser.click("#theme")
    light = browser.run(ground)
    assert dark != light
    browser.size(1200, 900)
    browser.settle()
    assert browser.run(ground) == light
    nothing_wrong(browser)


def test_a_phone_shows_every_view_without_scrolling_sideways(browser, planned, split):
    browser.size(390, 800)
    for path in (planned, split):
        browser.open(path)
        for view in browser.tabs():
            browser.view(view)
            assert browser.run("return document.documentElement.scrollWidth") <= 390, view
            assert browser.run(COVERED) == [], view
    browser.size(1200, 900)
    nothing_wrong(browser)


def hostile(plan):
    """The plan with such a name wherever it has names."""
    replace = msgspec.structs.replace
    source = Source(HOSTILE, 1)
    tensors = tuple(
        replace(t, id=f"{HOSTILE}{k}", name=f"{HOSTILE}{k}", source=source, dtype=HOSTILE)
        for k, t in enumerate(plan.graph.tensors)
    )
    names = [f"{HOSTILE}{k}" for k in range(len(plan.graph.ops))]
    ops = tuple(
        replace(
            op,
            id=names[k],
            name=f"{HOSTILE}.{HOSTILE}",
            kind=f"aten.{HOSTILE}",
            source=source,
            differentiates="",
            attributes={"annotation": HOSTILE},
        )
        for k, op in enumerate(plan.graph.ops)
    )
    return replace(plan, graph=replace(plan.graph, tensors=tensors, ops=ops, name=HOSTILE), method=HOSTILE)


def hostile_split(plan):
    """The same for a split step, with the nodes of its pictures."""
    replace = msgspec.structs.replace
    pictures = tuple(
        replace(
            one,
            graph=replace(
                one.graph,
                ops=tuple(
                    replace(op, id=f"{HOSTILE}{op.id}", name=f"{HOSTILE}.{op.id}", boxes={HOSTILE: box})
                    for op in one.graph.ops
                    for box in [next(iter(op.boxes.values()), None)]
                ),
            ),
        )
        for one in plan.pictures
    )
    graph = hostile(plan.plan).graph
    named = hostile(replace(plan.plan, graph=plan.graph)).graph
    split = replace(plan.split, name=HOSTILE)
    inner = replace(plan.plan, graph=graph, method=HOSTILE)
    changed = {"graph": named, "plan": inner, "pictures": pictures}
    return replace(plan, target=HOSTILE, split=split, others=(split,), **changed)


def test_hostile_names_are_text(browser, folder):
    plans = [hostile(plan) for plan in (recomputing(), tiled())]
    given = [Given(f"{HOSTILE}{k}", value, note=HOSTILE) for k, value in enumerate(plans)]
    given.append(Given(HOSTILE, hostile_split(sharded())))
    given.append(Given(HOSTILE, Step(plans[0].graph, costs=families().costs)))
    given.append(
        Given(HOSTILE, msgspec.structs.replace(DEVICE, matrix_flop_per_second={"float32": 1e9, HOSTILE: 2e9}))
    )
    report = report_of(given, title=HOSTILE, about=HOSTILE, target=HOSTILE, made_by=HOSTILE)
    report = msgspec.structs.replace(report, notes=(HOSTILE,))
    path = folder / "hostile.html"
    path.write_bytes(html_page(report))
    browser.open(path)
    assert len(browser.tabs()) >= 11
    for view in browser.tabs():
        browser.view(view)
        for field in FIELDS.get(view, ()):
            if field != "graph" and browser.colours(field):
                browser.hover(field, 0.5, 0.5)
        assert (
            browser.run(
                "return document.querySelectorAll('img, b:not([data-picked]):not(p b):not(.legend b):not(.node b)').length"
            )
            == 0
        ), view
        assert browser.run("return document.title") == HOSTILE
    nothing_wrong(browser)


def test_the_first_pair_is_of_one_step(browser, folder):
    """Of two different steps the last is shown beside its own before; another choice says that they differ."""
    browser.open(written(folder, "others", measured(), recomputing()))
    chosen = (
        "return [...document.querySelectorAll('.pair select')].map((x) => x.selectedOptions[0].innerText)"
    )
    assert browser.run(chosen) == ["storing everything", "others 1"]
    assert not browser.run("return document.querySelector('[data-other]') !== null")
    browser.run(
        "const x = document.querySelector('.pair select'); x.value = '0';"
        "x.dispatchEvent(new Event('change', { bubbles: true }))"
    )
    browser.settle()
    assert "different steps" in browser.run("return document.querySelector('[data-other]').innerText")
    assert "−" not in browser.run("return document.querySelector('[data-card=peak]').innerText")
    nothing_wrong(browser)


def test_a_snapshot_is_not_the_step_of_a_plan_beside_it(browser, folder):
    """A plan is shown beside its own before; what a file without parameters took gets no time of the step's."""
    browser.open(written(folder, "beside", read_snapshot(pickled()), measured()))
    chosen = (
        "return [...document.querySelectorAll('.pair select')].map((x) => x.selectedOptions[0].innerText)"
    )
    assert browser.run(chosen) == ["eager PyTorch", "beside 1"]
    assert not browser.run("return document.querySelector('[data-unsure]') !== null")
    browser.run(
        "const x = document.querySelector('.pair select'); x.value = '0';"
        "x.dispatchEvent(new Event('change', { bubbles: true }))"
    )
    browser.settle()
    assert "which step" in browser.run("return document.querySelector('[data-unsure]').innerText")
    assert browser.run("return document.querySelector('[data-card=time] .big').innerText").startswith("–")
    nothing_wrong(browser)


def test_a_budget_that_is_out_of_the_picture_is_told(browser, folder):
    browser.open(written(folder, "roomy", msgspec.structs.replace(recomputing(), budget_bytes=1 << 40)))
    legend = browser.run("return document.querySelector('.legend').innerText")
    assert "budget 1.00 TiB, far above what is drawn" in legend
    assert "there throughout: parameters, inputs" in legend
    nothing_wrong(browser)


def apart(drawn, *starts):
    """Whether the texts that begin so lie beside or below each other."""
    found = [next(one for one in reversed(drawn) if one[0].startswith(start)) for start in starts]
    return all(
        a[2] <= b[1] or b[2] <= a[1] or abs(a[3] - b[3]) >= 12 for k, a in enumerate(found) for b in found[:k]
    )


def test_words_at_lines_that_are_near_do_not_cover_each_other(browser, folder):
    """The measured peak and the budget; the limits of a device in types of one rate."""
    run = msgspec.structs.replace(measured(), recording=None)
    fast = msgspec.structs.replace(
        DEVICE, matrix_flop_per_second={"float16": 1.01e9, "bfloat16": 1e9, "float32": 0.99e9}
    )
    browser.open(written(folder, "near", run, fast))
    browser.run(WORDS)
    browser.click("#theme")
    assert apart(browser.run("return window.drawn"), "measured peak", "budget")
    browser.view("operators")
    browser.click("#theme")
    assert apart(browser.run("return window.drawn"), "float16 1", "bfloat16 1", "float32 990")
    nothing_wrong(browser)


def test_an_empty_table_says_why_and_can_be_sorted(browser, folder):
    step = capture(lambda model, x: model(x).sum(), torch.nn.Linear(8, 1), torch.ones(4, 8)).step
    costs = Costs((1.0,) * len(step.graph.ops), origin="unit")
    plan = plan_for(step.graph, costs, Budget(share=1.0), time_limit=1.0)
    browser.open(written(folder, "empty", plan))
    browser.view("decisions")
    assert "nothing to decide" in browser.run("return document.querySelector('main').innerText")
    assert "Storing everything fits" in browser.run("return document.querySelector('main').innerText")
    for k in range(browser.run("return document.querySelectorAll('th button').length")):
        browser.run("document.querySelectorAll('th button')[arguments[0]].click()", k)
    browser.settle()
    nothing_wrong(browser)


def test_every_colour_of_the_lanes_is_in_the_legend(browser, folder):
    profile = read_file(str(H200 / "profiler.json.gz")).step
    browser.open(written(folder, "phases", profile))
    browser.view("lanes")
    legend = browser.run("return document.querySelector('.legend').innerText")
    phases = {op.phase.value for op in profile.graph.ops}
    assert len(phases) > 2
    assert all(phase in legend for phase in phases)
    nothing_wrong(browser)


def test_words_on_pale_boxes_are_as_dark_as_the_text(browser, planned):
    """Boxes of single operators are pale in light colours, where white words could not be read."""
    browser.open(planned)
    browser.view("graph")
    browser.click("[data-fold='9']")
    browser.run(
        """
        const own = CanvasRenderingContext2D.prototype.fillText;
        window.drawn = [];
        CanvasRenderingContext2D.prototype.fillText = function (text, ...at) {
          if (this.textAlign === "center") window.drawn.push([text, this.fillStyle]);
          own.call(this, text, ...at);
        };
        """
    )
    for _ in range(2):
        browser.run("window.drawn = []")
        browser.click("#theme")
        ink = browser.run(
            "const at = document.createElement('canvas').getContext('2d');"
            "at.fillStyle = getComputedStyle(document.documentElement).getPropertyValue('--text').trim();"
            "return at.fillStyle"
        )
        words = dict(browser.run("return window.drawn"))
        kinds = [text for text in words if text.isidentifier()]
        assert kinds
        assert {words[text] for text in kinds} == {ink}
    nothing_wrong(browser)
