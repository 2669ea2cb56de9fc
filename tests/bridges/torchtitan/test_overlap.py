"""Copies that torchtitan makes beside the next passes, ``async_with_pinned_mem``: as late as it may, before the step.

They need a card: stand-ins copy on a thread, and a thread writes in the place of a process.
"""

from threading import Event
from types import SimpleNamespace

import pytest

pytest.importorskip("torchtitan.trainer")

from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.checkpointer import dcp

from trainbus import Bus, CheckpointHook, TrainbusCheckpointManager
from trainbus.bridges.torchtitan import checkpoints
from trainbus.eventloop import ConfigurationError
from trainbus.testing.host_job import Counting, assert_same, noted

from .job import WARNINGS, Job

pytestmark = WARNINGS


class Pinned(Job):
    """A job whose copies are made when they are waited for; ``copied`` has the passes that the model had made then."""

    mode = "async_with_pinned_mem"

    def make(self, **options):
        super().make(**options)
        self.due, self.copied = Event(), []
        manager = self.trainer.checkpointer
        for name in ("maybe_wait_for_staging", "maybe_wait_for_saving"):
            setattr(manager, name, self.then_wait(getattr(manager, name)))

    def then_wait(self, wait):
        def waiting():
            self.due.set()
            wait()
            self.due.clear()

        return waiting


class Ours(Pinned):
    manager = TrainbusCheckpointManager


@pytest.fixture
def pinned(monkeypatch):
    """Return a function that makes a job whose copies are made as late as torchtitan permits."""
    jobs, stage = [], DefaultStager._stage

    def late(stager, state, **options):
        assert jobs[-1].due.wait(60)
        jobs[-1].copied.append(jobs[-1].net.passes)
        return stage(stager, state, **options)

    def make(kind, *args, **options):
        jobs.append(kind(*args, beside=True, look=count, **options))
        return jobs[-1]

    for module in (dcp, checkpoints):
        monkeypatch.setattr(module, "StagingOptions", lambda **_: StagingOptions(False, False, True, False))
    monkeypatch.setattr(dcp, "AsyncCheckpointerType", SimpleNamespace(PROCESS=AsyncCheckpointerType.THREAD))
    monkeypatch.setattr(DefaultStager, "_stage", late)
    return make


def count(net):
    net.passes += net.training


@pytest.mark.parametrize("kind", [Pinned, Ours])
def test_a_save_of_a_hook_is_copied_beside_the_next_passes_and_has_the_state_before_them(pinned, tmp_path, kind):
    """Buffers change in the passes."""
    plain = Job(tmp_path / "plain", Bus(whole := Counting(), CheckpointHook(2, by_epoch=False)), accumulate=2)
    plain.fit()
    bus = Bus(Counting(), CheckpointHook(2, by_epoch=False, staging="overlap"))
    told = noted(bus, "checkpoint_committed", "path")
    job = pinned(kind, tmp_path / "late", bus, accumulate=2)
    job.fit()
    assert told == [str(tmp_path / "late" / f"iter_{number}") for number in (2, 4, 6, 8)]
    assert job.copied == [4, 6, 8, 8]  # in the step after the save; the last one at the end
    for number in (2, 4, 6, 8):
        assert_same(*(one.stored(one.folder / f"iter_{number}") for one in (job, plain)))
    again = Job(tmp_path / "again", Bus(hook := Counting()), accumulate=2)
    again.fit(job.folder / "iter_4")
    assert_same(again.weights(), plain.weights())
    assert hook.iters == whole.iters


@pytest.mark.parametrize("bus", [Bus, lambda: None], ids=["bus", "bare"])
def test_our_manager_copies_the_buffers_of_its_own_saves_before_the_next_pass(pinned, tmp_path, bus):
    plain = Job(tmp_path / "plain", every=2)
    plain.fit()
    job = pinned(Ours, tmp_path / "late", bus(), every=2)
    job.fit()
    job.trainer.close()
    assert job.copied == [3, 5, 7]  # torchtitan waits for the last one
    for step in (6, 8):
        assert_same(*(one.stored(one.folder / f"checkpoint/step-{step}") for one in (job, plain)))


@pytest.mark.parametrize("mode", ["async", "disabled"])
@pytest.mark.parametrize("manager", [CheckpointManager, TrainbusCheckpointManager])
def test_overlapped_copies_without_pinned_memory_are_refused(tmp_path, monkeypatch, mode, manager):
    monkeypatch.setattr(Job, "manager", manager)
    job = Job(tmp_path, Bus(CheckpointHook(2, by_epoch=False, staging="overlap")), beside=mode == "async")
    with pytest.raises(ConfigurationError, match=r"checkpoint\.async_mode='async_with_pinned_mem'"):
        job.fit()
