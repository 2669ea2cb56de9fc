"""A real server of the dashboard, a visitor who has its token, and a browser."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from trainbus.observe.dashboard import Server

from ..browsers import browser as browser
from .dashboards import Visitor, serving


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as one:
        yield one


@pytest.fixture
def visitor(server: Server) -> Iterator[Visitor]:
    with Visitor(server) as one:
        yield one
