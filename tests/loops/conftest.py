"""``pytest -m loops tests/loops --bodies 5000`` tries that many programs; ``--without "zip,islice"`` leaves features out."""

from __future__ import annotations

from math import ceil

CHUNK = 125
"""Programs of one test: small enough that two processes share them evenly."""


def pytest_addoption(parser):
    parser.addoption("--bodies", type=int, default=1000, help="number of training programs to try")
    parser.addoption("--first", type=int, default=0, help="number of the first chunk of them, to go on where others ended")
    parser.addoption("--without", default="", help="features of the grammar to leave out, by name, with commas")
    parser.addoption("--also", default="", help="features that each program has, by name, with commas")


def pytest_generate_tests(metafunc):
    if "chunk" in metafunc.fixturenames:
        first = metafunc.config.getoption("--first", 0)
        metafunc.parametrize("chunk", range(first, first + ceil(metafunc.config.getoption("--bodies", CHUNK) / CHUNK)))
