"""A store that does not take a save ends no run with a work dir: the file is kept there, and uploaded later."""

import errno
import json
import os
import shutil
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem
from structlog.testing import capture_logs

from trainbus.eventloop import CheckpointError
from trainbus.eventloop.checkpoint import load, verify
from trainbus.eventloop.training.saves import capture
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
    """``run(hooks, **options)`` trains in ``tmp_path / "run"``; returns the loop, its events of checkpoints and its error."""

    def train(*hooks, at=(), resume=None, **options):
        loop = options.pop("loop", None) or job.loop(*hooks, work_dir=tmp_path / "run", **options)
        told = []
        for name in ("checkpoint_committed", "checkpoint_failed", "checkpoint_skipped"):
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


@pytest.mark.parametrize("on_error", ["raise", "log"])
def test_the_run_goes_on_says_so_each_time_and_keeps_the_newest_save_which_a_resume_uploads(
    run, tmp_path, refuse, there, on_error, job
):
    refuse("epoch_2", "epoch_3")
    hook = CheckpointHook(1, out_dir=OUT, on_error=on_error)
    with capture_logs() as logs:
        _, told, error = run(hook, max_epochs=3)
    kept = tmp_path / "run/kept_epoch_3.safetensors"
    due, again = outcomes(told)[:4], outcomes(told)[4:]
    assert due == [("committed", "epoch_1"), ("failed", "epoch_2"), ("skipped", "epoch_2"), ("failed", "epoch_3")]
    assert set(again) == {("failed", "epoch_3")}, "the last try"
    keeps = [event.kept for what, event in told if what == "failed"]
    assert keeps == [str(kept.with_stem("kept_epoch_2")), *[str(kept)] * (1 + len(again))]
    said = [one["kept"] for one in logs if one["log_level"] == "error" and "kept" in one]
    assert said == [*keeps, str(kept)], "and what is left at the end"
    assert (error is None) == (on_error == "log")
    if error is not None:
        assert all(text in str(error) for text in ("quota", f"{URL}/epoch_3.safetensors", str(kept)))
    assert files(tmp_path / "run") == {"kept_epoch_3"}
    assert there() == {"epoch_1", "last_checkpoint"}
    assert (tmp_path / "run/last_checkpoint").read_text() == kept.name
    refuse()
    loop, told, error = run(CheckpointHook(1, out_dir=OUT, max_keep_ckpts=2), max_epochs=4, resume="auto")
    assert error is None
    assert outcomes(told)[:2] == [("committed", "epoch_3"), ("committed", "epoch_4")]
    assert there() == {"epoch_3", "epoch_4", "last_checkpoint"}
    assert (tmp_path / "run/last_checkpoint").read_text() == f"{URL}/epoch_4.safetensors"
    assert not files(tmp_path / "run")
    assert not (tmp_path / "run/kept.json").exists()
    straight = job.loop(work_dir=tmp_path / "straight", max_epochs=4)
    straight.run()
    assert job.same(loop.model.state_dict(), straight.model.state_dict())


def test_a_save_that_the_work_dir_keeps_holds_no_memory(run, refuse, monkeypatch):
    refuse("epoch_")
    staged, held, real = [], [], capture.stage

    def stage(*args, **options):
        staged.append(real(*args, **options))
        return staged[-1]

    monkeypatch.setattr(capture, "stage", stage)
    count = [("checkpoint_failed", lambda event: held.append(sum(not one.released for one in staged)))]
    run(CheckpointHook(1, out_dir=OUT, on_error="log"), max_epochs=3, at=count)
    assert held[:3] == [0, 0, 0]


def test_a_store_that_comes_back_gets_the_next_save_and_the_kept_file_goes(run, tmp_path, refuse, there):
    refuse("epoch_2", "epoch_3")
    seen = []
    watch = [
        (name, lambda event: seen.append(files(tmp_path / "run"))) for name in ("checkpoint_failed", "checkpoint_committed")
    ]
    _, told, error = run(CheckpointHook(1, out_dir=OUT), max_epochs=4, at=watch)
    assert error is None
    assert seen == [set(), {"kept_epoch_2"}, {"kept_epoch_3"}, set()]
    assert there() == {"epoch_1", "epoch_4", "last_checkpoint"}
    assert not files(tmp_path / "run")
    assert ("skipped", "epoch_3") in outcomes(told)


def test_a_store_that_comes_back_at_the_end_gets_the_newest_save_its_pointer_and_the_published_copy(
    run, tmp_path, refuse, there, memory
):
    refuse("epoch_2")
    back = [("after_train", lambda event: (event.run.wait_for_saves(), refuse()))]
    hook = CheckpointHook(1, out_dir=OUT, save_last=True, published_keys="state_dict")
    _, told, error = run(hook, max_epochs=2, at=back)
    assert error is None
    assert outcomes(told)[-1] == ("committed", "epoch_2")
    assert memory.cat_file("/bucket/run/last_checkpoint") == b"epoch_2.safetensors"
    assert (tmp_path / "run/last_checkpoint").read_text() == f"{URL}/epoch_2.safetensors"
    assert any(name.startswith("epoch_2-") for name in there())
    assert not files(tmp_path / "run")


@pytest.mark.parametrize(("k", "best"), [(1, {4}), (2, {3, 4}), (3, {2, 3, 4}), (-1, {1, 2, 3, 4, 5})])
def test_a_store_that_comes_back_gets_the_k_best_files(tmp_path, refuse, there, k, best):
    """Those that are no longer among them are given up while it is away."""
    hook = CheckpointHook(out_dir=OUT, save_best="acc", save_top_k=k, save_last=False)
    loop = scored(tmp_path / "run", hook, 0.1, 0.2, 0.3, 0.4, 0.05)
    kept = []
    refuse("best_acc_epoch_2", "best_acc_epoch_3", "best_acc_epoch_4")
    loop.bus.on("checkpoint_failed", lambda event: kept.append(len(files(tmp_path / "run"))))
    loop.bus.on("after_train", lambda event: (event.run.wait_for_saves(), refuse()))
    loop.run()
    assert max(kept) <= (k if k > 0 else 3) + 1
    assert there() == {f"best_acc_epoch_{n}" for n in best} | {"last_checkpoint"}
    assert not files(tmp_path / "run")
    assert loop.best.score == 0.4


@pytest.mark.parametrize("on_error", ["raise", "log"])
def test_no_older_file_is_published_in_the_place_of_the_newest(run, refuse, there, on_error, tmp_path):
    """With a work dir the newest is kept, and without one it is lost."""
    refuse("epoch_2")
    hook = CheckpointHook(1, out_dir=OUT, published_keys="state_dict", on_error=on_error)
    with capture_logs() as logs:
        run(hook, max_epochs=2)
    assert there() == {"epoch_1", "last_checkpoint"}
    assert [one["path"] for one in logs if one["event"].startswith("not published")] == [f"{URL}/epoch_2.safetensors"]


def test_a_save_that_is_lost_is_not_replaced_by_an_older_published_one(job, refuse, memory):
    refuse("epoch_2")
    with capture_logs() as logs:
        job.loop(CheckpointHook(1, out_dir=URL, published_keys="state_dict", on_error="log"), max_epochs=2).run()
    assert [one["path"] for one in logs if one["event"].startswith("not published")] == [f"{URL}/epoch_2.safetensors"]
    assert not [name for name in memory.store if "epoch_1-" in name]


def test_without_a_work_dir_a_failed_upload_ends_the_run(job, refuse):
    refuse("epoch_2")
    with pytest.raises(CheckpointError, match="quota"):
        job.loop(CheckpointHook(1, out_dir=URL), max_epochs=3).run()


@pytest.mark.parametrize("down", ["local", "store"])
def test_a_failure_of_one_of_two_places_costs_the_other_nothing(run, tmp_path, refuse, there, down, monkeypatch):
    hooks = CheckpointHook(1, max_keep_ckpts=1), CheckpointHook(1, out_dir=OUT, name="there")
    if down == "store":
        refuse("epoch_2")
        _, _, error = run(*hooks, max_epochs=3)
        assert error is None
        assert files(tmp_path / "run") == {"epoch_3"}
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
    assert ("committed", "epoch_2") in outcomes(told)
    assert "epoch_2" in there()


def test_of_two_stores_each_gets_what_it_takes_and_the_kept_file_is_a_link_to_a_local_one(run, tmp_path, refuse, memory):
    refuse("bucket/run/epoch_2")
    hooks = [CheckpointHook(1, out_dir=out, name=name) for name, out in (("a", OUT), ("b", "memory://other"))]
    links = []
    watch = [("checkpoint_failed", lambda event: links.append(Path(event.kept).samefile(tmp_path / "run/epoch_2.safetensors")))]
    _, _, error = run(*hooks, CheckpointHook(1, name="c"), max_epochs=2, at=watch)
    assert "bucket/run/epoch_2" in str(error)
    assert "other" not in str(error)
    assert links
    assert all(links)
    assert "/other/run/epoch_2.safetensors" in memory.store
    assert json.loads((tmp_path / "run/kept.json").read_text()) == {"kept_epoch_2.safetensors": [f"{URL}/epoch_2.safetensors"]}


@pytest.mark.parametrize("better", [True, False])
def test_a_best_save_is_kept_until_the_store_has_it_or_a_better_one(run, tmp_path, refuse, there, better):
    """The regular file of the same state is replaced by the next one; the best file is not."""
    refuse("epoch_2")
    hook = CheckpointHook(1, out_dir=OUT, max_keep_ckpts=1, save_best="acc")
    loop = scored(tmp_path / "run", hook, 0.1, 0.5, 0.6 if better else 0.3, 0.2)
    loop.bus.on("after_train_epoch", lambda event: (event.run.wait_for_saves(), refuse()), priority=100, once=3)
    _, _, error = run(loop=loop)
    assert error is None
    assert there() == {"epoch_4", "last_checkpoint", f"best_acc_epoch_{3 if better else 2}"}
    assert not files(tmp_path / "run")
    verify(f"{URL}/best_acc_epoch_{3 if better else 2}.safetensors")


def test_a_best_save_of_an_earlier_run_is_uploaded_and_removed_once_there_is_a_better_one(run, tmp_path, refuse, there):
    refuse("best_acc_epoch_2")
    hook = CheckpointHook(1, out_dir=OUT, save_best="acc", max_keep_ckpts=1)
    _, _, error = run(loop=scored(tmp_path / "run", hook, 0.1, 0.5, 0.2))
    assert "best_acc_epoch_2" in str(error)
    assert files(tmp_path / "run") == {"kept_best_acc_epoch_2"}
    refuse()
    for last, scores, best in ((4, (0.2, 0.3), 2), (5, (0.3, 0.7), 5)):
        hook = CheckpointHook(1, out_dir=OUT, save_best="acc", max_keep_ckpts=1)
        _, _, error = run(loop=scored(tmp_path / "run", hook, *scores, max_epochs=last), resume="auto")
        assert error is None
        assert there() == {f"epoch_{last}", "last_checkpoint", f"best_acc_epoch_{best}"}
        assert not files(tmp_path / "run")


def test_a_second_failure_of_one_name_keeps_the_later_file(run, tmp_path, refuse):
    """A handler asks for one name twice, with two states."""
    refuse("mine")

    def ask(event):
        event.run.request_save("mine.safetensors", directory=URL)

    _, _, error = run(max_epochs=2, at=[("after_train_epoch", ask)])
    (kept,) = files(tmp_path / "run")
    assert kept == "kept_mine-2"
    assert kept in str(error)
    assert load(tmp_path / f"run/{kept}.safetensors")["progress"]["epoch"] == 2
    assert (tmp_path / "run/last_checkpoint").read_text() == "kept_mine-2.safetensors"


def test_a_killed_run_resumes_from_the_kept_file_and_uploads_it(run, job, tmp_path, refuse, there):
    refuse("epoch_2", "epoch_3", "epoch_4", "epoch_5")
    hook = CheckpointHook(1, out_dir=OUT)

    def kill(event):
        event.run.wait_for_saves()
        shutil.copytree(tmp_path / "run", tmp_path / "killed")  # the disk as a kill leaves it

    run(hook, max_epochs=5, at=[("after_train_iter", lambda event: event.progress.iter == 13 and kill(event))])
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "killed").rename(tmp_path / "run")
    assert files(tmp_path / "run") == {"kept_epoch_3"}
    refuse()
    began = []
    watch = [("before_train", lambda event: began.append(event.progress.epoch))]
    loop, told, error = run(CheckpointHook(1, out_dir=OUT), max_epochs=5, resume="auto", at=watch)
    assert (began, error) == ([3], None)
    assert outcomes(told)[0] == ("committed", "epoch_3")
    assert there() == {"epoch_1", "epoch_3", "epoch_4", "epoch_5", "last_checkpoint"}
    straight = job.loop(work_dir=tmp_path / "straight", max_epochs=5)
    straight.run()
    assert job.same(loop.model.state_dict(), straight.model.state_dict())


def test_a_run_without_resume_leaves_kept_files_of_another_one_alone(run, tmp_path, refuse, there):
    refuse("epoch_2")
    run(CheckpointHook(1, out_dir=OUT), max_epochs=2)
    refuse()
    _, _, error = run(CheckpointHook(1, out_dir=OUT), max_epochs=1)
    assert error is None
    assert files(tmp_path / "run") == {"kept_epoch_2"}
    assert there() == {"epoch_1", "last_checkpoint"} | {f"/bucket/run-2/{name}" for name in ("epoch_1", "last_checkpoint")}


def test_a_file_that_the_store_does_not_remove_is_logged_and_removed_with_the_next_one(run, monkeypatch, there):
    monkeypatch.setattr(MemoryFileSystem, "rm_file", fails(TimeoutError("no answer")))
    hook = CheckpointHook(1, out_dir=OUT, max_keep_ckpts=1)
    real = [
        ("before_train_epoch", lambda event: (event.run.wait_for_saves(), event.progress.epoch == 3 and monkeypatch.undo()))
    ]
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
        _, _, error = run(CheckpointHook(1, out_dir=OUT), max_epochs=3, at=stop)
        assert error is not None
    assert files(tmp_path / "run") == {"kept_iter_6"}


def test_a_store_that_fails_slowly_is_left_alone_for_a_while(run, tmp_path, memory, monkeypatch, there):
    """So a training that saves often does not wait for it each time. At the end it is asked in any case."""
    now, asked, real = [0.0], [], MemoryFile.commit

    def commit(self):
        asked.append(Path(self.path).stem)
        if "epoch_2" in self.path or "epoch_7" in self.path:
            now[0] += 10.0
            raise TimeoutError("no answer")
        real(self)

    def pass_time(event):
        event.run.wait_for_saves()
        now[0] += 9.0

    monkeypatch.setattr(MemoryFile, "commit", commit)
    monkeypatch.setattr("trainbus.eventloop.checkpoint.remote._WAITS", ())
    clock = SimpleNamespace(monotonic=lambda: now[0], perf_counter=time.perf_counter)
    monkeypatch.setattr("trainbus.eventloop.training.saves.write.time", clock)
    _, told, error = run(CheckpointHook(1, out_dir=OUT), max_epochs=8, at=[("before_train_epoch", pass_time)])
    assert error is None
    assert [name for name in dict.fromkeys(asked) if "epoch" in name] == ["epoch_1", "epoch_2", "epoch_6", "epoch_7", "epoch_8"]
    assert [name for what, name in outcomes(told) if what == "failed"] == [*(f"epoch_{n}" for n in (2, 3, 4, 5, 7, 8))]
    assert there() == {"epoch_1", "epoch_6", "epoch_8", "last_checkpoint"}


def test_a_best_save_that_arrives_late_does_not_replace_a_later_regular_one(run, tmp_path, refuse, there):
    refuse("epoch_2", "epoch_3")
    back = [("after_train", lambda event: (event.run.wait_for_saves(), refuse("epoch_3")))]
    hook = CheckpointHook(1, out_dir=OUT, save_best="acc")
    _, _, error = run(loop=scored(tmp_path / "run", hook, 0.1, 0.5, 0.3), at=back)
    assert f"{URL}/epoch_3.safetensors" in str(error)
    (kept,) = files(tmp_path / "run")
    assert kept.startswith("kept_epoch_3")
    assert (tmp_path / "run/last_checkpoint").read_text() == f"{kept}.safetensors"
    assert "best_acc_epoch_2" in there()


def test_a_file_that_arrived_without_its_pointer_is_removed_with_the_next_one(run, tmp_path, refuse, there, memory):
    """It counts as not saved, and is kept; the pointer goes on naming a file that is there."""
    pointers = []

    def watch(event):
        pointers.append(memory.cat_file("/bucket/run/last_checkpoint").decode())
        assert f"/bucket/run/{pointers[-1]}" in memory.store
        refuse(*["last_checkpoint"] * (event.progress.epoch == 1))

    hook = CheckpointHook(1, out_dir=OUT, max_keep_ckpts=1)
    at = [("checkpoint_committed", watch), ("checkpoint_failed", watch)]
    _, told, error = run(hook, max_epochs=3, at=at)
    assert error is None
    assert outcomes(told)[1] == ("failed", "epoch_2")
    assert pointers == [f"epoch_{number}.safetensors" for number in (1, 1, 3)]
    assert there() == {"epoch_3", "last_checkpoint"}
    assert not files(tmp_path / "run")
