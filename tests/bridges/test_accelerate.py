"""``Run(bus, accelerator=...)`` around a loop with Accelerate, against the real library."""

import itertools

import pytest
import structlog
import torch
from torch import nn

pytest.importorskip("accelerate")

from accelerate.utils import DistributedType

from trainbus.bridges import attach
from trainbus.eventloop import Bus, ConfigurationError, Run, TrainingError
from trainbus.eventloop.errors import CheckpointError
from trainbus.hooks import EMAHook, ParamSchedulerHook
from trainbus.testing.host_job import assert_same

from ..waiting import until
from .conformance import accelerate


class Job(accelerate.Job):
    """With a schedule."""

    def make(self):
        super().make()
        self.schedule = self.trainer.prepare(torch.optim.lr_scheduler.StepLR(self.optimizer.optimizer, 5))


@pytest.mark.parametrize("hooks", [[], [EMAHook]])
def test_what_accelerate_saves_itself_is_not_saved_again_and_a_second_run_takes_the_place_of_the_first(tmp_path, hooks):
    job = Job(tmp_path, Bus(*(hook() for hook in hooks)), epochs=1, every=4)
    for _ in range(2):
        job.fit()
    (file,) = job.own().glob("custom_checkpoint_*")
    entry = torch.load(file, weights_only=True)
    assert "optimizer" not in entry
    assert ("state_dict" in entry) is bool(hooks)


def test_a_state_is_saved_and_loaded_only_where_it_makes_sense(tmp_path):
    job = Job(tmp_path, Bus())
    with job.run(None) as run:
        for _ in run.epochs(1):
            for batch in run.train(job.data):
                job.learn(batch)
        with pytest.raises(TrainingError):
            job.trainer.save_state(tmp_path)
            job.trainer.load_state(tmp_path)
    with pytest.raises(TrainingError, match=r"accelerator\.save_state\(\)"):
        job.trainer.save_state(tmp_path / "late")
    torch.save({"other": 1}, tmp_path / "custom_checkpoint_0.pkl")
    with pytest.raises(CheckpointError, match=r"load_state\(\)"):
        job.trainer.load_state(tmp_path)


def test_another_object_is_refused():
    with pytest.raises(ConfigurationError, match=r"accelerate\.Accelerator"):
        Run(Bus(), model=nn.Linear(1, 1), accelerator=object())


@pytest.mark.parametrize("prepared", [False, True])
def test_a_schedule_steps_by_the_hook_prepared_or_not(tmp_path, prepared):
    job = Job(tmp_path, bus := Bus(), epochs=1, batches=8)
    bus.add(ParamSchedulerHook(job.schedule if prepared else job.schedule.scheduler, by="iter"))
    job.fit()
    assert job.optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


# --------------------------------------------------------------------- folders written beside the training


def named(directory, limit=None):
    """A job whose accelerator names its folders itself."""
    job = Job(directory, beside=True)
    job.trainer.project_configuration.total_limit = limit
    return job


def beside(directory):
    """A job whose folders a test names."""
    job = Job(directory)
    job.attach_saver()
    return job


def learn(job, steps=1):
    for batch in itertools.islice(job.data, steps):
        job.learn(batch)


def folders(directory):
    return sorted(path.name for path in directory.iterdir())


def test_a_folder_has_the_files_of_accelerate_which_loads_it_without_trainbus(tmp_path):
    plain, job = Job(tmp_path), Job(tmp_path)
    plain.trainer.save_state(tmp_path / "plain")
    with attach(Bus(), job.trainer, checkpoints=True):
        returned = job.trainer.save_state(tmp_path / "ours")
        learn(job)
    assert returned == tmp_path / "ours"
    assert folders(tmp_path / "ours") == sorted([*folders(tmp_path / "plain"), "trainbus-digests.json"])
    assert folders(tmp_path) == ["ours", "plain"]
    fresh = Job(tmp_path)
    with torch.no_grad():
        next(fresh.model.parameters()).zero_()
    fresh.trainer.load_state(tmp_path / "ours")
    assert_same(fresh.weights(), plain.weights())
    assert fresh.optimizer.state_dict()["param_groups"] == plain.optimizer.state_dict()["param_groups"]


def test_folders_beyond_the_limit_go_and_others_stay(tmp_path):
    job, directory = named(tmp_path, limit=2), tmp_path / "checkpoints"
    (directory / "notes_1").mkdir(parents=True)
    for _ in range(4):
        job.trainer.save_state()
        learn(job)
    job.trainer.end_training()
    assert folders(directory) == ["checkpoint_2", "checkpoint_3", "notes_1"]
    assert folders(tmp_path) == ["checkpoints"]


def test_a_save_that_failed_is_told_and_the_folders_before_it_stay(tmp_path, disk):
    disk.go.set()
    job, directory = named(tmp_path, limit=1), tmp_path / "checkpoints"
    job.trainer.save_state()
    until((directory / "checkpoint_0").exists)
    disk.error = OSError("broken disk")
    job.trainer.save_state()
    with pytest.raises(CheckpointError, match="broken disk"):
        job.trainer.save_state()
    disk.error = None
    assert folders(directory) == ["checkpoint_0"]
    job.trainer.load_state()  # the newest that is there
    job.trainer.save_state()
    job.trainer.end_training()
    assert len(folders(directory)) == 1
    assert folders(tmp_path) == ["checkpoints"]


def test_a_folder_is_replaced_but_no_other_files(tmp_path):
    job = beside(tmp_path)
    for _ in range(2):
        job.trainer.save_state(tmp_path / "state")
        learn(job)
    job.trainer.load_state(tmp_path / "state")
    (tmp_path / "state" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"notes\.txt"):
        job.trainer.save_state(tmp_path / "state")
    assert (tmp_path / "state" / "notes.txt").read_text() == "mine"
    assert folders(tmp_path) == ["state"]


def test_a_tilde_is_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    job = beside(tmp_path)
    assert job.trainer.save_state("~/state") == tmp_path / "home" / "state"
    job.trainer.load_state("~/state")
    job.trainer.end_training()
    assert not (tmp_path / "~").exists()


def test_a_damaged_folder_is_not_loaded(tmp_path):
    job = beside(tmp_path)
    job.trainer.save_state(tmp_path / "state")
    job.trainer.load_state(tmp_path / "state")
    with (tmp_path / "state" / "optimizer.bin").open("r+b") as file:
        file.seek(-20, 2)
        file.write(b"?")
    with pytest.raises(CheckpointError, match=r"optimizer\.bin"):
        job.trainer.load_state(tmp_path / "state")


def test_the_newest_named_folder_is_checked_and_missing_files_are_told(tmp_path):
    job = named(tmp_path)
    for _ in range(11):
        newest = job.trainer.save_state()
    job.trainer.load_state()
    (newest / "random_states_0.pkl").unlink()
    with structlog.testing.capture_logs() as logs:
        job.trainer.load_state()
    assert [(one["path"], one["files"]) for one in logs if one.get("id") == "accelerate-files-missing"] == [
        (str(newest), ["random_states_0.pkl"])
    ]
    (newest / "optimizer.bin").write_bytes(b"?")
    with pytest.raises(CheckpointError, match=r"checkpoint_10.*optimizer\.bin"):
        job.trainer.load_state()


def test_what_cannot_be_written_beside_the_training_is_refused(tmp_path, monkeypatch):
    job = Job(tmp_path)
    with pytest.raises(ConfigurationError, match="around Run"):
        attach(Bus(), job.trainer)
    monkeypatch.setattr(job.trainer.state, "distributed_type", DistributedType.FSDP)
    with pytest.raises(ConfigurationError, match="FSDP"):
        attach(Bus(), job.trainer, checkpoints=True)
