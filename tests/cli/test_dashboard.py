"""``trainbus dashboard``, as a user would type it."""

import json
import re
import urllib.request
from pathlib import Path

import pytest

from trainbus.observe.dashboard import FolderWatcher

from ..observe.folders import session, write_run

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")


@pytest.fixture
def visits(monkeypatch, capsys):
    """The answers to a visitor who looks at the runs, and then presses Ctrl-C."""
    found = []

    def visit(watcher):
        watcher.read_new()
        address, token = re.search(r"(http://127\.0\.0\.1:\d+/)(?:#token=(\S+))?", capsys.readouterr().out).groups()
        headers = {"Host": "hub.example", "Authorization": f"Bearer {token}"} if token else {}
        for path in ("runs.json", "curves.json?runs=1:0"):
            request = urllib.request.Request(address + path, headers=headers)  # noqa: S310 - of this machine
            with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310 - as above
                found.append(json.load(answer))
        raise KeyboardInterrupt

    monkeypatch.setattr(FolderWatcher, "follow", visit)
    return found


@pytest.mark.parametrize(("words", "names"), [([], ["a", "deep/b"]), (["runs/deep/b", "runs"], ["runs/deep/b", "a"])])
def test_the_runs_in_folders_are_shown_until_ctrl_c(here, trainbus, visits, words, names):
    write_run(Path("runs/a"), session(settings={"lr": 0.1}))
    write_run(Path("runs/deep/b"), session(settings={"lr": 0.2}))
    trainbus("dashboard", *words, "--port", "0")
    runs, curves = visits
    assert [run["name"] for run in runs["runs"]] == names
    assert set(runs["settings"]) == {"lr"}
    assert runs["may_change"] is False
    assert "loss" in {one["name"] for one in curves["1"]["curves"]}


def test_behind_a_proxy_the_runs_are_shown_under_its_name_to_those_who_have_the_token(here, trainbus, visits):
    write_run(Path("runs/a"), session())
    trainbus("dashboard", "--port", "0", "--hosts", "proxy.example", "--hosts", "hub.example")
    assert [run["name"] for run in visits[0]["runs"]] == ["a"]


def test_mistakes_are_told(here, trainbus):
    assert "missing: no such folder" in trainbus("dashboard", "missing", status=2).err
    Path("runs").mkdir()
    assert "token=" in trainbus("dashboard", "--host", "0.0.0.0", status=2).err  # noqa: S104 - it is refused
    assert "a/b" in trainbus("dashboard", "--hosts", "a/b", status=2).err
    assert "65535" in trainbus("dashboard", "--port", "70000", status=2).err
