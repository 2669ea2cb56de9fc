import os
import threading

import pytest

from eventloop.observe import RunFolder
from hooks import CheckpointHook, RunRecordHook

from .conftest import batches, make_loop


def kinds(folder):
    return [line["kind"] for line in RunFolder(folder).record()]


def test_a_checkpoint_that_is_durable_only_after_the_end_of_the_run_has_its_line(tmp_path, monkeypatch):
    ended, fsync = threading.Event(), os.fsync

    def slow(descriptor):
        ended.wait(30)
        fsync(descriptor)

    loop = make_loop(CheckpointHook(), RunRecordHook(), work_dir=tmp_path)
    loop.bus.on("after_run", lambda event: ended.set(), priority="LOWEST")
    monkeypatch.setattr(os, "fsync", slow)
    loop.run()
    assert kinds(tmp_path)[-2:] == ["end", "checkpoint"]


def test_a_test_after_the_training_is_in_the_same_record(tmp_path):
    loop = make_loop(RunRecordHook(), work_dir=tmp_path, test_data=batches(1))
    loop.run()
    loop.test()
    assert [kind for kind in kinds(tmp_path) if kind != "costs"] == ["end", "test", "end"]
    [session] = RunFolder(tmp_path).facts().sessions
    assert (session.state, session.stages) == ("finished", ["train", "test"])


@pytest.mark.parametrize("costs", [True, False])
def test_the_last_costs_come_before_the_end_if_they_are_measured(tmp_path, costs):
    make_loop(RunRecordHook(costs=costs), work_dir=tmp_path).run()
    assert kinds(tmp_path) == (["costs"] if costs else []) + ["end"]
