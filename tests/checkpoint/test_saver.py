"""AsyncSaver: saves beside the caller, one at a time, loud when they fail."""

import os
import threading
from concurrent.futures import wait

import pytest
import torch

from trainbus.eventloop import CheckpointError, ConfigurationError
from trainbus.eventloop.checkpoint import AsyncSaver, BackgroundWriter, load
from trainbus.eventloop.errors import CheckpointValueError


def tree(number):
    return {"w": torch.full((1000,), float(number))}


def saved(directory):
    return {path.name: load(path)["w"][0].item() for path in directory.iterdir()}


def test_a_save_is_a_snapshot_and_durable_after_wait_and_its_future_returns_the_file(tmp_path):
    state = tree(0)
    with AsyncSaver() as saver:
        for number in range(5):
            state["w"].fill_(number)
            future = saver.save(state, tmp_path / f"{number}")
        saver.wait()
        assert saved(tmp_path) == {str(number): number for number in range(5)}
        info = future.result()
    assert (info.path, info.bytes) == (tmp_path / "4", (tmp_path / "4").stat().st_size)


def test_wait_is_the_default_and_skips_nothing(disk, tmp_path):
    with AsyncSaver() as saver:
        saver.save(tree(0), tmp_path / "0")
        threading.Timer(0.02, disk.go.set).start()
        saver.save(tree(1), tmp_path / "1")
        assert (tmp_path / "0").exists()
    assert saved(tmp_path) == {"0": 0, "1": 1}


def test_skip_drops_saves_due_during_a_write(disk, tmp_path):
    with AsyncSaver(busy="skip") as saver:
        first = saver.save(tree(0), tmp_path / "0")
        second = saver.save(tree(1), tmp_path / "1")
        assert second.cancelled()
        assert wait([second], 5).not_done == set()  # which wants to be told
        disk.go.set()
        first.result(30)
        saver.wait()
        saver.save(tree(2), tmp_path / "2")
    assert saved(tmp_path) == {"0": 0, "2": 2}


def test_replace_replaces_the_one_that_waits_and_never_the_one_being_written(disk, tmp_path):
    with AsyncSaver(busy="replace") as saver:
        futures = [saver.save(tree(0), tmp_path / "0")]
        assert disk.reached.wait(30)  # it is being written
        futures += [saver.save(tree(number), tmp_path / f"{number}") for number in range(1, 5)]
        assert [future.cancelled() for future in futures] == [False, True, True, True, False]
        assert saver._buffer.bytes == 8000  # twice the tree, however many were replaced
        assert wait(futures[1:4], 5).not_done == set()
        disk.go.set()
    assert saved(tmp_path) == {"0": 0, "4": 4}


@pytest.mark.parametrize("call", ["save", "wait", "close"])
def test_a_save_that_failed_is_raised_by_the_next_call(disk, tmp_path, call):
    disk.error = OSError(28, "No space left on device")
    disk.go.set()
    saver = AsyncSaver()
    future = saver.save(tree(0), tmp_path / "0")
    assert isinstance(future.exception(30), CheckpointError)
    with pytest.raises(CheckpointError, match=r"/0 .*No space left"):
        saver.save(tree(1), tmp_path / "1") if call == "save" else getattr(saver, call)()
    disk.error = None
    if call != "close":
        saver.save(tree(2), tmp_path / "2")
        saver.close()
        assert saved(tmp_path) == {"2": 2}  # neither debris of the first nor the second, which was not taken


def test_an_error_in_the_block_is_raised_with_a_note_about_the_save(disk, tmp_path):
    disk.error = OSError(5, "Input/output error")
    disk.go.set()
    with pytest.raises(ValueError, match="mine") as caught, AsyncSaver() as saver:
        saver.save(tree(0), tmp_path / "0")
        raise ValueError("mine")
    assert any("Input/output error" in note for note in caught.value.__notes__)


def test_an_unsupported_tree_is_refused_and_the_saver_continues(tmp_path):
    with AsyncSaver() as saver:
        with pytest.raises(CheckpointValueError, match=r"^odd: "):
            saver.save({"odd": object()}, tmp_path / "0")
        saver.save(tree(1), tmp_path / "1")
    assert saved(tmp_path) == {"1": 1}


def test_a_cancelled_future_is_not_written(disk, tmp_path):
    with AsyncSaver(busy="replace") as saver:
        saver.save(tree(0), tmp_path / "0")
        assert disk.reached.wait(30)
        assert saver.save(tree(1), tmp_path / "1").cancel()
        disk.go.set()
    assert saved(tmp_path) == {"0": 0}


def test_saving_with_a_closed_saver_and_an_unknown_policy_are_errors(tmp_path):
    saver = AsyncSaver()
    saver.close()
    saver.close()
    with pytest.raises(CheckpointError, match="closed"):
        saver.save(tree(0), tmp_path / "0")
    with pytest.raises(ConfigurationError, match=r"busy=\'drop\'"):
        AsyncSaver(busy="drop")


def test_pending_saves_are_written_at_interpreter_exit_and_one_that_fails_is_reported(script, tmp_path):
    done = script(
        f"""
        import torch
        from trainbus.eventloop.checkpoint import AsyncSaver
        AsyncSaver().save({{"w": torch.full((2_000_000,), 3.0)}}, "{tmp_path}/c")
        AsyncSaver().save({{"w": 1}}, "{tmp_path}/gone/c")
        """
    )
    assert done.stderr.count("Traceback") == done.stderr.count("CheckpointError: cannot write") == 1
    assert saved(tmp_path) == {"c": 3.0}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_after_a_fork_it_is_inert(disk, tmp_path):
    with AsyncSaver() as saver:
        saver.save(tree(0), tmp_path / "0")
        assert disk.reached.wait(30)
        child = os.fork()
        if child == 0:
            saver.wait()
            saver.close()
            try:
                saver.save(tree(1), tmp_path / "1")
            except CheckpointError as error:
                os._exit(0 if "create another one here" in str(error) else 1)
            os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
        disk.go.set()
    assert saved(tmp_path) == {"0": 0}


def test_a_save_right_before_closing_is_written_though_the_thread_is_slow(tmp_path, monkeypatch):
    """The thread, once the first file is durable, does not continue until the saver is being closed."""
    closing, first = threading.Event(), []

    def closed(writer):
        if threading.current_thread().name == "trainbus-saver" and first and first[0].done():
            closing.wait(10)
        return vars(writer)["closed"]

    def close(writer, value):
        vars(writer)["closed"] = value
        if value:
            closing.set()

    monkeypatch.setattr(BackgroundWriter, "closed", property(closed, close), raising=False)
    with AsyncSaver() as saver:
        first.append(saver.save(tree(0), tmp_path / "0"))
        saver.save(tree(1), tmp_path / "1")
    assert saved(tmp_path) == {"0": 0, "1": 1}


def test_one_save_waits_in_the_queue_and_a_third_one_waits_for_its_place(disk, tmp_path):
    state = tree(0)
    with AsyncSaver(busy="queue") as saver:
        saver.save(state, tmp_path / "0")
        assert disk.reached.wait(30)
        state["w"].fill_(1)
        saver.save(state, tmp_path / "1")  # while the first one is being written
        state["w"].fill_(2)
        third = threading.Thread(target=lambda: saver.save(state, tmp_path / "2"))
        third.start()
        third.join(0.2)
        assert third.is_alive()
        disk.go.set()
        third.join(30)
    assert saved(tmp_path) == {"0": 0, "1": 1, "2": 2}


def test_an_action_waits_for_the_save_before_it_and_for_no_later_one(disk, tmp_path):
    there = []
    with AsyncSaver(busy="queue") as saver:
        for name in "01":
            saver.save(tree(0), tmp_path / name)
            saver.after_commit(lambda: there.append(sorted(path.name for path in tmp_path.glob("[0-9]"))))
            assert disk.reached.wait(30)
        assert there == []
        disk.go.set()
        saver.wait()
        assert there == [["0"], ["0", "1"]]
        saver.after_commit(there.clear)  # no save is under way: at once
        assert there == []


def test_a_failure_in_the_queue_is_raised_by_the_next_save(disk, tmp_path):
    with AsyncSaver(busy="queue") as saver:
        saver.save(tree(0), tmp_path / "gone" / "0")
        with pytest.raises(CheckpointError, match="gone"):
            for number in range(3):
                saver.save(tree(number), tmp_path / str(number))
                disk.go.set()
        saver.wait()
