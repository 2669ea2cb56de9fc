"""The page of ``trainbus report`` in a browser."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trainbus.cli.runs import best_metric, rules_of
from trainbus.observe.report import ReportedRun, build_report

from .folders import session, write_run

pytestmark = [pytest.mark.filterwarnings("default::DeprecationWarning"), pytest.mark.filterwarnings("default::ResourceWarning")]


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    """The pages of a run, of two runs and of nine."""
    folder = tmp_path_factory.mktemp("runs")
    runs = [ReportedRun(write_run(folder / name, name=name)) for name in ("first", "second")]
    written = {name: folder / f"{name}.html" for name in ("one", "two", "many")}
    search = [write_run(folder / f"{i}", session(settings={"lr": 1 / (i + 1)}), name=f"run {i}") for i in range(9)]
    written["many"].write_bytes(build_report([*map(ReportedRun, search)], best_metric, rules_of))
    written["one"].write_bytes(build_report(runs[:1], best_metric))
    written["two"].write_bytes(build_report(runs, best_metric))
    return written


@pytest.fixture
def opened(browser, files) -> Iterator[Any]:
    """Open a page; no error may be there at the end, and no request may have left the file."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme="light")
    page = context.new_page()
    page.set_default_timeout(30_000)
    troubles: list[str] = []
    page.on("console", lambda message: troubles.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("request", lambda request: None if request.url.startswith(("file:", "data:")) else troubles.append(request.url))

    def open_page(name: str = "one", width: int = 1280) -> Any:
        page.set_viewport_size({"width": width, "height": 900})
        page.goto(files[name].as_uri())
        page.locator(".chart").first.scroll_into_view_if_needed()  # charts are drawn when they come into view
        page.wait_for_selector(".chart canvas")
        return page

    yield open_page
    context.close()
    assert troubles == []


SECTIONS = {
    "one": "Verdict Curves Costs Step-time Lanes Checkpoints Validations Tests Resumes-and-stops Environment",
    "two": "Runs Verdict Curves Costs Step-time Differences Each-run",
    "many": "Runs Parallel-coordinates Curves Each-run",
}
"""The links at the top of each page."""


def pixels(page: Any) -> str:
    """The picture of the first chart."""
    return page.evaluate("document.querySelector('.chart canvas').toDataURL()")


def wait_for_other_pixels(page: Any, before: str) -> None:
    page.wait_for_function("before => document.querySelector('.chart canvas').toDataURL() !== before", arg=before)


@pytest.mark.long
@pytest.mark.parametrize("name", ["one", "two", "many"])
@pytest.mark.parametrize("width", [1280, 400])
def test_the_page_does_not_scroll_sideways(opened, name, width):
    page = opened(name, width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert [link.replace(" ", "-") for link in page.locator("nav a").all_inner_texts()] == SECTIONS[name].split()
    assert name != "two" or page.locator(".chart").first.locator(".legend li").count() == 2  # a line for each run


def test_dragging_zooms_and_the_button_shows_all(opened):
    page = opened()
    before = pixels(page)
    place = page.locator(".chart .u-over").first
    place.scroll_into_view_if_needed()
    box = place.bounding_box()
    page.mouse.move(box["x"] + 50, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + 150, box["y"] + 50, steps=5)
    page.mouse.up()
    wait_for_other_pixels(page, before)
    page.get_by_role("button", name="Show all").click()
    page.wait_for_function("before => document.querySelector('.chart canvas').toDataURL() === before", arg=before)


def test_keys_zoom_a_chart(opened):
    page = opened()
    before = pixels(page)
    page.locator(".chart .plot").first.focus()
    page.keyboard.press("+")
    wait_for_other_pixels(page, before)
    near = pixels(page)
    page.keyboard.press("ArrowLeft")
    wait_for_other_pixels(page, near)
    page.keyboard.press("0")
    page.wait_for_function("before => document.querySelector('.chart canvas').toDataURL() === before", arg=before)


def test_smoothing_log_scale_and_the_axis_redraw_the_curves(opened):
    page = opened()
    before = pixels(page)
    page.get_by_label("log scale").check()
    wait_for_other_pixels(page, before)
    before = pixels(page)
    page.get_by_label("Smoothing").fill("0.9")
    wait_for_other_pixels(page, before)
    assert page.locator("#smoothed").text_content() == "0.9"
    for axis in ("time", "epoch", "step"):
        before = pixels(page)
        page.get_by_label(axis, exact=True).check()
        wait_for_other_pixels(page, before)


def test_the_colours_follow_the_browser_and_the_switch(opened):
    page = opened()
    back = "getComputedStyle(document.documentElement).backgroundColor"
    light, picture = page.evaluate(back), pixels(page)
    page.get_by_role("button", name="Dark colours").click()
    assert page.evaluate(back) != light
    wait_for_other_pixels(page, picture)
    page.get_by_role("button", name="Light colours").click()
    assert page.evaluate(back) == light
    page.emulate_media(color_scheme="dark")
    assert page.evaluate(back) == light  # the switch wins


def test_the_figures_behind_a_chart_are_a_table(opened):
    page = opened()
    page.locator(".chart .figures summary").first.click()
    rows = page.locator(".chart .figures tbody tr")
    rows.nth(99).wait_for()
    assert rows.count() == 100
    assert rows.first.locator("td").all_text_contents() == ["1", "0.1", "1 s", "1"]


def names(page: Any) -> list[str]:
    return [one.strip() for one in page.locator("#table tbody tr:visible th").all_text_contents()]


def test_the_table_of_runs_is_sorted_by_its_headings_with_mouse_and_keyboard(opened):
    page = opened("many")
    assert names(page)[:2] == ["run 0", "run 1"]
    page.locator("#table").get_by_role("button", name="lr").click()
    assert names(page)[:2] == ["run 8", "run 7"]
    assert page.locator("#table th[aria-sort]").get_attribute("aria-sort") == "ascending"
    page.keyboard.press("Enter")
    assert names(page)[:2] == ["run 0", "run 1"]
    page.locator("#table").get_by_role("button", name="Run").focus()
    page.keyboard.press("Space")
    assert names(page)[-1] == "run 8"


@pytest.mark.long
def test_the_box_of_the_table_hides_rows_and_lines(opened):
    page = opened("many")
    before = pixels(page)
    page.get_by_label("Runs with").fill("RUN 0.25")
    assert names(page) == ["run 3"]
    assert page.locator("#number").text_content() == "1 of 9 runs"
    assert page.locator(".way:visible").count() == 1
    page.locator(".chart").first.scroll_into_view_if_needed()
    wait_for_other_pixels(page, before)


def test_a_marked_run_and_the_one_under_the_pointer_stand_out(opened):
    page = opened("many")
    before = pixels(page)
    page.get_by_role("checkbox", name="run 2").check()
    page.locator(".chart").first.scroll_into_view_if_needed()
    wait_for_other_pixels(page, before)
    page.mouse.move(0, 0)
    page.wait_for_function("() => document.querySelectorAll('.way.back').length === 8")
    page.get_by_role("button", name="Mark none").click()
    page.locator(".chart").first.scroll_into_view_if_needed()
    page.wait_for_function("before => document.querySelector('.chart canvas').toDataURL() === before", arg=before)
    page.locator("#table tr", has_text="run 4").hover()
    assert page.locator("#way").text_content() == "run 4"
    place = page.locator(".chart .plot").first  # what is in it is drawn anew when it comes into view
    place.scroll_into_view_if_needed()
    size = place.bounding_box()
    place.hover(position={"x": size["width"] / 2 + 20, "y": size["height"] - 50})  # the losses are near zero there
    page.wait_for_function("() => document.querySelector('.chart .readout').textContent.startsWith('iteration 5')")
    assert " run " in page.locator(".chart .readout").first.text_content()


def test_sections_fold_and_the_tab_remembers_which_are_open(opened):
    page = opened()
    assert page.locator("details.fold[open]").evaluate_all("all => all.map(one => one.dataset.fold)") == [
        "verdict",
        "curves",
        "costs",
    ]
    page.locator("summary", has_text="Environment").click()
    page.locator("summary", has_text="Costs").click()
    page.wait_for_function("() => Object.values(sessionStorage).some((one) => JSON.parse(one).costs === false)")
    page.reload()
    assert page.locator("#environment").is_visible()
    assert page.locator("table.costs").is_hidden()
    page.locator("nav").get_by_role("link", name="Costs").click()
    assert page.locator("table.costs").is_visible()
    page.get_by_role("button", name="Open all").click()
    page.get_by_role("button", name="Close all").click()
    assert page.locator("details.fold[open]").count() == 0


@pytest.mark.long
@pytest.mark.parametrize("name", ["one", "many"])
def test_on_paper_all_charts_are_drawn_and_all_sections_are_open(opened, name):
    page = opened(name)
    page.evaluate("scrollTo(0, 0)")
    page.evaluate(
        """addEventListener("beforeprint", () => queueMicrotask(() => { window.printed = {
            closed: document.querySelectorAll("details.fold:not([open]), details.run:not([open])").length,
            charts: [...document.querySelectorAll("figure.chart")].map((one) => {
                const canvas = one.querySelector("canvas");
                return canvas ? new Set(canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data).size : 0;
            }),
        }; }))"""
    )
    page.pdf()
    printed = page.evaluate("printed")
    assert printed["closed"] == 0
    assert printed["charts"]
    assert min(printed["charts"]) > 2  # more than the ground and one colour
    assert page.locator("details.fold:not([open])").count() > 0  # as before


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("name", ["one", "two", "many"])
def test_the_page_is_accessible(browser, files, name, width, scheme):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, bypass_csp=True)
    page = context.new_page()
    page.set_default_timeout(30_000)
    page.goto(files[name].as_uri())
    for all_open in (False, True):
        if all_open:
            page.get_by_role("button", name="Open all").click()
        results = axe.Axe().run(page)
        assert results.violations_count == 0, results.generate_report()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    context.close()
