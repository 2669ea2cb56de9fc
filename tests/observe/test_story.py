"""``RunStory``: a live run and its files have one story, and the states of a run are listed once."""

from pathlib import Path

import pytest

from trainbus import eventloop
from trainbus.eventloop.events import BeforeBackward, Progress
from trainbus.hooks import CheckpointHook
from trainbus.observe import RunFolder, RunRecordHook, RunStatus
from trainbus.observe.entries import entry_of
from trainbus.observe.latest import LatestHook
from trainbus.observe.record import FailedCheckpoint, Validation
from trainbus.observe.states import ENDED

from ..hooks.conftest import batches, loss_of, make_loop

ROOT = Path(eventloop.__file__).resolve().parent.parent


def test_a_live_run_and_its_files_have_one_story(tmp_path):
    latest = LatestHook()
    hooks = CheckpointHook(interval=1, save_best="loss"), RunRecordHook(), latest
    validates = {"val_data": batches(1), "val_step": lambda model, batch: {"loss": loss_of(model, batch)}}
    make_loop(*hooks, work_dir=tmp_path, **validates).run()
    live, read = latest.story, RunFolder(tmp_path).story()
    assert live.state is read.state is RunStatus.FINISHED
    assert live.manifest.name == read.manifest.name
    assert live.outcomes == {"committed": len(read.checkpoints()), "failed": len(read.of(FailedCheckpoint)), "skipped": 0}
    assert live.stalled == pytest.approx(sum(one.stall for one in read.checkpoints()))
    assert {f"val/{name}": value for name, value in read.of(Validation)[-1].metrics.items()} == live.metrics
    assert [(one.epoch, one.iter) for one in read.sessions] == [(2, 8)]


def test_an_event_that_is_no_part_of_the_story_is_an_error():
    with pytest.raises(TypeError, match="BeforeBackward"):
        entry_of(BeforeBackward(progress=Progress()))


def test_the_states_of_a_run_are_listed_once():
    lists = []
    for path in (path for part in ("eventloop", "hooks", "trainbus") for path in ROOT.glob(f"{part}/**/*")):
        if path.suffix in (".py", ".js", ".html"):
            text = path.read_text()
            if sum(f'"{state}"' in text for state in ENDED) > 2:
                lists.append(path.name)
    assert lists == ["states.py"]
