"""The site builds without a warning, its links and anchors lead somewhere, and nothing on a page comes from elsewhere."""

import re
import subprocess
import sys
from html.parser import HTMLParser
from urllib.parse import urldefrag, urlsplit

import pytest

from .pages import DOCS

pytestmark = pytest.mark.xdist_group("docs")


class Page(HTMLParser):
    """The links, the ids and what the browser loads of one page."""

    def __init__(self, text):
        super().__init__()
        self.links, self.ids, self.loaded = set(), set(), set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.ids.update(value for name, value in attributes if name == "id" or (tag == "a" and name == "name"))
        if tag == "a" and given.get("href"):
            self.links.add(given["href"])
        if tag == "link" and given.get("rel") in ("stylesheet", "icon", "preconnect", "preload"):
            self.loaded.add(given["href"])
        if tag in ("script", "img", "iframe", "source") and given.get("src"):
            self.loaded.add(given["src"])


@pytest.fixture(scope="module")
def pages(site):
    return {path: Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}


def test_every_link_within_the_site_leads_to_a_page_and_an_anchor(site, pages):
    lost = []
    for path, page in pages.items():
        for link in page.links:
            target, anchor = urldefrag(link)
            if urlsplit(link).scheme or path.name == "404.html":
                continue
            there = (path.parent / target).resolve() if target else path
            there = there / "index.html" if there.is_dir() else there
            if not there.is_file() or (anchor and there in pages and anchor not in pages[there].ids):
                lost.append(f"{path.relative_to(site)}: {link}")
    assert not lost, "\n".join(lost)


def test_nothing_that_a_page_loads_comes_from_elsewhere(site, pages):
    foreign = {url for page in pages.values() for url in page.loaded if urlsplit(url).scheme not in ("", "data")}
    for style in site.rglob("*.css"):
        foreign |= set(re.findall(r"(?:url\(|@import )[\"']?(https?:[^\"')]+)", style.read_text(encoding="utf-8")))
    assert not foreign


def test_every_page_has_text(pages):
    assert len(pages) > 50


def test_the_drawings_are_those_that_the_script_draws():
    script = [sys.executable, str(DOCS / "_site" / "drawings.py"), "--check"]
    checked = subprocess.run(script, text=True, capture_output=True)  # noqa: S603
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_page_of_a_wrong_address_leads_on(site):
    text = (site / "404.html").read_text()
    assert 'href="/index.html"' in re.search(r"404 - Not found</h1>.*?</article>", text, re.DOTALL)[0]


def test_dialogs_have_a_name_for_screen_readers(site):
    nameless = [
        path.name
        for path in site.rglob("*.html")
        for tag in re.findall(r'<[^>]*role="dialog"[^>]*>', path.read_text(encoding="utf-8"))
        if "aria-label" not in tag
    ]
    assert not nameless
