"""A browser for tests of pages: Debian's Chromium, driven by Playwright."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Where Playwright and Chromium are installed. Of a module: no event loop can run beside it."""
    playwright = pytest.importorskip("playwright.sync_api")
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("Chromium is not installed")
    options = ["--disable-gpu", "--disable-dev-shm-usage", "--host-resolver-rules=MAP *.test 127.0.0.1"]
    if os.getuid() == 0:  # Chromium refuses a sandbox to root, as in containers
        options.append("--no-sandbox")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=found, args=options)
        yield browser
        browser.close()
