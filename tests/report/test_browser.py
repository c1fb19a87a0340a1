"""The report in a real Chromium, opened from `file://`: what a user sees and does, at three sizes, light and dark.

Needs Chromium (Debian's package `chromium`) and the test dependencies playwright and axe-playwright-python.
"""

import copy

import pytest

from shardwright.parallelize import captured_graph
from shardwright.parallelize import plan as make_plan
from shardwright.report import report
from shardwright.report.visual import VisualReport
from tests.models.zoo import ZOO
from tests.report.browser import SIZES, Opened, browser, chromium

pytest.importorskip("playwright", reason="no browser tests: playwright is not installed")
pytestmark = pytest.mark.skipif(
    chromium() is None, reason="no browser tests: there is no chromium (apt-get install chromium)"
)
PLANS = {"flat": "dp=2,tp=2", "pipeline": "pp=2,dp=2", "auto": "auto"}


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """The reports of a small GPT: with its graph, of the plan file alone, and of two plans."""
    module, args, kwargs = ZOO["gpt"]()
    example = (args, kwargs)
    graph = captured_graph(module, example).graph
    plans = {name: make_plan(module, example=example, plan=text, cluster="4xA100-80GB") for name, text in PLANS.items()}
    folder = tmp_path_factory.mktemp("reports")
    shown = {name: report(plan, graph) for name, plan in plans.items()}
    shown |= {"file": report(plans["pipeline"]), "two": report(plans["flat"], graph, other=plans["auto"])}
    shown["large"] = VisualReport(title="large", contents={"plans": [grown(shown["flat"].contents["plans"][0], 6000)]})
    return {name: each.save(folder / f"{name}.html") for name, each in shown.items()}


def grown(contents, ops):
    """A report with so many ops, none of which fold: its modules again and again under other names."""
    contents = copy.deepcopy(contents)
    tree, known = contents["tree"], {}
    for name, row in zip(contents["names"], contents["rowOf"], strict=True):
        known.setdefault(row, []).append(name)
    pattern, number = copy.deepcopy(tree["children"]), max(contents["rowOf"]) + 1

    def renumbered(node, prefix):
        nonlocal number
        for row in node["rows"]:
            contents["names"] += [f"{prefix}.{name}" for name in known.get(row["id"], ())]
            contents["rowOf"] += [number] * len(known.get(row["id"], ()))
            row["id"], number = number, number + 1
        for child in node["children"]:
            renumbered(child, prefix)

    while number < ops:
        prefix = f"copy{number}"
        copied = {"name": prefix, "count": 1, "stages": [0], "rows": [], "children": copy.deepcopy(pattern)}
        renumbered(copied, prefix)
        tree["children"].append(copied)
    detail = contents["timeline"]["details"][0]
    for phase in ("forward", "backward"):
        times = ops // len(detail[phase]["names"])
        length = detail[phase]["starts"][-1] + detail[phase]["lengths"][-1]
        starts = detail[phase].pop("starts")
        detail[phase] = {key: part * times if isinstance(part, list) else part for key, part in detail[phase].items()}
        detail[phase]["starts"] = [round(at * length + start, 2) for at in range(times) for start in starts]
    return contents


@pytest.fixture(scope="module")
def running():
    with browser() as started:
        yield started


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["pipeline", "two"])
def test_it_opens_without_errors_or_requests_and_fits_the_screen(running, reports, name, size, theme):
    with Opened(running, reports[name], size, theme) as opened:
        assert opened.page.evaluate("document.documentElement.dataset.theme") == theme
        opened.page.locator("#code").scroll_into_view_if_needed()
        opened.page.wait_for_selector("#code .codeline")
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= SIZES[size][0]
        assert opened.errors == []
        assert [url for url in opened.requests if not url.startswith("file://")] == []


@pytest.mark.parametrize(("name", "theme"), [("pipeline", "light"), ("two", "dark")])
def test_axe_finds_no_serious_fault(running, reports, name, theme):
    pytest.importorskip("axe_playwright_python", reason="axe-playwright-python is not installed")
    with Opened(running, reports[name], "desktop", theme) as opened:
        opened.page.keyboard.press("/")
        opened.page.keyboard.type("blocks.1.up / linear")
        opened.page.keyboard.press("Enter")
        assert opened.serious() == []
        opened.page.evaluate("main.prepend(h('p', {style: {color: '#999', background: '#aaa'}}, 'hardly to be read'))")
        assert "hardly to be read" in " ".join(opened.serious("#main > p"))


def test_search_finds_an_op_of_a_folded_layer(running, reports):
    with Opened(running, reports["flat"]) as opened:
        page = opened.page
        page.keyboard.press("/")
        page.keyboard.type("blocks.1.up / linear")
        assert page.locator(".result").first.inner_text() == "blocks.1.up / linear"
        page.keyboard.press("Enter")
        row = page.locator(".row.found")
        assert "linear" in row.inner_text()
        assert row.is_visible() and "ma, tp: n" in page.locator(".facts").first.inner_text()
        page.keyboard.press("/")
        page.locator(".search input").fill("no such op")
        assert page.locator(".results").inner_text() == "nothing has this name"


def test_the_tree_opens_and_closes_by_keys(running, reports):
    with Opened(running, reports["flat"]) as opened:
        page = opened.page
        before = page.locator("[role=treeitem]").count()
        page.locator("#modules .row", has_text="blocks").first.click()
        inside = page.locator("[role=treeitem]").count()
        assert inside > before
        page.locator("[role=treeitem]", has_text="blocks").first.focus()
        page.keyboard.press("ArrowLeft")
        assert page.locator("[role=treeitem]").count() == before
        page.keyboard.press("Enter")
        page.keyboard.press("ArrowDown")
        assert page.evaluate("document.activeElement.getAttribute('aria-level')") == "2"


def test_only_ops_with_reshards(running, reports):
    with Opened(running, reports["flat"]) as opened:
        opened.page.locator(".chip", has_text="with reshards").click()
        ops = opened.page.locator("#modules .row:not(:has(.module))")
        assert ops.count() == opened.page.locator("#modules .row:not(:has(.module)) .flag.sends").count() > 0


def test_the_timeline_zooms_to_ops_and_leads_to_them(running, reports):
    with Opened(running, reports["pipeline"]) as opened:
        page, canvas = opened.page, opened.page.locator("#timeline canvas")
        whole = page.evaluate("WINDOW.end - WINDOW.start")
        page.locator("#timeline button", has_text="One microbatch").click()
        assert page.evaluate("WINDOW.end - WINDOW.start") < whole / 2
        canvas.scroll_into_view_if_needed()
        box = canvas.bounding_box()
        page.mouse.click(box["x"] + box["width"] / 2, box["y"] + 24 + 24 + 12)  # the ops of the first lane
        assert "predicted" in page.locator("#timeline .selected").inner_text()
        page.locator("#timeline .selected button").click()
        assert page.locator(".row.found").count() == 1
        canvas.focus()
        page.keyboard.press("0")
        assert page.evaluate("WINDOW.end - WINDOW.start") == whole
        page.keyboard.down("Control")
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 30)
        canvas.hover()
        page.mouse.wheel(0, -300)
        assert page.evaluate("WINDOW.end - WINDOW.start") < whole


def test_memory_says_the_op_under_the_pointer(running, reports):
    with Opened(running, reports["flat"]) as opened:
        opened.page.locator("#memory canvas").hover()
        assert "activations" in opened.page.locator(".tip").inner_text()
        opened.page.locator("#memory canvas").focus()
        opened.page.keyboard.press("ArrowRight")
        assert "iB" in opened.page.locator("#memory [aria-live]").inner_text()


def test_a_source_line_marks_its_generated_lines(running, reports):
    with Opened(running, reports["flat"]) as opened:
        opened.page.locator("#code").scroll_into_view_if_needed()
        opened.page.locator("#code .pane").first.locator(".codeline[data-to]").first.click()
        assert opened.page.locator("#code .pane").nth(1).locator(".codeline.on").count() > 0


def test_two_plans_are_compared_in_every_view(running, reports):
    with Opened(running, reports["two"]) as opened:
        page = opened.page
        assert "decisions differ" in page.locator("#differences").inner_text()
        assert page.locator("#memory canvas").count() == page.locator("#timeline canvas").count() == 2
        assert page.locator(".tile .was").count() >= 3
        page.locator(".chip", has_text="that differ").click()
        assert page.locator(".flag.changed", has_text="only here").count() == 0  # it is one model
        rows = page.locator("#modules .row:not(:has(.module))")
        assert rows.count() == page.locator("#modules .row:not(:has(.module)) .flag.changed").count() > 0


def test_the_theme_is_switched_and_kept(running, reports):
    with Opened(running, reports["flat"]) as opened:
        opened.page.keyboard.press("t")
        opened.page.reload()
        assert opened.page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_six_thousand_ops_are_a_small_file_and_a_small_page(running, reports):
    assert reports["large"].stat().st_size < 5e6
    with Opened(running, reports["large"]) as opened:
        assert opened.page.evaluate("TREES[0].rows.size") >= 6000
        assert opened.page.evaluate("document.querySelectorAll('*').length") < 6000  # the rest when it is opened
        assert opened.errors == []
