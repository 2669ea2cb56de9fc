"""Runs in folders on the dashboard: what they wrote, and what they write from then on."""

import json
from pathlib import Path

import pytest

from trainbus.observe import RunManifest, write_manifest
from trainbus.observe.dashboard import Board, FolderWatcher

from .folders import BEGAN, GONE, entry, loss_lines, session, write_record, write_run, write_scalars

pytest.importorskip("starlette")


def watch(*folders: Path) -> tuple[Board, FolderWatcher]:
    board = Board(most_ended=None)
    return board, FolderWatcher(board, folders)


def told(page) -> list[tuple[str, dict]]:
    """The messages of a page: kind and data."""
    return [
        (lines[1].removeprefix("event: "), json.loads(lines[2].removeprefix("data: ")))
        for lines in (message.decode().splitlines() for message in page.messages.read()[0])
    ]


def curves(page) -> dict[tuple[str, str], list[tuple[float, float]]]:
    return {(one["name"], one["stage"]): list(zip(one["iter"], one["values"], strict=True)) for one in page.curves()}


def test_an_ended_run_is_shown_with_its_curves_events_costs_and_end(tmp_path):
    write_run(tmp_path / "runs/a", session(epoch=10, iter=100, settings={"lr": 0.1}))
    board, watcher = watch(tmp_path / "runs")
    assert watcher.read_new() == 1
    [page] = board
    assert page.summary() == {"number": 1, "name": "a", "state": "finished", "began": BEGAN, "iter": 100, "epoch": 10}
    assert page.settings["lr"] == 0.1
    found = curves(page)
    assert found["loss", "train"][:2] == [(1, 1.0), (2, 0.5)]
    assert found["accuracy", "val"] == [(50, 0.9), (80, 0.8)]
    assert found["accuracy", "test"] == [(100, 0.85)]
    kinds = [kind for kind, _ in told(page)]
    assert {"hello", "scalars", "validation", "checkpoint", "checkpoint_failed", "costs"} < set(kinds)
    assert told(page)[-1] == (
        "state",
        {"time": BEGAN + 100, "iter": 100, "epoch": 10, "state": "finished", "over": True, "reason": ""},
    )


def test_a_run_that_goes_on_is_followed_and_one_that_comes_later_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(type(GONE), "lives", lambda process: True)
    write_manifest(tmp_path / "a", RunManifest(name="a", sessions=[session(lasted=None)]))
    write_scalars(tmp_path / "a", *loss_lines(3))
    board, watcher = watch(tmp_path)
    watcher.read_new()
    [page] = board
    assert (page.over, page.iter) == (False, 3)
    write_scalars(tmp_path / "a", *loss_lines(2, begin=4))
    write_record(tmp_path / "a", entry(5, "validation", 1, 5, metrics={"loss": 0.5}))
    write_run(tmp_path / "b")
    assert watcher.read_new() == 2
    assert [one.summary()["name"] for one in board] == ["a", "b"]
    assert [at for at, _ in curves(page)["loss", "train"]] == [1, 2, 3, 4, 5]
    assert curves(page)["loss", "val"] == [(5, 0.5)]
    number = page.messages.number
    watcher.read_new()
    assert page.messages.number == number  # nothing new, nothing told
    write_manifest(tmp_path / "a", RunManifest(name="a", sessions=[session(lasted=20.0, epoch=1, iter=5)]))
    watcher.read_new()
    assert page.over
    assert page.summary()["state"] == "finished"


def test_a_resumed_run_begins_anew_without_what_it_abandoned(tmp_path, monkeypatch):
    folder = tmp_path / "a"
    write_manifest(folder, RunManifest(name="a", sessions=[session(lasted=10.0, epoch=1, iter=8)]))
    write_scalars(folder, *loss_lines(8))
    board, watcher = watch(folder)
    watcher.read_new()
    monkeypatch.setattr(type(GONE), "lives", lambda process: True)
    sessions = [session(lasted=10.0, epoch=1, iter=8), session(BEGAN + 100, lasted=None, epoch=1, iter=6)]
    write_manifest(folder, RunManifest(name="a", sessions=sessions))
    write_record(folder, entry(101, "resume", 0, 5, path="/a/iter_5.safetensors"))
    write_scalars(folder, *loss_lines(1, begin=6, began=BEGAN + 100))
    watcher.read_new()
    [page] = board
    assert (page.number, page.over) == (2, False)
    assert [at for at, _ in curves(page)["loss", "train"]] == [1, 2, 3, 4, 5, 6]


def test_the_list_of_checkpoints_has_the_files_that_are_there(tmp_path):
    write_run(tmp_path / "a")
    kept, gone = (str(tmp_path / "a" / name) for name in ("epoch_7.safetensors", "epoch_6.safetensors"))
    Path(kept).touch()
    for at, path in ((60, gone), (70, kept)):
        write_record(tmp_path / "a", entry(at, "checkpoint", at // 10, at, names=[path], bytes=1000))
    board, watcher = watch(tmp_path)
    watcher.read_new()
    [page] = board
    [files] = [data["files"] for kind, data in told(page) if kind == "files"]
    # The folder of the first is of another machine.
    assert [one["names"] for one in files] == [["epoch_5.safetensors"], ["epoch_7.safetensors"]]


def test_a_killed_run_is_over(tmp_path, monkeypatch):
    monkeypatch.setattr(type(GONE), "lives", lambda process: False)
    write_run(tmp_path, session(lasted=None, epoch=10, iter=100))
    board, watcher = watch(tmp_path)
    watcher.read_new()
    [page] = board
    assert (page.over, told(page)[-1][1]["state"]) == (True, "killed")


def test_lines_without_a_scalar_are_no_lines_with_a_nan(tmp_path):
    at = {"epoch": 1, "time": BEGAN}
    write_manifest(tmp_path, RunManifest(name="a", sessions=[session()]))
    rows = [{"train/loss": 1.0}, {"val/loss": 2.0}, {"train/lr": 0.1}, {"train/loss": float("nan")}]
    write_scalars(tmp_path, *({"step": i, "iter": i, **at, **row} for i, row in enumerate(rows, 1)))
    board, watcher = watch(tmp_path)
    watcher.read_new()
    [page] = board
    columns = [(data["iter"], data["values"], data["at"]) for kind, data in told(page) if kind == "scalars"]
    assert columns == [([1, 3, 4], {"loss": [1.0, None], "lr": [0.1]}, {"loss": [0, 2], "lr": [1]})]


def test_damaged_numbers_are_left_out(tmp_path):
    write_manifest(tmp_path, RunManifest(name="a", sessions=[session()]))
    damaged = [{"iter": "x"}, {"iter": None}, {"epoch": "x"}, {"time": None}, {"train/loss": "x"}, {}]
    write_scalars(
        tmp_path, *({"iter": i, "epoch": 1, "time": BEGAN, "train/loss": i} | one for i, one in enumerate(damaged, 1))
    )
    board, watcher = watch(tmp_path)
    watcher.read_new()
    [page] = board
    assert curves(page)["loss", "train"] == [(3, 3), (4, 4), (6, 6)]


def test_a_damaged_run_is_told_once_and_the_others_are_shown(tmp_path, logs):
    write_run(tmp_path / "b")
    (tmp_path / "a").mkdir()
    (tmp_path / "a/run.json").write_text("{")
    _, watcher = watch(tmp_path)
    assert [watcher.read_new(), watcher.read_new()] == [1, 1]
    assert sum(line["log_level"] == "warning" for line in logs) == 1


def test_curves_of_chosen_runs_come_once_and_again_when_there_are_more(tmp_path, server, visitor):
    for name in "ab":
        write_run(tmp_path / name, session(settings={"lr": {"a": 0.1, "b": 0.2}[name], "seed": 3}))
    FolderWatcher(server.board, [tmp_path]).read_new()
    found = visitor.client.get("/runs.json").json()
    assert found["settings"] == {"lr": {"1": 0.1, "2": 0.2}}
    both = visitor.client.get("/curves.json", params={"runs": "1:0,2:0,9:0,x"}).json()
    assert set(both) == {"1", "2"}
    assert {(one["name"], one["stage"]) for one in both["1"]["curves"]} >= {("loss", "train"), ("accuracy", "val")}
    assert visitor.client.get("/curves.json", params={"runs": f"1:{both['1']['seen']},2:0"}).json().keys() == {"2"}


def test_a_long_curve_is_thinned_and_keeps_its_extremes(tmp_path):
    write_manifest(tmp_path, RunManifest(name="a", sessions=[session()]))
    lines = loss_lines(3000)
    lines[1234]["train/loss"] = 99.0
    write_scalars(tmp_path, *lines)
    board, watcher = watch(tmp_path)
    watcher.read_new()
    [page] = board
    found = curves(page)["loss", "train"]
    assert len(found) <= 300
    assert max(value for _, value in found) == 99.0
