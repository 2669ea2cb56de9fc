"""A work dir is that of one training at a time, in whatever process; and no lock outlives its process."""

import errno
import os
import signal
import socket
from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs

from trainbus.eventloop import ConfigurationError, Run, platform
from trainbus.eventloop.training.folders import LOCK, DirectoryLock
from trainbus.hooks import CheckpointHook

from ..failing import fails, said
from ..scripts import Script
from ..waiting import until

HOLDS = """
import os, sys, time
from pathlib import Path
from trainbus.eventloop.training.folders import DirectoryLock
os.setsid()
lock = DirectoryLock(Path(sys.argv[1]))
if os.fork():
    print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def other(tmp_path, tmp_path_factory):
    """A process that holds ``tmp_path``, with a child like the worker of a loader."""
    with Script(HOLDS, tmp_path_factory.mktemp("other"), arguments=[tmp_path]) as script:
        until(lambda: script.out.read_text() == "held\n")
        yield script
        os.killpg(script.pid, signal.SIGKILL)


def test_a_second_training_in_a_work_dir_is_refused_while_the_first_one_lives(parts, tmp_path, other, logs):
    loop = parts.loop(work_dir=tmp_path, max_epochs=1)
    assert f"{tmp_path} is in use by process {other.pid} on {socket.gethostname()}, and" in said(loop.run)
    assert loop.counters.iter == 0
    loop.validate()
    other.kill()  # its child lives on, and holds nothing
    loop.run()
    assert loop.counters.iter == 3


def test_trainings_of_any_kind_are_refused_before_a_hook_opens_a_file_and_evaluations_are_not(parts, bus, trace, tmp_path):
    lock = DirectoryLock(tmp_path)
    loop = parts.loop(bus, work_dir=tmp_path, test_data=parts.batches(1))
    with capture_logs(), pytest.raises(ConfigurationError, match="process"):
        loop.run()
    assert trace.names == ["on_exception"]
    model = torch.nn.Linear(1, 1)
    for optimizer in (torch.optim.SGD(model.parameters(), lr=0.1), None):
        own = Run(model=model, optimizer=optimizer, work_dir=tmp_path)
        with capture_logs(), pytest.raises(ConfigurationError, match=str(tmp_path)), own:
            for _ in own.train([1]):
                pytest.fail("an iteration")
    loop.validate()
    loop.test()
    assert (tmp_path / LOCK).exists()  # of the other, as it was
    lock.release()


def test_the_advice_for_a_run_that_was_never_left_works(parts, tmp_path, logs):
    """As in a notebook, in whose process the lock would stay for ever."""
    left = Run(model=parts.model(), optimizer=None, work_dir=tmp_path)
    left.__enter__()
    next(iter(left.train([1])))
    assert "`run.__exit__(None, None, None)`" in said(parts.loop(work_dir=tmp_path, max_epochs=1).run)
    left.__exit__(None, None, None)
    parts.loop(work_dir=tmp_path, max_epochs=1).run()


@pytest.mark.parametrize("ends", ["in order", "by an exception"])
def test_the_next_run_has_the_work_dir(parts, bus, tmp_path, ends):
    if ends == "by an exception":
        bus.on("before_train_iter", lambda event: 1 / 0, once=1)
        with capture_logs(), pytest.raises(ZeroDivisionError):
            parts.loop(bus, work_dir=tmp_path).run()
    else:
        loop = parts.loop(bus, work_dir=tmp_path, max_epochs=1)
        loop.run()
        loop.validate()
    assert not (tmp_path / LOCK).exists()
    parts.loop(work_dir=tmp_path, max_epochs=1).run()


def test_an_out_dir_in_which_a_run_of_the_same_name_saves_is_in_use_as_well(parts, bus, tmp_path):
    lock = DirectoryLock(tmp_path / "out" / "run")
    bus.add(CheckpointHook(1, out_dir=tmp_path / "out"))
    with capture_logs(), pytest.raises(ConfigurationError, match="out/run"):
        parts.loop(bus, work_dir=tmp_path / "run").run()
    lock.release()


@pytest.mark.parametrize("work_dir", ["runs/latest", "runs/x/../x", "runs/x"])
def test_a_run_can_use_a_directory_under_two_names(parts, bus, tmp_path, work_dir):
    (tmp_path / "runs" / "x").mkdir(parents=True)
    (tmp_path / "runs" / "latest").symlink_to("x")
    bus.add(CheckpointHook(1, out_dir=tmp_path / "runs"))
    parts.loop(bus, work_dir=tmp_path / work_dir, max_epochs=1).run()
    there = {file.name for file in (tmp_path / "runs" / "x").iterdir()} - {"scores.json"}
    assert there == {"epoch_1.safetensors", "last_checkpoint"}


def test_a_lock_file_left_by_a_killed_process_does_not_lock(parts, tmp_path):
    (tmp_path / LOCK).write_text("process 1 on mars")
    parts.loop(work_dir=tmp_path, max_epochs=1).run()
    assert not (tmp_path / LOCK).exists()


def test_a_work_dir_that_cannot_be_made_is_an_error_before_the_first_iteration(parts, tmp_path):
    (tmp_path / "file").write_text("")
    loop = parts.loop(work_dir=tmp_path / "file" / "run", max_epochs=1)
    with pytest.raises(ConfigurationError, match=r"file/run.*work_dir"):
        loop.run()
    assert loop.counters.iter == 0


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_a_work_dir_that_cannot_be_written_is_an_error(parts, tmp_path, monkeypatch, number):
    real = os.open

    def refuse(path, *rest):
        if Path(path).name == LOCK:
            raise OSError(number, os.strerror(number))
        return real(path, *rest)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ConfigurationError, match=os.strerror(number)):
        parts.loop(work_dir=tmp_path, max_epochs=1).run()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, None])
def test_training_works_on_file_systems_without_locks(parts, tmp_path, monkeypatch, number, logs):
    """And on some that are mounted over a network, which number a file anew each time it is looked at."""
    if number is None:
        monkeypatch.setattr(os.path, "samestat", lambda *files: False)
    else:
        monkeypatch.setattr(platform, "lock", fails(OSError(number, os.strerror(number))))
    loop = parts.loop(work_dir=tmp_path, max_epochs=1)
    loop.run()
    assert loop.counters.iter == 3
    (told,) = [entry for entry in logs if entry.get("id") == "directory-not-locked"]
    assert number is None or told["error"] == str(OSError(number, os.strerror(number)))


def test_a_lock_that_is_waited_for_while_its_file_is_removed_is_taken_on_a_new_one(tmp_path, monkeypatch):
    """As another process does that ends between our opening the file and our lock on it."""
    first = DirectoryLock(tmp_path)
    real = platform.lock

    def late(descriptor):
        monkeypatch.undo()
        first.release()
        real(descriptor)

    monkeypatch.setattr(platform, "lock", late)
    second = DirectoryLock(tmp_path)
    with pytest.raises(ConfigurationError):
        DirectoryLock(tmp_path)
    second.release()
    assert not list(tmp_path.iterdir())
