import errno
import json
import os
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from trainbus.eventloop import Bus, Run
from trainbus.hooks import CheckpointHook, JSONLinesWriter, LoggerHook
from trainbus.observe import RunFolder, RunRecordHook
from trainbus.observe.report import ReportedRun

from ..failing import fails
from ..hooks.conftest import batches, make_loop, own_loop, small_model


def record(folder, *kinds):
    """The lines of some kinds."""
    return [line for line in RunFolder(folder).record() if line["kind"] in kinds]


def kinds(folder):
    return [line["kind"] for line in RunFolder(folder).record()]


def full_for(monkeypatch, name):
    """The disk takes no file of this name."""
    replace = os.replace

    def refuse(source, target, **options):
        if Path(target).name == name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(source, target, **options)

    monkeypatch.setattr(os, "replace", refuse)


def session(folder):
    (one,) = RunFolder(folder).manifest().sessions
    return one


def test_a_checkpoint_that_is_durable_only_after_the_end_of_the_run_has_its_line(tmp_path, disk):
    loop = make_loop(RunRecordHook(), work_dir=tmp_path)

    @loop.bus.on("after_run", priority="LOWEST")
    def save_once_more(event):
        event.run.checkpoints.save("late")
        disk.go.set()

    loop.run()
    assert kinds(tmp_path)[-2:] == ["end", "checkpoint"]


@pytest.mark.parametrize("costs", [["costs"], []])
def test_the_record_has_each_end_after_the_last_costs_if_they_are_measured_and_a_test_after_the_training(tmp_path, costs):
    loop = make_loop(RunRecordHook(costs=bool(costs)), work_dir=tmp_path, test_data=batches(1))
    loop.run()
    assert kinds(tmp_path) == [*costs, "end"]
    loop.test()
    assert [kind for kind in kinds(tmp_path) if kind != "costs"] == ["end", "test", "end"]
    assert (session(tmp_path).state, session(tmp_path).stages) == ("finished", ["train", "test"])


def test_checkpoints_and_validations_count_finished_epochs_and_iterations(tmp_path):
    hooks = CheckpointHook(interval=1), RunRecordHook()
    make_loop(*hooks, work_dir=tmp_path, val_data=batches(1), val_step=lambda model, batch: {}).run()
    places = {(line["kind"], line["epoch"], line["iter"]) for line in record(tmp_path, "checkpoint", "validation")}
    assert places == {(kind, epoch, 4 * epoch) for kind in ("checkpoint", "validation") for epoch in (1, 2)}


def test_the_save_of_a_stop_has_the_place_that_its_file_has_and_the_session_the_reason(tmp_path):
    loop = make_loop(CheckpointHook(), RunRecordHook(), work_dir=tmp_path)
    loop.bus.on("after_train_iter", lambda event: event.run.stop("enough"), every=2)
    loop.run()
    [line] = record(tmp_path, "checkpoint")
    assert (line["epoch"], line["iter"], line["names"]) == (0, 2, [str(tmp_path / "iter_2.safetensors")])
    assert (session(tmp_path).state, session(tmp_path).reason) == ("stopped", "enough")


def test_a_resumed_run_has_two_sessions_and_a_line_with_the_place_of_the_checkpoint(tmp_path, monkeypatch):
    make_loop(CheckpointHook(interval=1), RunRecordHook(), work_dir=tmp_path, max_epochs=3).run()
    monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")
    loop = make_loop(CheckpointHook(interval=1), RunRecordHook(), work_dir=tmp_path, max_epochs=4)
    loop.run(resume=tmp_path / "epoch_2.safetensors")
    first, second = RunFolder(tmp_path).manifest().sessions
    assert (first.epoch, first.state, second.epoch, second.state) == (3, "finished", 4, "finished")
    assert second.resumed_from.endswith("epoch_2.safetensors")
    [line] = record(tmp_path, "resume")
    assert (line["epoch"], line["iter"], line["path"]) == (2, 8, second.resumed_from)


def test_a_test_of_an_earlier_checkpoint_resumes_nothing(tmp_path):
    make_loop(CheckpointHook(interval=1), RunRecordHook(), work_dir=tmp_path).run()
    with Run(Bus(RunRecordHook()), model=small_model(), work_dir=tmp_path, resume=tmp_path / "epoch_1.safetensors") as run:
        for _ in run.test(batches(1)):
            pass
    assert "resume" not in kinds(tmp_path)
    one = session(tmp_path)
    assert (one.epoch, one.iter, one.resumed_from) == (2, 8, "")


@pytest.mark.parametrize(
    ("raised", "state"),
    [
        (ValueError("a bad batch"), "failed"),
        (KeyboardInterrupt(), "interrupted"),
        (SystemExit(0), "stopped"),
        (SystemExit("no data"), "failed"),
    ],
    ids=["error", "Ctrl-C", "exit", "exit with a reason"],
)
def test_a_run_that_ends_by_an_exception_says_so(tmp_path, raised, state):
    loop = make_loop(RunRecordHook(), work_dir=tmp_path)
    loop.bus.on("after_train_iter", fails(raised))
    with pytest.raises(type(raised)):
        loop.run()
    one = session(tmp_path)
    assert (one.state, str(raised) in one.reason, one.ended is not None) == (state, True, True)


@pytest.mark.parametrize(
    "content", [b"{", b'{"name": "", "config": %s}' % (b"[" * 5_000 + b"]" * 5_000), None], ids=["cut", "deep", "folder"]
)
def test_an_unreadable_run_json_is_kept_under_a_free_name_and_recording_goes_on(tmp_path, content, logs):
    (tmp_path / "run.json.old").write_text("an earlier one")
    (tmp_path / "run.json").mkdir() if content is None else (tmp_path / "run.json").write_bytes(content)
    make_loop(RunRecordHook(), work_dir=tmp_path).run(resume="auto")
    kept = tmp_path / "run.json.old-2"
    assert kept.is_dir() if content is None else kept.read_bytes() == content
    assert (tmp_path / "run.json.old").read_text() == "an earlier one"
    assert RunFolder(tmp_path).manifest().sessions[0].state == "finished"
    assert [line["file"] for line in logs if line["log_level"] == "warning"] == [str(kept)]


def test_a_stop_without_a_reason_is_recorded_as_a_stop(tmp_path):
    loop = make_loop(RunRecordHook(), work_dir=tmp_path)
    loop.bus.on("after_train_iter", lambda event: event.run.stop(), once=2)
    loop.run()
    assert (session(tmp_path).state, session(tmp_path).reason) == ("stopped", "run.stop() was called")
    assert record(tmp_path, "end")[0]["state"] == "stopped"


@pytest.mark.parametrize("leave", ["break", "islice"])
def test_a_loop_that_is_left_before_its_last_epoch_is_recorded_as_stopped(tmp_path, leave):
    with Run(Bus(RunRecordHook()), model=small_model(), work_dir=tmp_path) as run:
        for epoch in islice(run.epochs(20), 3) if leave == "islice" else run.epochs(20):
            for _ in run.train(batches()):
                run.report(loss=0.5)
            if leave == "break" and epoch == 2:
                break
    assert (session(tmp_path).state, session(tmp_path).reason) == ("stopped", "the training ended after 3 of 20 epochs")


def test_the_end_in_the_record_counts_where_run_json_could_not_be_rewritten(tmp_path, monkeypatch):
    """The disk is full when the run ends."""
    loop = make_loop(RunRecordHook(), work_dir=tmp_path)

    @loop.bus.on("after_train", priority=0)
    def fill(event):
        loop.bus.drain()
        full_for(monkeypatch, "run.json")

    loop.run()
    assert session(tmp_path).state == "running"
    story = RunFolder(tmp_path).story()
    assert (story.state, story.came_to, story.sessions[-1].ended) == ("finished", (2, 8), record(tmp_path, "end")[0]["time"])


def test_report_and_table_count_the_epochs_that_were_completed(tmp_path):
    loop = make_loop(RunRecordHook(), LoggerHook(1, writers=[JSONLinesWriter()]), work_dir=tmp_path)
    loop.bus.on("after_train_iter", lambda event: event.progress.iter == 5 and event.run.stop())
    loop.run()
    run = ReportedRun(tmp_path)
    assert (run.epochs, run.iterations) == run.story.came_to == (1, 6)


def test_a_value_of_the_configuration_that_no_file_can_hold_costs_no_file(tmp_path):
    cyclic: dict[str, Any] = {"lr": 0.1, "device": torch.device("cpu"), "model": torch.nn.ReLU(), (1, 2): float("nan")}
    cyclic["self"] = cyclic
    make_loop(RunRecordHook(), LoggerHook(writers=[JSONLinesWriter()]), work_dir=tmp_path, config=cyclic).run()
    expected = {"lr": 0.1, "device": "cpu", "model": "ReLU()", "(1, 2)": "nan", "self": "..."}
    assert RunFolder(tmp_path).manifest().config == json.loads((tmp_path / "config.json").read_bytes()) == expected
    assert kinds(tmp_path)[-1] == "end"


def test_a_folder_that_cannot_be_written_does_not_end_the_run(tmp_path, monkeypatch, logs):
    full_for(monkeypatch, "run.json")
    loop, epochs = make_loop(RunRecordHook(), work_dir=tmp_path), []
    loop.bus.on("after_train_epoch", lambda event: epochs.append(event.progress.epoch))
    loop.run()
    assert epochs == [0, 1]
    assert sum(line["log_level"] == "error" for line in logs) == 1  # not for every event


def test_without_a_work_dir_nothing_is_written_which_is_told(tmp_path, monkeypatch, logs):
    monkeypatch.chdir(tmp_path)
    make_loop(RunRecordHook()).run()
    assert list(tmp_path.iterdir()) == []
    assert sum(line.get("id") == "record-without-work-dir" for line in logs) == 1


def test_only_the_first_rank_writes():
    assert RunRecordHook.ranks == "rank0"


def test_a_loop_of_ones_own_leaves_the_same(tmp_path):
    own_loop(Bus(RunRecordHook()), small_model(), work_dir=tmp_path, name="by hand", config={"lr": 0.1})
    facts = RunFolder(tmp_path).manifest()
    assert (facts.name, facts.config) == ("by hand", {"lr": 0.1})
    assert (session(tmp_path).state, session(tmp_path).epoch) == ("finished", 1)
