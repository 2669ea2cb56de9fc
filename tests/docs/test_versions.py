"""The site of several versions, with a list to choose from."""

import json
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from .pages import DOCS

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("docs"), pytest.mark.filterwarnings("default::ResourceWarning")]


@pytest.fixture
def address(tmp_path, monkeypatch):
    """Serve the site of this checkout and, as if it were an older one, a second version."""
    pytest.importorskip("mkdocs", reason="needs the extra docs")
    monkeypatch.syspath_prepend(str(DOCS / "_site"))
    versions = __import__("versions")
    monkeypatch.setattr(versions, "build_tag", lambda tag, folder: (folder.mkdir(), (folder / "index.html").write_text(tag)))
    versions.main(tmp_path, ["v0.2"])
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(tmp_path)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", tmp_path
    server.shutdown()
    thread.join()
    server.server_close()
    del sys.modules["versions"]


def test_a_reader_chooses_another_version(address, browser):
    url, folder = address
    assert [one["version"] for one in json.loads((folder / "versions.json").read_text())] == ["latest", "0.2"]
    page = browser.new_page()
    elsewhere = []
    page.on("request", lambda request: None if request.url.startswith(url) else elsewhere.append(request.url))
    page.goto(url)
    page.wait_for_url("**/latest/index.html")
    page.locator(".md-version button").focus()
    page.locator(".md-version__link", has_text="0.2").click()
    page.wait_for_url("**/0.2/")
    assert page.content().count("v0.2") == 1
    assert elsewhere == []
    page.close()
