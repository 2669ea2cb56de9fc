"""Ranks whose machines have disks of their own resume from the newest checkpoint that any of them has."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from structlog.testing import capture_logs

from trainbus.hooks import CheckpointHook

from ..training.conftest import damage
from .jobs import make_loop, weights

SENT = "another rank has the newest checkpoint, and sends it"


def train(folder: Path, disks: tuple[str, ...], options: dict[str, Any]) -> tuple[dict[str, torch.Tensor], list[str], int]:
    """Train on the disk of this rank; return the weights, the logged events, and the number of epochs trained here."""
    disk = folder / disks[torch.distributed.get_rank()]
    disk.mkdir(exist_ok=True)
    os.chdir(disk)
    resume = options.pop("resume", "auto")
    loop = make_loop("run", CheckpointHook(1), **options)
    epochs: list[int] = []
    loop.bus.on("before_train_epoch", lambda event: epochs.append(event.progress.epoch))
    with capture_logs() as logs:
        loop.run(resume=resume)
    return weights(loop.model), [entry["event"] for entry in logs], len(epochs)


@pytest.fixture
def run(outcomes, tmp_path):
    """``run("a", "b", **options)`` trains on two ranks with the disks a and b."""
    return lambda *disks, **options: outcomes(train, tmp_path, disks, options)


@pytest.fixture
def whole(run):
    return run("w", "w", epochs=4)[0].value[0]


def assert_resumed(outcomes, whole, *, epochs: int, receivers: tuple[int, ...]) -> None:
    for rank, one in enumerate(outcomes):
        found, told, trained = one.value
        assert trained == epochs, one.output
        assert (SENT in told) == (rank in receivers)
        assert all(torch.equal(found[name], value) for name, value in whole.items())


@pytest.mark.long
def test_a_new_machine_in_the_place_of_rank_0_gets_the_file_of_the_other(run, whole, tmp_path):
    run("a", "b", epochs=2)
    assert not list((tmp_path / "b/run").glob("*.safetensors")), "rank 0 alone writes"
    assert_resumed(run("new", "a", epochs=4), whole, epochs=2, receivers=(0,))
    assert (tmp_path / "new/run/epoch_4.safetensors").exists()


@pytest.mark.long
def test_the_newest_checkpoint_wins_wherever_it_is(run, whole, tmp_path):
    run("a", "b", epochs=3)
    for case, (older, receivers) in enumerate([((True, False), (0,)), ((False, True), (1,)), ((False, False), ())]):
        disks = [f"{case}-{rank}" for rank in range(2)]
        for disk, is_older in zip(disks, older, strict=True):
            shutil.copytree(tmp_path / "a", tmp_path / disk)
            if is_older:
                (tmp_path / disk / "run/epoch_3.safetensors").unlink()
        assert_resumed(run(*disks, epochs=4), whole, epochs=1, receivers=receivers)


@pytest.mark.long
def test_a_damaged_file_is_replaced_by_a_good_copy_on_another_machine(run, whole, tmp_path):
    run("a", "b", epochs=3)
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    damage(tmp_path / "a/run/epoch_3.safetensors")
    assert_resumed(run("a", "copy", epochs=4), whole, epochs=1, receivers=(0,))


@pytest.mark.long
def test_a_given_file_is_sent_to_ranks_that_do_not_have_it(run, whole, tmp_path):
    run("a", "b", epochs=3)
    file = "run/epoch_3.safetensors"
    assert_resumed(run("new", "a", epochs=4, resume=file), whole, epochs=1, receivers=(0,))
    for one in run("new2", "new3", epochs=4, resume=file):
        assert one.error.startswith("CheckpointNotFoundError")


def test_without_any_checkpoint_a_new_run_begins(run, whole):
    assert_resumed(run("a", "b", epochs=4), whole, epochs=4, receivers=())


@pytest.mark.long
def test_spread_tensors_that_a_rank_cannot_read_are_an_error_that_names_it(run, tmp_path):
    run("a", "a", epochs=1, shard=True)
    for one in run("new", "a", epochs=2, shard=True):
        assert one.error.startswith("CheckpointError: rank 1")
        assert "rank 0: no checkpoint" in one.error
        assert "a/run/epoch_1.safetensors" in one.error


class Store(LocalFileSystem):
    """A store that all ranks reach, in a folder; it may refuse what is to be put there."""

    protocol = "shared"
    folder = ""
    down = False

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return f"{cls.folder}/{path.removeprefix('shared://')}" if path.startswith("shared://") else path

    def open(self, *arguments: Any, **options: Any) -> Any:
        if Store.down and "wb" in arguments:
            raise OSError(28, "quota")  # an error that is not tried again
        return super().open(*arguments, **options)

    def put_file(self, *arguments: Any, **options: Any) -> None:
        if Store.down:
            raise OSError(28, "quota")
        super().put_file(*arguments, **options)


def train_to_store(folder: Path, disks: tuple[str, ...], epochs: int, down: bool) -> tuple[Any, list[int], list[str]]:
    """Like ``train``, with a store; return the weights, the epochs trained here, and the names of the kept files."""
    fsspec.register_implementation("shared", Store)
    Store.folder, Store.down = str(folder), down
    disk = folder / disks[torch.distributed.get_rank()]
    disk.mkdir(exist_ok=True)
    os.chdir(disk)
    loop = make_loop("run", CheckpointHook(1, out_dir="shared://store", on_error="log"), epochs=epochs)
    trained: list[int] = []
    loop.bus.on("before_train_epoch", lambda event: trained.append(event.progress.epoch))
    loop.run(resume="auto")
    return weights(loop.model), trained, sorted(file.name for file in Path("run").glob("epoch*"))


@pytest.mark.long
def test_what_waits_on_one_machine_is_resumed_by_all_and_uploaded_by_rank_0(outcomes, whole, tmp_path):
    def run(*disks: str, epochs: int, down: bool = False) -> list[Any]:
        found = outcomes(train_to_store, tmp_path, disks, epochs, down)
        assert [one.error for one in found] == ["", ""], found[0].output
        return [one.value for one in found]

    store = tmp_path / "store/run"
    run("a", "b", epochs=1)
    assert [files for _, _, files in run("a", "b", epochs=2, down=True)] == [["epoch_2.safetensors"], []]
    assert sorted(file.name for file in store.iterdir()) == ["epoch_1.safetensors", "last_checkpoint", "scores.json"]
    for disks in (("b", "a"), ("a", "b")):  # rank numbers change between starts: the first of these only reads
        (_, first, _), (_, second, _) = run(*disks, epochs=2, down=disks[0] == "b")
        assert first == second == []
    assert sorted(file.name for file in store.glob("*.safetensors")) == ["epoch_1.safetensors", "epoch_2.safetensors"]
    assert (store / "last_checkpoint").read_text() == "epoch_2.safetensors"
    for found, trained, files in run("new", "a", epochs=4):
        assert (trained, files) in (([2, 3], ["epoch_4.safetensors"]), ([2, 3], ["epoch_2.safetensors"]))
        assert all(torch.equal(found[name], value) for name, value in whole.items())


def train_in(folder: Path, epochs: int, resume: str | None) -> list[str]:
    """Train with best files in a directory of this rank alone; return the names of these files."""
    disk = folder / f"disk-{torch.distributed.get_rank()}"
    loop = make_loop(disk, CheckpointHook(1, save_best="loss"), epochs=epochs)
    loop.run(resume=resume)
    return [file.name for file in disk.glob("best_*")]


@pytest.mark.long
@pytest.mark.parametrize("empty", [None, 0])
def test_best_scores_are_those_of_rank_0_where_each_rank_has_a_disk_of_its_own(ranks, tmp_path, empty):
    best, nothing = ranks(train_in, tmp_path, 2, None)
    assert len(best) == 1
    assert not nothing
    if empty is not None:  # the machine of rank 0 is a new one: its disk has no best file
        (tmp_path / "disk-0").rename(tmp_path / "disk-1-new")
        (tmp_path / "disk-1-new").rename(tmp_path / "disk-1")
    ranks(train_in, tmp_path, 2, "auto")  # nothing is left to train
    ranks(train_in, tmp_path, 4, "auto")
    assert list((tmp_path / "disk-0").glob("best_*"))
