"""The zoo runs by a command of its own: ``pytest -m zoo tests/zoo``; ``--zoo-page FILE`` writes what it tried as a page."""

from __future__ import annotations

import random
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest
import torch

from . import installed  # noqa: F401 - before other packages import torchvision
from .kit import Outcome
from .page import Row, written

KEY = "zoo"


def pytest_addoption(parser):
    parser.addoption("--zoo-page", type=Path, help="write the table of what was tried to this file")
    parser.addoption("--zoo-every", type=int, default=1, help="one of N entries: the same ones if others are added")


def pytest_ignore_collect(config):
    """Leave the zoo out of other runs: to import it takes as long as many tests."""
    return None if config.option.markexpr == "zoo" else True


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    own = [item for item in items if Path(__file__).parent in item.path.parents]
    for item in own:
        item.add_marker(pytest.mark.zoo)
    every = config.getoption("--zoo-every", 1)
    left_out = {id(item) for item in own if crc32(item.nodeid.encode()) % every}
    items[:] = [item for item in items if id(item) not in left_out]


@pytest.fixture
def row(record_property):
    """``row(group, name, detail, way, outcome)`` adds a row to the table."""

    def add(group, name, detail, way, outcome):
        outcome = outcome if isinstance(outcome, Outcome) else Outcome(outcome, "")
        record_property(KEY, [group, name, detail, way, outcome.ours, outcome.control])

    return add


@pytest.fixture(autouse=True)
def _threads_and_random_states_stay():
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    yield
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])


def pytest_configure(config):
    if config.getoption("--zoo-page", None) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Page(config.getoption("--zoo-page")))


class _Page:
    """Writes the page at the end, of the rows that all workers report."""

    def __init__(self, path):
        self.path, self.rows = path, []

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.skipped:
            for name, value in report.user_properties:
                if name == KEY and not report.failed:
                    self.rows.append(Row(*value))

    def pytest_sessionfinish(self):
        self.path.write_text(written(self.rows))
