"""Fixtures of the dashboard's tests: a real server, and a visitor who has its token."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from eventloop.observe.dashboard import Server

from .dashboards import Visitor, serving


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as one:
        yield one


@pytest.fixture
def visitor(server: Server) -> Iterator[Visitor]:
    with Visitor(server) as one:
        yield one
