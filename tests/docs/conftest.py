"""The built site, and a browser."""

import os
import subprocess
import sys

import pytest

from ..browsers import browser as browser
from .pages import ROOT


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The folder of the built site; proxies that do not exist keep it from the network."""
    pytest.importorskip("mkdocs", reason="needs the extra docs")
    pytest.importorskip("mkdocstrings", reason="needs the extra docs")
    folder = tmp_path_factory.mktemp("site")
    nowhere = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9", "NO_MKDOCS_2_WARNING": "1"}
    build = ["mkdocs", "build", "-f", "docs/_site/mkdocs.yml", "--strict", "--quiet", "--site-dir", str(folder)]
    command = [sys.executable, "-m", *build]
    environment = {**os.environ, **nowhere, "PYTHONPATH": str(ROOT)}
    built = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True, timeout=170)  # noqa: S603
    assert built.returncode == 0, built.stdout + built.stderr
    return folder
