"""``trainbus run --trace``; ``trainbus trace merge`` is tested beside the files that it merges."""

from pathlib import Path

import pytest

import eventloop
from eventloop.cli import main

from ..observe.traces import Picture

pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning:sklearn")
DIGITS = str(Path(eventloop.__file__).parent.parent / "examples" / "digits.toml")


def test_a_run_with_trace_leaves_a_picture_of_50_iterations(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["run", DIGITS, "loop.max_epochs=5", "--trace"]) == 0
    picture = Picture(next(Path("runs").glob("*/trace.json")))
    picture.check()
    assert picture.iterations == list(range(100, 150))


def test_a_trace_hook_of_the_configuration_is_not_added_twice(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hook = 'custom_hooks=[{type="TraceHook", first=3, iterations=2}]'
    assert main(["run", DIGITS, "loop.max_epochs=1", hook, "--trace"]) == 0
    assert Picture(next(Path("runs").glob("*/trace.json"))).iterations == [3, 4]
