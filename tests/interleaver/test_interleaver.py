"""Interleavings of a bus: a part of them here, all by ``python -m tests.interleaver``."""

import pytest

from .__main__ import run_all
from .cases import cases


def test_another_task_uses_the_bus_where_its_opening_and_closing_wait():
    chosen = [case for case in cases(["aopen", "aclose"]) if isinstance(case.point, int)]
    assert len(chosen) > 150
    assert run_all(chosen[::14], processes=1) == []


@pytest.mark.long
def test_others_use_the_bus_at_lines_of_opening_and_closing():
    assert run_all(cases(["open", "close"], every=300), processes=1) == []
