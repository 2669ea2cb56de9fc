"""The page of ``trainbus report`` in a browser."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eventloop.cli.runs import best_metric
from eventloop.observe.report import ReportedRun, build_report

from .folders import write_run

pytestmark = [pytest.mark.filterwarnings("default::DeprecationWarning"), pytest.mark.filterwarnings("default::ResourceWarning")]


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    """The pages of a run and of two runs."""
    folder = tmp_path_factory.mktemp("runs")
    runs = [ReportedRun(write_run(folder / name, name=name)) for name in ("first", "second")]
    written = {"one": folder / "one.html", "two": folder / "two.html"}
    written["one"].write_bytes(build_report(runs[:1], best_metric))
    written["two"].write_bytes(build_report(runs, best_metric))
    return written


@pytest.fixture
def opened(browser, files) -> Iterator[Any]:
    """Open a page; no error may be there at the end, and no request may have left the file."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme="light")
    page = context.new_page()
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


def pixels(page: Any) -> str:
    """The picture of the first chart."""
    return page.evaluate("document.querySelector('.chart canvas').toDataURL()")


def wait_for_other_pixels(page: Any, before: str) -> None:
    page.wait_for_function("before => document.querySelector('.chart canvas').toDataURL() !== before", arg=before)


@pytest.mark.parametrize("name", ["one", "two"])
@pytest.mark.parametrize("width", [1280, 400])
def test_the_page_does_not_scroll_sideways(opened, name, width):
    page = opened(name, width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("nav a").count() >= 6
    assert name == "one" or page.locator(".chart").first.locator(".legend li").count() == 2  # a line for each run


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
