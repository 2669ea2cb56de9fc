"""Checkpoints in stores that fsspec reaches: complete under their names or not there, and every failure loud."""

import pickle
import sys
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from structlog.testing import capture_logs

from trainbus.eventloop.checkpoint import (
    STATE_FILE,
    TEMPORARY_PREFIX,
    AsyncSaver,
    RemotePath,
    as_path,
    commit_bytes,
    commit_folder,
    inspect,
    link,
    list_directories,
    list_files,
    load,
    outline,
    remove,
    save,
    symlink,
    verify,
)
from trainbus.eventloop.errors import CheckpointDamagedError, CheckpointError, ConfigurationError

from ..failing import fails
from ..waiting import meanwhile
from .trees import canonical


class Failing(MemoryFileSystem):
    """Counts what is asked of it, and fails one of it."""

    protocol = "failing"
    cachable = True
    calls: ClassVar[list[str]] = []
    fail_at: ClassVar[int] = -1
    error: ClassVar[Exception] = TimeoutError("no answer")

    def __getattribute__(self, name: str) -> Any:
        if name in ("info", "open", "mv", "pipe_file", "cp_file", "rm_file", "cat_file", "ls", "makedirs"):
            Failing.calls.append(name)
            if len(Failing.calls) - 1 == Failing.fail_at:
                raise Failing.error
        return super().__getattribute__(name)


@pytest.fixture(autouse=True)
def nothing_fails(memory: MemoryFileSystem) -> None:
    fsspec.register_implementation("failing", Failing, clobber=True)
    Failing.fail_at = -1


def tree(value: float = 1.0) -> dict[str, Any]:
    return {"weight": torch.full((300, 100), value), "step": 3, "none": torch.empty(0)}


def test_a_url_can_be_saved_loaded_verified_and_described(memory: MemoryFileSystem, tmp_path: Path) -> None:
    url = "memory://bucket/run/a.safetensors"
    with pytest.raises(FileNotFoundError):
        load(url)
    with AsyncSaver() as saver:
        info = saver.save(tree(), url).result(30)
    assert str(info.path) == url
    assert info.bytes == memory.info("/bucket/run/a.safetensors")["size"]
    assert canonical(load(url)) == canonical(tree())
    verify(url)
    assert inspect(url).digest == info.digest
    assert outline(url)["weight"].shape == (300, 100)
    save(tree(), tmp_path / "a.safetensors")
    content = bytearray(memory.cat_file("/bucket/run/a.safetensors"))
    assert content == (tmp_path / "a.safetensors").read_bytes()
    content[5000] ^= 1
    memory.pipe_file("/bucket/run/a.safetensors", bytes(content))
    with pytest.raises(CheckpointDamagedError, match=r"memory://bucket/run/a\.safetensors"):
        load(url)


@pytest.mark.parametrize("error", [PermissionError("not yours"), OSError(5, "down"), RuntimeError("HTTP 503")])
def test_a_failed_write_keeps_the_existing_file(memory: MemoryFileSystem, error: Exception) -> None:
    url = "failing://bucket/a.safetensors"
    save(tree(1.0), url)
    Failing.error = error
    failures = 0
    for at in range(100):
        Failing.calls.clear()
        Failing.fail_at = at
        try:
            save(tree(2.0), url)
        except CheckpointError as failure:
            Failing.fail_at = -1
            failures += 1
            assert failure.__cause__ is error
            assert "a.safetensors" in str(failure)
            # Only what fails after the name was given, the last comparison of sizes, finds the new file there.
            assert load(url)["weight"][0, 0] in ((1.0, 2.0) if "mv" in Failing.calls[:at] else (1.0,))
            assert [name for name in memory.store if TEMPORARY_PREFIX in name] == []
            save(tree(1.0), url)
        else:
            break
    assert failures >= 3
    Failing.fail_at = -1
    assert load(url)["weight"][0, 0] == 2.0


@pytest.mark.parametrize(
    ("error", "tries"), [(TimeoutError("no answer"), 4), (ConnectionResetError("gone"), 4), (OSError("quota"), 1)]
)
@pytest.mark.parametrize(
    "put", [lambda: save(tree(), "memory://b/a.safetensors"), lambda: commit_bytes("memory://b/last_checkpoint", b"a")]
)
def test_what_passes_is_tried_again_a_few_times(memory, monkeypatch: pytest.MonkeyPatch, put, error, tries) -> None:
    """A store whose library does not do so is asked again, after waits that grow."""
    waits: list[float] = []
    monkeypatch.setattr("trainbus.eventloop.checkpoint.remote.time.sleep", waits.append)
    real, faults = MemoryFileSystem.info, [error] * (tries - 1)

    def info(self: MemoryFileSystem, path: str, **options: Any) -> dict[str, Any]:
        if faults:
            raise faults.pop()
        return real(self, path, **options)

    monkeypatch.setattr(MemoryFileSystem, "info", info)
    put()
    assert len(waits) == tries - 1
    assert waits == sorted(waits)
    faults[:] = [error] * tries
    with pytest.raises(CheckpointError, match=str(error)):
        put()
    assert not faults


def test_an_upload_that_is_too_short_never_gets_the_name(memory: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    real = MemoryFileSystem.info

    def short(self: MemoryFileSystem, path: str, **options: Any) -> dict[str, Any]:
        found = real(self, path, **options)
        return found | {"size": found["size"] - 1} if TEMPORARY_PREFIX in path else found

    monkeypatch.setattr(MemoryFileSystem, "info", short)
    with pytest.raises(CheckpointError, match="store"):
        save(tree(), "failing://bucket/a.safetensors")
    assert list(memory.store) == []


def test_an_upload_is_not_part_of_a_transaction_of_someone_else(memory: MemoryFileSystem) -> None:
    with memory.transaction:
        pass
    save(tree(), "memory://bucket/a.safetensors")
    assert not memory.transaction.files
    verify("memory://bucket/a.safetensors")


def test_a_second_name_is_copied_within_the_store_and_moved_between_places(memory: MemoryFileSystem, tmp_path: Path) -> None:
    local, back = tmp_path / "l.safetensors", tmp_path / "back.safetensors"
    remote, other = as_path("memory://b/r.safetensors"), as_path("failing://b/o.safetensors")
    save(tree(), local)
    link(local, remote)
    link(remote, remote.with_name("best.safetensors"))
    link(remote, other)
    link(other, back)
    assert back.read_bytes() == local.read_bytes()
    assert memory.cat_file("/b/best.safetensors") == local.read_bytes()


def test_removing_a_missing_file_is_allowed_and_a_refusal_or_a_missing_bucket_is_an_error(monkeypatch) -> None:
    path = as_path("failing://bucket/a.safetensors")
    remove(path)
    Failing.calls.clear()
    Failing.fail_at, Failing.error = 0, PermissionError("not yours")
    with pytest.raises(CheckpointError, match=r"failing://bucket/a.safetensors: not yours"):
        remove(path)
    monkeypatch.setattr(MemoryFileSystem, "open", fails(FileNotFoundError("the bucket does not exist")))
    with pytest.raises(CheckpointError, match="bucket"):
        save(tree(), "memory://bucket/a.safetensors")


def test_a_file_url_is_a_path(tmp_path: Path) -> None:
    assert as_path(f"file://{tmp_path}/a%20b.safetensors") == tmp_path / "a b.safetensors"
    save(tree(), f"file://{tmp_path}/a%20b.safetensors")
    verify(tmp_path / "a b.safetensors")
    assert as_path(f"file:{tmp_path}/a%20b") == tmp_path / "a%20b"


def test_a_remote_path_has_parts_and_is_picklable() -> None:
    path = as_path("memory://bucket/run/") / "epoch_3.safetensors"
    assert isinstance(path, RemotePath)
    assert (path.name, path.stem, path.suffix) == ("epoch_3.safetensors", "epoch_3", ".safetensors")
    assert str(path.parent) == "memory://bucket/run"
    assert pickle.loads(pickle.dumps(path)) == path  # noqa: S301
    assert len({path, as_path("memory://bucket/run/epoch_3.safetensors")}) == 1


def test_without_fsspec_the_error_names_the_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(ConfigurationError, match=r"trainbus\[remote\]"):
        as_path("s3://bucket/run")
    monkeypatch.undo()
    with pytest.raises(ConfigurationError, match="nowhere"):
        as_path("nowhere://bucket/run")


def test_a_symbolic_link_replaces_what_had_its_name_and_without_them_it_is_a_hard_link(tmp_path, monkeypatch):
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
    symlink(tmp_path / "a", tmp_path / "last")
    symlink(tmp_path / "b", tmp_path / "last")
    assert ((tmp_path / "last").readlink(), (tmp_path / "last").read_text()) == (Path("b"), "b")
    symlink(tmp_path / "gone", tmp_path / "last")  # keeps what it names
    assert (tmp_path / "last").read_text() == "b"
    (tmp_path / "folder").mkdir()
    with capture_logs() as logs:
        symlink(tmp_path / "a", tmp_path / "folder")
    assert [one["path"] for one in logs] == [str(tmp_path / "folder")]
    assert (tmp_path / "folder").read_text() == "a"
    monkeypatch.setattr(Path, "symlink_to", fails(OSError("not here")))
    symlink(tmp_path / "a", tmp_path / "last")
    assert (tmp_path / "last").samefile(tmp_path / "a")
    assert not (tmp_path / "last").is_symlink()


def test_a_folder_that_cannot_be_replaced_keeps_its_name(tmp_path, monkeypatch):
    old, written = tmp_path / "checkpoint-1", tmp_path / "written"
    for folder, text in ((old, b"old"), (written, b"new")):
        folder.mkdir()
        (folder / STATE_FILE).write_bytes(text)
    rename = Path.rename

    def fail(self, target):
        if self == written:
            raise OSError(28, "No space left on device")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(CheckpointError, match="No space left"):
        commit_folder(written, old)
    assert (old / STATE_FILE).read_bytes() == b"old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-1", "written"]


def test_a_file_without_our_digest_is_compared_whole(tmp_path, memory):
    """Files of torch.save have equal ends: what another process has written is not taken for our own."""
    one, other = tmp_path / "one.ckpt", tmp_path / "other.ckpt"
    one.write_bytes(b"a" * 100 + b"end."), other.write_bytes(b"b" * 100 + b"end.")
    path = as_path("memory://bucket/x.ckpt")
    assert isinstance(path, RemotePath)
    path.upload(one, create=True)
    path.upload(one, create=True)  # as after an answer that was lost
    with pytest.raises(CheckpointError, match="it exists"):
        path.upload(other, create=True)
    assert memory.cat_file("/bucket/x.ckpt") == one.read_bytes()


def test_a_directory_that_another_process_removes_is_listed_as_it_is_or_as_empty(tmp_path):
    def come_and_go():
        (place / "one").mkdir(parents=True)
        (place / "one").rmdir()
        place.rmdir()

    place = tmp_path / "place"
    with meanwhile(come_and_go):
        for _ in range(3000):
            assert list_files(place) == []
            assert list_directories(place) in ([], [place / "one"])
    place.touch()
    assert list_files(place) == list_directories(place) == []


@pytest.mark.parametrize("target", ["loop", "file/below", "gone", "file", "folder"])
def test_a_link_is_listed_as_a_file_unless_it_leads_to_a_directory(tmp_path, target):
    (tmp_path / "place").mkdir()
    (tmp_path / "place/loop").symlink_to(f"../{target}" if target != "loop" else target)
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    assert [path.name for path, _ in list_files(tmp_path / "place")] == ["loop"] * (target != "folder")
    assert list_directories(tmp_path / "place") == []
