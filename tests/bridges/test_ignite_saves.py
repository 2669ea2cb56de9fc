"""``TrainbusSaver``, the save handler for Ignite's ``Checkpoint``, with and without a bus."""

import pytest
import torch

pytest.importorskip("ignite")

from ignite import distributed as idist
from ignite.engine import Events
from ignite.handlers import Checkpoint

from trainbus import TrainbusSaver
from trainbus.eventloop import Bus
from trainbus.testing.host_job import assert_same, loader, noted

from ..scripts import run_script
from .conformance import ignite


class Job(ignite.Job):
    """With a save handler of ours at the end of each epoch; a bus comes behind it."""

    def __init__(self, directory, bus=None, **options):
        super().__init__(directory, deterministic=False)
        saver = TrainbusSaver(directory, self.trainer)
        if bus is not None:
            self.attach(bus)
        self.handler = Checkpoint(self.to_save, saver, **options)
        self.trainer.add_event_handler(Events.EPOCH_COMPLETED, self.handler)

    def run(self, epochs=4):
        self.trainer.run(loader(2), max_epochs=epochs)
        return self

    @property
    def names(self):
        return sorted(each.name for each in self.folder.iterdir())


def files(*numbers):
    return [f"checkpoint_{number}.pt" for number in numbers]


def test_the_files_are_those_of_the_handler_that_ignite_has(tmp_path):
    job = Job(tmp_path / "ours", n_saved=2)
    torch.manual_seed(0)
    plain = Checkpoint(job.to_save, str(tmp_path / "plain"), n_saved=2)
    job.trainer.add_event_handler(Events.EPOCH_COMPLETED, plain)
    job.run()
    assert job.names == files(6, 8) == sorted(each.name for each in (tmp_path / "plain").iterdir())
    for name in job.names:
        ours, theirs = (torch.load(tmp_path / where / name, weights_only=True) for where in ("ours", "plain"))
        assert_same(ours["model"], theirs["model"])
        assert_same(ours["optimizer"]["state"][0], theirs["optimizer"]["state"][0])
        assert ours["trainer"] == theirs["trainer"]
    assert job.handler.last_checkpoint == tmp_path / "ours" / "checkpoint_8.pt"


def test_a_file_saved_again_under_its_name_stays(tmp_path):
    Job(tmp_path, n_saved=1, filename_pattern="last.pt").run(3)
    assert torch.load(tmp_path / "last.pt", weights_only=True)["trainer"]["iteration"] == 6


def test_the_best_and_the_last_checkpoint_are_durable_when_they_are_named(tmp_path):
    job = Job(tmp_path / "last", n_saved=1)
    saver = TrainbusSaver(tmp_path / "best", job.trainer)
    best = Checkpoint({"model": job.model}, saver, n_saved=1, score_function=lambda _: job.trainer.state.epoch)
    job.evaluator.add_event_handler(Events.COMPLETED, best)
    named = []

    @job.trainer.on(Events.EPOCH_COMPLETED)
    def validate():
        job.evaluate()
        named.extend(handler.last_checkpoint.is_file() for handler in (job.handler, best))

    job.run(3)
    assert named == [True] * 6
    assert len(list((tmp_path / "best").iterdir())) == len(list((tmp_path / "last").iterdir())) == 1


def test_a_save_outside_of_a_run_waits_for_its_file(tmp_path):
    job = Job(tmp_path, n_saved=1, filename_pattern="{name}_{global_step}.pt")
    job.handler(job.trainer)
    assert job.names == files(0)
    job.run(1)
    assert job.names == files(2)
    job.trainer.state.iteration = 9
    job.handler(job.trainer)
    assert job.names == files(9)


def test_a_full_directory_is_refused_and_another_rank_writes_nothing(tmp_path, monkeypatch):
    job = Job(tmp_path).run(1)
    with pytest.raises(ValueError, match="require_empty=False"):
        TrainbusSaver(tmp_path, job.trainer)
    TrainbusSaver(tmp_path, job.trainer, require_empty=False)
    with monkeypatch.context() as patch:
        patch.setattr(idist, "get_rank", lambda: 1)
        other = Job(tmp_path / "other").run(2)
    assert not other.folder.exists()


_KILLED = """
import os, signal, sys, torch
from pathlib import Path
from tests.bridges.test_ignite_saves import Job
replace, count = os.replace, [0]
def killing(source, target):
    count[0] += 1
    if count[0] == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    replace(source, target)
os.replace = killing
Job(Path(sys.argv[1]), n_saved=1).run(5)
"""


def test_a_process_that_is_killed_leaves_a_file_that_goes_on(tmp_path):
    assert run_script(_KILLED, tmp_path, arguments=[tmp_path / "a"]).returncode == -9
    left = [each.name for each in (tmp_path / "a").iterdir() if not each.name.startswith(".trainbus-")]
    assert left == files(4)
    rest = Job(tmp_path / "b")
    Checkpoint.load_objects(rest.to_save, tmp_path / "a" / left[0])
    rest.run(5)
    assert_same(rest.weights(), Job(tmp_path / "c").run(5).weights())


def test_a_bus_hears_of_each_file_when_it_is_durable_and_no_path_before_ignite_has_named_it(tmp_path):
    before = noted(bus := Bus(), "before_save_checkpoint", "path")
    told = noted(bus, "checkpoint_committed", "path", "bytes")
    Job(tmp_path, bus, n_saved=None).run(2)
    assert told == [(str(tmp_path / name), (tmp_path / name).stat().st_size) for name in files(2, 4)]
    assert before == ["", ""]
