"""Saves of two processes with FSDP2 that a store does not take: they wait on disk, and the next start uploads them."""

import os
import signal
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from structlog.testing import capture_logs

from trainbus.eventloop import CheckpointError
from trainbus.eventloop.checkpoint import RemotePath, load, load_whole, sharded
from trainbus.hooks import CheckpointHook
from trainbus.hooks.sharded_mirror import ShardedMirror

from ..training.conftest import damage
from . import jobs
from .test_sharded import whole

pytestmark = pytest.mark.long


class Seen(NamedTuple):
    """What a run on one rank did."""

    began: Any
    """The iteration at which it began, with the weights and the optimizer's state; None if it did not begin to train."""
    ended: Any
    """The same at its end."""
    error: str
    logs: list[dict[str, Any]]
    told: list[tuple[str, str]]
    """The outcomes of saves, each with the name, once."""


def on_disks(folder: Path, disks: tuple[str, ...], options: dict[str, Any]) -> Seen:
    """Train on the disk of this rank; the store, a folder that all reach, takes no paths with a ``refused`` text."""
    rank, size = jobs.rank_and_size()
    refused, down = options.get("refused", ()), options.get("down", False)
    out_dir, keep = options.get("out_dir", f"local://{folder}/store"), options.get("keep", -1)
    hook = CheckpointHook(interval=1, out_dir=out_dir, max_keep_ckpts=keep)
    work_dir = folder / disks[rank] / options.get("name", "run").format(disks[rank])
    loop = jobs.make_loop(work_dir, hook, epochs=options["epochs"], shard=size > 1)
    upload, files = RemotePath.upload, RemotePath.files

    def uploads(self: RemotePath, *args: Any, **more: Any) -> None:
        if any(text in str(self) for text in refused):
            raise CheckpointError(f"cannot write {self}: the store is full")
        upload(self, *args, **more)

    def lists(self: RemotePath) -> Any:
        if down:
            raise CheckpointError(f"cannot list {self}: no answer")
        return files(self)

    RemotePath.upload, RemotePath.files = uploads, lists
    seen: list[Any] = [None, None]
    told: list[tuple[str, str]] = []
    for name in ("uploaded", "failed", "skipped"):
        loop.bus.on(f"checkpoint_{name}", lambda event, name=name: told.append((name, Path(event.path).stem)))

    def look(event: Any, at: int) -> None:
        moments = event.run.optimizers["optimizer"].state_dict()["state"]
        states = {index: whole(one) for index, one in moments.items()}
        seen[at] = event.progress.iter, whole(loop.model.state_dict()), states

    loop.bus.on("before_train", lambda event: look(event, 0))
    loop.bus.on("after_train", lambda event: look(event, 1))
    error = ""
    with capture_logs() as logs:
        try:
            loop.run(resume=options.get("resume", "auto"))
        except CheckpointError as caught:
            error = str(caught)
    return Seen(*seen, error, logs, [*dict.fromkeys(told)])


@pytest.fixture
def run(outcomes, tmp_path):
    """``run("a", "b", epochs=3)`` trains on two ranks with the disks a and b; returns what each has seen."""

    def train(*disks: str, **options: Any) -> list[Seen]:
        found = outcomes(on_disks, tmp_path, disks, options, size=len(disks))
        assert [one.error for one in found] == [""] * len(disks), "\n".join(one.output for one in found)
        return [one.value for one in found]

    return train


def assert_same(found: Any, expected: Any) -> None:
    """Compare the iterations, the weights and the optimizer's states, bitwise."""
    assert found[0] == expected[0]
    assert found[1].keys() == expected[1].keys()
    assert all(torch.equal(found[1][key], value) for key, value in expected[1].items())
    assert found[2].keys() == expected[2].keys()
    for index, state in expected[2].items():
        assert all(torch.equal(found[2][index][key], value) for key, value in state.items())


def on(disk: Path) -> set[str]:
    """Return the files of checkpoints on a disk, without tokens and scores."""
    files = [path for path in (disk / "run").rglob("*") if path.is_file() and not path.name.startswith((".", "scores."))]
    found = {path.relative_to(disk / "run").as_posix() for path in files}
    return {f"{name[:7]}{name[16:]}" if ".shards/" in name else name for name in found} - {"last_checkpoint"}


def of(epoch: int, *ranks: int) -> set[str]:
    """Return the files that a disk has of a save, if it is that of these ranks."""
    parts = {f"epoch_{epoch}.shards/{name}" for name in ("committed", *(f"__{rank}.safetensors" for rank in ranks))}
    return parts | ({f"epoch_{epoch}.safetensors", f"epoch_{epoch}.shards/index.safetensors"} if 0 in ranks else set())


def only(epoch: int, *disks: Path) -> bool:
    """Return True if disks have no other save than the newest."""
    return all(name.startswith(f"epoch_{epoch}.") for disk in disks for name in on(disk))


MAIN = "epoch_3.safetensors"
ON_A, ON_B = of(3, 0), of(3, 1)


@pytest.fixture
def ended(run, tmp_path):
    """Two ranks with the disks a and b have trained for 3 epochs; the store has not taken the last one. Returns that state."""
    both = run("a", "b", epochs=3, refused=["epoch_3"], resume=None)
    for one in both:
        assert "kept as" in one.error
        assert one.told == [("uploaded", "epoch_1"), ("uploaded", "epoch_2"), ("failed", "epoch_3")]
    assert (on(tmp_path / "a"), on(tmp_path / "b")) == (ON_A, ON_B)
    assert {path.name for path in (tmp_path / "store/run").glob("*.safetensors")} == {f"epoch_{n}.safetensors" for n in (1, 2)}
    return both[0].ended


@pytest.mark.parametrize("disks", [("b", "a"), ("b", "new", "a")], ids=str)
def test_what_each_disk_keeps_is_uploaded_by_whoever_has_it_and_resumed_from(run, ended, tmp_path, disks):
    for one in run(*disks, epochs=4):
        assert not one.error
        assert_same(one.began, ended)
        assert one.told == [("uploaded", "epoch_3"), ("uploaded", "epoch_4")]
    assert only(4, *(tmp_path / disk for disk in disks))
    tree = load_whole(tmp_path / "store/run/epoch_3.safetensors")
    assert all(torch.equal(tree["state_dict"][key], value) for key, value in ended[1].items())
    assert (tmp_path / "store/run/last_checkpoint").read_text() == "epoch_4.safetensors"


def test_a_run_that_has_nothing_left_to_train_uploads_what_is_kept(run, ended, tmp_path):
    for one in run("b", "a", epochs=3):
        assert_same(one.began or ended, ended)
    assert (tmp_path / "store/run/last_checkpoint").read_text() == "epoch_3.safetensors"


@pytest.mark.parametrize(
    ("disks", "lacks"),
    [
        (("a", "new"), "__1.safetensors"),
        (("new", "b"), "index.safetensors, the file that names it"),
        (("a",), ""),
        (("b",), ""),
    ],
    ids=str,
)
def test_without_the_machine_that_has_a_part_the_newest_save_of_the_store_is_resumed(run, ended, tmp_path, disks, lacks):
    seen = run(*disks, epochs=4)
    for one in seen:
        assert not one.error
        assert one.began[0] == 16
        assert one.told == [("uploaded", "epoch_3"), ("uploaded", "epoch_4")]
    if len(disks) == 2:
        (told,) = [entry for entry in seen[0].logs if "not complete" in entry["event"]]
        holder = int(disks[0] == "new")
        assert told["lacks"].startswith(f"{lacks}; there is rank {holder} has {tmp_path}/{disks[holder]}/run/")
    for one in run("a", "b", epochs=4):  # the machine is back, and has nothing that the store needs
        assert not one.error
        assert one.told == []


@pytest.mark.parametrize("disks", [("a", "new"), ("b",)], ids=str)
def test_if_there_is_no_other_save_missing_parts_are_an_error_and_no_new_run(run, tmp_path, disks):
    (before, _) = run("a", "b", epochs=1, refused=["epoch"], resume=None)
    kept = on(tmp_path / "a"), on(tmp_path / "b")
    for one in run(*disks, epochs=2):
        assert one.began is None
        assert f"{tmp_path}/{disks[0]}/run/epoch_1" in one.error
    assert (on(tmp_path / "a"), on(tmp_path / "b")) == kept
    for one in run("b", "a", epochs=2):
        assert_same(one.began, before.ended)


def test_a_kill_between_the_parts_and_the_file_leaves_the_save_before(outcomes, run, tmp_path):
    options = {"epochs": 3, "resume": None, "dies": "_finish", "at": 2}
    first, _ = outcomes(on_kill, tmp_path, ("a", "b"), options)
    assert first.exitcode == -signal.SIGKILL
    assert not list((tmp_path / "a/run").glob("epoch_2.*"))
    assert any("__0" in name for name in on(tmp_path / "a"))
    for one in run("b", "a", epochs=3):
        assert not one.error
        assert one.began[0] == 8
    assert only(3, tmp_path / "a", tmp_path / "b")


def on_kill(folder: Path, disks: tuple[str, ...], options: dict[str, Any]) -> Any:
    """Like ``on_disks``; rank 0 dies at a step of saving or uploading, when it comes there for the n-th time."""
    step, calls, at = options.pop("dies"), [], options.pop("at", 1)
    owner: Any = {"_finish": sharded.Parts, "_forget_copy": ShardedMirror}.get(step, RemotePath)
    name = "upload" if owner is RemotePath else step
    real = getattr(owner, name)

    def dies(self: Any, *args: Any, **more: Any) -> Any:
        calls.extend([None] if name == step or str(self).endswith(step) else [])
        if len(calls) == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(self, *args, **more)

    if not jobs.rank_and_size()[0]:
        setattr(owner, name, dies)
    return on_disks(folder, disks, options)


@pytest.mark.parametrize("step", ["/__0.safetensors", "/epoch_3.safetensors", "_forget_copy"])
def test_after_a_kill_during_the_upload_the_next_start_goes_on_with_it(outcomes, run, ended, tmp_path, step):
    first, _ = outcomes(on_kill, tmp_path, ("a", "b"), {"epochs": 4, "dies": step})
    assert first.exitcode == -signal.SIGKILL
    assert on(tmp_path / "a") == ON_A
    for one in run("b", "a", epochs=4):
        assert not one.error
        assert_same(one.began, ended)
    assert only(4, tmp_path / "a", tmp_path / "b")


def test_with_work_dirs_of_several_names_the_store_is_that_of_rank_0(run, tmp_path):
    run("a", "b", epochs=2, refused=["epoch_2"], resume=None, name="run-{}")
    for one in run("a", "b", epochs=2, name="run-{}"):
        assert "rank 1: no checkpoint" in one.error  # a resume needs one name, as without an outage
    assert load_whole(tmp_path / "store/run-a/epoch_2.safetensors")["progress"]["epoch"] == 2


def test_a_disk_that_keeps_a_part_tells_which_run_of_a_name_is_the_newest(run, tmp_path):
    run("c", "d", epochs=1, resume=None)
    run("a", "b", epochs=2, refused=["epoch_2"], resume=None)
    assert list((tmp_path / "b/run-2").glob("*.shards/committed"))
    for one in run("new", "b", epochs=2):
        assert not one.error
        assert one.began[0] == 8
    assert {path.parent.name for path in tmp_path.glob("store/*/epoch_2.safetensors")} == {"run-2"}


def test_a_kept_save_that_the_store_has_left_behind_is_removed_and_not_resumed(run, ended, tmp_path):
    seen = run("c", "d", epochs=4)
    assert seen[0].began[0] == 16
    for one in run("a", "b", epochs=5):
        assert_same(one.began, seen[0].ended)
        assert one.told == [("uploaded", "epoch_5")]
    assert only(5, tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize(("disk", "file"), [("b", "__1.safetensors"), ("a", MAIN)])
def test_a_damaged_part_is_told_and_the_newest_save_of_the_store_is_resumed(run, ended, tmp_path, disk, file):
    (path,) = (tmp_path / disk).rglob(file)
    damage(path)
    for one in run("b", "a", epochs=3):
        assert not one.error
        assert one.began[0] == 16
        told = [entry["lacks"] for entry in one.logs if "not complete" in entry["event"]]
        assert all(text.startswith(f"{file} (rank {int(disk == 'a')}: CheckpointDamagedError: {path}") for text in told)
    assert only(3, tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize("fault", [{"refused": ["epoch_3"]}, {"refused": ["epoch_3.safetensors"]}, {"down": True}], ids=str)
def test_while_the_store_is_out_a_start_fails_with_the_ranks_and_their_files(run, ended, tmp_path, fault):
    for one in run("b", "a", epochs=4, **fault):
        assert one.began is None
        assert f"rank 1 has {tmp_path}/a/run/{MAIN}" in one.error
        assert f"rank 0 has {tmp_path}/b/run/epoch_3-" in one.error
    assert (on(tmp_path / "a"), on(tmp_path / "b")) == (ON_A, ON_B)
    for one in run("a", "b", epochs=4):
        assert_same(one.began, ended)


def test_a_run_that_saves_to_another_store_now_uploads_there_and_resumes(run, ended, tmp_path):
    other = f"local://{tmp_path}/other"
    for one in run("b", "new", epochs=4, out_dir=other):  # not a new run
        assert one.began is None
        assert "lacks index.safetensors, the file that names it" in one.error
    assert (on(tmp_path / "a"), on(tmp_path / "b")) == (ON_A, ON_B)
    for one in run("b", "new", "a", epochs=4, out_dir=other):
        assert not one.error
        assert_same(one.began, ended)
        assert one.told == [("uploaded", "epoch_3"), ("uploaded", "epoch_4")]
    assert only(4, tmp_path / "a", tmp_path / "b")
    assert {path.stem for path in (tmp_path / "other/run").glob("*.safetensors")} == {"epoch_3", "epoch_4"}


@pytest.mark.parametrize("disks", [("b", "a"), ("b", "new")], ids=str)
def test_a_run_that_saves_to_no_store_now_does_not_begin_anew_either(run, ended, tmp_path, disks):
    for one in run(*disks, epochs=4, out_dir=None):
        assert one.began is None
        assert f"{tmp_path}/{'a' if 'a' in disks else 'b'}/run/epoch_3" in one.error
    assert (on(tmp_path / "a"), on(tmp_path / "b")) == (ON_A, ON_B)


def test_in_one_work_dir_a_kept_save_is_resumed_while_the_store_takes_nothing(run, tmp_path):
    before, _ = run("a", "a", epochs=3, refused=["epoch_3"], resume=None, keep=1)
    for one in run("a", "a", epochs=4, refused=["epoch_3", "epoch_4"], keep=1):
        assert "kept as" in one.error
        assert_same(one.began, before.ended)
    assert "epoch_4.safetensors" in on(tmp_path / "a")
    assert MAIN not in on(tmp_path / "a")
    for one in run("a", "a", epochs=4):
        assert not one.error
    assert only(4, tmp_path / "a")
    assert load_whole(tmp_path / "store/run/epoch_4.safetensors")["progress"]["epoch"] == 4


def test_in_one_work_dir_a_kept_save_is_resumed_without_a_store_and_a_later_local_one_has_all(run, tmp_path):
    before, _ = run("a", "a", epochs=3, refused=["epoch_3"], resume=None)
    for one in run("a", "a", epochs=4, out_dir=None):
        assert not one.error
        assert_same(one.began, before.ended)
    for one in run("a", "a", epochs=5, out_dir=None):
        assert not one.error
        assert one.began[0] == 32


def test_ranks_on_one_disk_of_several_keep_their_parts_together(run, tmp_path):
    before, *_ = run("a", "a", "b", "b", epochs=2, refused=["epoch_2"], resume=None)
    assert {name for name in on(tmp_path / "b") if "__" in name} == {f"epoch_2.shards/__{n}.safetensors" for n in (2, 3)}
    for one in run("b", "b", "a", epochs=3, keep=1):
        assert_same(one.began, before.ended)
    assert only(3, tmp_path / "a", tmp_path / "b")
    store = tmp_path / "store/run"
    assert {path.parent.name for path in store.glob("*/*")} == {load(store / "epoch_3.safetensors")["shards"]}
    assert not (store / "epoch_2.safetensors").exists()
