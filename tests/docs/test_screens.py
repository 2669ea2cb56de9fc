"""The pages on a phone: nothing scrolls sideways, and a drawing fits, with text that can be read."""

import pytest

pytestmark = pytest.mark.xdist_group("docs")

DRAWN = ["index", "concepts/events", "concepts/errors", "guides/trace", "internals/house", "benchmarks"]
SMALLEST = """() => Math.min(...[...document.querySelectorAll("svg.drawing text")]
    .filter((text) => text.getBoundingClientRect().width > 0)
    .map((text) => parseFloat(text.getAttribute("font-size")) * text.ownerSVGElement.getScreenCTM().a))"""
OUTSIDE = """() => [...document.querySelectorAll("svg.drawing")].filter((one) => one.getBoundingClientRect().width > 0)
    .flatMap((one) => { const box = one.getBoundingClientRect();
        return [...one.querySelectorAll("text")].filter((text) => text.getBoundingClientRect().right > box.right + 1) })
    .map((text) => text.textContent)"""


@pytest.fixture(scope="module")
def tab(browser):
    page = browser.new_page()
    yield page
    page.close()


@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize("name", DRAWN)
def test_a_drawing_fits_the_screen(site, tab, name, width):
    tab.set_viewport_size({"width": width, "height": 900})
    tab.goto((site / f"{name}.html").as_uri())
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    boxes = [box for box in (one.bounding_box() for one in tab.locator("svg.drawing").all()) if box]
    assert boxes
    assert all(box["x"] >= 0 and box["x"] + box["width"] <= width for box in boxes)
    assert tab.evaluate(OUTSIDE) == []
    assert tab.evaluate(SMALLEST) >= (9 if width == 400 else 7)  # pixels


@pytest.mark.parametrize(("wish", "shown"), [("no-preference", "webp"), ("reduce", "png")])
def test_a_moving_picture_is_still_where_less_motion_is_asked_for_and_can_be_stopped(site, browser, wish, shown):
    context = browser.new_context(reduced_motion=wish)
    page = context.new_page()
    page.goto((site / "guides" / "dashboard.html").as_uri())
    picture = page.locator("picture.moving img")
    picture.scroll_into_view_if_needed()
    page.wait_for_function("() => document.querySelector('picture.moving img').currentSrc !== ''")
    assert picture.evaluate("image => image.currentSrc").endswith(f"dashboard.{shown}")
    page.get_by_role("button", name="Stop the picture" if shown == "webp" else "Play the picture").click()
    other = "png" if shown == "webp" else "webp"
    page.wait_for_function(f"() => document.querySelector('picture.moving img').currentSrc.endsWith('{other}')")
    context.close()


def test_pictures_are_small(site):
    assert all(path.stat().st_size < 300_000 for path in (site / "images").iterdir())
    assert all(path.stat().st_size < 1_000_000 for path in site.rglob("*.html"))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_pages_are_accessible(site, browser, width, scheme):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    page = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme).new_page()
    for name in ("index", "start/tutorial", "guides/dashboard", "help/troubleshooting", "benchmarks", "reference/index"):
        page.goto((site / f"{name}.html").as_uri())
        results = axe.run(page)
        assert results.violations_count == 0, f"{name}: {results.generate_report()}"
    page.context.close()
