"""The dashboard behind proxies, in a browser: its page streams and controls the run under their prefixes and names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ..proxies import jupyter, nginx
from .dashboards import serving, watched

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")


@contextmanager
def behind(proxy: str, to: int, folder: Path) -> Iterator[str]:
    """The address of a server behind a proxy; Chromium resolves names that end in `.test` to this machine."""
    if proxy == "jupyter":
        with jupyter(folder, token="of-jupyter") as port:  # noqa: S106 - of a test
            yield f"http://hub.test:{port}/proxy/{to}/?token=of-jupyter"
    elif proxy == "nginx":
        with nginx(folder, to, prefix="/team/training/") as port:
            yield f"http://train.test:{port}/team/training/"
    else:  # as nginx is without further settings: it gives its own name for the server
        with nginx(folder, to, prefix="/training/", lines="") as port:
            yield f"http://127.0.0.1:{port}/training/"


@pytest.mark.long
@pytest.mark.parametrize("proxy", ["jupyter", "nginx", "nginx that names the server"])
def test_behind_a_proxy_the_page_streams_and_controls_the_run(browser, tmp_path, proxy):
    hosts = ["hub.test", "train.test"]
    with serving(hosts=hosts) as server, watched(server, slow=True) as job, behind(proxy, server.port, tmp_path) as address:
        tab = browser.new_page()
        tab.set_default_timeout(30_000)
        tab.goto(f"{address}#token={server.token}")
        tab.wait_for_function("() => document.getElementById('state')?.textContent === 'running'")
        before = tab.text_content("#iter")
        tab.wait_for_function("before => document.getElementById('iter').textContent !== before", arg=before)
        tab.click("#pause")
        tab.wait_for_function("() => document.getElementById('state').textContent === 'paused'")
        tab.click("#pause")
        tab.wait_for_function("() => document.getElementById('state').textContent === 'running'")
        assert job.thread.is_alive()
        tab.close()


def test_without_the_token_a_proxy_shows_nothing_of_the_run(browser, tmp_path):
    with serving(hosts=["*"]) as server, watched(server, name="secret"), behind("nginx", server.port, tmp_path) as address:
        tab = browser.new_page()
        tab.goto(address)
        tab.wait_for_function("() => /token is missing/.test(document.getElementById('notice').textContent)")
        assert "secret" not in tab.content()
        tab.close()
