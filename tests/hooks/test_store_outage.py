"""A store that does not take a save ends no run: the file waits on this machine, and is uploaded later."""

import errno
import os
import shutil
import tempfile
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem
from structlog.testing import capture_logs

from trainbus.eventloop import CheckpointError
from trainbus.eventloop.checkpoint import steps_awaited, verify
from trainbus.hooks import CheckpointHook

from ..failing import fails
from .conftest import files, scored

OUT = "memory://bucket"
URL = "memory://bucket/run"
"""Of a run whose work dir is named so."""


@pytest.fixture
def refuse(memory, monkeypatch):
    """``refuse(*names)`` makes the store refuse files whose paths have one of the names; without names it takes all again."""
    real, refused = MemoryFile.commit, []

    def commit(self):
        if any(name in self.path for name in refused):
            raise OSError(28, "quota")
        real(self)

    monkeypatch.setattr(MemoryFile, "commit", commit)
    return lambda *names: refused.__setitem__(slice(None), names)


@pytest.fixture
def run(job, tmp_path):
    """``run(hooks, **options)`` trains in ``tmp_path / "run"``; returns the loop, what is told of the store, and the error."""

    def train(*hooks, at=(), resume=None, **options):
        loop = options.pop("loop", None) or job.loop(*hooks, work_dir=tmp_path / "run", **options)
        told = []
        for name in ("checkpoint_uploaded", "checkpoint_failed", "checkpoint_skipped"):
            loop.bus.on(name, lambda event, name=name: told.append((name.partition("_")[2], event)))
        for mount_point, act in at:
            loop.bus.on(mount_point, act, priority="LOWEST")
        error = None
        try:
            loop.run(resume=resume)
        except CheckpointError as caught:
            error = caught
        return loop, told, error

    return train


def outcomes(told):
    return [(what, Path(event.path).stem) for what, event in told]


def wait(event):
    event.run.checkpoints.wait()


EACH = ("after_train_epoch", wait)


@pytest.mark.parametrize("on_error", ["raise", "log"])
def test_the_run_goes_on_says_so_and_keeps_what_the_store_lacks_which_a_resume_uploads(
    run, tmp_path, refuse, there, on_error, job
):
    refuse("epoch_2", "epoch_3")
    hook = CheckpointHook(1, out_dir=OUT, on_error=on_error)
    with capture_logs() as logs:
        _, told, error = run(hook, max_epochs=3, at=[("before_train_epoch", wait)])
    assert outcomes(told) == [("uploaded", "epoch_1"), ("failed", "epoch_2"), ("failed", "epoch_3")]
    kept = [str(tmp_path / f"run/epoch_{number}.safetensors") for number in (2, 3)]
    assert [event.kept for what, event in told if what == "failed"] == kept
    assert [one["kept"] for one in logs if one["log_level"] == "error" and "kept" in one] == kept * 2, "also at the end"
    assert (error is None) == (on_error == "log")
    if error is not None:
        assert all(text in str(error) for text in ("quota", f"{URL}/epoch_3.safetensors", *kept))
    assert files(tmp_path / "run") == {"epoch_2", "epoch_3"}
    assert there() == {"epoch_1", "last_checkpoint"}
    refuse()
    loop, told, error = run(CheckpointHook(1, out_dir=OUT, max_keep_ckpts=2), max_epochs=4, resume="auto")
    assert error is None
    assert outcomes(told)[:3] == [("uploaded", "epoch_3"), ("uploaded", "epoch_2"), ("uploaded", "epoch_4")]
    assert there() == {"epoch_3", "epoch_4", "last_checkpoint"}
    assert files(tmp_path / "run") == {"epoch_4"}
    straight = job.loop(work_dir=tmp_path / "straight", max_epochs=4)
    straight.run()
    assert job.same(loop.model.state_dict(), straight.model.state_dict())


def test_what_waits_is_what_the_hook_wants(run, tmp_path, refuse, there):
    refuse("epoch_2", "epoch_3")
    seen = []
    at = [("before_train_epoch", lambda event: (wait(event), seen.append(files(tmp_path / "run"))))]
    _, told, error = run(CheckpointHook(1, out_dir=OUT, max_keep_ckpts=1), max_epochs=4, at=at)
    assert error is None
    assert seen == [set(), {"epoch_1"}, {"epoch_2"}, {"epoch_3"}]
    assert there() == {"epoch_4", "last_checkpoint"}, "and the first one goes once the store has a later one"
    assert ("skipped", "epoch_3") in outcomes(told)


def test_without_room_here_the_oldest_files_that_wait_are_given_up_and_told(run, tmp_path, refuse, there, monkeypatch):
    """Of those that are regular, and not the newest."""
    refuse("epoch_")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2 * 10**4 - 7 * 10**3 * len(files(path))))
    hook = CheckpointHook(1, out_dir=OUT, save_best="acc", on_error="log")
    loop = scored(tmp_path / "run", hook, 0.5, 0.1, 0.2, 0.3)
    with capture_logs() as logs:
        _, told, _ = run(loop=loop, at=[EACH])
    assert files(tmp_path / "run") == {"epoch_4", "best_acc_epoch_1"}
    assert [name for what, name in outcomes(told) if what == "skipped"] == ["epoch_1", "epoch_2", "epoch_3"]
    assert any("local_dir=" in one["event"] and "free" in one["event"] for one in logs), "at the first save"


def test_a_store_that_comes_back_at_the_end_gets_the_newest_save_its_pointer_and_the_published_copy(
    run, tmp_path, refuse, there, memory
):
    refuse("epoch_2")
    back = [("after_train", lambda event: (wait(event), refuse()))]
    hook = CheckpointHook(1, out_dir=OUT, save_last=True, published_keys="state_dict")
    _, told, error = run(hook, max_epochs=2, at=back)
    assert error is None
    assert outcomes(told)[-1] == ("uploaded", "epoch_2")
    assert memory.cat_file("/bucket/run/last_checkpoint") == b"epoch_2.safetensors"
    assert any(name.startswith("epoch_2-") for name in there())
    assert files(tmp_path / "run") == {"epoch_2"}


@pytest.mark.parametrize(("k", "best"), [(1, {4}), (2, {3, 4}), (3, {2, 3, 4}), (-1, {1, 2, 3, 4, 5})])
def test_a_store_that_comes_back_gets_the_k_best_files(tmp_path, refuse, there, k, best):
    """Those that are no longer among them are given up while it is away."""
    hook = CheckpointHook(out_dir=OUT, save_best="acc", save_top_k=k, save_last=False)
    loop = scored(tmp_path / "run", hook, 0.1, 0.2, 0.3, 0.4, 0.05)
    kept = []
    refuse("best_acc_epoch_2", "best_acc_epoch_3", "best_acc_epoch_4")
    loop.bus.on("checkpoint_failed", lambda event: kept.append(len(files(tmp_path / "run"))))
    loop.bus.on("after_train", lambda event: (wait(event), refuse()))
    loop.run()
    assert max(kept) <= (k if k > 0 else 5) + 1
    assert there() == {f"best_acc_epoch_{n}" for n in best} | {"last_checkpoint"}
    assert len(files(tmp_path / "run")) == 1
    assert loop.best.score == 0.4


@pytest.mark.parametrize("work_dir", [True, False])
def test_no_older_file_is_published_in_the_place_of_the_newest(job, refuse, there, work_dir, tmp_path):
    refuse("epoch_2")
    hook = CheckpointHook(1, out_dir=OUT if work_dir else URL, published_keys="state_dict", on_error="log")
    job.loop(hook, max_epochs=2, work_dir=tmp_path / "run" if work_dir else None).run()
    assert there() == {"epoch_1", "last_checkpoint"}


def test_without_a_work_dir_files_wait_in_a_temporary_directory_which_goes_with_the_run(
    job, refuse, tmp_path, monkeypatch, there
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    job.loop(CheckpointHook(1, out_dir=URL), max_epochs=2).run()
    assert there() == {"epoch_1", "epoch_2", "last_checkpoint"}
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    refuse("epoch_3")
    with pytest.raises(CheckpointError, match=r"quota.*epoch_3\.safetensors: once the store answers"):
        job.loop(CheckpointHook(1, out_dir=URL), max_epochs=3).run(resume=URL)
    assert [path.stem for path in tmp_path.rglob("*.safetensors")] == ["epoch_3"]


@pytest.mark.parametrize("down", ["local", "store"])
def test_a_failure_of_one_of_two_places_costs_the_other_nothing(run, tmp_path, refuse, there, down, monkeypatch):
    there_only = CheckpointHook(1, out_dir=OUT, local_dir=tmp_path / "waiting", name="there")
    hooks = CheckpointHook(1, max_keep_ckpts=1), there_only
    if down == "store":
        refuse("epoch_2")
        _, _, error = run(*hooks, max_epochs=3)
        assert "epoch_2" in str(error)
        assert files(tmp_path / "run") == {"epoch_3"}
        assert files(tmp_path / "waiting/run") == {"epoch_2", "epoch_3"}
        assert there() == {"epoch_1", "epoch_3", "last_checkpoint"}
        return
    replace = os.replace

    def refused(temporary, name):
        if str(name) == str(tmp_path / "run/epoch_2.safetensors"):
            raise OSError(errno.EIO, "broken disk", str(name))
        replace(temporary, name)

    monkeypatch.setattr(os, "replace", refused)
    _, told, error = run(*hooks, max_epochs=3)
    assert "epoch_2.safetensors" in str(error)
    assert ("uploaded", "epoch_2") in outcomes(told)


def test_of_two_stores_each_gets_what_it_takes_and_a_local_hook_keeps_its_files(run, tmp_path, refuse, memory):
    refuse("bucket/run/epoch_2")
    hooks = [CheckpointHook(1, out_dir=out, name=name, max_keep_ckpts=1) for name, out in (("a", OUT), ("b", "memory://other"))]
    _, _, error = run(*hooks, CheckpointHook(1, name="c"), max_epochs=2, at=[("before_train_epoch", wait)])
    assert "bucket/run/epoch_2" in str(error)
    assert "other" not in str(error)
    assert {name for name in memory.store if "epoch" in name} == {
        f"/{one}.safetensors" for one in ("bucket/run/epoch_1", "other/run/epoch_2")
    }
    assert files(tmp_path / "run") == {"epoch_1", "epoch_2"}


@pytest.mark.parametrize("better", [True, False])
def test_a_best_save_waits_until_the_store_has_it_or_a_better_one(run, tmp_path, refuse, there, better):
    """The regular file of the same state is replaced by the next one; the best file is not."""
    refuse("epoch_2")
    hook = CheckpointHook(1, out_dir=OUT, max_keep_ckpts=1, save_best="acc")
    loop = scored(tmp_path / "run", hook, 0.1, 0.5, 0.6 if better else 0.3, 0.2)
    loop.bus.on("after_train_epoch", lambda event: (wait(event), refuse()), priority=100, once=3)
    _, _, error = run(loop=loop)
    assert error is None
    assert there() == {"epoch_4", "last_checkpoint", f"best_acc_epoch_{3 if better else 2}"}
    assert files(tmp_path / "run") == {"epoch_4"}
    verify(f"{URL}/best_acc_epoch_{3 if better else 2}.safetensors")


def test_a_best_save_of_an_earlier_run_is_uploaded_and_removed_once_there_is_a_better_one(run, tmp_path, refuse, there):
    refuse("best_acc_epoch_2")
    hook = CheckpointHook(1, out_dir=OUT, save_best="acc", max_keep_ckpts=1)
    _, _, error = run(loop=scored(tmp_path / "run", hook, 0.1, 0.5, 0.2))
    assert "best_acc_epoch_2" in str(error)
    assert files(tmp_path / "run") == {"best_acc_epoch_2", "epoch_3"}
    refuse()
    for last, scores, best in ((4, (0.2, 0.3), 2), (5, (0.3, 0.7), 5)):
        hook = CheckpointHook(1, out_dir=OUT, save_best="acc", max_keep_ckpts=1)
        _, _, error = run(loop=scored(tmp_path / "run", hook, *scores, max_epochs=last), resume="auto")
        assert error is None
        assert there() == {f"epoch_{last}", "last_checkpoint", f"best_acc_epoch_{best}"}
        assert len(files(tmp_path / "run")) == 1


def test_a_later_file_of_one_name_goes_to_the_store_in_the_place_of_the_first(run, tmp_path, refuse, memory):
    hook = CheckpointHook(by_epoch=False, interval=1, out_dir=OUT, save_last=False)

    def again(event):
        wait(event)
        event.run.set_lr(0.5)

    run(hook, max_iters=2, at=[("before_train_iter", again)])
    before = memory.cat_file("/bucket/run/iter_2.safetensors")
    hook = CheckpointHook(by_epoch=False, interval=1, out_dir=OUT, save_last=False)
    run(hook, max_iters=2, resume=f"{URL}/iter_1.safetensors")
    assert memory.cat_file("/bucket/run/iter_2.safetensors") != before
    assert memory.cat_file("/bucket/run/iter_2.safetensors") == (tmp_path / "run/iter_2.safetensors").read_bytes()


def test_a_killed_run_resumes_from_the_file_that_waits_and_uploads_it(run, job, tmp_path, refuse, there):
    refuse("epoch_2", "epoch_3", "epoch_4", "epoch_5")
    hook = CheckpointHook(1, out_dir=OUT, max_keep_ckpts=1)

    def kill(event):
        wait(event)
        shutil.copytree(tmp_path / "run", tmp_path / "killed")  # the disk as a kill leaves it

    run(hook, max_epochs=5, at=[("after_train_iter", lambda event: event.progress.iter == 13 and kill(event))])
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "killed").rename(tmp_path / "run")
    assert files(tmp_path / "run") == {"epoch_3"}
    refuse()
    began = []
    watch = [("before_train", lambda event: began.append(event.progress.epoch))]
    loop, told, error = run(CheckpointHook(1, out_dir=OUT), max_epochs=5, resume="auto", at=watch)
    assert (began, error) == ([3], None)
    assert outcomes(told)[0] == ("uploaded", "epoch_3")
    assert there() >= {"epoch_3", "epoch_4", "epoch_5", "last_checkpoint"}
    straight = job.loop(work_dir=tmp_path / "straight", max_epochs=5)
    straight.run()
    assert job.same(loop.model.state_dict(), straight.model.state_dict())


def test_a_run_that_has_nothing_left_to_train_uploads_what_waits(run, tmp_path, refuse, there):
    refuse("epoch_2")
    run(CheckpointHook(1, out_dir=OUT), max_epochs=2)
    refuse()
    _, told, error = run(CheckpointHook(1, out_dir=OUT), max_epochs=2, resume="auto")
    assert error is None
    assert outcomes(told) == [("uploaded", "epoch_2")]
    assert there() == {"epoch_1", "epoch_2", "last_checkpoint"}


def test_a_run_without_resume_leaves_the_files_of_another_one_alone(run, tmp_path, refuse, there):
    refuse("epoch_2")
    run(CheckpointHook(1, out_dir=OUT), max_epochs=2)
    refuse()
    _, _, error = run(CheckpointHook(1, out_dir=OUT), max_epochs=1)
    assert error is None
    assert files(tmp_path / "run") == {"epoch_2"}
    assert there() == {"epoch_1", "last_checkpoint"} | {f"/bucket/run-2/{name}" for name in ("epoch_1", "last_checkpoint")}


def test_a_file_that_the_store_does_not_remove_is_logged_and_removed_with_the_next_one(run, monkeypatch, there):
    monkeypatch.setattr(MemoryFileSystem, "rm_file", fails(TimeoutError("no answer")))
    hook = CheckpointHook(1, out_dir=OUT, max_keep_ckpts=1)
    real = [("before_train_epoch", lambda event: (wait(event), event.progress.epoch == 3 and monkeypatch.undo()))]
    with capture_logs() as logs:
        _, _, error = run(hook, max_epochs=4, at=real)
    assert error is None
    assert there() == {"epoch_4", "last_checkpoint"}
    assert [one["path"] for one in logs if "no answer" in str(one.get("error"))][:1] == [f"{URL}/epoch_1.safetensors"]


@pytest.mark.parametrize("exit_code", [0, 75])
def test_a_stop_with_an_exit_code_keeps_it(run, tmp_path, refuse, exit_code):
    refuse("epoch", "iter")
    stop = [("after_train_iter", lambda event: event.progress.iter == 5 and event.run.stop(exit_code=exit_code))]
    with pytest.raises(SystemExit) if exit_code else nullcontext():
        _, _, error = run(CheckpointHook(1, out_dir=OUT, max_keep_ckpts=1), max_epochs=3, at=stop)
        assert error is not None
    assert files(tmp_path / "run") == {"iter_6"}


def test_of_two_stores_both_have_all_before_a_file_goes_here(run, tmp_path, memory):
    hooks = [CheckpointHook(1, out_dir=out, name=name) for name, out in (("a", OUT), ("b", "memory://other"))]
    run(*hooks, max_epochs=4, at=[EACH])
    assert files(tmp_path / "run") <= {"epoch_3", "epoch_4"}
    assert sum("epoch_" in name for name in memory.store) == 8


def test_a_file_that_somebody_else_removes_here_costs_no_other_one(run, tmp_path, refuse, there):
    refuse("epoch_1", "epoch_2")

    def remove(event):
        wait(event)
        if event.progress.epoch == 2:
            (tmp_path / "run/epoch_1.safetensors").unlink()
            refuse()

    with capture_logs() as logs:
        _, _, error = run(CheckpointHook(1, out_dir=OUT), max_epochs=3, at=[("before_train_epoch", remove)])
    assert error is None
    assert there() == {"epoch_2", "epoch_3", "last_checkpoint"}
    assert any("epoch_1" in str(one) and one["log_level"] == "error" for one in logs)


def test_an_error_of_a_handler_of_an_upload_is_told_and_the_uploads_go_on(run, tmp_path, there):
    with capture_logs() as logs:
        _, _, error = run(CheckpointHook(1, out_dir=OUT), max_epochs=2, at=[("checkpoint_uploaded", lambda event: 1 / 0)])
    assert error is None
    assert there() == {"epoch_1", "epoch_2", "last_checkpoint"}
    assert [one["log_level"] for one in logs if one.get("id") == "handler-of-upload-failed"] == ["error", "error"]


def test_while_uploads_are_slower_than_saves_the_store_does_not_grow(run, memory, monkeypatch, there):
    real, most = MemoryFile.commit, []

    def commit(self):
        time.sleep(0.03)
        real(self)
        most.append(len([name for name in memory.store if "epoch_" in name]))

    monkeypatch.setattr(MemoryFile, "commit", commit)
    run(CheckpointHook(1, out_dir=OUT, max_keep_ckpts=1), max_epochs=20)
    assert max(most) <= 3
    assert there() == {"epoch_20", "last_checkpoint"}


def test_an_exception_tells_what_waits(run, tmp_path, refuse):
    refuse("epoch_1")

    def crash(event):
        wait(event)
        assert event.progress.epoch == 0

    with capture_logs() as logs, pytest.raises(AssertionError):
        run(CheckpointHook(1, out_dir=OUT), max_epochs=2, at=[("before_train_epoch", crash)])
    (told,) = [one for one in logs if one.get("id") == "files-wait-for-store"]
    assert told["names"] == [str(tmp_path / "run/epoch_1.safetensors")]


def test_a_wait_for_a_store_is_no_hang(job, tmp_path, memory, monkeypatch):
    """What watches a training sees the thread wait for uploads (``HeartbeatHook``)."""
    real, seen, thread = MemoryFile.commit, [], threading.get_ident()

    def commit(self):
        time.sleep(0.05)  # until the training has ended
        seen.append(steps_awaited(thread))
        real(self)

    monkeypatch.setattr(MemoryFile, "commit", commit)
    job.loop(CheckpointHook(out_dir=OUT), max_epochs=1, work_dir=tmp_path / "run").run()
    assert None not in seen[-2:]


def test_a_save_that_is_asked_for_goes_to_the_store_too(run, there):
    """As one before the machine is taken away: the next one finds it there."""
    ask = [("after_train_iter", lambda event: event.progress.iter == 1 and event.run.checkpoints.save())]
    run(CheckpointHook(out_dir=OUT, save_last=False), max_epochs=1, at=ask)
    assert there() == {"iter_2", "last_checkpoint"}


def test_a_store_that_fails_slowly_is_left_alone_for_a_while(run, tmp_path, memory, monkeypatch, there):
    """At the end it is asked in any case."""
    now, asked, real = [0.0], [], MemoryFile.commit

    def commit(self):
        asked.append(Path(self.path).stem)
        if ("epoch_2" in self.path and now[0] < 60) or ("epoch_7" in self.path and now[0] < 89):
            now[0] += 10.0
            raise TimeoutError("no answer")
        real(self)

    def pass_time(event):
        wait(event)
        now[0] += 9.0

    monkeypatch.setattr(MemoryFile, "commit", commit)
    monkeypatch.setattr("trainbus.eventloop.checkpoint.remote._WAITS", ())
    monkeypatch.setattr("trainbus.hooks.mirror.time", SimpleNamespace(monotonic=lambda: now[0]))
    hook = CheckpointHook(1, out_dir=OUT, max_keep_ckpts=1)
    _, told, error = run(hook, max_epochs=8, at=[("before_train_epoch", pass_time)])
    assert error is None
    assert [name for name in dict.fromkeys(asked) if "epoch" in name] == ["epoch_1", "epoch_2", "epoch_6", "epoch_7", "epoch_8"]
    assert [name for what, name in outcomes(told) if what == "failed"] == [*(f"epoch_{n}" for n in (2, 3, 4, 5, 7, 8))]
    assert there() == {"epoch_8", "last_checkpoint"}


def test_a_best_save_that_arrives_late_does_not_replace_a_later_regular_one(run, tmp_path, refuse, there, memory):
    refuse("epoch_2", "epoch_3")
    back = [("after_train", lambda event: (wait(event), refuse("epoch_3")))]
    hook = CheckpointHook(1, out_dir=OUT, save_best="acc")
    _, _, error = run(loop=scored(tmp_path / "run", hook, 0.1, 0.5, 0.3), at=back)
    assert f"{URL}/epoch_3.safetensors" in str(error)
    assert (tmp_path / "run/last_checkpoint").read_text() == "epoch_3.safetensors"
    assert {"best_acc_epoch_2", "epoch_2"} <= there()
    refuse()
    run(loop=scored(tmp_path / "run", CheckpointHook(1, out_dir=OUT, save_best="acc"), 0.1, max_epochs=4), resume="auto")
    assert memory.cat_file("/bucket/run/last_checkpoint") == b"epoch_4.safetensors"


def test_a_file_that_arrived_without_its_pointer_is_uploaded_again_and_the_pointer_names_what_is_there(
    run, tmp_path, refuse, there, memory
):
    pointers = []

    def watch(event):
        pointers.append(memory.cat_file("/bucket/run/last_checkpoint").decode())
        assert f"/bucket/run/{pointers[-1]}" in memory.store
        refuse(*["last_checkpoint"] * (event.progress.epoch == 1))

    hook = CheckpointHook(1, out_dir=OUT, max_keep_ckpts=1)
    at = [("checkpoint_uploaded", watch), ("checkpoint_failed", watch), ("before_train_epoch", wait)]
    _, told, error = run(hook, max_epochs=3, at=at)
    assert error is None
    assert outcomes(told)[1] == ("failed", "epoch_2")
    assert pointers == [f"epoch_{number}.safetensors" for number in (1, 1, 3)]
    assert there() == {"epoch_3", "last_checkpoint"}
    assert files(tmp_path / "run") == {"epoch_3"}


def test_what_only_the_store_has_stays_until_it_has_what_replaces_it(run, tmp_path, refuse, there):
    run(CheckpointHook(1, out_dir=OUT, max_keep_ckpts=2), max_epochs=3)
    assert there() == {"epoch_2", "epoch_3", "last_checkpoint"}
    shutil.rmtree(tmp_path / "run")  # the run goes on with another disk
    refuse("epoch_4", "epoch_5", "epoch_6")
    _, _, error = run(CheckpointHook(1, out_dir=OUT, max_keep_ckpts=1), max_epochs=6, resume="auto")
    assert error is not None
    assert there() == {"epoch_3", "last_checkpoint"}  # of the two, the newer one
    refuse()
    run(CheckpointHook(1, out_dir=OUT, max_keep_ckpts=1), max_epochs=6, resume="auto")
    assert there() == {"epoch_6", "last_checkpoint"}
