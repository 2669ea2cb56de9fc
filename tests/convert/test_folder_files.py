import sys
import threading
import types

import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file
from safetensors.torch import save_file as safe_save_file
from structlog.testing import capture_logs

from trainbus.convert import FolderFiles, verify_folder
from trainbus.eventloop.checkpoint import AsyncSaver, stage
from trainbus.eventloop.errors import CheckpointDamagedError, CheckpointError

from ..checkpoint.trees import canonical
from ..waiting import on_threads

WEIGHTS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(5, dtype=torch.bfloat16), "c": torch.zeros(0)}


def library(folder):
    """Stands for the code of a library, which knows nothing of us."""
    (folder / "inner").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    safetensors.torch.save_file(WEIGHTS, str(folder / "model.safetensors"), metadata={"format": "pt", "mine": "yes"})
    safe_save_file(WEIGHTS, folder / "inner" / "adapter.safetensors", {"format": "pt"})
    torch.save({"state": {0: {"step": torch.tensor(3.0)}}, "args": threading.local}, folder / "optimizer.pt")


@pytest.fixture
def written(tmp_path):
    files = FolderFiles(tmp_path / "temporary")
    with files.recorded():
        library(tmp_path / "temporary")
    info = files.write(stage(files.tree), tmp_path / "final")
    return tmp_path / "final", info


def test_the_files_are_those_of_the_library(tmp_path, written, monkeypatch):
    monkeypatch.setitem(globals(), "safe_save_file", safetensors.torch.save_file)
    library(tmp_path / "plain")
    ours, plain = written[0], tmp_path / "plain"
    for name in ("model.safetensors", "inner/adapter.safetensors"):
        assert canonical(load_file(ours / name)) == canonical(load_file(plain / name))
    with safetensors.safe_open(ours / "model.safetensors", "pt") as opened:
        assert opened.metadata() == {"format": "pt", "mine": "yes"}
    back = torch.load(ours / "optimizer.pt", weights_only=False)
    assert (back["state"][0]["step"].item(), back["args"]) == (3.0, threading.local)
    assert (ours / "config.json").read_text() == "{}"


def test_a_folder_that_is_replaced_loses_no_file_of_another_origin(tmp_path, written):
    final, _ = written
    for former in ("former-final", "former-final-2"):
        (final / "inner" / "notes.txt").write_text("precious")
        files = FolderFiles(tmp_path / "temporary")
        files.folder.mkdir()  # now without most of the files
        with capture_logs() as logs:
            files.write(stage({}), final)
        assert (tmp_path / former / "inner" / "notes.txt").read_text() == "precious"
        assert [entry["files"] for entry in logs] == [["inner/notes.txt"]]
        (final / "inner").mkdir()
    files = FolderFiles(tmp_path / "temporary")
    files.folder.mkdir()
    files.write(stage({}), final)
    assert {path.name for path in tmp_path.iterdir()} == {"final", "former-final", "former-final-2"}


def test_a_link_to_a_folder_is_replaced_and_the_folder_stays(tmp_path, written):
    (tmp_path / "link").symlink_to(written[0])
    files = FolderFiles(tmp_path / "temporary")
    files.folder.mkdir()
    files.write(stage({}), tmp_path / "link")
    assert not (tmp_path / "link").is_symlink()
    assert (written[0] / "config.json").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"final", "link"}


def test_what_is_written_is_the_state_of_the_copy_and_the_folder_appears_complete(tmp_path):
    tensor, files = torch.ones(1000), FolderFiles(tmp_path / "temporary")
    with files.recorded():
        (tmp_path / "temporary").mkdir()
        torch.save({"x": tensor}, tmp_path / "temporary" / "x.pt")
    assert not (tmp_path / "temporary" / "x.pt").exists()
    with AsyncSaver() as saver:
        saver.save(files.tree, tmp_path / "final", write=files.write)
        tensor.zero_()
    assert torch.load(tmp_path / "final" / "x.pt")["x"].sum() == 1000
    assert not (tmp_path / "temporary").exists()


def test_other_files_threads_and_options_are_the_librarys_own_business(tmp_path):
    (tmp_path / "temporary").mkdir()
    originals, files = (torch.save, safe_save_file), FolderFiles(tmp_path / "temporary")
    with files.recorded():
        torch.save(1, tmp_path / "other.pt")
        with (tmp_path / "temporary" / "opened.pt").open("wb") as opened:
            torch.save(1, opened)
        torch.save(1, tmp_path / "temporary" / "legacy.pt", _use_new_zipfile_serialization=False)
        on_threads(lambda name: torch.save(1, tmp_path / "temporary" / name), "thread.pt")
    assert (torch.save, safe_save_file) == originals
    with pytest.raises(ZeroDivisionError), FolderFiles(tmp_path).recorded():
        assert (torch.save, safe_save_file) != originals
        raise ZeroDivisionError
    assert (torch.save, safe_save_file) == originals
    assert files.tree == {}
    assert sorted(path.name for path in (tmp_path / "temporary").iterdir()) == ["legacy.pt", "opened.pt", "thread.pt"]


def test_threads_record_at_the_same_time_and_leave_nothing_behind(tmp_path):
    original, both, left = torch.save, threading.Barrier(2, timeout=10), threading.Event()
    first, second = (FolderFiles(tmp_path / name) for name in ("first", "second"))

    def record(files, last):
        files.folder.mkdir()
        if last:
            both.wait()
        with files.recorded():
            if not last:
                both.wait()
            both.wait()
            if last:
                left.wait(10)
            torch.save(torch.ones(3), files.folder / "x.pt")
        left.set()

    on_threads(lambda each: record(*each), (first, False), (second, True))
    assert (list(first.tree), list(second.tree)) == (["x.pt"], ["x.pt"])
    assert torch.save is original


def test_a_module_that_is_imported_meanwhile_has_the_librarys_function_afterwards(tmp_path, monkeypatch):
    original, module = torch.save, types.ModuleType("imported_late")
    tmp_path.joinpath("folder").mkdir()
    for _ in range(2):
        files = FolderFiles(tmp_path / "folder")
        with files.recorded():
            monkeypatch.setitem(sys.modules, "imported_late", module)
            module.save = torch.save
            module.save(torch.ones(3), tmp_path / "folder" / "x.pt")
        assert list(files.tree) == ["x.pt"]
        assert module.save is original


def test_modules_are_searched_once(tmp_path, monkeypatch):
    class Counted(types.ModuleType):
        looks = 0

        def __getattribute__(self, name):
            if name == "__dict__":
                Counted.looks += 1
            return super().__getattribute__(name)

    monkeypatch.setitem(sys.modules, "counted", Counted("counted"))
    with FolderFiles(tmp_path).recorded():
        first = Counted.looks
    for _ in range(3):
        with FolderFiles(tmp_path).recorded():
            pass
    assert Counted.looks == first > 0


def test_a_changed_or_missing_file_is_found(written):
    folder, info = written
    verify_folder(folder)
    assert info.bytes == sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and "digests" not in path.name)
    (folder / "added later").write_text("")
    verify_folder(folder)
    data = bytearray((folder / "config.json").read_bytes())
    (folder / "config.json").write_bytes(data[::-1])
    (folder / "optimizer.pt").write_bytes(b"")
    with pytest.raises(CheckpointDamagedError, match=r"config\.json, optimizer\.pt .*trainbus-digests\.json"):
        verify_folder(folder)
    (folder / "optimizer.pt").unlink()
    assert verify_folder(folder, ["*.pt"]) == (["optimizer.pt"], ["config.json"])
    (folder / "trainbus-digests.json").write_text("{")
    with pytest.raises(CheckpointDamagedError, match=r"digests\.json"):
        verify_folder(folder)
    (folder / "trainbus-digests.json").unlink()
    verify_folder(folder)  # of another program


def test_a_failed_write_leaves_nothing_behind(tmp_path):
    (tmp_path / "final").write_text("a file where a folder would have to be")
    files = FolderFiles(tmp_path / "temporary")
    with files.recorded():
        library(tmp_path / "temporary")
    (tmp_path / "temporary" / "optimizer.pt").mkdir()
    with pytest.raises(CheckpointError, match=r"final.*optimizer"):
        files.write(stage(files.tree), tmp_path / "final")
    assert [path.name for path in tmp_path.iterdir()] == ["final"]
