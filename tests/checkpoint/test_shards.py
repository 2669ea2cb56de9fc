"""Sharded checkpoints that something else has written or changed: nothing of them is run, and no file but theirs is read."""

import io
import json
import os
import pickle
import shutil
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from trainbus.cli import main
from trainbus.convert import export_tree
from trainbus.eventloop.checkpoint import RemotePath, as_path, load, load_whole, save, sweep_shards
from trainbus.eventloop.checkpoint.sharded import ShardStage
from trainbus.eventloop.errors import CheckpointDamagedError, CheckpointError
from trainbus.eventloop.training.saves.discover import find_checkpoint
from trainbus.hooks import CheckpointHook

from ..failing import fails
from ..hooks.conftest import make_loop
from .trees import canonical

TOKEN = "0123abcd"  # noqa: S105 - no secret
WEIGHTS = {"w": torch.arange(6.0).view(3, 2), "b": torch.ones(4)}


class Trap:
    """Makes a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.file),)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories with a sharded checkpoint, ``a.safetensors``: as it is written now, and as 0.2 wrote it."""
    now, old = tmp_path_factory.mktemp("now"), tmp_path_factory.mktemp("old")
    path = now / "a.safetensors"
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        tensors = {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in WEIGHTS.items()}
        tree, parts = ShardStage().copy_parts({"state_dict": tensors}, path, TOKEN, distributed.group.WORLD)
        parts.commit(path, lambda: save(tree, path).bytes)
    finally:
        distributed.destroy_process_group()
    shutil.copy(path, old)
    directory = old / shards(now).name
    directory.mkdir()
    part, index = b"", {}
    for name, value in WEIGHTS.items():
        file = io.BytesIO()
        torch.save(value, file)
        at = {"file": "__0_0.distcp", "begin": len(part), "bytes": len(file.getvalue())}
        piece = {"offsets": [0] * value.dim(), "shape": list(value.shape), **at}
        index[f"state_dict.{name}"] = {"dtype": "float32", "shape": list(value.shape), "pieces": [piece]}
        part += file.getvalue()
    (directory / "__0_0.distcp").write_bytes(part)
    (directory / "index.json").write_text(json.dumps(index))
    seal(old)
    return {"now": now, "0.2": old}


@pytest.fixture
def copied(written: dict[str, Path], tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Copies one of them; and has a trap that nothing may spring."""
    yield lambda which: Path(shutil.copytree(written[which], tmp_path / "copy"))
    assert not (tmp_path / "sprung").exists()


@pytest.fixture(params=["now", "0.2"])
def place(copied: Callable[[str], Path], request: pytest.FixtureRequest) -> Path:
    return copied(request.param)


@pytest.fixture
def old_place(copied: Callable[[str], Path]) -> Path:
    return copied("0.2")


def shards(place: Path) -> Path:
    (found,) = place.glob("*.shards")
    return found


def digest_of(file: Path) -> str:
    return f"crc32:{zlib.crc32(file.read_bytes()):08x}"


def seal(place: Path) -> None:
    """Write right digests of whatever is there."""
    names = {file.name for file in shards(place).iterdir() if file.is_file() and "digests" not in file.name}
    (shards(place) / "index.digests.json").write_text(json.dumps({name: digest_of(shards(place) / name) for name in names}))
    for file in shards(place).glob("[0-9]*.digests.json"):
        file.unlink()


def change_index(place: Path, change: Callable[[dict[str, Any]], Any], more: Callable[[str], str] = str) -> None:
    old, new = shards(place) / "index.json", shards(place) / "index.safetensors"
    index = json.loads(old.read_bytes() if old.exists() else load(new)["index"])
    change(index)
    text = more(json.dumps(index))
    if old.exists():
        old.write_text(text)
        seal(place)
    else:
        save({"index": text.encode()}, new)


def change_piece(place: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    """Put other bytes in the place of a tensor's."""

    def point(index: dict[str, Any]) -> None:
        (piece,) = index[name]["pieces"]
        old = (shards(place) / piece["file"]).read_bytes()[piece["begin"] :][: piece["bytes"]]
        new = change(old)
        (shards(place) / "other.distcp").write_bytes(new)
        piece |= {"file": "other.distcp", "begin": 0, "bytes": len(new)}

    change_index(place, point)


def assert_refused(place: Path, says: str = "") -> None:
    path = place / "a.safetensors"
    for read in (load_whole, lambda path: export_tree(path, place / "out.pth")):
        with pytest.raises(CheckpointDamagedError, match=rf"a\.safetensors .*[\s\S]*{says}"):
            read(path)


def test_shards_round_trip(place):
    assert canonical(load_whole(place / "a.safetensors")["state_dict"]) == canonical(WEIGHTS)


def test_shards_are_files_that_the_package_safetensors_opens(copied):
    (part,) = shards(copied("now")).glob("__*")
    assert canonical({name: load_file(part)[f"state_dict.{name}"] for name in WEIGHTS}) == canonical(WEIGHTS)


def test_a_piece_of_0_2_may_be_in_any_file(old_place):
    change_piece(old_place, "state_dict.w", lambda old: old)
    assert load_whole(old_place / "a.safetensors")["state_dict"]["w"].equal(WEIGHTS["w"])


@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize("name", [".metadata", "__0.metadata"])
def test_a_pickle_beside_it_is_never_read(place, tmp_path, name, index):
    (shards(place) / name).write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
    if not index:
        for file in ("index.json", "index.safetensors"):
            (shards(place) / file).unlink(missing_ok=True)
    if index:
        load_whole(place / "a.safetensors")
    else:
        assert_refused(place)


def zipped(files: dict[str, bytes], how: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", how) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return file.getvalue()


def test_a_pickle_in_the_place_of_a_tensor_is_not_run(old_place, tmp_path):
    code = pickle.dumps(Trap(tmp_path / "sprung"), protocol=2)
    change_piece(old_place, "state_dict.w", lambda old: zipped({"a/data.pkl": code, "a/version": b"3", "a/.pad": bytes(99)}))
    assert_refused(old_place)


def test_a_tensor_that_grows_when_it_is_unpacked_is_refused(old_place):
    def pack(old: bytes) -> bytes:
        with zipfile.ZipFile(io.BytesIO(old)) as archive:
            return zipped(
                {name: archive.read(name) for name in archive.namelist()} | {"a/x": bytes(10**6)}, zipfile.ZIP_DEFLATED
            )

    change_piece(old_place, "state_dict.w", pack)
    assert_refused(old_place, "compressed")


OF_A_PIECE = {
    "file": ["../a.safetensors", "/etc/passwd", "", "..", "x\0y", "missing", "fifo", "link", "index.digests.json"],
    "begin": [2**40, -1],
    "bytes": [2**63 - 1, 2**64, 0, "long"],
    "offsets": [[2**62, 0], [-1, 0], [0]],
    "shape": [[3, 2, 2**62], [3, 1], [9] * 100_000],
}
OF_THE_TENSOR = {"pieces": [[]], "dtype": ["object", "float64"], "shape": [[2**40, 2**40], [3, 2, 1]]}
CHANGES = [
    (places is OF_A_PIECE, key, value)
    for places in (OF_A_PIECE, OF_THE_TENSOR)
    for key, values in places.items()
    for value in values
]


@pytest.mark.parametrize(("of_a_piece", "key", "value"), CHANGES, ids=lambda one: str(one)[:40])
def test_an_index_that_contradicts_the_files_is_refused(place, of_a_piece, key, value):
    os.mkfifo(shards(place) / "fifo")
    (shards(place) / "link").symlink_to(place / "a.safetensors")

    def apply(index: dict[str, Any]) -> None:
        tensor = index["state_dict.w"]
        (tensor["pieces"][0] if of_a_piece else tensor)[key] = value

    if value == "long":  # more digits than json writes
        change_index(place, len, lambda text: text.replace('"bytes": ', f'"bytes": {"1" * 5000}', 1))
    else:
        change_index(place, apply)
    assert_refused(place)


def test_pieces_that_overlap_and_leave_a_hole_are_refused(place):
    def overlap(index: dict[str, Any]) -> None:
        tensor = index["state_dict.w"]
        (piece,) = tensor["pieces"]
        row = piece["bytes"] // 3
        again = piece | {"offsets": [1, 0], "shape": [1, 2], "begin": piece["begin"] + 2 * row, "bytes": row}
        tensor["pieces"] = [piece | {"shape": [2, 2], "bytes": 2 * row}, again]  # nothing for the third row

    change_index(place, overlap)
    assert_refused(place)


def test_pieces_that_share_their_bytes_promise_no_more_than_the_files_have(place):
    def repeat(index: dict[str, Any]) -> None:
        first = index["state_dict.w"]
        for number in range(1, 100):  # as many elements in other forms; of the same form it would be a tied tensor
            more = [1] * number
            pieces = [
                one | {"offsets": [*one["offsets"], *[0] * number], "shape": one["shape"] + more} for one in first["pieces"]
            ]
            index[f"copy {number}"] = first | {"shape": first["shape"] + more, "pieces": pieces}

    change_index(place, repeat)
    assert_refused(place)


@pytest.mark.parametrize(
    "name", ["../copy.shards", "/etc", "", "..", "a\0.shards", "other", 7, ["a.shards"], None, "link.shards", "fifo.shards"]
)
def test_directories_outside_are_not_read(place, name):
    real = shards(place)
    shutil.copytree(real, place.parent / "copy.shards")
    (place / "link.shards").symlink_to(place.parent / "copy.shards")
    os.mkfifo(place / "fifo.shards")
    save(load(place / "a.safetensors") | {"shards": name}, place / "a.safetensors")
    assert_refused(place)
    assert sweep_shards(place, still=1e9)
    assert real.exists()


def test_the_tensors_of_a_checkpoint_stay_under_any_name_of_it(place):
    own = shards(place)
    (place / "a.safetensors").rename(place / "a.bak")
    assert sweep_shards(place, still=0)
    assert own.exists()
    (place / "a.bak").unlink()
    (place / "notes.txt").write_text("mine")
    save_file({"w": torch.ones(2)}, place / "weights.safetensors")  # of another program
    torch.save({"w": torch.ones(2)}, place / "torch.safetensors")
    assert sweep_shards(place, still=0)
    assert not own.exists()


def test_the_tensors_of_a_damaged_checkpoint_stay(place):
    own = shards(place)
    (place / "a.safetensors").write_bytes((place / "a.safetensors").read_bytes()[:-1])
    assert sweep_shards(place, still=0)
    assert own.exists()


def test_a_file_that_cannot_be_read_does_not_keep_the_tensors_of_later_checkpoints(place):
    own = shards(place)
    for one in (*own.iterdir(), place / "a.safetensors"):
        os.utime(one, (1e9, 1e9))
    shutil.copytree(own, later := place / f"b-{TOKEN}.shards", copy_function=shutil.copyfile)
    (place / "a.safetensors").write_bytes((place / "a.safetensors").read_bytes()[:-1])
    os.utime(place / "a.safetensors", (1e9, 1e9))
    assert sweep_shards(place, still=0)
    assert own.exists()
    assert not later.exists()


def test_a_store_that_does_not_answer_is_no_damage(copied, monkeypatch):
    place = copied("now")

    @contextmanager
    def refuses(self: RemotePath) -> Iterator[Any]:
        if self.name.startswith("__"):
            raise CheckpointError(f"cannot read {self}: no answer")
        with opened(self) as found:
            yield found

    opened = RemotePath.opened
    monkeypatch.setattr(RemotePath, "opened", refuses)
    path = as_path(f"local://{place}/a.safetensors")
    for read in (load_whole, find_checkpoint_beside):
        with pytest.raises(CheckpointError, match="no answer") as error:
            read(path)
        assert not isinstance(error.value, CheckpointDamagedError)


def find_checkpoint_beside(path: Any) -> Any:
    return find_checkpoint(path.parent)


@pytest.mark.parametrize("names", [{"../a.safetensors": "crc32:0"}, {"fifo": "crc32:0"}, ["x"], {"index.json": 1}, "deep"])
def test_digests_of_other_files_are_refused(old_place, names):
    os.mkfifo(shards(old_place) / "fifo")
    text = "[" * 100_000 if names == "deep" else json.dumps(names)
    (shards(old_place) / "more.digests.json").write_text(text)
    assert_refused(old_place)


def test_a_fifo_in_the_place_of_a_file_does_not_hang(place):
    for file in shards(place).glob("index*"):
        file.unlink()
        os.mkfifo(file)
    assert_refused(place, "FIFO")


CONTRADICTIONS = [("state_dict.w", [3, 2], "float64"), ("x", [1], "float32"), ("state_dict.w", [2**40], "float32")]


@pytest.mark.parametrize("marker", [*CONTRADICTIONS, ([], [1], "float32"), None])
def test_a_file_that_contradicts_its_index_or_has_two_places_for_one_tensor_is_refused(place, marker):
    tree = load(place / "a.safetensors")
    if marker is None:
        tree["state_dict"]["b"] = tree["state_dict"]["w"]
    else:
        tree["state_dict"]["w"] = dict(zip(("__sharded__", "shape", "dtype"), marker, strict=True))
    save(tree, place / "a.safetensors")
    assert_refused(place, "state_dict.w" if marker is None else "")


def test_a_run_without_shards_executes_no_pickle_and_uses_the_previous_file(tmp_path):
    make_loop(CheckpointHook(1), work_dir=tmp_path, max_epochs=1).run()
    directory = tmp_path / "x.shards"
    directory.mkdir()
    (directory / ".metadata").write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
    (directory / "a.digests.json").write_text(json.dumps({".metadata": digest_of(directory / ".metadata")}))
    save(load(tmp_path / "epoch_1.safetensors") | {"shards": "x.shards"}, tmp_path / "epoch_2.safetensors")
    (tmp_path / "last_checkpoint").write_text("epoch_2.safetensors")
    with capture_logs() as logs:
        make_loop(CheckpointHook(1), work_dir=tmp_path, max_epochs=2).run(resume="auto")
    assert [entry["path"] for entry in logs if "damaged" in entry["event"]] == [str(tmp_path / "epoch_2.safetensors")]
    assert not (tmp_path / "sprung").exists()


FOREIGN = {
    "train.shards": {"0.tar": b"precious"},
    f"train-{TOKEN}.shards": {"0.tar": b"precious"},
    f"empty-{TOKEN}.shards": {},
    f"index-{TOKEN}.shards": {"index.json": b"{}", "index.safetensors": b"{}"},
    f"torch-{TOKEN}.shards": {".metadata": b"precious", "__0_0.distcp": b"precious"},
    f"more-{TOKEN}.shards": {"index.json": b"{}", "__0_0.distcp": b"precious", "notes.txt": b"precious"},
    "upper-0123ABCD.shards": {"__0_0.distcp": b"precious", "__0.safetensors": b"precious"},
}


def test_only_directories_of_trainbus_are_removed_and_each_removal_is_logged(place):
    for name, parts in FOREIGN.items():
        (place / name).mkdir()
        for part, content in parts.items():
            (place / name / part).write_bytes(content)
    (place / f"link-{TOKEN}.shards").symlink_to(shards_of_a := place / f"a-{TOKEN}.shards")
    left = place / f"b-{TOKEN}.shards"
    shutil.copytree(shards_of_a, left)
    for one in (*left.iterdir(), *place.glob("*.shards")):
        os.utime(one, (0, 0))
    loop = make_loop(CheckpointHook(1, out_dir=place))
    there = place.rename(place.with_name("there"))  # a new run would get another directory
    loop.bus.on("before_train", lambda event: shutil.copytree(there, place, symlinks=True, dirs_exist_ok=True), priority=0)
    with capture_logs() as logs:
        loop.run()
    assert {one.name for one in place.glob("*.shards")} == {*FOREIGN, f"link-{TOKEN}.shards", shards_of_a.name}
    assert {one: {part.name: part.read_bytes() for part in (place / one).iterdir()} for one in FOREIGN} == FOREIGN
    assert [entry["path"] for entry in logs if "removed" in entry["event"]] == [str(left)]
    load_whole(place / "a.safetensors")


def test_verify_reads_the_sharded_tensors_too(place, capsys):
    assert main(["checkpoint", "verify", str(place / "a.safetensors")]) == 0
    (part,) = shards(place).glob("__*")
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
    assert main(["checkpoint", "verify", str(place / "a.safetensors")]) == 1
    assert part.name in capsys.readouterr().out


@pytest.mark.parametrize("lost", ["a tensor in the index", "a part", "the index"])
def test_ls_and_verify_look_into_the_index(place, lost, capsys):
    assert main(["checkpoint", "ls", str(place)]) == 0
    if lost == "a tensor in the index":
        change_index(place, lambda index: index.pop("state_dict.w"))
    else:
        for file in shards(place).glob("index.[js]*" if lost == "the index" else "__*"):
            file.unlink()
    for command in ("ls", "verify"):
        assert main(["checkpoint", command, str(place)]) == 1
        assert "damaged" in capsys.readouterr().out


def test_paths_that_differ_by_their_dots_alone_are_two_tensors(tmp_path):
    path = tmp_path / "a.safetensors"
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        one, two = (distribute_tensor(torch.full((2,), at), init_device_mesh("cpu", (1,)), [Shard(0)]) for at in (1.0, 2.0))
        tree, parts = ShardStage().copy_parts({"a.b": one, "a": {"b": two}}, path, TOKEN, distributed.group.WORLD)
        parts.commit(path, lambda: save(tree, path).bytes)
    finally:
        distributed.destroy_process_group()
    whole = load_whole(path)
    assert (whole["a.b"].tolist(), whole["a"]["b"].tolist()) == ([1.0, 1.0], [2.0, 2.0])


def test_each_save_of_a_stage_has_its_own_tensors_also_after_one_that_failed(tmp_path):
    """Processes tell rank 0 what they write only if it has changed since the last save."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    stage, mesh = ShardStage(), init_device_mesh("cpu", (1,))

    def save_with(number: int, *lengths: int, write: Callable[[], int] | None = None) -> None:
        path = tmp_path / f"{number}.safetensors"
        tensors = {str(n): torch.full((length,), float(number)) for n, length in enumerate(lengths)}
        state = {name: distribute_tensor(one, mesh, [Shard(0)]) for name, one in tensors.items()}
        tree, parts = stage.copy_parts(state, path, f"{number:08x}", distributed.group.WORLD)
        parts.commit(path, write or (lambda: save(tree, path).bytes))
        assert {name: load_whole(path)[name].tolist() for name in tensors} == {n: one.tolist() for n, one in tensors.items()}

    try:
        for number, lengths in enumerate([(2, 3), (2, 3), (2, 3, 4), (2, 3, 4), (5, 3), (5, 3), ()]):
            save_with(number, *lengths)
            with pytest.raises(CheckpointError, match="no room"):
                save_with(number + 100, 7, 8, *lengths, write=fails(OSError("no room")))
    finally:
        distributed.destroy_process_group()
