"""``trainbus report`` and ``trainbus runs``, as a user would type them."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import FunctionType

import numpy as np
import pytest

from trainbus.cli.runs import best_metric
from trainbus.eventloop.terminal import plain
from trainbus.observe import Costs, LaneCosts, Part, RankCosts, RankTimes, RunManifest, Straggler, last_lines, write_manifest
from trainbus.observe.report import ReportedRun, verdict

from ..failing import fails
from ..observe.folders import BEGAN, entry, loss_lines, session, write_record, write_run, write_scalars


def test_a_report_is_written_in_the_folder_of_the_run_and_its_verdict_is_printed(trainbus, here):
    write_run(Path("a"))
    lines = trainbus("report", "a").out.splitlines()
    assert lines[0].startswith("The run finished after 10 epochs")
    assert re.fullmatch(r"a/report\.html \([\d.]+ kB\): open it in a browser", lines[-1])
    assert Path("a/report.html").read_text().startswith("<!doctype html>")
    trainbus("report", "a")  # again
    Path("a/report.html").write_text("of another program")
    assert "a/report.html" in trainbus("report", "a", status=2).err
    assert Path("a/report.html").read_text() == "of another program"


def test_a_report_on_several_runs_is_written_in_the_current_folder_or_where_it_is_wanted(here, trainbus):
    write_run(Path("a"))
    write_run(Path("b"))
    trainbus("report", "a", "b", "a")
    assert "2 runs compared" in Path("report.html").read_text()
    for option, name in (("-o", "c.html"), ("--output", "d.html")):
        trainbus("report", "a", "b", option, name)
        assert Path(name).is_file()


def test_a_report_on_several_runs_prints_their_table_and_the_best_in_words(here, trainbus):
    write_run(Path("runs/a"), session(settings={"lr": 0.1, "loop.work_dir": "a"}))
    write_run(Path("runs/deep/b"), session(settings={"lr": 0.2, "loop.work_dir": "b"}))
    write_record(Path("runs/deep/b"), entry(80, "validation", 9, 90, metrics={"accuracy": 0.95}))
    lines = trainbus("report", "runs").out.splitlines()
    assert lines[0].split() == ["run", "state", "epochs", "accuracy", "lr", "time", "size"]
    assert [line.split()[0] for line in lines[1:3]] == ["deep/b", "a"]
    assert lines[3] == "best accuracy: 0.95, deep/b"
    assert lines[-1].startswith("report.html ")


def test_without_a_folder_the_report_is_of_the_run_that_was_written_last(here, trainbus):
    assert str(here / "runs") in trainbus("report", status=2).err
    for name, written in (("b", 3), ("deep/a", 5), ("c", 4)):
        write_run(Path("runs", name))
        for file in Path("runs", name).iterdir():
            os.utime(file, (written, written))
    assert "runs/deep/a/report.html" in trainbus("report").out


@pytest.mark.long
def test_folders_that_are_nested_more_deeply_than_calls_are_searched(here, trainbus):
    write_run(Path("runs/a"))
    deep = os.open("runs/a", os.O_RDONLY)
    for _ in range(2 * sys.getrecursionlimit()):
        os.mkdir("d", dir_fd=deep)
        inner = os.open("d", os.O_RDONLY, dir_fd=deep)
        os.close(deep)
        deep = inner
    os.close(deep)
    Path("runs/a/d").rename("runs/d")
    write_run(Path("runs/d/d/b"))
    out = trainbus("runs").out
    assert "a " in out
    assert "d/d/b" in out
    subprocess.run(["/bin/rm", "-r", "runs/d"], check=True)  # rmtree() is recursive


def test_names_that_are_too_long_are_told_in_one_line(here, trainbus):
    write_run(Path("a"))
    name = "n" * 5000
    raises = sys.version_info < (3, 14)  # where pathlib raises an error for such a name; a later one finds no folder
    assert len(trainbus("report", "a", "-o", name, status=1).err) < (200 if raises else 400)  # that of a write has two names
    status = 1 if raises else 2
    for words in ("report", "runs", "trace merge", "checkpoint ls"):
        assert len(trainbus(*words.split(), name, status=status).err) < 200
    assert "name too long" in trainbus("run", f"{name}.toml", status=2).err


def test_the_time_of_a_report_grows_with_the_number_of_metrics_and_not_with_its_square(here, trainbus, monkeypatch):
    calls, nanmin = [], np.nanmin
    monkeypatch.setattr(np, "nanmin", lambda values: calls.append(1) or nanmin(values))
    Path("a").mkdir()
    write_scalars(Path("a"), {"step": 1, "epoch": 1, "iter": 1, "time": 1e9, **{f"m{index}": 1.0 for index in range(40)}})
    trainbus("report", "a")
    assert len(calls) <= 40


def test_a_folder_of_runs_is_a_report_on_all_of_them_without_those_that_cannot_be_read(here, trainbus):
    for name in ("a", "deep/b", "damaged"):
        write_run(Path("runs", name))
    Path("runs/damaged/run.json").write_text("{")
    assert "runs/damaged/run.json is damaged" in trainbus("report", "runs", status=1).out
    assert "2 runs compared" in Path("report.html").read_text()


def test_json_has_the_verdict_the_settings_and_the_metrics_of_each_run(here, trainbus):
    write_run(Path("runs/a"), session(settings={"lr": 0.1}, epoch=10, iter=100))
    write_run(Path("runs/b"), session(settings={"lr": 0.2}, state="failed"))
    told = json.loads(trainbus("report", "runs", "--json").out)
    assert (told["path"], told["bytes"]) == ("report.html", Path("report.html").stat().st_size)
    assert [(one["path"], one["state"], one["settings"]["lr"]) for one in told["runs"]] == [
        ("runs/a", "finished", 0.1),
        ("runs/b", "failed", 0.2),
    ]
    first = told["runs"][0]
    assert first["verdict"][0].startswith("The run finished after 10 epochs")
    assert (first["metrics"]["accuracy"], first["metrics"]["test/accuracy"]) == (0.9, 0.85)
    assert (first["epochs"], first["iterations"], first["seconds"]) == (10, 100, 100)


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        (["empty"], 2, "empty: not the folder of a run: it has no run.json, scalars.jsonl or media.jsonl"),
        (["missing"], 2, "missing: no such folder"),
        (["a", "missing"], 2, "missing: no such folder"),
        (["damaged"], 1, "damaged/run.json is damaged"),
        (["a", "-o", "empty"], 2, "empty is a folder; name a file in it"),
        (["a", "-o", "none/r.html"], 2, "none/r.html cannot be written: no folder none"),
        ([], 2, "report"),
    ],
)
def test_mistakes_are_told_and_nothing_is_written(here, trainbus, words, status, says):
    write_run(Path("a"))
    Path("empty").mkdir()
    Path("damaged").mkdir()
    Path("damaged/run.json").write_text("{")
    out, err = trainbus("report", *words, status=status)
    assert says in err
    assert out == ""
    assert not list(here.rglob("*.html"))


def test_a_disk_error_is_told(here, trainbus, monkeypatch):
    write_run(Path("a"))
    monkeypatch.setattr("trainbus.cli.report.commit_bytes", fails(OSError(28, "No space left on device")))
    assert "a/report.html cannot be written (No space left on device)" in trainbus("report", "a", status=1).err


def test_damaged_lines_are_left_out_and_give_the_status_1(here, trainbus):
    write_run(Path("a"))
    with Path("a/scalars.jsonl").open("a") as file:
        file.write("{\n")
    assert "a/scalars.jsonl: 1 damaged line left out, the first is line 101" in trainbus("report", "a", status=1).out
    assert Path("a/report.html").is_file()


def rows(out: str) -> dict[str, list[str]]:
    return {cells[0]: cells[1:] for cells in (re.split(r" {2,}", line.rstrip()) for line in out.splitlines())}


def test_runs_are_listed_with_state_epochs_best_metric_time_and_size(here, trainbus):
    write_run(Path("runs/a"))
    write_run(Path("runs/deep/b"), session(state="failed", lasted=3700))
    for folder in (Path("runs/c"), Path("runs/d")):
        folder.mkdir()
        write_scalars(folder, {"step": 1, "loss": 1.0})
    for value in (0.5, 0.25, float("nan"), 0.75):
        write_record(Path("runs/d"), {"time": 1.0, "kind": "validation", "metrics": {"speed": 3, "loss": value}})
    write_run(Path("runs/killed"), session(lasted=None, epoch=1))
    table = rows(trainbus("runs").out)
    assert table["run"] == ["state", "epochs", "best", "time", "size"]
    assert table["a"][:4] == ["finished", "10", "accuracy 0.9", "0:01:40"]
    assert table["deep/b"][0] == "failed"
    assert table["deep/b"][3] == "1:01:40"
    assert table["c"][0] == "unknown"
    assert table["c"][-1] == f"{Path('runs/c/scalars.jsonl').stat().st_size} bytes"
    assert "loss 0.25" in table["d"]  # the least, and never NaN
    assert table["killed"][:2] == ["unknown", "10"]  # the epochs of its record


@pytest.mark.parametrize("same_process", [True, False])
def test_what_a_resume_abandons_counts_nowhere_and_is_told_in_a_sentence(trainbus, here, same_process):
    first = session(BEGAN, lasted=50, epoch=5, iter=40)
    sessions = [first] if same_process else [first, session(BEGAN + 1000, lasted=10, epoch=4, iter=32)]
    after = BEGAN + (50 if same_process else 1000)
    if same_process:
        first.ended, first.epoch, first.iter = BEGAN + 60, 4, 32
    write_manifest(Path("a"), RunManifest(name="digits", sessions=sessions))
    scores = [0.1, 0.5, 0.3, 0.4, 0.9]
    write_record(
        Path("a"),
        *(
            {"time": BEGAN + 10 * i, "kind": "validation", "epoch": i, "iter": 8 * i, "metrics": {"accuracy": score}}
            for i, score in enumerate(scores, 1)
        ),
        {"time": after + 1, "kind": "resume", "epoch": 3, "iter": 24, "path": "/a/epoch_3.safetensors"},
        {"time": after + 2, "kind": "validation", "epoch": 3, "iter": 24, "metrics": {"accuracy": 0.3}},
        {"time": after + 8, "kind": "validation", "epoch": 4, "iter": 32, "metrics": {"accuracy": 0.45}},
    )
    write_scalars(Path("a"), *loss_lines(40, per_epoch=8), *loss_lines(8, begin=25, began=after + 1 - 24, per_epoch=8))
    table = rows(trainbus("runs", ".").out)
    seconds = 30 + 9 + (0 if same_process else 1)
    assert table["a"][1:4] == ["4", "accuracy 0.5", f"0:00:{seconds}"]
    history = ReportedRun(Path("a"))
    assert (history.epochs, history.iterations, history.seconds) == (4, 32, seconds)
    loss = history.curves["train/loss"]
    assert loss.iterations.tolist() == list(range(1, 33))
    assert loss.times[24] == after + 2
    state, abandoned, best, *_ = verdict(history, best_metric)
    assert "4 epochs and 32 iterations" in state
    assert abandoned.startswith("16 iterations and 3 validations were abandoned")
    assert "epoch 3, iteration 24, from epoch_3.safetensors" in abandoned
    assert best.endswith("at epoch 2, iteration 16; 4 validations.")


def test_a_run_that_goes_back_and_has_nothing_left_to_train_tells_the_present_one(here):
    sessions = [session(epoch=5, iter=40), session(BEGAN + 1000, epoch=3, iter=24)]
    write_manifest(Path("a"), RunManifest(name="digits", sessions=sessions))
    write_scalars(Path("a"), *loss_lines(40, per_epoch=8))
    write_record(Path("a"), {"time": BEGAN + 1001, "kind": "resume", "epoch": 3, "iter": 24, "path": ""})
    assert verdict(ReportedRun(Path("a")), best_metric)[0].startswith("The run finished after 3 epochs and 24 iterations")


def test_a_damaged_run_is_told_after_the_others(here, trainbus):
    write_run(Path("runs/a"))
    write_run(Path("runs/b"))
    Path("runs/b/run.json").write_text("{")
    with Path("runs/a/record.jsonl").open("a") as file:
        file.write("{\n")
    out = trainbus("runs", status=1).out
    assert out.splitlines()[1].startswith("a ")
    assert "runs/b/run.json is damaged" in out


def test_a_folder_without_runs_says_so_and_a_missing_one_is_a_mistake(here, trainbus):
    Path("runs").mkdir()
    assert trainbus("runs").out == "no runs in runs\n"
    assert "missing: no such folder" in trainbus("runs", "missing", status=2).err


EVIL = "acc[/foo][red]\x1b[31m\r\n:smile:"


@pytest.mark.parametrize("command", [["runs", "runs"], ["report", "runs/[bold]a\x1b[31m"], ["runs", "runs/[bold]a\x1b[31m"]])
def test_names_are_neither_markup_nor_control_characters(here, trainbus, command):
    folder = write_run(Path("runs") / "[bold]a\x1b[31m", session(state="failed", reason=EVIL))
    write_record(folder, {"time": 1764000080.0, "kind": "validation", "epoch": 9, "iter": 90, "metrics": {EVIL: 0.95}})
    write_scalars(folder, {"step": 101, EVIL: float("nan")})
    out = trainbus(*command).out
    assert not {"\x1b", "\r", "☺", "😃"} & set(out)
    assert "[bold]a" in out
    assert command[0] == "runs" or "acc[/foo][red]\\x1b[31m\\r\\n:smile:" in out


def test_the_tables_of_a_bus_print_names_as_they_are(here, bus):
    part = Part("hook", EVIL, 1, 1.0, 0.5, 1.0, EVIL)
    lane = LaneCosts(EVIL, [EVIL], 1, 0, 1, 0, 1.0, 1.0)
    times = RankTimes("hook", EVIL, 1.0, 1.0, 1.0, 0, EVIL)
    ranks = RankCosts(2, 1, 1.0, [times], Straggler(0, EVIL, "hook", EVIL, 1.0, 0.5, 0.5))
    costs = Costs(2.0, [part], lanes=[lane], ranks=ranks)
    handler = FunctionType((lambda event: None).__code__, {}, EVIL)
    handler.__qualname__ = EVIL
    bus.on("after_train_iter", handler, offload="thread")
    write_scalars(here, {"step": 1, "train/loss" + EVIL: 1.0})
    for shown in (costs, bus.describe(), bus.stats(), last_lines(here, bus)):
        text = plain(shown)
        assert not {"\x1b", "\r"} & set(text)
        assert "acc[/foo][red]" in text.replace("\n", "")
