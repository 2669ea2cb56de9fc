"""Saves of two processes with FSDP2 that a store does not take: they are kept on disk, and the next start uploads them."""

import os
import signal
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from structlog.testing import capture_logs

from trainbus.eventloop import CheckpointError
from trainbus.eventloop.checkpoint import RemotePath, load, load_whole, sharded
from trainbus.eventloop.training.saves import kept_upload
from trainbus.hooks import CheckpointHook

from ..training.conftest import damage
from . import jobs
from .test_sharded import whole

pytestmark = pytest.mark.long


def kept_for(work_dir: str, out_dir: str, refused: list[int], resume: str | None) -> Any:
    """Train with a store that does not take the n-th uploads of rank 1; return what was told, and the error of the run."""
    work_dir = work_dir.format(rank=jobs.rank_and_size()[0])
    loop = jobs.make_loop(work_dir, CheckpointHook(interval=1, out_dir=out_dir), epochs=3, shard=True)
    told: list[tuple[str, str, bool]] = []
    for name in ("committed", "failed", "skipped"):
        loop.bus.on(
            f"checkpoint_{name}",
            lambda event, name=name: told.append((name, Path(event.path).stem, bool(getattr(event, "kept", "")))),
        )
    uploads: list[str] = []

    def refuses(do: Any) -> Any:
        def part(self: Any, directory: Any) -> Any:
            if isinstance(directory, RemotePath):
                uploads.append(str(directory))
                if jobs.rank_and_size()[0] == 1 and len(uploads) in refused:
                    raise CheckpointError("the store does not answer")
            return do(self, directory)

        return part

    for name in ("_write_part", "_link_part"):
        setattr(sharded.Parts, name, refuses(getattr(sharded.Parts, name)))
    try:
        loop.run(resume=resume)
    except CheckpointError as error:
        return told, str(error)
    return told, ""


def left_in(folder: Path) -> set[str]:
    return {one.name.partition("-")[0] for one in folder.iterdir() if one.suffix in (".safetensors", ".shards")}


KEPT = {"kept_sharded_epoch_3.safetensors", "epoch_3"}


@pytest.mark.parametrize(
    ("disks", "refused", "expected"),
    [
        ("one", [2], [("committed", 1), ("failed", 2), ("committed", 3), ("skipped", 2)]),
        ("of {rank}", [2], [("committed", 1), ("failed", 2), ("committed", 3), ("skipped", 2)]),
        ("one", [3], [("committed", 1), ("committed", 2), ("failed", 3), ("committed", 3)]),
        ("of {rank}", [3], [("committed", 1), ("committed", 2), ("failed", 3), ("committed", 3)]),
        ("one", [1, 2], [("failed", 1), ("failed", 2), ("skipped", 1), ("committed", 3), ("skipped", 2)]),
    ],
)
def test_the_work_dir_keeps_a_sharded_save_until_the_store_has_it_or_a_later_one(ranks, tmp_path, disks, refused, expected):
    work, out, store = tmp_path / disks / "work", f"local://{tmp_path}/store", tmp_path / "store/work"
    for told, error in ranks(kept_for, str(work), out, refused, None):
        assert not error
        assert sorted(told) == sorted((name, f"epoch_{number}", name == "failed") for name, number in expected)
    dirs = [tmp_path / disks.format(rank=rank) / "work" for rank in (0, 1)]
    assert not left_in(dirs[0]) | left_in(dirs[1])
    assert load_whole(store / "epoch_3.safetensors")["progress"]["epoch"] == 3
    assert (dirs[0] / "last_checkpoint").read_text() == f"local://{store}/epoch_3.safetensors"


def test_a_sharded_save_that_no_store_took_is_resumed_from_and_goes_to_the_store_later(ranks, tmp_path):
    work, out, store = tmp_path / "work", f"local://{tmp_path}/store", tmp_path / "store/work"
    for told, error in ranks(kept_for, str(work), out, [*range(3, 9)], None):
        assert "kept as" in error
        assert {kept for name, _, kept in told if name == "failed"} == {True}  # also the uploads at the end of the run
    assert left_in(work) == KEPT
    assert (work / "last_checkpoint").read_text() == "kept_sharded_epoch_3.safetensors"
    kept = load_whole(work / "kept_sharded_epoch_3.safetensors")
    for told, error in ranks(kept_for, str(work), out, [], "auto"):
        assert not error
        assert ("committed", "epoch_3", False) in told
    assert not left_in(work)
    sent = load_whole(store / "epoch_3.safetensors")["state_dict"]
    assert all(torch.equal(value, sent[key]) for key, value in kept["state_dict"].items())


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
    for name in ("committed", "failed", "skipped"):
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


MAIN = "kept_sharded_epoch_3.safetensors"
ON_A = {MAIN, *(f"epoch_3.shards/{name}" for name in ("kept.json", "index.safetensors", "__0.safetensors"))}
ON_B = {"epoch_3.shards/kept.json", "epoch_3.shards/__1.safetensors"}


@pytest.fixture
def ended(run, tmp_path):
    """Two ranks with the disks a and b have trained for 3 epochs; the store has not taken the last one. Returns that state."""
    both = run("a", "b", epochs=3, refused=["epoch_3"], resume=None)
    for one in both:
        assert "kept as" in one.error
        assert one.told == [("committed", "epoch_1"), ("committed", "epoch_2"), ("failed", "epoch_3")]
    assert (on(tmp_path / "a"), on(tmp_path / "b")) == (ON_A, ON_B)
    assert {path.name for path in (tmp_path / "store/run").glob("*.safetensors")} == {f"epoch_{n}.safetensors" for n in (1, 2)}
    return both[0].ended


@pytest.mark.parametrize("disks", [("b", "a"), ("b", "new", "a")], ids=str)
def test_what_each_disk_keeps_is_uploaded_by_whoever_has_it_and_resumed_from(run, ended, tmp_path, disks):
    for one in run(*disks, epochs=4):
        assert not one.error
        assert_same(one.began, ended)
        assert one.told == [("committed", "epoch_3"), ("committed", "epoch_4")]
    for disk in disks:
        assert not on(tmp_path / disk)
    tree = load_whole(tmp_path / "store/run/epoch_3.safetensors")
    assert all(torch.equal(tree["state_dict"][key], value) for key, value in ended[1].items())
    assert (tmp_path / "store/run/last_checkpoint").read_text() == "epoch_4.safetensors"


def test_a_run_that_has_nothing_left_to_train_uploads_what_is_kept(run, ended, tmp_path):
    for one in run("b", "a", epochs=3):
        assert_same(one.began or ended, ended)
    url = f"local://{tmp_path}/store/run/epoch_3.safetensors"
    assert (tmp_path / "store/run/last_checkpoint").read_text() == "epoch_3.safetensors"
    assert (tmp_path / "a/run/last_checkpoint").read_text() == url
    assert not on(tmp_path / "a") | on(tmp_path / "b")


@pytest.mark.parametrize(
    ("disks", "lacks"),
    [
        (("a", "new"), "__1.safetensors"),
        (("new", "b"), f"{MAIN}, index.safetensors, __0.safetensors"),
        (("a",), "__1.safetensors"),
        (("b",), f"{MAIN}, index.safetensors, __0.safetensors"),
    ],
    ids=str,
)
def test_without_the_machine_that_has_a_part_the_newest_save_of_the_store_is_resumed(run, ended, tmp_path, disks, lacks):
    seen = run(*disks, epochs=4)
    for one in seen:
        assert not one.error
        assert one.began[0] == 16
        assert one.told == [("committed", "epoch_3"), ("committed", "epoch_4")]
    (told,) = [entry for entry in seen[0].logs if "not complete" in entry["event"]]
    holder = int(disks[0] == "new")
    assert told["lacks"].startswith(f"{lacks}; there is rank {holder} has {tmp_path}/{disks[holder]}/run/")
    for one in run("a", "b", epochs=4):  # the machine is back, and has nothing that the store needs
        assert not one.error
        assert one.told == []
    assert not on(tmp_path / "a") | on(tmp_path / "b")


@pytest.mark.parametrize("disks", [("a", "new"), ("b",)], ids=str)
def test_if_there_is_no_other_save_missing_parts_are_an_error_and_no_new_run(run, tmp_path, disks):
    (before, _) = run("a", "b", epochs=1, refused=["epoch"], resume=None)
    kept = on(tmp_path / "a"), on(tmp_path / "b")
    for one in run(*disks, epochs=2):
        assert one.began is None
        assert "kept_sharded_epoch_1.safetensors" in one.error
        assert f"__{int('b' not in disks)}.safetensors" in one.error
    assert (on(tmp_path / "a"), on(tmp_path / "b")) == kept
    for one in run("b", "a", epochs=2):
        assert_same(one.began, before.ended)


@pytest.mark.parametrize("step", ["_from_first", "_finish"], ids=["before the record", "before the file"])
def test_a_kill_between_the_parts_and_the_file_leaves_the_newest_save_of_the_store(outcomes, run, tmp_path, step):
    options = {"epochs": 3, "refused": ["epoch_2"], "resume": None, "dies": step}
    first, _ = outcomes(on_kill, tmp_path, ("a", "b"), options)
    assert first.exitcode == -signal.SIGKILL
    assert not list((tmp_path / "a/run").glob("kept*"))
    assert any("__0" in name for name in on(tmp_path / "a"))
    for one in run("b", "a", epochs=3):
        assert not one.error
        assert one.began[0] == 8
    assert not on(tmp_path / "a") | on(tmp_path / "b")


def on_kill(folder: Path, disks: tuple[str, ...], options: dict[str, Any]) -> Any:
    """Like ``on_disks``; rank 0 dies at a step of keeping, or of uploading what is kept."""
    step = options.pop("dies")
    owner: Any = kept_upload if step == "sweep" else RemotePath if step.startswith("/") else sharded.Parts
    name = {"sweep": "sweep_kept_shards"}.get(step, "upload" if step.startswith("/") else step)
    real = getattr(owner, name)

    def dies(*args: Any, **more: Any) -> Any:
        path = next((str(one) for one in args if isinstance(one, RemotePath)), "")
        if path.endswith(step) if step.startswith("/") else step != "_finish" or not path:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **more)

    if not jobs.rank_and_size()[0]:
        setattr(owner, name, dies)
    return on_disks(folder, disks, options)


@pytest.mark.parametrize("step", ["/__0.safetensors", "/epoch_3.safetensors", "sweep"])
def test_after_a_kill_during_the_upload_the_next_start_goes_on_with_it(outcomes, run, ended, tmp_path, step):
    first, _ = outcomes(on_kill, tmp_path, ("a", "b"), {"epochs": 4, "dies": step})
    assert first.exitcode == -signal.SIGKILL
    assert on(tmp_path / "a") == ON_A
    for one in run("b", "a", epochs=4):
        assert not one.error
        assert_same(one.began, ended)
    assert not on(tmp_path / "a") | on(tmp_path / "b")


def test_with_work_dirs_of_several_names_the_store_is_that_of_rank_0(run, tmp_path):
    run("a", "b", epochs=2, refused=["epoch_2"], resume=None, name="run-{}")
    for one in run("a", "b", epochs=2, name="run-{}"):
        assert "rank 1: no checkpoint" in one.error  # a resume needs one name, as without an outage
    assert load_whole(tmp_path / "store/run-a/epoch_2.safetensors")["progress"]["epoch"] == 2


def test_a_disk_that_keeps_a_part_tells_which_run_of_a_name_is_the_newest(run, tmp_path):
    run("c", "d", epochs=1, resume=None)
    run("a", "b", epochs=2, refused=["epoch_2"], resume=None)
    assert list((tmp_path / "b/run-2").glob("*.shards/kept.json"))
    for one in run("new", "b", epochs=2):
        assert not one.error
        assert one.began[0] == 8
    assert {path.parent.name for path in tmp_path.glob("store/*/epoch_2.safetensors")} == {"run-2"}


def test_a_kept_save_that_the_store_has_left_behind_is_removed_and_not_resumed(run, ended, tmp_path):
    seen = run("c", "d", epochs=4)
    assert seen[0].began[0] == 16
    for one in run("a", "b", epochs=5):
        assert_same(one.began, seen[0].ended)
        assert one.told == [("committed", "epoch_5")]
    assert not on(tmp_path / "a") | on(tmp_path / "b")


@pytest.mark.parametrize(("disk", "file"), [("b", "__1.safetensors"), ("a", MAIN)])
def test_a_damaged_part_is_told_and_the_newest_save_of_the_store_is_resumed(run, ended, tmp_path, disk, file):
    (path,) = (tmp_path / disk).rglob(file)
    damage(path)
    for one in run("b", "a", epochs=3):
        assert not one.error
        assert one.began[0] == 16
        told = [entry["lacks"] for entry in one.logs if "not complete" in entry["event"]]
        assert all(text.startswith(f"{file} (rank {int(disk == 'a')}: CheckpointDamagedError: {path}") for text in told)
    assert not on(tmp_path / "a") | on(tmp_path / "b")


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
        assert "lacks kept_sharded_epoch_3.safetensors, index.safetensors, __0.safetensors" in one.error
    assert (on(tmp_path / "a"), on(tmp_path / "b")) == (ON_A, ON_B)
    for one in run("b", "new", "a", epochs=4, out_dir=other):
        assert not one.error
        assert_same(one.began, ended)
        assert one.told == [("committed", "epoch_3"), ("committed", "epoch_4")]
    assert not on(tmp_path / "a") | on(tmp_path / "b")
    assert {path.stem for path in (tmp_path / "other/run").glob("*.safetensors")} == {"epoch_3", "epoch_4"}


@pytest.mark.parametrize("disks", [("b", "a"), ("b", "new")], ids=str)
def test_a_run_that_saves_to_no_store_now_does_not_begin_anew_either(run, ended, tmp_path, disks):
    for one in run(*disks, epochs=4, out_dir=None):
        assert one.began is None
        assert f"kept for local://{tmp_path}/store/run/epoch_3.safetensors" in one.error
    assert (on(tmp_path / "a"), on(tmp_path / "b")) == (ON_A, ON_B)


def test_in_one_work_dir_a_kept_save_is_resumed_while_the_store_takes_nothing(run, tmp_path):
    before, _ = run("a", "a", epochs=3, refused=["epoch_3"], resume=None)
    for one in run("a", "a", epochs=4, refused=["epoch_3", "epoch_4"]):
        assert "kept as" in one.error
        assert_same(one.began, before.ended)
    assert "kept_sharded_epoch_4.safetensors" in on(tmp_path / "a")
    assert MAIN not in on(tmp_path / "a")
    for one in run("a", "a", epochs=4):
        assert not one.error
    assert not on(tmp_path / "a")
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
    assert not on(tmp_path / "a") | on(tmp_path / "b")
    store = tmp_path / "store/run"
    assert {path.parent.name for path in store.glob("*/*")} == {load(store / "epoch_3.safetensors")["shards"]}
    assert not (store / "epoch_2.safetensors").exists()
