"""``RunStory``: a live run and its files have one story, and the states of a run are listed once."""

from pathlib import Path

import pytest

import eventloop
from eventloop.observe import RunFolder, RunStatus
from eventloop.observe.latest import LatestHook
from eventloop.observe.record import FailedCheckpoint, Resume, Validation, entry_of
from eventloop.observe.states import ENDED
from hooks import CheckpointHook, RunRecordHook

from ..hooks.conftest import batches, loss_of, make_loop

ROOT = Path(eventloop.__file__).parent.parent


VALIDATED = {"val_data": batches(1), "val_step": lambda model, batch: {"loss": loss_of(model, batch)}}


def test_a_live_run_and_its_files_have_one_story(tmp_path):
    latest = LatestHook()
    make_loop(CheckpointHook(interval=1, save_best="loss"), RunRecordHook(), latest, work_dir=tmp_path, **VALIDATED).run()
    live, read = latest.story, RunFolder(tmp_path).story()
    assert live.state is read.state is RunStatus.FINISHED
    assert live.manifest.name == read.manifest.name
    assert live.outcomes == {"committed": len(read.checkpoints()), "failed": len(read.of(FailedCheckpoint)), "skipped": 0}
    assert live.stalled == pytest.approx(sum(one.stall for one in read.checkpoints()))
    assert {f"val/{name}": value for name, value in read.of(Validation)[-1].metrics.items()} == live.metrics
    assert [(one.epoch, one.iter) for one in read.sessions] == [(2, 8)]


def test_a_resume_abandons_what_is_beyond_its_checkpoint(tmp_path):
    make_loop(CheckpointHook(interval=1), RunRecordHook(), work_dir=tmp_path, max_epochs=3, **VALIDATED).run()
    loop = make_loop(CheckpointHook(interval=1), RunRecordHook(), work_dir=tmp_path, max_epochs=3, **VALIDATED)
    loop.run(resume=tmp_path / "epoch_1.safetensors")
    story = RunFolder(tmp_path).story()
    assert [(cut.epoch, cut.iter, cut.lost) for cut in story.cuts] == [(1, 4, 8)]
    assert [one.epoch for one in story.of(Validation)] == [1, 2, 3]
    assert [one.epoch for one in story.abandoned if isinstance(one, Validation)] == [1, 2, 3]  # the first is repeated
    assert len(story.of(Resume)) == 1


def test_an_event_that_is_no_part_of_the_story_is_an_error():
    from eventloop.events import BeforeBackward, Progress

    with pytest.raises(TypeError, match="BeforeBackward"):
        entry_of(BeforeBackward(progress=Progress()))


def test_the_states_of_a_run_are_listed_once():
    lists = []
    for path in (*ROOT.glob("eventloop/**/*"), *ROOT.glob("hooks/**/*")):
        if path.suffix in (".py", ".js", ".html"):
            text = path.read_text()
            if sum(f'"{state}"' in text for state in ENDED) > 2:
                lists.append(path.name)
    assert lists == ["states.py"]
