"""Checkpoints of trainers that are written beside the training: what all savers keep, with and without a bus."""

import threading

import pytest
import torch
from structlog.testing import capture_logs

from trainbus.eventloop import Bus, CheckpointError
from trainbus.hooks import CheckpointHook, EMAHook
from trainbus.testing.host_job import Counting, assert_same, at_steps, checkpoints, noted

from ..failing import fails
from ..waiting import until
from .conformance import WARNINGS, hosts

pytestmark = WARNINGS

savers = hosts("own", "body", "toy")


@savers
@pytest.mark.usefixtures("no_thread_is_left")
def test_training_goes_on_while_a_file_is_written_and_its_end_waits(host, tmp_path, disk):
    seen = []

    def look(net):
        seen.append(job.kept())
        disk.go.set()
        until(lambda: job.kept() == [4])
        stored = {name.removeprefix("net."): tensor for name, tensor in job.stored(job.own()).items()}
        weights = dict(net.named_parameters())
        assert_same({name: stored[name] for name in weights}, weights)  # those of the moment of the save
        disk.go.clear()
        threading.Timer(0.1, disk.go.set).start()

    job = host(tmp_path, epochs=1, batches=8, every=4, beside=True, look=at_steps({5: look}))
    job.fit()
    assert seen == [[]]
    assert job.kept() == [8]


@savers
def test_the_file_before_is_removed_behind_the_commit_of_its_successor(host, tmp_path, disk):
    seen = []

    def first(net):
        disk.go.set()
        until(lambda: job.kept() == [3])
        disk.go.clear()

    def second(net):
        seen.append(job.kept())
        disk.go.set()

    job = host(tmp_path, every=3, epochs=2, beside=True, look=at_steps({5: first, 8: second}))
    job.fit()
    assert seen == [[3]]
    assert job.kept()[-1] >= 6
    assert len(job.kept()) == 1


@savers
@pytest.mark.parametrize("every", [3, 8])
def test_a_save_that_fails_is_raised_and_the_file_before_stays(host, tmp_path, disk, every):
    disk.go.set()
    told = noted(bus := Bus(), "checkpoint_failed", "error")

    def look(net):
        until(lambda: job.kept() == ([3] if every == 3 else []))
        disk.error = OSError("the disk is full")

    job = host(tmp_path, bus, every=every, beside=True, look=at_steps({5: look}))
    with pytest.raises(CheckpointError, match="the disk is full"):
        job.fit()
    assert job.kept() == ([3] if every == 3 else [])  # 8 is the last of the training
    assert len(told) == (1 if host.attaches else 0)


@pytest.mark.long
@savers
@pytest.mark.parametrize("error", [ValueError("broken"), KeyboardInterrupt()], ids=repr)
def test_after_an_exception_the_save_that_is_under_way_is_complete(host, tmp_path, disk, error):
    threading.Timer(0.3, disk.go.set).start()
    job = host(tmp_path, every=3, beside=True, look=at_steps({5: fails(error)}))
    with pytest.raises((type(error), *host.interrupts)):
        job.fit()
    assert job.kept() == [3]


@hosts("own", "body", "toy", "accelerate", "transformers")
def test_the_own_error_of_a_training_is_raised_with_a_note_about_the_save(host, tmp_path, disk):
    disk.go.set()
    disk.error = OSError("the disk is full")
    job = host(tmp_path, every=3, beside=True, look=at_steps({5: fails(ValueError("broken"))}))
    with pytest.raises(ValueError, match="broken") as caught:
        job.fit()
    assert any("the disk is full" in note for note in caught.value.__notes__)


@savers
@pytest.mark.parametrize("with_bus", [False, True])
def test_a_training_resumed_from_a_file_goes_on_exactly(host, tmp_path, with_bus):
    def make(folder, **options):
        bus = Bus(ema := EMAHook(momentum=0.1), counting := Counting())
        return host(tmp_path / folder, bus if with_bus else None, **options), ema, counting

    whole, ema, counting = make("whole")
    whole.fit()
    cut, *_ = make("cut", every=4, ends=True, beside=True, look=at_steps({6: fails(ValueError("killed"))}))
    with pytest.raises(ValueError, match="killed"):
        cut.fit()
    rest, average, counted = make("cut")
    rest.fit(cut.own())
    assert_same(rest.weights(), whole.weights())
    if with_bus:
        assert_same(average.average.tensors, ema.average.tensors)
        assert counted.iters == counting.iters


@hosts("own", "body", "toy", "accelerate")
def test_a_bus_hears_of_each_file_of_host_and_hooks_when_it_is_durable(host, tmp_path, disk):
    bus = Bus(CheckpointHook(interval=3, by_epoch=False, max_keep_ckpts=1, save_last=False))
    paths, threads, before = checkpoints(bus), set(), []
    bus.on("checkpoint_committed", lambda event: threads.add(threading.current_thread().name))

    def look(net):
        before.extend(paths)
        disk.go.set()

    job = host(tmp_path, bus, every=4, beside=True, look=at_steps({4: look}))
    job.fit()
    assert before == []
    assert threads == {"trainbus-saver"}
    hooks = [tmp_path / f"iter_{step}{host.suffix}" for step in (3, 6)]
    assert [path for path in paths if path in hooks] == hooks
    assert job.own() in paths
    assert not hooks[0].exists()
    assert torch.is_grad_enabled()


@hosts("own", "body", "toy", "accelerate")
def test_ctrl_c_waits_for_the_file_that_is_being_written_and_names_it(host, tmp_path, disk):
    bus = Bus(CheckpointHook(interval=2, by_epoch=False))
    threading.Timer(0.3, disk.go.set).start()
    job = host(tmp_path, bus, beside=True, look=at_steps({3: fails(KeyboardInterrupt())}))
    with capture_logs() as logs, pytest.raises(host.interrupts):
        job.fit()
    assert f"continue from {tmp_path / f'iter_2{host.suffix}'} with" in logs[-1]["event"]
